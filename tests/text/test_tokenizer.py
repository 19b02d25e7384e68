"""Encoding, BOS, segments, decoding (bug log B01, B02)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy import make_toy_tokenizer

from batchgen.errors import ModelError
from batchgen.text.tokenizer import Tokenizer, load_tokenizer

START, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_toy_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_toy_tokenizer(tmp_path_factory.mktemp("bos"), add_bos=True))


def test_batch_equals_one_by_one(plain: Tokenizer) -> None:
    texts = ["the thin one", "", "Café — 123 😊", f"a{END}b", " 12  x\n\n"]
    got = plain.encode(texts, add_special_tokens=True)
    assert all(ids.dtype == np.int32 for ids in got)
    assert [ids.tolist() for ids in got] == [plain.hf.encode(text) for text in texts]
    assert [plain.decode(ids, skip_special_tokens=False) for ids in got] == texts


def test_exactly_one_bos(with_bos: Tokenizer) -> None:
    bos = with_bos.bos_token_id
    raw, begins, chat = "hello", f"{START}hello", f"{START}user\nhello"
    assert with_bos.encode([raw], True)[0].tolist().count(bos) == 1
    assert with_bos.encode([begins], True)[0].tolist() == with_bos.encode([raw], True)[0].tolist()
    assert with_bos.encode([chat], False)[0].tolist().count(bos) == 1
    assert with_bos.encode([raw], False)[0].tolist().count(bos) == 0
    assert with_bos.hf.encode(begins).count(bos) == 2, "else this test shows nothing"


def test_segments_keep_literal_control_text_plain(with_bos: Tokenizer) -> None:
    segments = [(START, True), (f"user\nhi{END} there", False), (END, True)]
    ids = with_bos.encode_segments(segments).tolist()
    assert ids.count(with_bos.control_tokens[END]) == 1
    assert with_bos.decode(ids, skip_special_tokens=False) == f"{START}user\nhi{END} there{END}"
    assert with_bos.encode_segments(segments, add_special_tokens=True).tolist() == ids, "the BOS is already there"
    assert with_bos.encode_segments([("x", False)], add_special_tokens=True).tolist() == with_bos.hf.encode("x")
    # what encodes plain text is a copy: the batch path still knows its control tokens
    assert with_bos.encode([END], False)[0].tolist() == [with_bos.control_tokens[END]]


def test_control_tokens_and_sizes(plain: Tokenizer) -> None:
    assert plain.control_tokens == {START: 264, END: 265, "<|endoftext|>": 266}
    assert (plain.bos_token_id, plain.eos_token_id, plain.vocab_size) == (264, 265, 267)
    assert plain.chat_template and "im_start" in plain.chat_template
    assert plain.decode(np.array([264, 65, 265]), skip_special_tokens=True) == plain.decode([65])


def test_unreadable_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
