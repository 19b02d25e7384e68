"""A JSON document that is one list, item by item, in memory for a few of them. Knows no file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

_PIECE_BYTES = 2**18
_MAX_ITEM = 2**30  # characters
_SPACE = " \t\n\r"


def begins_list(head: bytes) -> bool:
    return head.lstrip().startswith(b"[")


def items(stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """(characters, value) of each item; a ValueError in the place of a value is why the item cannot be taken.

    Raises ValueError where the list itself is broken: nothing after that place can be told apart. An object with a key
    twice is such a ValueError item.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, at, is_end, first = "", 0, False, True

    def more() -> None:
        """Another piece; twice as much while one item asks for more, so that it is not read anew too often."""
        nonlocal text, at, is_end
        raw = stream.read(max(_PIECE_BYTES, len(text) - at))
        text, at = text[at:] + decoder.decode(raw, final=not raw), 0
        is_end = not raw

    def skip_space() -> str:
        nonlocal at
        while True:
            while at < len(text) and text[at] in _SPACE:
                at += 1
            if at < len(text) or is_end:
                return text[at : at + 1]
            more()

    if skip_space() != "[":
        raise ValueError("not a list")
    at += 1
    while (sign := skip_space()) != "]":
        if not first:
            if sign != ",":
                raise ValueError("a comma or ] is missing" if sign else "it ends before its ]")
            at += 1
            skip_space()
        first = False
        while True:
            try:
                value, end = _PLAIN.raw_decode(text, at)
            except json.JSONDecodeError as error:
                if is_end or len(text) - at > _MAX_ITEM:
                    raise ValueError(error.msg) from None
            else:
                if end < len(text) or is_end:  # else a number may go on
                    break
            more()
        size = end - at
        try:
            value, _ = _STRICT.raw_decode(text, at)
        except ValueError as error:
            value = error
        at = end
        yield size, value
    at += 1
    if skip_space():
        raise ValueError("something follows after its ]")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; raises ValueError for one with a key twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)} is there twice in one object")
    return made


_PLAIN = json.JSONDecoder()
_STRICT = json.JSONDecoder(object_pairs_hook=unique_keys)
