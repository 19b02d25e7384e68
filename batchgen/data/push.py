"""Finished results to another place: a folder, an object store (s3://, gs://, az://), whatever fsspec reaches.

Each file is uploaded under a name that no reader of results takes, and then moved to its own (a store without renames
copies). What an earlier push of the job left there and this one does not bring is deleted, and manifest.json comes last:
names, bytes and checksums of all that belongs together. A push that broke off is repeated by the next `run` or `merge`.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from batchgen.errors import BatchgenError, UsageError

MANIFEST = "manifest.json"
_ASIDE = "_uploading."
_STREAM_BYTES = 2**20
_FLAT = {"s3", "gs", "az", "abfs", "oss", "oci"}  # stores without folders, where making one would make a bucket


def check_target(url: str) -> None:
    """Raises UsageError, before any work, if nothing can be pushed to `url`: no such protocol, a package that is missing."""
    try:
        fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UsageError(f"output.push_to: {url}: {error}") from None
    except ValueError as error:
        raise UsageError(f"output.push_to: {url}: {error}; give a folder or a URL such as s3://bucket/folder") from None
    except Exception as error:  # credentials and the like, in each store's own words
        raise UsageError(f"output.push_to: {url}: {_words(error)}") from None


def push(files: Sequence[Path], url: str) -> None:
    """Put `files`, which lie in one folder, into the folder `url`. Raises BatchgenError with the store's words."""
    with _explained(url):
        fs, folder = fsspec.core.url_to_fs(url)
        if _FLAT.isdisjoint([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol):
            fs.makedirs(folder, exist_ok=True)
        entries = [{"name": file.name, "bytes": file.stat().st_size, "xxh3_128": _checksum(file)} for file in files]
        for file in files:
            aside = posixpath.join(folder, _ASIDE + file.name)
            fs.put_file(str(file), aside)
            fs.mv(aside, posixpath.join(folder, file.name))
        names = {file.name for file in files}
        for name in _pushed_before(fs, folder) - names:
            if fs.exists(path := posixpath.join(folder, name)):
                fs.rm_file(path)
        fs.pipe_file(posixpath.join(folder, MANIFEST), json.dumps({"files": entries}, indent=2).encode())
        fs.invalidate_cache()


def _pushed_before(fs: Any, folder: str) -> set[str]:
    try:
        manifest = json.loads(fs.cat_file(posixpath.join(folder, MANIFEST)))
        return {posixpath.basename(entry["name"]) for entry in manifest["files"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none yet, or not ours
        return set()


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb") as stream:
        while piece := stream.read(_STREAM_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each store has its own kinds
        raise BatchgenError(
            f"output.push_to: {url}: {_words(error)}; the results are safe in the run folder, and `batchgen merge DIR` "
            "pushes again"
        ) from error


def _words(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
