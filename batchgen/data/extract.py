"""output.extract: a value taken out of each answer by a regular expression, and whether it is the expected one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from batchgen.job import ExtractSection


def extract_value(text: str | None, settings: ExtractSection) -> str | None:
    """Group 1 (else the whole) of the first or last match in `text`; None if nothing matches."""
    if text is None:
        return None
    matches = re.finditer(settings.pattern, text)
    found = next(matches, None)
    if settings.take == "last":
        for found in matches:  # noqa: B007 the last one stays
            pass
    return None if found is None else found[1 if found.re.groups else 0]


def is_correct(value: str | None, expected: object, settings: ExtractSection) -> bool | None:
    """Whether `value` is the expected one; no value is a wrong one. None, not scored, if nothing is expected."""
    if expected is None:
        return None
    if value is None:
        return False
    if settings.as_ == "number":
        number = _number(value)
        return number is not None and number == _number(str(expected))
    return value.strip() == str(expected).strip()


def extract_column(texts: Sequence[str | None], settings: ExtractSection) -> list[str | None]:
    return [extract_value(text, settings) for text in texts]


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().replace(",", ""))  # Decimal takes a trailing dot
    except InvalidOperation:
        return None
