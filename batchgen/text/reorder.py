"""Advice on a prompt template: its paragraphs in the order in which rows share the most.

The prefixes that rows share make a tree; the order whose tree has the fewest characters on its edges is the one that leaves
least to compute. Paragraphs stay whole: "Title: {{ title }}" is not taken apart. Only advice, as the order of a prompt may
matter to a model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import numpy as np

from batchgen.text.template import user_environment

MAX_TRIED = 6  # paragraphs that differ by row, of which each order is tried
_BLANK_LINES = re.compile(r"\n[ \t]*\n")


def paragraphs(template: str) -> tuple[list[str], str]:
    """(what blank lines part, or lines if there are none; what joins them)."""
    by_blank_lines = _BLANK_LINES.split(template.strip("\n"))
    return (by_blank_lines, "\n\n") if len(by_blank_lines) > 1 else (template.strip("\n").split("\n"), "\n")


def reordered(template: str, rows: Sequence[dict[str, Any]]) -> str | None:
    """`template` with its paragraphs in the order in which `rows` share the most; None if that is the order they are in.

    Raises ValueError, in words for the user, where it cannot be taken apart.
    """
    if "{%" in template:
        raise ValueError("it has statements ({% ... %}), which may reach over what would be moved")
    parts, joint = paragraphs(template)
    values = [_values(part, rows) for part in parts]
    varying = [i for i, (ids, _) in enumerate(values) if ids.any()]
    constant = [i for i in range(len(parts)) if i not in varying]
    tried: Iterable[Sequence[int]] = itertools.permutations(varying)
    if len(varying) > MAX_TRIED:  # fewest values first
        tried = [sorted(varying, key=lambda i: (int(values[i][0].max()), i))]
    best = min(tried, key=lambda order: _edges([values[i] for i in order]), default=())
    moved = [parts[i] for i in [*constant, *best]]
    return None if moved == parts else joint.join(moved)


def _values(part: str, rows: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """([n] int64, which of its values each row renders it to; [n] int64, their lengths). A failure (a null) is a value."""
    try:
        template = user_environment().from_string(part)
    except jinja2.TemplateSyntaxError:
        raise ValueError("an expression ({{ ... }}) reaches over a line that would be moved") from None
    known: dict[str, int] = {}
    ids, lengths = [], []
    for row in rows:
        try:
            text = template.render(row)
        except Exception:  # a template is a program: it can raise anything
            text = ""
        ids.append(known.setdefault(text, len(known)))
        lengths.append(len(text))
    return np.array(ids, np.int64), np.array(lengths, np.int64)


def _edges(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    """Characters on the edges of the tree of prompts that have these parts in this order."""
    total = 0
    above = np.zeros(len(parts[0][0]) if parts else 0, np.int64)  # which prefix each row has so far
    for ids, lengths in parts:
        _, first, above = np.unique(above * (ids.max(initial=0) + 1) + ids, return_index=True, return_inverse=True)
        total += int(lengths[first].sum())
    return total
