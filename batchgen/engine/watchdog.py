"""Ends a process whose step hangs (a kernel that does not come back, a dead driver), which no signal handler would reach."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from batchgen.errors import Interrupted

PATIENCE = 60  # seconds for saving what is finished, which may hang as well


class Watchdog:
    """`with Watchdog(...) as watchdog:` Between `begin` and `end` no more than `seconds` may pass; None: any time.

    If more do, another thread writes where all threads are to `trace`, calls `save`, prints one line and ends the process
    with exit code 75. `save` has the main thread's data to itself: `begin` and `end` wait for it, and nothing comes after.
    It cannot help against code that holds the interpreter's lock for ever.
    """

    def __init__(self, seconds: float | None, trace: Path, save: Callable[[], object]) -> None:
        self.seconds, self.trace, self.save = seconds, trace, save
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._since: float | None = None

    def __enter__(self) -> Watchdog:
        if self.seconds is not None:
            threading.Thread(target=self._watch, args=(self.seconds,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
        self._closed.set()

    def begin(self) -> None:
        with self._lock:
            self._since = time.monotonic()

    def end(self) -> None:
        with self._lock:
            self._since = None

    def _watch(self, seconds: float) -> None:
        while not self._closed.wait(min(seconds / 4, 1.0)):
            with self._lock:
                if self._since is not None and time.monotonic() - self._since > seconds:
                    self._end_process(seconds)

    def _end_process(self, seconds: float) -> None:
        saved = "what was finished is safe"
        try:
            with open(self.trace, "w") as file:
                faulthandler.dump_traceback(file)
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            self.save()
        except BaseException as error:
            saved = f"what was committed is safe ({type(error).__name__}: {error})"
        print(
            f"batchgen: a step has not ended for {seconds:g} seconds (engine.step_timeout); {self.trace} says where it "
            f"hangs; {saved}, run the same command again to go on",
            file=sys.stderr,
            flush=True,
        )
        os._exit(Interrupted.exit_code)
