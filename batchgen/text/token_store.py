"""The token ids of all prompts of a run, in a memory-mapped Arrow IPC file: written once, read without copying.

Columns: row int64, row_key uint64, token_ids list<int32>, error_code string, error_message string (null for a good row; a
row with a fault has no tokens). Offsets count within one record batch, whose size is bounded, so 32 bits are enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from batchgen.errors import CorruptRunError
from batchgen.records import RowFault

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("row_key", pa.uint64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)
MAX_BATCH_TOKENS = 1 << 22  # 16 MiB: what the writer holds before it writes


class TokenStoreWriter:
    """Appends batches to `<path>.tmp`; `finish` makes it `path`. A store that is not finished does not exist.

    As a context manager it finishes on leaving, and removes the file if an exception passes through.
    `metadata` is kept in the file (fingerprints, for resume).
    """

    def __init__(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self.tmp = self.path.with_name(self.path.name + ".tmp")
        self.file = self.tmp.open("wb")
        self.writer = pa.ipc.new_file(self.file, SCHEMA.with_metadata(dict(metadata or {})))
        self.num_rows = 0

    def append(
        self,
        rows: Sequence[int] | np.ndarray,
        row_keys: Sequence[int] | np.ndarray,
        token_ids: Sequence[np.ndarray],
        faults: Sequence[RowFault | None],
    ) -> None:
        """One entry a row in each of the four; `token_ids` int32 arrays, empty where there is a fault."""
        start = tokens = 0
        for i in range(len(token_ids)):
            tokens += len(token_ids[i])
            if tokens >= MAX_BATCH_TOKENS or i + 1 == len(token_ids):
                part = slice(start, i + 1)
                self._write(rows[part], row_keys[part], token_ids[part], faults[part])
                start, tokens = i + 1, 0

    def finish(self) -> None:
        """Make the file durable, then visible."""
        self.writer.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.tmp, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self) -> None:
        """Drop what was written."""
        self.file.close()
        self.tmp.unlink(missing_ok=True)

    def __enter__(self) -> TokenStoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _write(
        self,
        rows: Sequence[int] | np.ndarray,
        row_keys: Sequence[int] | np.ndarray,
        token_ids: Sequence[np.ndarray],
        faults: Sequence[RowFault | None],
    ) -> None:
        offsets = np.zeros(len(token_ids) + 1, np.int32)
        np.cumsum([len(ids) for ids in token_ids], out=offsets[1:])
        values = np.concatenate(token_ids).astype(np.int32, copy=False)
        columns = [
            pa.array(np.asarray(rows, np.int64)),
            pa.array(np.asarray(row_keys, np.uint64)),
            pa.ListArray.from_arrays(offsets, pa.array(values), type=SCHEMA.field("token_ids").type),
            pa.array([fault.code if fault else None for fault in faults], pa.string()),
            pa.array([fault.message if fault else None for fault in faults], pa.string()),
        ]
        self.writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self.num_rows += len(token_ids)


class TokenStore:
    """Reads a finished store. Arrays are views of the mapped file; only rows, keys and lengths are in memory."""

    def __init__(self, batches: list[pa.RecordBatch], metadata: dict[str, str]) -> None:
        self.metadata = metadata
        self._batches = batches
        self._starts = np.cumsum([0] + [batch.num_rows for batch in batches])  # entry at which each batch begins
        self._offsets = [batch.column("token_ids").offsets.to_numpy() for batch in batches]
        self._values = [batch.column("token_ids").values.to_numpy() for batch in batches]
        self.num_rows = int(self._starts[-1])
        self.rows = _column(batches, "row", np.int64)  # [num_rows] int64, position in the input
        self.row_keys = _column(batches, "row_key", np.uint64)  # [num_rows] uint64
        self.lengths = np.concatenate([np.diff(o) for o in self._offsets] or [np.empty(0, np.int32)])  # [num_rows] int32

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Map the file. FileNotFoundError if there is none, CorruptRunError if it is damaged."""
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            if not reader.schema.equals(SCHEMA):
                raise CorruptRunError(f"{path}: not a token store of this version; delete it to tokenize again")
            metadata = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
            return cls([reader.get_batch(i) for i in range(reader.num_record_batches)], metadata)
        except (pa.ArrowInvalid, OSError) as e:
            if isinstance(e, FileNotFoundError):
                raise
            raise CorruptRunError(f"{path}: damaged token store ({e}); delete it to tokenize again") from e

    def tokens(self, i: int) -> np.ndarray:
        """Entry i's token ids, int32, a read-only view."""
        batch, at = self._locate(i)
        offsets = self._offsets[batch]
        return self._values[batch][offsets[at] : offsets[at + 1]]

    def fault(self, i: int) -> RowFault | None:
        """Why entry i has no tokens, or None."""
        batch, at = self._locate(i)
        return _fault(self._batches[batch], at)

    def faults(self) -> dict[int, RowFault]:
        """Entry -> fault, of all entries that have one."""
        found: dict[int, RowFault] = {}
        for start, batch in zip(self._starts.tolist(), self._batches):
            codes = batch.column("error_code")
            if codes.null_count < len(codes):
                for at in np.flatnonzero(codes.is_valid().to_numpy(zero_copy_only=False)).tolist():
                    fault = _fault(batch, at)
                    assert fault is not None
                    found[start + at] = fault
        return found

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < self.num_rows:
            raise IndexError(f"entry {i} of a token store with {self.num_rows}")
        batch = int(np.searchsorted(self._starts, i, side="right")) - 1
        return batch, i - int(self._starts[batch])


def _column(batches: list[pa.RecordBatch], name: str, dtype: type) -> np.ndarray:
    return np.concatenate([batch.column(name).to_numpy() for batch in batches] or [np.empty(0, dtype)])


def _fault(batch: pa.RecordBatch, at: int) -> RowFault | None:
    code = batch.column("error_code")[at].as_py()
    return None if code is None else RowFault(code, batch.column("error_message")[at].as_py() or "")
