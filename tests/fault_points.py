"""Every system call that changes a run folder, as a named point at which a process can die or find the disk full.

Nothing in batchgen knows of this: `install` replaces open, os.fsync, os.replace and their like in the process that calls it.
A call that concerns `folder` is named by its file (relative to the folder), its operation and how many of these came before:
"parts/part-000001.parquet.tmp write 1". Its moments are "before", "after" and, for a write, "torn": half of the bytes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

MAKES_LARGER = {"create", "write", "mkdir", "link"}  # what a full disk refuses


class Faults:
    """Counts the calls below `folder`. `record`: file that gets the name of each point passed. `at`: the point that strikes.

    `fault`: kill (SIGKILL at the point), term (SIGTERM there, and once more), refuse (that one call raises ENOSPC), full (it
    and all later ones that need room).
    """

    def __init__(self, folder: str, record: str | None = None, at: str | None = None, fault: str = "kill") -> None:
        self.folder, self.at, self.fault = os.path.realpath(folder), at, fault
        self.is_full = False
        self.seen: Counter[str] = Counter()
        self.record = None if record is None else os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def call(self, path: Any, operation: str, do: Callable[[], Any], torn: Callable[[], Any] | None = None) -> Any:
        name = self._relative(path)
        if name is None:
            return do()
        self.seen[f"{name} {operation}"] += 1
        call = f"{name} {operation} {self.seen[f'{name} {operation}']}"
        self._pass(f"{call} before", operation)
        if torn is not None:
            if self.at == f"{call} torn":
                torn()
            self._pass(f"{call} torn", operation)
        result = do()
        self._pass(f"{call} after", operation)
        return result

    def _relative(self, path: Any) -> str | None:
        """ "." is the folder itself, ".." the one that it is in; None is no business of ours."""
        name = os.path.relpath(os.path.abspath(os.fsdecode(path)), self.folder)
        return None if name.startswith("../") else name

    def _pass(self, point: str, operation: str) -> None:
        if self.record is not None:
            os.write(self.record, point.encode() + b"\n")
        if point == self.at:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "term":
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            self.is_full = self.fault == "full"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.is_full and operation in MAKES_LARGER and point.endswith("before"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def install(folder: str, *, clock: float | None = None, **settings: Any) -> Faults:
    """Wrap the calls of this process. `clock`: the wall clock begins at this time and runs backwards."""
    faults = Faults(folder, **settings)
    real_open, real = builtins.open, {name: getattr(os, name) for name in ("fsync", "replace", "rename", "mkdir", "link")}
    real |= {name: getattr(os, name) for name in ("unlink", "rmdir", "ftruncate", "pwrite")}

    class WatchedFile(io.FileIO):
        """Each write(2) and ftruncate(2) of a buffered file comes through here."""

        def write(self, data: Any) -> int:
            data = memoryview(data).cast("B")
            write = super().write
            return faults.call(self.name, "write", lambda: write(data), lambda: write(data[: len(data) // 2]))

        def truncate(self, size: int | None = None) -> int:
            truncate = super().truncate
            return faults.call(self.name, "truncate", lambda: truncate(size))

    def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or mode not in ("wb", "ab", "xb") or faults._relative(file) is None:
            return real_open(file, mode, *args, **kwargs)
        create = not os.path.exists(file) or mode == "wb"
        raw = faults.call(file, "create", lambda: WatchedFile(file, mode)) if create else WatchedFile(file, mode)
        return io.BufferedWriter(raw)

    def of_handle(operation: str, name: str) -> Callable[..., Any]:
        return lambda handle, *rest: faults.call(
            os.readlink(f"/proc/self/fd/{handle}"), operation, lambda: real[name](handle, *rest)
        )

    def of_path(operation: str, name: str, at: int = 0) -> Callable[..., Any]:
        def wrapped(*paths: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            inside = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            if dir_fd is not None:
                kwargs["dir_fd"] = dir_fd
            return faults.call(os.path.join(inside, paths[at]), operation, lambda: real[name](*paths, **kwargs))

        return wrapped

    builtins.open = io.open = watched_open  # type: ignore[assignment]
    os.fsync, os.ftruncate, os.pwrite = (
        of_handle("fsync", "fsync"),
        of_handle("truncate", "ftruncate"),
        of_handle("write", "pwrite"),
    )
    os.replace, os.rename = of_path("rename", "replace", at=1), of_path("rename", "rename", at=1)  # named by the new name
    os.link = of_path("link", "link", at=1)
    os.mkdir, os.unlink, os.rmdir = of_path("mkdir", "mkdir"), of_path("unlink", "unlink"), of_path("rmdir", "rmdir")
    shutil._use_fd_functions = True  # type: ignore[attr-defined]  # it compared os.unlink with what it knows
    if clock is not None:
        began = time.monotonic()
        time.time = lambda: clock - 1000 * (time.monotonic() - began)
    return faults
