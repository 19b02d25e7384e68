"""A signal that comes while a row is rendered or tokenized stops the job; it never becomes a fault of that row."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from sections import section
from toy import make_toy_tokenizer

from batchgen.errors import Interrupted
from batchgen.records import Prompt
from batchgen.signals import SIGNALS, StopSignals
from batchgen.text.template import PromptRenderer, RowFilter
from batchgen.text.token_store import TokenStoreWriter
from batchgen.text.tokenize import tokenize
from batchgen.text.tokenizer import load_tokenizer


class Stops:
    """A value whose use is the moment at which the signal arrives."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "text"

    __html__ = __str__

    def __gt__(self, other: object) -> bool:
        return bool(str(self))


def test_in_a_template(tmp_path: Path) -> None:
    renderer = PromptRenderer(section(text="{{ q }}"), load_tokenizer(make_toy_tokenizer(tmp_path)))
    with StopSignals() as stop, pytest.raises(Interrupted, match="SIGTERM"):
        renderer.render({"q": Stops()}, 0, 0)
    assert stop.received == "SIGTERM"


def test_in_a_filter() -> None:
    with StopSignals(), pytest.raises(Interrupted):
        RowFilter("q > 1").keeps({"q": Stops()})


def test_in_the_tokenizer_and_the_unfinished_store_is_gone(tmp_path: Path) -> None:
    class Tokenizer:
        def encode(self, texts: list[str], add_special_tokens: bool) -> list[np.ndarray]:
            os.kill(os.getpid(), signal.SIGINT)
            return [np.array([1], np.int32) for _ in texts]

    with StopSignals(), pytest.raises(Interrupted), TokenStoreWriter(tmp_path / "tokens.arrow") as writer:
        tokenize(
            [Prompt(0, 0, "a")],
            Tokenizer(),
            writer,
            add_special_tokens=False,
            max_prompt_tokens=9,  # type: ignore[arg-type]
        )
    assert list(tmp_path.iterdir()) == []


def test_deferred_and_nested() -> None:
    """What is deferred ends first. An inner handler gives way to the outer one again, and that to none."""
    before = signal.getsignal(signal.SIGTERM)
    done = False
    with StopSignals() as outer:
        with StopSignals() as inner, pytest.raises(Interrupted), inner.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            done = True
        assert done and inner.received == "SIGTERM" and outer.received is None
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_last_one_leaves_no_moment_in_which_a_signal_kills() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.raises(Interrupted), StopSignals(last=True):
            os.kill(os.getpid(), signal.SIGTERM)
        assert all(signal.getsignal(number) == signal.SIG_IGN for number in SIGNALS)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
