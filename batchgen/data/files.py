"""From input.path to a list of files, the same on every machine. Knows names, not formats."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from batchgen.errors import InputError


class InputFile(NamedTuple):
    source: str  # path below the input's base folder: names the file in row keys, so it must not hold this machine's folders
    path: str  # where it is, for its file system
    fs: Any  # fsspec file system

    def open(self) -> Any:
        # a local file goes to the reader as itself: no Python between it and the bytes
        return self.path if isinstance(self.fs, LocalFileSystem) else self.fs.open(self.path, "rb")


def find_files(paths: str | Sequence[str], suffix: str) -> list[InputFile]:
    """All files that `paths` (file, folder or glob each) mean, each once, sorted by their full path as text.

    A folder means every `*{suffix}` below it, but nothing whose name, or whose folder's name, begins with . or _.
    Raises InputError if one of `paths` means no file.
    """
    asked = [paths] if isinstance(paths, str) else list(paths)
    found: dict[str, Any] = {}
    bases: list[str] = []
    for path in asked:
        base, names, fs = _expand(path, suffix)
        bases.append(base)
        found |= dict.fromkeys(names, fs)
    base = bases[0] if len(set(bases)) == 1 else _common_folder(bases)
    files = [InputFile(posixpath.relpath(path, base) if base else path, path, fs) for path, fs in found.items()]
    return sorted(files, key=lambda file: file.path)


def _expand(path: str, suffix: str) -> tuple[str, list[str], Any]:
    """(base folder, full names, file system) of one file, folder or glob."""
    try:
        fs, full = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"input.path: {path}: {error}") from None
    try:
        if fs.isfile(full):
            return posixpath.dirname(full), [full], fs
        if fs.isdir(full):
            everything = fs.find(full)
            names = [name for name in everything if name.endswith(suffix) and not _is_hidden(name, full)]
            if names:
                return full, names, fs
            others = f"; there are {len(everything)} other files, such as {everything[0]}" if everything else ""
            raise InputError(f"input.path: no *{suffix} in the folder {path} or below it{others}")
        if any(sign in full for sign in "*?["):
            base = full[: next(i for i, letter in enumerate(full) if letter in "*?[")].rpartition("/")[0]
            names = [name for name in fs.glob(full) if not _is_hidden(name, base) and fs.isfile(name)]
            if names:
                return base, names, fs
            there = "" if fs.isdir(base or "/") else f"; the folder {base} does not exist"
            raise InputError(f"input.path: no file matches {path}{there}")
    except OSError as error:
        raise InputError(f"input.path: {path}: {error.strerror or error}") from None
    raise InputError(f"input.path: {path} does not exist{_nearest_folder(fs, full)}")


def _is_hidden(name: str, base: str) -> bool:
    """Such as _SUCCESS, _temporary/0/x.parquet, .x.parquet.crc: what other tools leave beside their data."""
    return any(step.startswith((".", "_")) for step in name[len(base) :].strip("/").split("/"))


def _common_folder(bases: list[str]) -> str:
    try:
        return os.path.commonpath(bases)
    except ValueError:  # on different file systems
        return ""


def _nearest_folder(fs: Any, path: str) -> str:
    folder = posixpath.dirname(path)
    while folder and folder != "/" and not fs.isdir(folder):
        folder = posixpath.dirname(folder)
    if not folder or folder == "/":
        return ""
    names = sorted(posixpath.basename(name.rstrip("/")) for name in fs.ls(folder, detail=False))
    return f"; {folder} holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else f"; {folder} is empty"
