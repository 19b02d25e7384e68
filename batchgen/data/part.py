"""A part on disk: the answers of one commit, in ANSWER_SCHEMA behind the two columns that say whose they are.

row_key      uint64   the row's identity, see data.rows
prompt_hash  uint64   xxh3-64 of what it was asked: the prompt's token ids, or why there are none
row ...               ANSWER_SCHEMA; `row` is the row's position at that time

and before the columns that tell how it was computed, which differ from run to run and so are in no results:

num_cached_tokens  int32   prompt tokens that were not computed again
num_preemptions    int32
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchgen.data.job_rows import JobRows
from batchgen.data.part_store import PartStore
from batchgen.data.schema import ANSWER_SCHEMA, RUN_FIELDS, completions_to_table
from batchgen.errors import CorruptRunError
from batchgen.records import Completion, Part

OWNER_FIELDS = [pa.field("row_key", pa.uint64(), nullable=False), pa.field("prompt_hash", pa.uint64(), nullable=False)]
PART_SCHEMA = pa.schema([*OWNER_FIELDS, *ANSWER_SCHEMA, *RUN_FIELDS], metadata=ANSWER_SCHEMA.metadata)


def part_table(completions: Sequence[Completion], rows: JobRows) -> pa.Table:
    """One row a completion, sorted by (row, sample_index), in PART_SCHEMA."""
    answers = completions_to_table(completions)
    index = rows.index(answers["row"].to_numpy())
    assert np.array_equal(rows.rows[index], answers["row"].to_numpy()), "an answer to a row that the job does not have"
    owners = [pa.array(rows.keys[index]), pa.array(rows.prompt_hashes[index])]
    return pa.Table.from_arrays([*owners, *answers.columns], schema=PART_SCHEMA)


def read_part(store: PartStore, part: Part) -> pa.Table:
    """A committed part in PART_SCHEMA, its checksum compared. Raises CorruptRunError."""
    try:
        image = (store.parts / part.name).read_bytes()
    except OSError as error:
        raise damaged(store, part, error.strerror or str(error)) from None
    if xxhash.xxh3_128_hexdigest(image) != part.checksum:
        raise damaged(store, part, "changed since it was committed (its checksum differs)")
    return pq.read_table(pa.BufferReader(image))


def read_part_columns(store: PartStore, part: Part, columns: list[str]) -> pa.Table:
    """Some columns of a committed part, without its checksum. Raises CorruptRunError."""
    try:
        with pq.ParquetFile(store.parts / part.name) as file:
            return file.read(columns=columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise damaged(store, part, str(error)) from None


def damaged(store: PartStore, part: Part, found: str) -> CorruptRunError:
    return CorruptRunError(
        f"{store.parts / part.name}: {found}, but it is committed; run the job again: it sets the part aside and computes "
        f"its {part.num_rows} answers anew"
    )
