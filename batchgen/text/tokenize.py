"""Prompts -> token store: batched encoding, and what happens to prompts that are too long. Knows no template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from batchgen.records import Prompt, RowFault
from batchgen.text.token_store import TokenStoreWriter
from batchgen.text.tokenizer import Tokenizer

NO_TOKENS = np.empty(0, np.int32)
BATCH_ROWS = 1024
BATCH_CHARS = 4 * 2**20
ON_TOO_LONG = ("error", "truncate_left", "truncate_right", "truncate_middle")


@dataclass
class TokenizeCounts:
    """What went into the store."""

    num_rows: int = 0
    num_faults: int = 0
    num_truncated: int = 0
    num_tokens: int = 0


def tokenize(
    prompts: Iterable[Prompt],
    tokenizer: Tokenizer,
    writer: TokenStoreWriter,
    *,
    add_special_tokens: bool,
    max_prompt_tokens: int,
    on_too_long: str = "error",
    batch_rows: int = BATCH_ROWS,
) -> TokenizeCounts:
    """Encode all prompts into the writer, in their order; the caller finishes it.

    A prompt of more than `max_prompt_tokens` tokens becomes the fault prompt_too_long, or loses tokens at the side that
    `on_too_long` names. Whatever happens to one row stays in that row. Holds `batch_rows` prompts at a time, or fewer long
    ones: the tokenizer takes some hundred bytes for each token until a batch is done.
    """
    if on_too_long not in ON_TOO_LONG:
        raise ValueError(f"on_too_long {on_too_long!r}: expected one of {', '.join(ON_TOO_LONG)}")
    counts = TokenizeCounts()
    for batch in _batches(prompts, batch_rows):
        outcomes = _encode(batch, tokenizer, add_special_tokens)
        token_ids: list[np.ndarray] = []
        faults: list[RowFault | None] = []
        for outcome in outcomes:
            ids, fault = (NO_TOKENS, outcome) if isinstance(outcome, RowFault) else (outcome, None)
            if fault is None and len(ids) == 0:
                fault = RowFault("empty_prompt", "the prompt has no tokens")
            elif fault is None and len(ids) > max_prompt_tokens:
                if on_too_long == "error":
                    fault = RowFault("prompt_too_long", f"the prompt has {len(ids)} tokens, {max_prompt_tokens} fit")
                    ids = NO_TOKENS
                else:
                    ids = truncate(ids, max_prompt_tokens, on_too_long)
                    counts.num_truncated += 1
            token_ids.append(ids)
            faults.append(fault)
        writer.append([prompt.row for prompt in batch], [prompt.row_key for prompt in batch], token_ids, faults)
        counts.num_rows += len(batch)
        counts.num_faults += sum(fault is not None for fault in faults)
        counts.num_tokens += sum(map(len, token_ids))
    return counts


def truncate(ids: np.ndarray, max_tokens: int, where: str) -> np.ndarray:
    """The `max_tokens` ids that are left after cutting at the left, the right or in the middle."""
    if where == "truncate_left":
        return ids[len(ids) - max_tokens :]
    if where == "truncate_right":
        return ids[:max_tokens]
    tail = max_tokens // 2
    return np.concatenate([ids[: max_tokens - tail], ids[len(ids) - tail :]])


def _batches(prompts: Iterable[Prompt], batch_rows: int) -> Iterator[list[Prompt]]:
    batch: list[Prompt] = []
    num_chars = 0
    for prompt in prompts:
        batch.append(prompt)
        num_chars += len(prompt.text or "") + sum(len(text) for text, _ in prompt.segments or ())
        if len(batch) == batch_rows or num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _encode(batch: list[Prompt], tokenizer: Tokenizer, add_special_tokens: bool) -> list[np.ndarray | RowFault]:
    texts = [prompt.text for prompt in batch if prompt.text is not None]
    try:
        encoded = iter(tokenizer.encode(texts, add_special_tokens))
    except Exception:  # one text that the tokenizer cannot take fails the whole batch: find out which
        encoded = None
    outcomes: list[np.ndarray | RowFault] = []
    for prompt in batch:
        if prompt.fault is not None:
            outcomes.append(prompt.fault)
        elif prompt.text is not None and encoded is not None:
            outcomes.append(next(encoded))
        else:
            outcomes.append(_encode_one(prompt, tokenizer, add_special_tokens))
    return outcomes


def _encode_one(prompt: Prompt, tokenizer: Tokenizer, add_special_tokens: bool) -> np.ndarray | RowFault:
    try:
        if prompt.segments is not None:
            return tokenizer.encode_segments(prompt.segments, add_special_tokens)
        return tokenizer.encode([prompt.text or ""], add_special_tokens)[0]
    except Exception as e:
        return RowFault("tokenizer_error", f"the tokenizer cannot encode this prompt: {' '.join(str(e).split())}")
