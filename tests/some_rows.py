"""Rows of a job for tests of what is below the tokenizer: row i has the id i and asks `prompt(i)`."""

from collections.abc import Callable, Iterable

import numpy as np

from batchgen.data.job_rows import JobRows
from batchgen.data.rows import row_key


def some_rows(rows: int | Iterable[int], prompt: Callable[[int], str] = str, ids: Callable[[int], int] = int) -> JobRows:
    """`rows`: how many, or their positions."""
    positions = list(range(rows) if isinstance(rows, int) else rows)
    keys = np.array([row_key("", 0, ids(row)) for row in positions], np.uint64)
    return JobRows.of(np.array(positions, np.int64), keys, [prompt(row).encode() for row in positions])
