"""Cutting prompts where they part changes no id, for every kind of tokenizer for which it is done."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from batchgen.models.loader import resolve_model
from batchgen.text import shared_prefixes
from batchgen.text.shared_prefixes import (
    _CASED,
    _CONTRACTIONS,
    _GPT2,
    _NEWER,
    _QWEN35,
    common_prefix,
    cut,
    cut_shared,
    may_cut,
)
from batchgen.text.tokenizer import Tokenizer, load_tokenizer

ATOMS = [
    "a", "b", "Z", "the", "it's", "WE'LL", "don't", "'s", "'", "0", "7", "12", "3456", " ", " ", " ",
    "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\u3000", "é", "e\u0301", "\u0301",
    "ﬁ", "Å", "ß", "漢字", "が", "か\u3099", "ا", "स्त", "😊", "👩\u200d🚀", "\u200b", "\x00", "\x07",
    ".", ",", "!?", "...", "/", "-", "_", "▁", "Ġ", "<|im_start|>", "<|im_end|>", "<|im_", "<s>", "word",
    "Question:", "answer", " is", "²", "½", "Ⅷ", "\u1680", "\u2028", "\x85", "\ufeff", "\ufffd",
]  # fmt: skip
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]


def random_text(rng: random.Random, most: int = 30) -> str:
    return "".join(rng.choices(ATOMS, k=rng.randint(0, most)))


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def bytes_after(*parts: Any) -> Any:
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def build(words: Any, normalizer: Any = None, model: Any = None, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    """A tokenizer trained on texts of the same kind as it is tested with, so that its merges are of the kind, too."""
    rust = tokenizers.Tokenizer(model or models.BPE(unk_token="<s>"))
    rust.pre_tokenizer, rust.normalizer = words, normalizer
    trainer: Any = trainers.WordPieceTrainer if isinstance(model, models.WordPiece) else trainers.BpeTrainer
    if isinstance(model, models.Unigram):
        trainer = trainers.UnigramTrainer
    rng = random.Random(1)
    rust.train_from_iterator(
        (random_text(rng) for _ in range(2000)),
        trainer(vocab_size=900, special_tokens=SPECIAL, show_progress=False, **({"unk_token": "<s>"} if model else {}))
        if isinstance(model, models.Unigram)
        else trainer(
            vocab_size=900, special_tokens=SPECIAL, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    rust.add_tokens(list(added))
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>"))


NFC = normalizers.NFC()
CUT = {
    "bytes": lambda: build(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt-2": lambda: build(bytes_after(split(_GPT2))),
    "gpt-2 removed": lambda: build(bytes_after(split(_GPT2, "removed", invert=True))),
    "llama-3": lambda: build(bytes_after(split(_NEWER % "{1,3}"))),
    "qwen-2": lambda: build(bytes_after(split(_NEWER % "")), NFC),
    "qwen-3.5": lambda: build(bytes_after(split(_QWEN35)), NFC),
    "gpt-4o": lambda: build(bytes_after(split(_CASED % (f"(?i:{_CONTRACTIONS})?", f"(?i:{_CONTRACTIONS})?", "{1,3}")))),
    "mistral": lambda: build(bytes_after(split(_CASED % ("", "", "")))),
    "smollm": lambda: build(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "digits": lambda: build(bytes_after(split(r"\p{N}{1,3}"), split(_GPT2)), normalizers.NFKC()),
    "NFD": lambda: build(bytes_after(split(_GPT2)), normalizers.Sequence([normalizers.NFD(), normalizers.NFKD()])),
    **{
        f"metaspace {scheme}": lambda scheme=scheme: build(pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True))
        for scheme in ("always", "first", "never")
    },
    "unigram": lambda: build(pre_tokenizers.Metaspace(), NFC, models.Unigram()),
    "added spaces": lambda: build(
        bytes_after(split(_GPT2)), None, None, (AddedToken("  "), AddedToken("word", lstrip=True))
    ),
}
WHOLE = {
    "whitespace and wordpiece": lambda: build(pre_tokenizers.Whitespace(), None, models.WordPiece(unk_token="<s>")),
    "bert": lambda: build(
        pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(), models.WordPiece(unk_token="<s>")
    ),
    "words that are not split": lambda: build(pre_tokenizers.Metaspace(split=False)),
    "no words": lambda: build(None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "bytes alone": lambda: build(bytes_after()),
    "prefix space": lambda: build(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "another pattern": lambda: build(bytes_after(split(r"[a-z]+ ?|\s+|.")), None),
    "removed spaces": lambda: build(bytes_after(split(_GPT2, "removed"))),
    "strip": lambda: build(bytes_after(split(_GPT2)), normalizers.Strip()),
    "token that takes the space after it": lambda: build(
        bytes_after(split(_GPT2)), None, None, (AddedToken("Question:", rstrip=True),)
    ),
    "token that must be a word": lambda: build(
        bytes_after(split(_GPT2)), None, None, (AddedToken("the", single_word=True),)
    ),
    "token with a space": lambda: build(bytes_after(split(_GPT2)), None, None, (AddedToken("Question: word"),)),
    "dropout": lambda: build(bytes_after(split(_GPT2)), None, models.BPE(dropout=0.1)),
}


def assert_cuts_change_nothing(tokenizer: Tokenizer, num_texts: int) -> None:
    assert tokenizer.rust is not None
    rng, num_cuts = random.Random(0), 0
    for _ in range(num_texts):
        text = random_text(rng)
        places = sorted({cut(text, n) for n in range(len(text) + 1)} - {0})
        parts = [part for at in places for part in (text[:at], text[at:])]
        whole, *ids = tokenizer.encode_whole([text, *parts], False)
        for k, at in enumerate(places):
            joined = [*ids[2 * k], *ids[2 * k + 1]]
            assert joined == whole.tolist(), (text[:at], text[at:])
        num_cuts += len(places)
    assert num_cuts > num_texts // 4


def families(rng: random.Random) -> Iterator[list[str]]:
    """Texts of which many begin alike, in no order."""
    for _ in range(40):
        texts = [random_text(rng) for _ in range(3)]
        for _ in range(25):
            parent = rng.choice(texts)
            texts.append(parent[: rng.randint(0, len(parent))] + random_text(rng, 12))
        yield texts


@pytest.mark.parametrize("name", CUT)
def test_ids_are_those_of_whole_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = CUT[name]()
    assert_cuts_change_nothing(tokenizer, 1000)
    monkeypatch.setattr(shared_prefixes, "MIN_PIECE", 1)
    for texts in families(random.Random(2)):
        for special in (False, True):
            for text, got, expected in zip(texts, tokenizer.encode(texts, special), tokenizer.encode_whole(texts, special)):
                assert got.dtype == np.int32 and got.tolist() == expected.tolist(), text
    assert tokenizer.shares_prefixes


@pytest.mark.model
def test_the_packaged_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(resolve_model("packaged:smollm2").folder)
    assert may_cut(tokenizer.rust)
    assert_cuts_change_nothing(tokenizer, 1000)


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_left_alone(name: str) -> None:
    tokenizer = WHOLE[name]()
    texts = ["a long text that both have in common, up to its very end, which is " + last for last in ("here", "there")]
    assert [ids.tolist() for ids in tokenizer.encode(texts, True)] == [tokenizer.hf.encode(text) for text in texts] or (
        name == "dropout"
    )
    assert tokenizer.shares_prefixes is False


def test_a_tokenizer_that_fails_the_probe_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = WHOLE["token that takes the space after it"]()
    texts = [("x" * 100) + " Question: " + last for last in ("here", "there")]
    monkeypatch.setattr("batchgen.text.tokenizer.may_cut", lambda _: True)
    assert [ids.tolist() for ids in tokenizer.encode(texts, True)] == [tokenizer.hf.encode(text) for text in texts]
    assert tokenizer.shares_prefixes is False


def test_each_shared_stretch_is_one_piece() -> None:
    """Two documents of 100 characters, three questions each, in no order: what is common is there once, also to two only."""
    a, b, c = "a" * 100, "b" * 100, "c" * 100
    texts = [f"{a} {b} one", f"{a} {c} two", f"{a} {b} three", "", f"{a} {c} {b} four", f"{a} {c} {b} five", f"{a} {b} one"]
    pieces, of_text = cut_shared(texts)
    assert ["".join(pieces[k] for k in of) for of in of_text] == texts
    assert pieces.count(a) == 1 and pieces.count(f" {b}") == 2 and pieces.count(f" {c}") == 1
    assert sum(map(len, pieces)) < 100 * 4 + 50
    assert cut_shared(["ab cd", "ab ce"]).pieces == ["ab cd", "ab ce"], "too short to pay"


def test_cut_and_common_prefix() -> None:
    assert [cut("ab cd. e", n) for n in (0, 2, 3, 7, 8)] == [0, 0, 2, 6, 6]
    assert [cut("ab  c\n d é f", n) for n in (7, 8, 12)] == [2, 2, 8], "not after white space, nor after what might compose"
    assert cut("  x", 3) == 0
    rng = random.Random(3)
    for _ in range(500):
        a, b = ("".join(rng.choices("ab", k=rng.randint(0, 9))) for _ in range(2))
        assert common_prefix(a, b) == next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_a_folder_says_the_same(tmp_path: Path) -> None:
    """As saved and loaded by transformers, which may put other parts in."""
    CUT["llama-3"]().hf.save_pretrained(tmp_path)
    assert may_cut(load_tokenizer(tmp_path).rust)
