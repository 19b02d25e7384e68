"""The token ids of all prompts of a run, in memory-mapped Arrow IPC files: written once, read without copying.

Columns: row int64, row_key uint64, token_ids list<int32>, error_code string, error_message string (null for a good row; a
row with a fault has no tokens). Offsets count within one record batch, whose size is bounded, so 32 bits are enough.

A job of at most HEAD_ROWS rows is one file in input order, `tokens.arrow`. A larger one is a folder `tokens/`: `head.arrow`,
the first rows, which can be read before the others are known, and `part-00000.arrow` ..., to which the others go as a
partitioning says. An entry is a position in these files, one after the other. Memory: 20 bytes an entry, and one file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from batchgen.errors import CorruptRunError
from batchgen.records import PackedTokens, RowFault

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("row_key", pa.uint64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)
MAX_BATCH_TOKENS = 1 << 22  # 16 MiB: what a file's writer holds before it writes
PARTITION_BATCH_TOKENS = 1 << 18  # 1 MiB: the same for each of the partitions, which are written side by side
HEAD_ROWS = 1 << 16
HEAD_TOKENS = 1 << 25  # a head ends with the row that reaches either


class Entries(NamedTuple):
    """Rows on their way into a file; one element a row in each."""

    rows: Sequence[int] | np.ndarray
    row_keys: Sequence[int] | np.ndarray
    token_ids: Sequence[np.ndarray]
    faults: Sequence[RowFault | None]

    def take(self, part: slice) -> Entries:
        return Entries(self.rows[part], self.row_keys[part], self.token_ids[part], self.faults[part])


class Partitioning(Protocol):
    """partitioning(token_ids) is below num_partitions."""

    @property
    def num_partitions(self) -> int: ...

    def __call__(self, token_ids: np.ndarray) -> int: ...


class _FileWriter:
    """One Arrow IPC file, written in record batches."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.path = path
        self.file = path.open("wb")
        self.writer = pa.ipc.new_file(self.file, SCHEMA.with_metadata(dict(metadata)))
        self.num_rows = self.num_tokens = 0

    def write(self, entries: Entries, max_batch_tokens: int) -> None:
        start = tokens = 0
        for i in range(len(entries.rows)):
            tokens += len(entries.token_ids[i])
            if tokens >= max_batch_tokens or i + 1 == len(entries.rows):
                self._write_batch(entries.take(slice(start, i + 1)))
                start, tokens = i + 1, 0

    def finish(self) -> None:
        """Make the file durable."""
        self.writer.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def abandon(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)

    def _write_batch(self, entries: Entries) -> None:
        offsets = np.zeros(len(entries.rows) + 1, np.int32)
        np.cumsum([len(ids) for ids in entries.token_ids], out=offsets[1:])
        values = np.concatenate(entries.token_ids).astype(np.int32, copy=False)
        columns = [
            pa.array(np.asarray(entries.rows, np.int64)),
            pa.array(np.asarray(entries.row_keys, np.uint64)),
            pa.ListArray.from_arrays(offsets, pa.array(values), type=SCHEMA.field("token_ids").type),
            pa.array([fault.code if fault else None for fault in entries.faults], pa.string()),
            pa.array([fault.message if fault else None for fault in entries.faults], pa.string()),
        ]
        self.writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self.num_rows += len(offsets) - 1
        self.num_tokens += len(values)


class _PartitionWriter:
    """A partition's file and the rows that wait for it."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.file = _FileWriter(path, metadata)
        self.waiting: tuple[list[int], list[int], list[np.ndarray], list[RowFault | None]] = ([], [], [], [])
        self.num_waiting_tokens = 0

    def add(self, row: int, row_key: int, token_ids: np.ndarray, fault: RowFault | None) -> None:
        rows, row_keys, ids, faults = self.waiting
        rows.append(row)
        row_keys.append(row_key)
        ids.append(token_ids)
        faults.append(fault)
        self.num_waiting_tokens += len(token_ids) + 16  # the rest of a row weighs something too
        if self.num_waiting_tokens >= PARTITION_BATCH_TOKENS:
            self.flush()

    def flush(self) -> None:
        if self.waiting[0]:
            self.file.write(Entries(*self.waiting), MAX_BATCH_TOKENS)
            self.waiting, self.num_waiting_tokens = ([], [], [], []), 0


class TokenStoreWriter:
    """Appends to `<path>.tmp`; `finish` makes it `path`. A store that is not finished does not exist.

    With `partition`, a store that outgrows its head becomes the folder `path` without its suffix, written in
    `<folder>.tmp/`: partition(head) is called once with the finished head, readable at once, and says where rows go from
    there on. As a context manager it finishes on leaving, and removes all if an exception passes through.
    `metadata` is kept in the files (fingerprints, for resume).
    """

    def __init__(
        self,
        path: str | Path,
        metadata: Mapping[str, str] | None = None,
        partition: Callable[[TokenStore], Partitioning] | None = None,
    ) -> None:
        self.path = Path(path)
        self.folder = self.path.with_suffix("")
        self.folder_tmp = self.folder.with_name(self.folder.name + ".tmp")
        self.metadata = dict(metadata or {})
        self.partition = partition
        shutil.rmtree(self.folder_tmp, ignore_errors=True)  # what a killed process left
        self.head = _FileWriter(self.path.with_name(self.path.name + ".tmp"), self.metadata)
        self.partitions: list[_PartitionWriter] = []
        self.partition_of: Partitioning | None = None

    def append(
        self,
        rows: Sequence[int] | np.ndarray,
        row_keys: Sequence[int] | np.ndarray,
        token_ids: Sequence[np.ndarray],
        faults: Sequence[RowFault | None],
    ) -> None:
        """One entry a row in each of the four; `token_ids` int32 arrays, empty where there is a fault."""
        entries = Entries(rows, row_keys, token_ids, faults)
        if self.partition is None:
            return self.head.write(entries, MAX_BATCH_TOKENS)
        if self.partition_of is None:
            room = self._room_in_head(entries)
            self.head.write(entries.take(slice(0, room)), MAX_BATCH_TOKENS)
            entries = entries.take(slice(room, None))
            if len(entries.rows):
                self.partition_of = self._end_head(self.partition)
        if self.partition_of is not None:
            for row, key, ids, fault in zip(*entries):
                self.partitions[self.partition_of(ids)].add(int(row), int(key), ids, fault)

    def finish(self) -> None:
        """Make the store durable, then visible."""
        if self.partition_of is None:
            self.head.finish()
            os.replace(self.head.path, self.path)
        else:
            for partition in self.partitions:
                partition.flush()
                partition.file.finish()
            _fsync_folder(self.folder_tmp)
            os.replace(self.folder_tmp, self.folder)
        _fsync_folder(self.path.parent)

    def abandon(self) -> None:
        """Drop what was written."""
        for partition in self.partitions:
            partition.file.abandon()
        self.head.abandon()
        shutil.rmtree(self.folder_tmp, ignore_errors=True)

    def __enter__(self) -> TokenStoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _room_in_head(self, entries: Entries) -> int:
        """How many of `entries` still belong to the head."""
        before = self.head.num_tokens + np.cumsum([0, *map(len, entries.token_ids)])[:-1]
        return min(int(np.searchsorted(before, HEAD_TOKENS)), HEAD_ROWS - self.head.num_rows)

    def _end_head(self, partition: Callable[[TokenStore], Partitioning]) -> Partitioning:
        self.head.finish()
        self.folder_tmp.mkdir()
        os.replace(self.head.path, self.folder_tmp / "head.arrow")
        partition_of = partition(TokenStore([self.folder_tmp / "head.arrow"]))
        for i in range(partition_of.num_partitions):
            self.partitions.append(_PartitionWriter(self.folder_tmp / f"part-{i:05d}.arrow", self.metadata))
        return partition_of


class _File:
    """A finished file, mapped. Arrays are views of it; pages that were read count as this process's memory until it goes."""

    def __init__(self, path: Path) -> None:
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            if not reader.schema.equals(SCHEMA):
                raise CorruptRunError(f"{path}: not a token store of this version; delete it to tokenize again")
            self.metadata = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
            self.batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            for batch in self.batches:
                batch.validate(full=True)  # of tokens only where they begin and end, so it reads no more than is used anyway
        except (pa.ArrowInvalid, OSError) as e:
            if isinstance(e, FileNotFoundError):
                raise
            raise CorruptRunError(f"{path}: damaged token store ({e}); delete it to tokenize again") from e
        self.starts = np.cumsum([0] + [batch.num_rows for batch in self.batches])  # entry at which each batch begins
        self.offsets = [batch.column("token_ids").offsets.to_numpy() for batch in self.batches]
        self.values = [batch.column("token_ids").values.to_numpy() for batch in self.batches]

    def column(self, name: str, dtype: type) -> np.ndarray:
        return np.concatenate([batch.column(name).to_numpy() for batch in self.batches] or [np.empty(0, dtype)])

    def lengths(self) -> np.ndarray:
        return np.concatenate([np.diff(o) for o in self.offsets] or [np.empty(0, np.int32)])

    def tokens(self, at: int) -> np.ndarray:
        batch, at = self._locate(at)
        return self.values[batch][self.offsets[batch][at] : self.offsets[batch][at + 1]]

    def fault(self, at: int) -> RowFault | None:
        batch, at = self._locate(at)
        code = self.batches[batch].column("error_code")[at].as_py()
        return None if code is None else RowFault(code, self.batches[batch].column("error_message")[at].as_py() or "")

    def _locate(self, at: int) -> tuple[int, int]:
        batch = int(np.searchsorted(self.starts, at, side="right")) - 1
        return batch, at - int(self.starts[batch])


class TokenStore:
    """Reads finished files as one sequence of entries. Only rows, keys and lengths are in memory; one file is mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.metadata: dict[str, str] = {}
        columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for at in range(len(self.paths)):
            self._mapped: tuple[int, _File] | None = None  # unmap the one before
            file = self._file(at)
            self.metadata |= file.metadata
            columns.append((file.column("row", np.int64), file.column("row_key", np.uint64), file.lengths()))
        rows, keys, lengths = zip(*columns)
        self.file_starts = np.cumsum([0, *map(len, rows)])  # [num_files + 1] int64, entry at which each file begins
        self.num_rows = int(self.file_starts[-1])
        self.rows = np.concatenate(rows)  # [num_rows] int64, position in the input
        self.row_keys = np.concatenate(keys)  # [num_rows] uint64
        self.lengths = np.concatenate(lengths)  # [num_rows] int32

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Read what a TokenStoreWriter of the same path finished. FileNotFoundError if there is none, CorruptRunError if
        it is damaged."""
        path = Path(path)
        folder = path.with_suffix("")
        if not path.exists() and folder.is_dir():
            return cls([folder / "head.arrow", *sorted(folder.glob("part-*.arrow"))])
        return cls([path])

    def tokens(self, i: int) -> np.ndarray:
        """Entry i's token ids, int32, a read-only view."""
        file, at = self._locate(i)
        return file.tokens(at)

    def fault(self, i: int) -> RowFault | None:
        """Why entry i has no tokens, or None."""
        file, at = self._locate(i)
        return file.fault(at)

    def faults(self, entries: Sequence[int] | np.ndarray | None = None) -> dict[int, RowFault]:
        """Entry -> fault, of those among `entries` (increasing; all if None) that have one."""
        entries = np.arange(self.num_rows) if entries is None else np.asarray(entries, np.int64)
        found = {int(i): self.fault(int(i)) for i in entries[self.lengths[entries] == 0]}
        return {i: fault for i, fault in found.items() if fault is not None}

    def pack(self, first: int, end: int) -> PackedTokens:
        """The prompts of entries [first, end), copied, so that no file stays mapped for them."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths[first:end], dtype=np.int64)])
        values = np.empty(offsets[-1], np.int32)
        begin = first
        while begin < end:
            file, at = self._locate(begin)
            batch, at = file._locate(at)
            take = min(end - begin, file.batches[batch].num_rows - at)
            bounds = file.offsets[batch][[at, at + take]]
            values[offsets[begin - first] : offsets[begin - first + take]] = file.values[batch][bounds[0] : bounds[1]]
            begin += take
        if len(self.paths) > 1:
            self._mapped = None
        return PackedTokens(values, offsets, first)

    def _locate(self, i: int) -> tuple[_File, int]:
        if not 0 <= i < self.num_rows:
            raise IndexError(f"entry {i} of a token store with {self.num_rows}")
        at = int(np.searchsorted(self.file_starts, i, side="right")) - 1
        return self._file(at), i - int(self.file_starts[at])

    def _file(self, at: int) -> _File:
        if self._mapped is None or self._mapped[0] != at:
            self._mapped = (at, _File(self.paths[at]))
        return self._mapped[1]


def remove_store(path: Path) -> None:
    """Delete a finished store, file or folder."""
    path.unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def _fsync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
