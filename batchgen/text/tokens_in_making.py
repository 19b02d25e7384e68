"""A token store while it is made: a thread reads and tokenizes, others take its head, and later the whole.

The thread shares the process: tokenizers and Arrow release the interpreter lock while they work. Knows no job file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from batchgen.errors import BatchgenError
from batchgen.records import Prompt
from batchgen.text.token_store import Partitioning, TokenStore, TokenStoreWriter

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 30.0  # for a thread that is told to end: longer than any batch, shorter than a file system that hangs


class _Abandoned(Exception):
    """Ends the thread at its next prompt."""


class TokensInMaking:
    """Made with a finished store, or empty and then `start`ed. As a context manager it ends the thread on leaving; what
    is not finished then leaves nothing behind."""

    def __init__(self, store: TokenStore | None = None) -> None:
        self._head = self._whole = store
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._changed = threading.Event()
        self._num_read = 0
        self._on_wait: Callable[[], None] = lambda: None
        self._on_rows: Callable[[int], None] = lambda _: None

    def start(
        self,
        path: Path,
        partition: Callable[[TokenStore], Partitioning],
        fill: Callable[[TokenStoreWriter, Callable[[Iterator[Prompt]], Iterator[Prompt]]], None],
        on_wait: Callable[[], None],
        on_rows: Callable[[int], None],
    ) -> None:
        """fill(writer, counted) runs in the thread and sends the prompts it reads through `counted`; on_wait() and
        on_rows(n) tell the thread that waits for them how far it is."""
        self._on_wait, self._on_rows = on_wait, on_rows
        self._thread = threading.Thread(target=self._make, args=(path, partition, fill), name="tokenize", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def num_rows(self) -> int | None:
        """None while it is not known."""
        return None if self._whole is None else self._whole.num_rows

    def head(self) -> TokenStore:
        """The first rows, as soon as they are there; all rows if they are there. Raises what the thread raised."""
        self._wait(lambda: self._head is not None)
        assert self._head is not None
        return self._whole or self._head

    def whole(self) -> TokenStore:
        """All rows, when they are there. Raises what the thread raised."""
        self._wait(lambda: self._whole is not None)
        assert self._whole is not None
        return self._whole

    def __enter__(self) -> TokensInMaking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._abandoned = True
        if self._thread is not None:
            self._thread.join(PATIENCE_SECONDS)

    def _wait(self, ready: Callable[[], bool]) -> None:
        if not ready() and not self.failed:
            self._on_wait()
            shown = 0
            while not ready() and not self.failed:
                self._changed.wait(POLL_SECONDS)
                self._changed.clear()
                self._on_rows(self._num_read - shown)
                shown = self._num_read
        if self._error is not None:
            raise self._error

    def _make(
        self,
        path: Path,
        partition: Callable[[TokenStore], Partitioning],
        fill: Callable[[TokenStoreWriter, Callable[[Iterator[Prompt]], Iterator[Prompt]]], None],
    ) -> None:
        def cut(head: TokenStore) -> Partitioning:
            chosen = partition(head)
            self._head = head
            self._changed.set()
            return chosen

        try:
            with TokenStoreWriter(path, partition=cut) as writer:
                fill(writer, self._counted)
                self._stop_if_abandoned()
            self._whole = TokenStore.open(path)
            self._head = self._head or self._whole
        except OSError as error:  # the reader tells its own; what is left is the store's disk
            self._error = BatchgenError(
                f"{path}: cannot write: {error.strerror or error}; what was committed is safe; solve this, then run "
                "the same command again"
            )
        except BaseException as error:  # whatever it is, it is raised where the store is waited for
            self._error = error
        finally:
            self._changed.set()

    def _counted(self, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
        for prompt in prompts:
            self._stop_if_abandoned()
            yield prompt
            self._num_read += 1

    def _stop_if_abandoned(self) -> None:
        if self._abandoned:
            raise _Abandoned
