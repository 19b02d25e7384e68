"""Arrow IPC, as files (Feather v2 is one) and as streams. A local file is mapped into memory, not read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from batchgen.data.files import InputFile
from batchgen.data.files_reader import BATCH_BYTES, FilesReader
from batchgen.data.unify import conform
from batchgen.errors import InputError

_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"


class ArrowReader(FilesReader):
    suffixes = (".arrow", ".feather")
    title = "Arrow IPC"

    def scan(self) -> tuple[pa.Schema, list[int]]:
        schemas, file_rows = [], []
        for file in self.files:
            with self._open(file) as (schema, batches):
                schemas.append(schema)
                file_rows.append(sum(batch.num_rows for batch in batches))
        return self.unified(schemas, file_rows), file_rows

    def read(self, file: InputFile, wanted: pa.Schema, num_rows: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        with self._open(file) as (_, batches):
            for batch in batches:
                if batch.num_rows == 0:
                    continue
                batch = conform(batch, wanted, file.path)
                size = max(1, min(batch_rows, int(BATCH_BYTES * batch.num_rows / max(1, batch.nbytes))))
                for start in range(0, batch.num_rows, size):
                    part = batch.slice(start, size)
                    # a copy: a slice would hold, and count as, the whole batch
                    yield part.take(pa.array(np.arange(part.num_rows))) if wanted.names and len(part) < len(batch) else part

    @contextlib.contextmanager
    def _open(self, file: InputFile) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """Schema and record batches, which may be of any size."""
        with self._explained(file), contextlib.ExitStack() as stack:
            if file.is_local and file.fs.size(file.path):  # an empty file cannot be mapped
                source = stack.enter_context(pa.memory_map(file.path))
            else:
                source = pa.PythonFile(stack.enter_context(file.fs.open(file.path, "rb")), "r")
            head = source.read(len(_FILE))
            source.seek(0)
            if head[: len(_FEATHER_1)] == _FEATHER_1:
                raise InputError(f"{file.path}: is Feather version 1, which is out of use; write it again as version 2")
            if head == _FILE:
                reader = stack.enter_context(pa.ipc.open_file(source))
                yield reader.schema, (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                reader = stack.enter_context(pa.ipc.open_stream(source))
                yield reader.schema, iter(reader)
