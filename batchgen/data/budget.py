"""How many rows may fail before a run stops: a job with a fault in it should not spend a night on making error rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from batchgen.errors import TooManyFailedRows
from batchgen.records import Completion


class ErrorBudget:
    """`limit`: rows that may fail, None for any number. `num_failed`: those that have, and are not computed again now."""

    def __init__(self, limit: int | None, num_failed: int = 0) -> None:
        self.limit, self.num_failed = limit, num_failed
        self._rows: set[int] = set()  # that failed in this run
        self._codes: Counter[str] = Counter()
        self._example = ""

    def count(self, completions: Iterable[Completion]) -> None:
        for one in completions:
            if one.fault is not None and one.row not in self._rows:
                self._rows.add(one.row)
                self._codes[one.fault.code] += 1
                self._example = self._example or f"; row {one.row}: {one.fault.message}"

    @property
    def is_spent(self) -> bool:
        return self.limit is not None and self.num_failed + len(self._rows) > self.limit

    def check(self) -> None:
        """Raises TooManyFailedRows if more rows have failed than may."""
        if self.is_spent:
            codes = ", ".join(f"{code}: {count}" for code, count in self._codes.most_common())
            raise TooManyFailedRows(
                f"stopped: {self.num_failed + len(self._rows)} rows have failed, and output.max_failed_rows allows "
                f"{self.limit}{f' (in this run {codes}{self._example})' if codes else ''}. What was finished is committed: "
                "raise the limit and run the same command again to go on, or begin anew with --restart"
            )
