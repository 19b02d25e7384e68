"""Hugging Face data sets: of the hub, local folders that `load_dataset` takes, and folders that `save_to_disk` wrote.

Rows come in the order of the data set. Its Arrow files are mapped into memory, not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from batchgen.data.arrow_ipc import refuse_damage
from batchgen.data.files_reader import BATCH_BYTES, SourceBatch, rows_only
from batchgen.data.unify import conform, require_columns
from batchgen.errors import InputError
from batchgen.job import InputSection

if TYPE_CHECKING:
    from datasets import Dataset

_HUB = re.compile(r"hf://datasets/(?P<id>[^/@]+(/[^/@]+)?)(@(?P<revision>[^/]+))?/?")  # deeper paths are files
_PROBE_ROWS = 16


def is_dataset(source: InputSection) -> bool:
    """Whether this reader is the one for it: an address on the hub, what `save_to_disk` wrote, or format hf."""
    path = source.path
    return source.format == "hf" or (isinstance(path, str) and (_HUB.fullmatch(path) is not None or _is_saved(Path(path))))


class DatasetReader:
    """A Reader (see reader.py) of one split."""

    def __init__(self, source: InputSection):
        """Raises InputError if the data set cannot be had, or if it has several splits and input.split names none."""
        if not isinstance(source.path, str):
            raise InputError("input.path: a list of paths cannot be read as a data set; give one path")
        self._dataset = _load(source.path, source)
        try:
            for batch in self._dataset.data.to_batches():
                refuse_damage(batch)
        except pa.ArrowException as error:
            raise InputError(f"input.path: {source.path}: damaged: {error}; load or save the data set again") from None
        self._source = str(self._dataset.split or "dataset")
        self._schema = pa.schema(list(self._dataset.data.schema))
        self._name = source.path

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def num_rows(self) -> int:
        return len(self._dataset)

    def batches(self, columns: list[str] | None, batch_rows: int = 1024) -> Iterator[SourceBatch]:
        """See Reader. Raises InputError for a column that is not there."""
        names = self._schema.names if columns is None else columns
        for name in names:
            require_columns(self._schema, {"columns": name})
        row = 0
        for batch in self._read(names, batch_rows) if self.num_rows else ():
            yield SourceBatch(self._source, row, row, batch)
            row += batch.num_rows

    def fingerprint(self) -> dict[str, str]:
        """See Reader. Of the rows as they come, which is the same wherever the data set is kept, and however indexed."""
        digest = xxhash.xxh3_128(str(self._schema).encode())
        for source in self.batches(None):
            digest.update(source.batch.serialize())
        return {self._source: digest.hexdigest()}

    def _read(self, names: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        if not names:
            yield from rows_only(self.num_rows, batch_rows)
            return
        wanted = pa.schema([self._schema.field(name) for name in names])
        rows = self._dataset.select_columns(names).with_format("arrow")
        probe = rows[:_PROBE_ROWS]
        size = max(1, min(batch_rows, int(BATCH_BYTES * probe.num_rows / max(1, probe.nbytes))))
        for table in rows.iter(size):
            # a copy: a slice would hold, and count as, the whole of what it is cut from
            copied = table.take(pa.array(np.arange(table.num_rows))).combine_chunks()
            yield conform(copied.to_batches()[0], wanted, self._name)


def _load(path: str, source: InputSection) -> Dataset:
    import datasets

    hub = _HUB.fullmatch(path)
    try:
        if hub is None and _is_saved(Path(path)):
            for key in ("config", "revision"):
                if getattr(source, key) is not None:
                    raise InputError(f"input.{key}: has no effect on {path}, which save_to_disk wrote; remove it")
            return _load_saved(Path(path), source.split)
        revision = source.revision or (hub and hub["revision"])
        loaded = datasets.load_dataset(hub["id"] if hub else path, source.config, split=source.split, revision=revision)
    except InputError:
        raise
    except Exception as error:  # a library with plugins: it can raise anything
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"input.path: {path}: the data set cannot be loaded: {said}{_way_out(hub is not None)}") from None
    return loaded if source.split is not None else loaded[_split(path, list(loaded), None)]


def _load_saved(folder: Path, split: str | None) -> Dataset:
    import datasets

    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        return _load_saved(folder / _split(str(folder), splits, split), None)
    loaded = datasets.load_from_disk(folder)
    if split is not None and split != str(loaded.split):
        raise InputError(f"input.split: {folder} holds one split ({loaded.split or 'without a name'}), not {split}")
    state: dict[str, Any] = json.loads((folder / "state.json").read_bytes())
    indices = state.get("_indices_data_files") or []  # of older versions; newer ones write the rows out, and ignore it
    if not indices:
        return loaded
    tables = []
    for file in indices:
        with pa.memory_map(str(folder / file["filename"])) as stream, pa.ipc.open_stream(stream) as reader:
            tables.append(reader.read_all())
    return loaded.select(pa.concat_tables(tables)["indices"].to_numpy())


def _split(path: str, splits: list[str], asked: str | None) -> str:
    if asked is None and len(splits) == 1:
        return splits[0]
    if asked not in splits:
        found = f"{path} has no split {asked}" if asked else f"{path} has several splits"
        raise InputError(f"input.split: {found}; choose one of {', '.join(splits)}")
    return asked


def _is_saved(folder: Path) -> bool:
    one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return one or (folder / "dataset_dict.json").is_file()


def _way_out(on_hub: bool) -> str:
    import datasets

    if not on_hub or not datasets.config.HF_HUB_OFFLINE:
        return ""
    return (
        "; HF_HUB_OFFLINE is set, so only what was loaded before is there: load it once without (batchgen plan does), with "
        "the same HF_HOME, or download its files and name them"
    )
