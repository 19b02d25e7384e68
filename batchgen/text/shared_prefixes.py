"""Text that prompts have in common is tokenized once: where a text may be cut so that its ids stay the same.

The one place where texts are cut is before a space that follows a printable ASCII character ("... above.| Answer"). No word
of the tokenizers below spans it, no normal form composes across it, and what follows it cannot change what stands before it.
Which tokenizers those are is read from their parts; any other one is left alone. Knows no template and no rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import tokenizers

MIN_PIECE = 64  # characters; to tokenize a piece of its own costs as much as some ten characters

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NEWER = (  # Llama 3 and GPT-4 take up to three digits as a word, Qwen takes one
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (  # GPT-4o, Llama 4 and (without contractions) Mistral
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In each, whatever matches a printable character ends before a space, and what matches a space ends the text before it
WORD_PATTERNS = {
    *(_GPT2, _NEWER % "{1,3}", _NEWER % "", _QWEN35),
    *(_CASED % (f"(?i:{_CONTRACTIONS})?", f"(?i:{_CONTRACTIONS})?", "{1,3}"), _CASED % ("", "", "")),
}
NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


def may_cut(rust: tokenizers.Tokenizer) -> bool:
    """Whether the ids of a text are those of the parts that `cut` makes of it, for any text. False if that is not known."""
    try:
        normalizer = None if rust.normalizer is None else json.loads(rust.normalizer.__getstate__())
        words = None if rust.pre_tokenizer is None else json.loads(rust.pre_tokenizer.__getstate__())
    except Exception:  # parts that are written in Python
        return False
    return (
        all(part["type"] in NORMAL_FORMS for part in _parts(normalizer, "normalizers"))
        and _words_end_at_spaces(_parts(words, "pretokenizers"))
        and getattr(rust.model, "dropout", None) is None
        and not any(
            token.rstrip or token.single_word or " " in token.content.lstrip(" ")
            for token in rust.get_added_tokens_decoder().values()
        )
    )


class Pieces(NamedTuple):
    """Texts as pieces that some of them share: text i is "".join(pieces[k] for k in of_text[i])."""

    pieces: list[str]
    of_text: list[list[int]]


def cut_shared(texts: Sequence[str]) -> Pieces:
    """Each stretch that texts have in common from their beginning is one piece; of what is shorter than MIN_PIECE none.

    In sorted order, texts with a common beginning are neighbours, so a text is cut where it parts from the next one, and
    where that one and its followers part from those after them.
    """
    order = sorted(range(len(texts)), key=texts.__getitem__)
    ordered = [texts[i] for i in order]
    shared = [cut(text, common_prefix(text, after)) for text, after in pairwise([*ordered, ""])]  # with the next text
    next_shorter = _next_smaller(shared)
    pieces: list[str] = []
    of_text: list[list[int]] = [[] for _ in texts]
    path: list[tuple[int, int]] = []  # (end in the text, piece): those of the text before that are in this one, too
    for at, text in enumerate(ordered):
        start = path[-1][0] if path else 0
        ends = []
        other = at
        while other < len(ordered) and shared[other] - start >= MIN_PIECE:
            ends.append(shared[other])
            other = next_shorter[other]
        for end in reversed(ends):
            if end - start >= MIN_PIECE:
                path.append((end, len(pieces)))
                pieces.append(text[start:end])
                start = end
        of_text[order[at]] = [*(piece for _, piece in path), len(pieces)]
        pieces.append(text[start:])
        while path and path[-1][0] > shared[at]:
            path.pop()
    return Pieces(pieces, of_text)


def cut(text: str, length: int) -> int:
    """The last place within text[:length] where it may be cut; 0 if there is none. The space after it is within, too."""
    at = text.rfind(" ", 0, length)
    while at > 0 and not "!" <= text[at - 1] <= "~":
        at = text.rfind(" ", 0, at)
    return max(at, 0)


def common_prefix(a: str, b: str) -> int:
    """Number of characters that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _next_smaller(values: Sequence[int]) -> list[int]:
    """For each value, the position of the next one that is smaller; the number of values if there is none."""
    found = [len(values)] * len(values)
    open_: list[int] = []
    for at, value in enumerate(values):
        while open_ and values[open_[-1]] > value:
            found[open_.pop()] = at
        open_.append(at)
    return found


def _parts(part: dict[str, Any] | None, of_sequence: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [one for each in part[of_sequence] for one in _parts(each, of_sequence)] if part["type"] == "Sequence" else [part]


def _words_end_at_spaces(parts: list[dict[str, Any]]) -> bool:
    """Whether some part cuts before every such space, and none of the others puts something at the beginning of a text."""
    cuts = False
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            if part["add_prefix_space"]:
                return False
            cuts |= part["use_regex"]
        elif kind == "Metaspace":
            # It puts its mark before a text, but not before one that begins with a space
            if not part["split"]:
                return False
            cuts = True
        elif kind == "Split" and part["pattern"].get("Regex") in WORD_PATTERNS:
            if (part["behavior"], part["invert"]) not in {("Isolated", False), ("Removed", True)}:
                return False
            cuts = True
        elif kind == "Split" and part["pattern"].get("Regex") in {r"\p{N}", r"\p{N}{1,3}"}:
            if (part["behavior"], part["invert"]) != ("Isolated", False):
                return False
        elif kind != "Digits":
            return False
    return cuts
