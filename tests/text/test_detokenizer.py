"""Stop strings and final text (bug log B05, B06)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from toy import make_toy_tokenizer
from transformers import PreTrainedTokenizerFast

from batchgen.errors import JobFileError
from batchgen.records import FinishReason
from batchgen.text.detokenizer import Detokenizer
from batchgen.text.tokenizer import Tokenizer, load_tokenizer

EOS = 265
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_toy_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """Metaspace and byte fallback, as Llama 2 has: it drops a leading space, and spoils a whole run of cut bytes."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁": 256, "▁one": 257, "▁END": 258, "E": 259, "N": 260, "a": 261}
    rust = RustTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


def generate(detokenizer: Detokenizer, ids: list[int]) -> tuple[int, str, str | None]:
    """As an engine does: ask after each token. (number of tokens, text, stop reason)"""
    for n in range(1, len(ids) + 1):  # the window says the same as decoding everything
        whole = detokenizer.tokenizer.decode(ids[:n])
        complete = any(stop in whole for stop in detokenizer.stop)
        assert detokenizer.hits_stop(np.array(ids[:n], np.int32)) == complete
        if complete:
            break
    for n in range(1, len(ids) + 1):
        if ids[n - 1] in detokenizer.eos_ids or detokenizer.hits_stop(np.array(ids[:n], np.int32)):
            return n, *detokenizer.finish(np.array(ids[:n], np.int32), STOP)
    return len(ids), *detokenizer.finish(np.array(ids, np.int32), LENGTH)


def test_both_stops_end_in_one_token(tokenizer: Tokenizer) -> None:
    the = tokenizer.encode([" the"], False)[0].tolist()
    assert len(the) == 1
    assert generate(Detokenizer(tokenizer, ["he", "the"], frozenset()), the) == (1, " ", "the")


def outcome(tokenizer: Tokenizer, text: str, stop: list[str]) -> tuple[str, str | None]:
    return generate(Detokenizer(tokenizer, stop, frozenset({EOS})), tokenizer.encode([text], False)[0].tolist())[1:]


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ([], "one END two", None),
        (["END"], "one ", "END"),
        (["ND t"], "one E", "ND t"),
        (["ND t", "END"], "one ", "END"),
        (["END two", "ND "], "one E", "ND "),
        (["one"], "", "one"),
        (["one END two and much more"], "one END two", None),
        (["two"], "one END ", "two"),
        (["<|im_end|>"], "one END two", None),
    ],
)
def test_stop_strings(stop: list[str], text: str, reason: str | None, tokenizer: Tokenizer) -> None:
    assert outcome(tokenizer, "one END two", stop) == (text, reason)


def test_every_cut_of_a_multi_byte_stop(tokenizer: Tokenizer) -> None:
    family = "👩‍👩‍👧"
    text = f"é {family}漢字 the"
    for at in range(len(text)):
        for end in range(at + 1, len(text) + 1):
            stop = text[at:end]
            assert outcome(tokenizer, text, [stop]) == (text[: text.index(stop)], stop)


def test_generation_ends_at_the_token_that_completes_the_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(["abcdefgh"], False)[0].tolist()
    assert generate(Detokenizer(tokenizer, ["cde"], frozenset()), ids) == (5, "ab", "cde")


def test_prompt_text_never_triggers(tokenizer: Tokenizer) -> None:
    # the prompt ended in "EN"; only the output is ever shown to the detokenizer
    assert outcome(tokenizer, "D two", ["END"]) == ("D two", None)


def test_end_token_and_special_tokens(tokenizer: Tokenizer) -> None:
    x, y = (tokenizer.encode([c], False)[0].tolist()[0] for c in "xy")
    with_eos = Detokenizer(tokenizer, ["xy"], frozenset({EOS, y}))
    assert generate(with_eos, [x, EOS, x]) == (2, "x", str(EOS))
    assert generate(with_eos, [x, y, x])[0] == 2
    assert generate(Detokenizer(tokenizer, [], frozenset({y})), [x, x, y]) == (3, "xx", str(y))
    # special tokens that were not asked to end it are invisible, however many stand inside a stop string
    assert generate(Detokenizer(tokenizer, ["xyx"], frozenset()), [x, x, y, *[266] * 30, x, x])[1:] == ("x", "xyx")
    assert Detokenizer(tokenizer, [], frozenset()).finish(np.empty(0, np.int32), LENGTH) == ("", None)


def test_a_cut_character_is_one_mark(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(["a😊"], False)[0]
    assert len(ids) == 5
    assert Detokenizer(tokenizer, ["b"], frozenset()).finish(ids[:4], LENGTH) == ("a\ufffd", None)


@pytest.mark.parametrize("stop", [" END", "😊", "é😊", " ", "END", "a", " E"])
def test_tokenizers_with_leading_spaces_and_byte_fallback(stop: str, sentencepiece_like: Tokenizer) -> None:
    spelled = {"é": list("é".encode()), "😊": list("😊".encode()), "漢": list("漢".encode())}
    ids = [257, *spelled["漢"], *spelled["漢"], *spelled["é"], *spelled["😊"], 256, 259, 258, 261]
    full = sentencepiece_like.decode(ids)
    assert full == "one漢漢é😊 E ENDa"
    _, text, reason = generate(Detokenizer(sentencepiece_like, [stop], frozenset()), ids)
    assert (text, reason) == (full[: full.index(stop)], stop)


def test_cost_does_not_grow_with_the_output(tokenizer: Tokenizer) -> None:
    longest = 0

    class Counting(Tokenizer):
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    detokenizer = Detokenizer(Counting(tokenizer.hf), ["never", "é漢"], frozenset())
    assert not detokenizer.hits_stop(np.full(100_000, 65, np.int32))
    assert 0 < longest <= 5 + 1 + 3


def test_empty_stop_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(JobFileError, match=r"sampling\.stop"):
        Detokenizer(tokenizer, ["a", ""], frozenset())
