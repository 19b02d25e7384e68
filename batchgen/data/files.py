"""From input.path to a list of files of one format, the same on every machine. Knows names and suffixes, no content."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from batchgen.errors import InputError

PACKED = (".gz", ".zst")  # may follow a suffix of a text format
_SELDOM_ROWS = (".json",)  # beside files of another suffix these describe them, as dataset_info.json does


class InputFile(NamedTuple):
    source: str  # path below the input's base folder: names the file in row keys, so it must not hold this machine's folders
    path: str  # where it is, for its file system
    fs: Any  # fsspec file system

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def open(self) -> Any:
        # a local file goes to the reader as itself: no Python between it and the bytes
        return self.path if self.is_local else self.fs.open(self.path, "rb")


def find_files(
    paths: str | Sequence[str], suffixes: Mapping[str, str], given: str | None = None
) -> tuple[list[InputFile], str]:
    """All files that `paths` (file, folder or glob each) mean, each once, sorted by their full path as text; their format.

    `suffixes`: suffix -> format. A folder means every file below it with one of these, but nothing whose name, or whose
    folder's name, begins with . or _. `given`, a format, is what files and globs are whatever their suffix; in a folder it
    chooses the suffixes. Raises InputError if one of `paths` means no file, or for files of no or more than one format.
    """
    asked = [paths] if isinstance(paths, str) else list(paths)
    if given is not None:
        suffixes = {suffix: name for suffix, name in suffixes.items() if name == given}
    found: dict[str, Any] = {}
    bases: list[str] = []
    for path in asked:
        base, names, fs = _expand(path, suffixes)
        bases.append(base)
        found |= dict.fromkeys(names, fs)
    base = bases[0] if len(set(bases)) == 1 else _common_folder(bases)
    files = [InputFile(posixpath.relpath(path, base) if base else path, path, fs) for path, fs in found.items()]
    files.sort(key=lambda file: file.path)
    return files, given or _one_format([file.path for file in files], suffixes)


def format_of(name: str, suffixes: Mapping[str, str]) -> str | None:
    return next((format for suffix, format in suffixes.items() if name.lower().endswith(suffix)), None)


def _one_format(names: list[str], suffixes: Mapping[str, str]) -> str:
    examples = {format_of(name, suffixes): name for name in reversed(names)}
    if None in examples:
        raise InputError(
            f"input.path: {examples[None]}: its suffix tells no format; set input.format "
            f"({', '.join(dict.fromkeys(suffixes.values()))}). Known are {', '.join(suffixes)}"
        )
    if len(examples) > 1:
        (one, first), (other, second), *_ = ((format, name) for format, name in examples.items())
        raise InputError(
            f"input.path: files of two formats: {first} ({one}) and {second} ({other}); name one of them, "
            "such as by a glob, or set input.format to take one from a folder"
        )
    (format,) = examples
    assert format is not None
    return format


def _expand(path: str, suffixes: Mapping[str, str]) -> tuple[str, list[str], Any]:
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
            names = [name for name in everything if format_of(name, suffixes) and not _is_hidden(name, full)]
            if telling := [name for name in names if not name.lower().endswith(_SELDOM_ROWS)]:
                names = telling
            if names:
                return full, names, fs
            others = f"; there are {len(everything)} other files, such as {everything[0]}" if everything else ""
            wanted = ", ".join(f"*{suffix}" for suffix in suffixes if not suffix.endswith(PACKED))
            raise InputError(f"input.path: no {wanted} in the folder {path} or below it{others}")
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
