"""Which Arrow type holds the JSON values of a column exactly. Knows no file."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_MAX_KEYS = 1000  # of one object: more are data, not columns
_MAX_DEPTH = 20
_EXACT_IN_DOUBLE = 2**53


class Shape:
    """What the values at one place of all rows have in common. `see` each, then ask for `arrow_type`."""

    __slots__ = ("fields", "high", "is_mixed", "item", "kinds", "low")

    def __init__(self) -> None:
        self.kinds: set[type] = set()
        self.low = self.high = 0
        self.item: Shape | None = None  # of the values in lists
        self.fields: dict[str, Shape] | None = None  # of objects, which all have these keys in this order
        self.is_mixed = False  # no type but text of JSON holds them

    def see(self, value: Any, depth: int = 0) -> None:
        kind = type(value)
        self.kinds.add(kind)
        if kind is int:
            if value < self.low:
                self.low = value
            elif value > self.high:
                self.high = value
        elif kind is list:
            if depth > _MAX_DEPTH:
                self.is_mixed = True
                return
            if self.item is None:
                self.item = Shape()
            for inner in value:
                self.item.see(inner, depth + 1)
        elif kind is dict:
            if self.is_mixed:
                return
            if self.fields is None:
                self.fields = {key: Shape() for key in value}
            if not 0 < len(value) <= _MAX_KEYS or depth > _MAX_DEPTH or list(value) != list(self.fields):
                self.is_mixed, self.fields = True, None
                return
            for key, inner in value.items():
                self.fields[key].see(inner, depth + 1)

    def arrow_type(self) -> pa.DataType | None:
        """None: there is no type from which each value comes back as it was. Whole numbers beside others become double."""
        kinds = self.kinds - {type(None)}
        if self.is_mixed:
            return None
        if not kinds:
            return pa.null()
        if kinds == {int, float}:
            return pa.float64() if max(self.high, -self.low) <= _EXACT_IN_DOUBLE else None
        if len(kinds) > 1:
            return None
        (kind,) = kinds
        if kind is int:
            if max(self.high, ~self.low) < 2**63:
                return pa.int64()
            return pa.uint64() if self.low >= 0 and self.high < 2**64 else None
        if kind is list:
            item = self.item.arrow_type() if self.item else None
            return item and pa.list_(item)
        if kind is dict:
            inner = {key: shape.arrow_type() for key, shape in (self.fields or {}).items()}
            return None if None in inner.values() else pa.struct(list(inner.items()))
        return {bool: pa.bool_(), float: pa.float64(), str: pa.string()}[kind]
