"""Keeps the text of a control token that stands in a row's content from becoming that control token.

Before a template is rendered, each such text in the row's values is replaced by one character of Unicode's private use
area; after it, what is left of control tokens is the template's own, and the characters are put back as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

PRIVATE_USE = range(0xE000, 0xF900)


class ControlTokenGuard:
    """For one set of control tokens. `trusted`: texts of the job's author, whose private-use characters are not taken."""

    def __init__(self, control_tokens: Collection[str], trusted: str = "") -> None:
        self.tokens = sorted(control_tokens, key=len, reverse=True)  # the longest match wins, as in the tokenizer
        self.found = re.compile("|".join(map(re.escape, self.tokens)) or "(?!)")
        # A value that ends in the beginning of a control token could be completed by what the template puts after it
        starts = {token[:n] for token in self.tokens for n in range(1, len(token))}
        self.begun = (
            re.compile(f"(?:{'|'.join(map(re.escape, sorted(starts, key=len, reverse=True)))})\\Z") if starts else None
        )
        self.taken = {char for char in trusted if ord(char) in PRIVATE_USE}

    def hide(self, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """(row with control-token text replaced, {private character: the text it stands for}); the row itself if none is."""
        if not any(self._concerns(text) for text in strings_in(row)):
            return row, {}
        used = {char for text in strings_in(row) for char in text if ord(char) in PRIVATE_USE} | self.taken
        free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        stand_ins = {token: next(free) for token in [*self.tokens, ""]}  # "" marks a place that no token may span

        def replace(text: str) -> str:
            text = self.found.sub(lambda match: stand_ins[match[0]], text)
            return text + stand_ins[""] if self.begun and self.begun.search(text) else text

        return map_strings(row, replace), {char: token for token, char in stand_ins.items()}

    def segments(self, rendered: str, stand_ins: dict[str, str]) -> list[tuple[str, bool]]:
        """The rendered text cut into (plain text, False) and (control token of the template, True)."""
        pieces: list[tuple[str, bool]] = []
        at = 0
        for match in self.found.finditer(rendered):
            pieces += [(rendered[at : match.start()], False), (match[0], True)]
            at = match.end()
        pieces.append((rendered[at:], False))
        return [(piece if control else restore(piece, stand_ins), control) for piece, control in pieces if piece]

    def _concerns(self, text: str) -> bool:
        return bool(self.found.search(text) or (self.begun and self.begun.search(text)))


def restore(text: str, stand_ins: Mapping[str, str]) -> str:
    """Put the literal texts back; also where a JSON filter has written the character as an escape."""
    for char, token in stand_ins.items():
        text = text.replace(char, token).replace(f"\\u{ord(char):04x}", token)
    return text


def strings_in(value: Any) -> list[str]:
    """All strings inside nested lists and dictionaries (their values)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in strings_in(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in strings_in(item)]
    return []


def map_strings(value: Any, function: Any) -> Any:
    """A copy with `function` applied to all of `strings_in`."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, function) for item in value]
    return value
