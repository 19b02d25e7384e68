"""Arrow IPC, as files (Feather v2 is one) and as streams. A local file is mapped into memory, not read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

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
                num_rows = 0
                for batch in batches:
                    refuse_damage(batch)
                    num_rows += batch.num_rows
                file_rows.append(num_rows)
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


def refuse_damage(batch: pa.RecordBatch) -> None:
    """Raises ArrowInvalid for offsets and indices that lead out of the data, which would end the process, not raise, when
    read. IPC has no checksums. Text that is not UTF-8 passes: it spoils its row only."""
    as_bytes = pa.schema([field.with_type(_as_bytes(field.type)) for field in batch.schema])
    pa.record_batch(_Relabelled(batch, as_bytes)).validate(full=True)


class _Relabelled:
    """The memory of a batch under another schema of the same layout."""

    def __init__(self, batch: pa.RecordBatch, schema: pa.Schema):
        self._batch, self._schema = batch, schema

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[Any, Any]:
        return self._schema.__arrow_c_schema__(), self._batch.__arrow_c_array__()[1]


_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """`kind` with bytes in the place of text, at any depth."""
    types = pa.types
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), kind.item_field.with_type(_as_bytes(kind.item_type)), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)), kind.list_size)
    for is_kind, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return _BYTES.get(kind, kind)
