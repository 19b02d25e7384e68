"""Columns that are written in folder names, as Hive does: lang=de/part.parquet gives each of its rows lang = "de"."""

from __future__ import annotations

import re
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from batchgen.data.rows import faults_of
from batchgen.data.unify import to_batch
from batchgen.errors import InputError

_NULL = "__HIVE_DEFAULT_PARTITION__"


class Partitions:
    """The partition columns of some files: text, or int64 where every value is written as a whole number is."""

    def __init__(self, sources: list[str], schema: pa.Schema):
        """`sources`: the files' names below the input's folder; `schema`: what the files themselves hold.

        Raises InputError if the files' folders name different columns, or one that the files hold too.
        """
        steps = [_steps(source) for source in sources]
        for source, own in zip(sources, steps, strict=True):
            if own.keys() != steps[0].keys():
                raise InputError(
                    f"input.path: {source} lies in folders that name the columns {_listed(own)}, but {sources[0]} in some "
                    f"that name {_listed(steps[0])}; give all files the same"
                )
            for name in own:
                if name in schema.names:
                    raise InputError(
                        f"input.path: the folder of {source} names a column {name}, which the files hold too; "
                        "rename the folder or the column"
                    )
        self.fields: list[pa.Field] = []
        self._values: dict[str, list[str | int | None]] = {}
        for name in steps[0] if steps else ():
            texts = [own[name] for own in steps]
            is_int = all(text is None or _is_whole(text) for text in texts) and any(texts)
            self.fields.append(pa.field(name, pa.int64() if is_int else pa.string()))
            self._values[name] = [int(text) if is_int and text is not None else text for text in texts]

    @property
    def names(self) -> set[str]:
        return set(self._values)

    def add(self, batch: pa.RecordBatch, wanted: pa.Schema, file: int) -> pa.RecordBatch:
        """`batch`, of the file with that number, with its partition columns (null in a bad row): of schema `wanted`."""
        is_bad = np.zeros(batch.num_rows, bool)
        is_bad[list(faults_of(batch))] = True
        arrays = []
        for field in wanted:
            if field.name in self._values:
                values = np.full(batch.num_rows, self._values[field.name][file], object)
                arrays.append(pa.array(values, field.type, mask=is_bad))
            else:
                arrays.append(batch.column(field.name))
        return to_batch(arrays, wanted.with_metadata(batch.schema.metadata), batch.num_rows)


def _steps(source: str) -> dict[str, str | None]:
    """Column -> text, of the folders in `source`."""
    found: dict[str, str | None] = {}
    for folder in source.split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if equals and name:
            found[unquote(name)] = None if value == _NULL else unquote(value)
    return found


def _is_whole(text: str) -> bool:
    """Written as int64 is: "007" stays text, or it would come out as another value."""
    return re.fullmatch(r"0|-?[1-9]\d{0,18}", text, re.ASCII) is not None and -(2**63) <= int(text) < 2**63


def _listed(own: dict[str, str | None]) -> str:
    return ", ".join(own) or "(none)"
