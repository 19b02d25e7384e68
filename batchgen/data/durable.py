"""Writes that survive a crash: aside, fsync, os.replace, fsync of the folder. A reader sees the old file or the new one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from batchgen.errors import BatchgenError

TMP_SUFFIX = ".tmp"  # what is left of a write that did not end; its owner deletes it on the next start


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """`write(file)` fills a file beside `path`, which then takes the place of `path`. Durable on return.

    Raises BatchgenError with path and cause if the system refuses (disk full, quota, read-only folder).
    """
    aside = path.with_name(path.name + TMP_SUFFIX)
    with explain_os_errors(path):
        try:
            with open(aside, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def write_once(path: Path, content: bytes, folder: Path) -> bytes:
    """The content of `path`: this one, or that of whoever was first, of all processes on all machines. Durable on return.

    By link(2), which unlike O_EXCL shows no other process half a file, of one in `folder`, where nobody else writes.
    Raises BatchgenError if the system refuses.
    """
    with explain_os_errors(path):
        if not path.exists():
            own = folder / (path.name + TMP_SUFFIX)
            with open(own, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
            own.unlink()
            fsync_folder(path.parent)
        return path.read_bytes()


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename lives in the folder, not in the file."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        raise BatchgenError(
            f"{path}: cannot write: {cause}; what was committed is safe; solve this, then run the same command again"
        ) from error
