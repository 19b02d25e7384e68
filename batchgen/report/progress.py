"""What a person sees while a job runs: a bar in tokens, with rows, hit rate and phase; plain lines where no one watches."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TextIO

from tqdm import tqdm

PIPE_SECONDS = 30.0  # between lines when the output is a file or a pipe


class Progress:
    """Phases follow each other; each prints its name and, on a terminal, a bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.on_terminal = self.stream.isatty()
        self.seconds: dict[str, float] = {}
        self._phase, self._began, self._bar = "", time.perf_counter(), None
        self._last_line = 0.0

    def say(self, text: str) -> None:
        """One line of information, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        with contextlib.suppress(OSError):  # a log on a full disk, a pipe that nobody reads: rows matter more than words
            print(text, file=self.stream, flush=True)

    def phase(self, name: str, total: int | None = None, unit: str = "tok") -> None:
        """Begin a phase (and end the one before). total: in `unit`s."""
        self.close()
        self._phase, self._began = name, time.perf_counter()
        self._last_line = self._began
        self._bar = tqdm(
            total=total, unit=unit, desc=name, file=self.stream, dynamic_ncols=True, leave=False,
            unit_scale=True, disable=not self.on_terminal, smoothing=0.1,
        )  # fmt: skip
        self._num_done, self._unit = 0, unit

    def update(self, n: int, facts: str = "", total: int | None = None) -> None:
        """n more units are done. facts: short text behind the bar. total: a better estimate of the whole."""
        bar = self._bar
        if bar is None:
            return
        self._num_done += n
        if total is not None:
            bar.total = max(total, self._num_done)
        if self.on_terminal:
            bar.set_postfix_str(facts, refresh=False)
            bar.update(n)
        elif (now := time.perf_counter()) - self._last_line >= PIPE_SECONDS:
            self._last_line = now
            share = f"/{bar.total:,}" if bar.total else ""
            rate = self._num_done / (now - self._began)
            self.say(f"{self._phase}: {self._num_done:,}{share} {self._unit}, {rate:,.0f} {self._unit}/s, {facts}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            spent = time.perf_counter() - self._began
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent
