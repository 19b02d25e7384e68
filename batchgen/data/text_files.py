"""Text files as bytes, whatever they are packed with. Knows no format but its compression."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import BinaryIO, cast

import pyarrow as pa

from batchgen.data.files import InputFile
from batchgen.data.files_reader import STREAM_BYTES
from batchgen.errors import InputError

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_UTF8_MARK = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\xff\xfe": "UTF-16 text; write it as UTF-8, such as by iconv",
    b"\xfe\xff": "UTF-16 text; write it as UTF-8, such as by iconv",
    b"PAR1": "a Parquet file; set input.format to parquet, or give it that suffix",
    b"ARROW1": "an Arrow file; set input.format to arrow, or give it that suffix",
    b"PK\x03\x04": "a zip archive; unpack it",
}


@contextlib.contextmanager
def open_text(file: InputFile) -> Iterator[BinaryIO]:
    """The bytes of the text, unpacked by what the file begins with (gzip, zstd), without the mark of UTF-8.

    Raises InputError if it begins as something else than UTF-8 text; OSError, as it is read, if it is cut off or damaged.
    """
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(file.fs.open(file.path, "rb"))
        stream = io.BufferedReader(raw, STREAM_BYTES)
        for magic, codec in _MAGIC.items():
            if stream.peek(4).startswith(magic):
                unpacked = stack.enter_context(pa.CompressedInputStream(pa.PythonFile(stream, "r"), codec))
                stream = io.BufferedReader(unpacked, STREAM_BYTES)
        head = stream.peek(8)
        for magic, what in _FOREIGN.items():
            if head.startswith(magic):
                raise InputError(f"{file.path}: is {what}")
        if head.startswith(_UTF8_MARK):
            stream.read(len(_UTF8_MARK))
        yield cast(BinaryIO, stream)
