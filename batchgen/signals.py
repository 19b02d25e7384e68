"""TERM, INT, USR1 and USR2 end a job in order: what is finished is committed, and the process exits with 75."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from batchgen.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """`with StopSignals() as stop:` A signal raises Interrupted at once, except inside `deferred()`, where it sets
    `received` and the loop there ends at its next step. Everything outside can be repeated, so it may break anywhere.

    last: nothing comes after it but the end of the process, for which signals are then ignored. Handing back to what was
    before, and ignoring then, would leave a moment in which a signal kills.
    """

    def __init__(self, last: bool = False) -> None:
        self._last = last
        self.received: str | None = None
        self._deferred = False

    def __enter__(self) -> StopSignals:
        self._old = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_IGN if self._last else handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block end in its own time; raises Interrupted after it if a signal came meanwhile."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.received is not None:
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        message = f"stopped by {self.received}; what was finished is safe, run the same command again to go on"
        return Interrupted(message, (self.received or "").removeprefix("SIG"))

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if not self._deferred:
            raise self._interrupted()


def ignore_signals() -> None:
    """For the end of a process whose work is done: what comes now must not make a failure of it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
