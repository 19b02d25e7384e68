"""Text to token ids and back: a thin wrapper around the model's own tokenizer. Knows no template and no rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from batchgen.errors import ModelError
from batchgen.text.shared_prefixes import cut_shared, may_cut

NUM_PROBES = 64


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder; ModelError if there is none or it cannot be read. Never runs code of the model."""
    if not Path(folder).is_dir():
        raise ModelError(f"tokenizer: no folder {os.fspath(folder)}")
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(os.fspath(folder), local_files_only=True, trust_remote_code=False))
    except Exception as e:  # every tokenizer class fails in its own way
        cause = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ModelError(f"tokenizer in {os.fspath(folder)} cannot be loaded: {cause}") from e


class Tokenizer:
    """Batched encoding to int32 arrays, decoding, and the special tokens by their text.

    `hf` is the transformers tokenizer; where it wraps a Rust tokenizer (nearly always) that one is called directly.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.rust: tokenizers.Tokenizer | None = getattr(hf, "backend_tokenizer", None)
        if self.rust is not None:
            self.rust.no_truncation()
            self.rust.no_padding()
        self.bos_token: str | None = hf.bos_token
        self.bos_token_id: int | None = hf.bos_token_id
        self.eos_token: str | None = hf.eos_token
        self.eos_token_id: int | None = hf.eos_token_id
        self.vocab_size: int = len(hf)
        self.special_tokens_map: dict[str, Any] = dict(hf.special_tokens_map)
        special = {str(token.content): int(i) for i, token in hf.added_tokens_decoder.items() if token.special}
        special |= {str(token): int(i) for token, i in zip(hf.all_special_tokens, hf.all_special_ids)}
        self.control_tokens: dict[str, int] = special  # text -> id of every special token
        self.shares_prefixes: bool | None = None  # not known before the first texts have come

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; of several named ones, the one called default."""
        template = self.hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[np.ndarray]:
        """texts -> one int32 array each; what texts have in common is tokenized once where that gives the same ids.

        With `add_special_tokens` the tokenizer adds what it adds to a raw text (for many: one BOS); a text that already
        begins with the BOS text does not get a second one. Text from a chat template is encoded without.
        """
        if self.shares_prefixes is None:
            self.shares_prefixes = self.rust is not None and may_cut(self.rust) and self._same_in_pieces(texts[:NUM_PROBES])
        encode = self._encode_in_pieces if self.shares_prefixes else self.encode_whole
        return encode(texts, add_special_tokens)

    def encode_whole(self, texts: Sequence[str], add_special_tokens: bool) -> list[np.ndarray]:
        """The same, each text for itself."""
        if self.rust is not None:
            encodings = self.rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        elif texts:
            lists = self.hf(list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]
            ids = [np.array(row, np.int32) for row in lists]
        else:
            ids = []
        return [self._one_bos(text, row) for text, row in zip(texts, ids)] if add_special_tokens else ids

    def encode_segments(self, segments: Sequence[tuple[str, bool]], add_special_tokens: bool = False) -> np.ndarray:
        """Pieces of one prompt -> int32 ids: (text, True) is one control token, (text, False) holds none, whatever it says.

        With `add_special_tokens`, what the tokenizer puts around a raw text is put around the whole.
        """
        parts: list[int] = []
        for text, is_control in segments:
            parts += [self.control_tokens[text]] if is_control else self._encode_plain(text)
        ids = np.array(parts, np.int32)
        return self._with_added(ids) if add_special_tokens and self.rust is not None else ids

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of token ids, exactly as the tokens spell it (no spaces are cleaned up)."""
        id_list = np.asarray(ids, np.int64).tolist()
        if self.rust is not None:
            return self.rust.decode(id_list, skip_special_tokens=skip_special_tokens)
        return self.hf.decode(id_list, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def _one_bos(self, text: str, ids: np.ndarray) -> np.ndarray:
        doubled = len(ids) > 1 and ids[0] == self.bos_token_id and ids[1] == self.bos_token_id
        return ids[1:] if doubled and self.bos_token and text.startswith(self.bos_token) else ids

    def _with_added(self, ids: np.ndarray) -> np.ndarray:
        """With the special ids that a raw text gets, but not with a second BOS."""
        before, after = self._added_around
        begins_with_bos = len(ids) > 0 and ids[0] == self.bos_token_id and before[-1:] == [self.bos_token_id]
        return np.concatenate([before[:-1] if begins_with_bos else before, ids, after]).astype(np.int32, copy=False)

    def _encode_in_pieces(self, texts: Sequence[str], add_special_tokens: bool) -> list[np.ndarray]:
        pieces, of_text = cut_shared(texts)
        ids = self.encode_whole(pieces, False)
        whole = [ids[of[0]] if len(of) == 1 else np.concatenate([ids[piece] for piece in of]) for of in of_text]
        return [self._with_added(row) for row in whole] if add_special_tokens else whole

    def _same_in_pieces(self, texts: Sequence[str]) -> bool:
        """A check on some of the job's own texts of what `may_cut` says."""
        return all(
            np.array_equal(a, b)
            for special in (False, True)
            for a, b in zip(self._encode_in_pieces(texts, special), self.encode_whole(texts, special))
        )

    def _encode_plain(self, text: str) -> list[int]:
        if self._plain is not None:
            return self._plain.encode(text, add_special_tokens=False).ids
        return self.hf.encode(text, add_special_tokens=False, split_special_tokens=True)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer | None:
        """A copy to which special tokens are plain text, so that the other one never changes under a running batch."""
        if self.rust is None:
            return None
        plain = tokenizers.Tokenizer.from_str(self.rust.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        """The special ids that the tokenizer adds (before, after) a raw text."""
        assert self.rust is not None
        bare = self.rust.encode("x", add_special_tokens=False).ids
        full = self.rust.encode("x", add_special_tokens=True).ids
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:start], full[start + len(bare) :]
