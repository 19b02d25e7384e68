"""The token store and the way into it: round trips, atomicity, faults, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import make_toy_tokenizer

from batchgen.errors import CorruptRunError
from batchgen.records import Prompt, RowFault
from batchgen.text import token_store
from batchgen.text.token_store import TokenStore, TokenStoreWriter
from batchgen.text.tokenize import tokenize, truncate
from batchgen.text.tokenizer import Tokenizer, load_tokenizer


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NONE = ids()
FAULT = RowFault("null_prompt", "column 'q' is null")


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "tokens.arrow"
    with TokenStoreWriter(path, {"model": "toy"}) as writer:
        writer.append([0, 3], [5, 2**64 - 1], [ids(1, 2, 3), NONE], [None, FAULT])
        writer.append([], [], [], [])
        writer.append(np.array([9]), np.array([7], np.uint64), [ids(4)], [None])
        assert not path.exists(), "a store that is not finished does not exist"
    store = TokenStore.open(path)
    assert store.num_rows == 3 and store.metadata == {"model": "toy"}
    assert store.rows.tolist() == [0, 3, 9] and store.row_keys.tolist() == [5, 2**64 - 1, 7]
    assert store.lengths.tolist() == [3, 0, 1]
    assert (store.rows.dtype, store.row_keys.dtype, store.lengths.dtype) == (np.int64, np.uint64, np.int32)
    assert [store.tokens(i).tolist() for i in range(3)] == [[1, 2, 3], [], [4]]
    assert store.fault(0) is None and store.fault(1) == FAULT and store.faults() == {1: FAULT}
    with pytest.raises(IndexError):
        store.tokens(3)


def test_tokens_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TokenStoreWriter(path) as writer:
        writer.append([0, 1], [0, 0], [ids(*range(100)), ids(1)], [None, None])
    view = TokenStore.open(path).tokens(0)
    assert view.dtype == np.int32 and view.base is not None and not view.flags.writeable


def test_empty_store(tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path / "t"):
        pass
    store = TokenStore.open(tmp_path / "t")
    assert store.num_rows == 0 and store.lengths.dtype == np.int32 and store.faults() == {}


def test_large_batches_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "MAX_BATCH_TOKENS", 10)
    rows = [np.arange(i, dtype=np.int32) for i in range(12)]
    with TokenStoreWriter(tmp_path / "t") as writer:
        writer.append(range(12), range(12), rows, [FAULT if i == 0 else None for i in range(12)])
    store = TokenStore.open(tmp_path / "t")
    assert len(store._file(0).batches) == 5  # of 10, 11, 15, 19 and 11 tokens
    assert [store.tokens(i).tolist() for i in range(12)] == [row.tolist() for row in rows]
    assert store.lengths.tolist() == list(range(12)) and store.faults() == {0: FAULT}


def test_a_failed_writer_leaves_nothing_and_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(RuntimeError), TokenStoreWriter(path) as writer:
        writer.append([0], [0], [ids(1)], [None])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        TokenStore.open(path)
    with TokenStoreWriter(path) as writer:
        writer.append([0], [0], [ids(*range(1000))], [None])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptRunError, match="delete it"):
        TokenStore.open(path)


class ByFirst:
    num_partitions = 3

    def __call__(self, token_ids: np.ndarray) -> int:
        return int(token_ids[0]) % 3 if len(token_ids) else 0


@pytest.mark.parametrize("batch_rows", [1, 3, 100])
def test_a_large_store_is_a_head_and_partitions(batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "HEAD_ROWS", 5)
    monkeypatch.setattr(token_store, "PARTITION_BATCH_TOKENS", 40)
    rows = [ids(i, *range(i)) if i % 7 else NONE for i in range(40)]
    heads = []

    def partition(head: TokenStore) -> ByFirst:
        heads.append(head)
        return ByFirst()

    path = tmp_path / "tokens.arrow"
    with TokenStoreWriter(path, {"model": "toy"}, partition) as writer:
        for begin in range(0, 40, batch_rows):
            part = range(begin, min(begin + batch_rows, 40))
            faults = [FAULT if i % 7 == 0 else None for i in part]
            writer.append(part, [1000 + i for i in part], [rows[i] for i in part], faults)
        assert [path.name for path in tmp_path.iterdir()] == ["tokens.tmp"], "a store that is not finished does not exist"
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    (head,) = heads
    assert head.rows.tolist() == list(range(5)) and head.tokens(3).tolist() == rows[3].tolist()
    store = TokenStore.open(path)
    assert store.num_rows == 40 and store.metadata == {"model": "toy"} and store.file_starts[1] == 5
    assert sorted(store.rows.tolist()) == list(range(40)) and (store.row_keys == store.rows + 1000).all()
    assert all(store.tokens(i).tolist() == rows[store.rows[i]].tolist() for i in range(40))
    assert {int(store.rows[i]) for i in store.faults()} == set(range(0, 40, 7)) and set(store.faults([3, 4])) == set()
    for first, end in ((0, 40), (3, 17), (6, 6)):
        packed = store.pack(first, end)
        assert len(packed) == end - first
        assert all(packed(i).tolist() == rows[store.rows[i]].tolist() for i in range(first, end))
    for a, b in zip(store.file_starts[1:-1], store.file_starts[2:]):
        assert len({ByFirst()(store.tokens(i)) for i in range(a, b)}) <= 1


@pytest.mark.parametrize("num_rows", [4, 5])
def test_a_store_that_fits_into_its_head_is_one_file(num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "HEAD_ROWS", 5)
    (tmp_path / "tokens.tmp").mkdir()  # of a process that was killed
    with TokenStoreWriter(tmp_path / "tokens.arrow", partition=lambda head: ByFirst()) as writer:
        writer.append(range(num_rows), range(num_rows), [ids(1)] * num_rows, [None] * num_rows)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.arrow"]


def test_a_large_store_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "HEAD_ROWS", 5)
    with pytest.raises(RuntimeError), TokenStoreWriter(tmp_path / "t.arrow", partition=lambda head: ByFirst()) as writer:
        writer.append(range(9), range(9), [ids(1)] * 9, [None] * 9)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_toy_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def run(prompts: Any, tokenizer: Any, path: Path, **options: Any) -> tuple[TokenStore, Any]:
    with TokenStoreWriter(path) as writer:
        defaults = dict(add_special_tokens=False, max_prompt_tokens=10, batch_rows=3)
        counts = tokenize(prompts, tokenizer, writer, **defaults | options)
    return TokenStore.open(path), counts


PROMPTS = [
    Prompt(0, 10, text="abcdefghij"),
    Prompt(2, 11, fault=FAULT),
    Prompt(3, 12, text="abcdefghijk"),
    Prompt(4, 13, text=""),
    Prompt(5, 14, segments=[("<|im_end|>", True), ("a<|im_end|>", False)]),
    Prompt(6, 15, segments=[("<|im_end|>", True), ("a", False)]),
    Prompt(7, 16, text="x"),
]


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_tokenize(batch_rows: int, tokenizer: Tokenizer, tmp_path: Path) -> None:
    store, counts = run(iter(PROMPTS), tokenizer, tmp_path / "t", batch_rows=batch_rows)
    assert store.rows.tolist() == [0, 2, 3, 4, 5, 6, 7] and store.row_keys.tolist() == list(range(10, 17))
    assert {i: fault.code for i, fault in store.faults().items()} == {
        1: "null_prompt",
        2: "prompt_too_long",
        3: "empty_prompt",
        4: "prompt_too_long",
    }
    assert store.fault(2) == RowFault("prompt_too_long", "the prompt has 11 tokens, 10 fit")
    assert tokenizer.decode(store.tokens(0)) == "abcdefghij" and tokenizer.decode(store.tokens(6)) == "x"
    assert store.tokens(5).tolist() == [265, *tokenizer.encode(["a"], False)[0].tolist()]
    assert (counts.num_rows, counts.num_faults, counts.num_tokens) == (7, 4, 10 + 2 + 1)


@pytest.mark.parametrize(
    ("where", "text"), [("truncate_left", "bcdefghijk"), ("truncate_right", "abcdefghij"), ("truncate_middle", "abcdeghijk")]
)
def test_truncation(where: str, text: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    store, counts = run(PROMPTS[2:3], tokenizer, tmp_path / "t", on_too_long=where)
    assert tokenizer.decode(store.tokens(0)) == text and counts.num_truncated == 1


def test_truncate_odd_and_one() -> None:
    for n in (1, 2, 3):
        for where in ("truncate_left", "truncate_right", "truncate_middle"):
            assert len(truncate(np.arange(9, dtype=np.int32), n, where)) == n
    assert truncate(np.arange(9), 3, "truncate_middle").tolist() == [0, 1, 8]


def test_a_row_that_the_tokenizer_refuses_stays_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    class Refusing(Tokenizer):
        def encode(self, texts: Any, add_special_tokens: bool) -> list[np.ndarray]:
            if any("bad" in text for text in texts):
                raise ValueError("cannot\nencode this")
            return super().encode(texts, add_special_tokens)

    prompts = [Prompt(i, i, text=text) for i, text in enumerate(["a", "bad", "b"])]
    store, _ = run(prompts, Refusing(tokenizer.hf), tmp_path / "t")
    assert store.faults() == {1: RowFault("tokenizer_error", "the tokenizer cannot encode this prompt: cannot encode this")}
    assert [tokenizer.decode(store.tokens(i)) for i in (0, 2)] == ["a", "b"]


def test_prompts_are_taken_batch_by_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    taken: list[int] = []

    def prompts() -> Iterator[Prompt]:
        for i in range(9):
            taken.append(i)
            yield Prompt(i, i, text="a")

    class Watching(TokenStoreWriter):
        def append(self, rows: Any, *rest: Any) -> None:
            assert len(taken) <= rows[-1] + 1, "read ahead of the batch that is written"
            super().append(rows, *rest)

    with Watching(tmp_path / "t") as writer:
        tokenize(prompts(), tokenizer, writer, add_special_tokens=False, max_prompt_tokens=10, batch_rows=4)
    assert TokenStore.open(tmp_path / "t").num_rows == 9


def test_long_prompts_are_encoded_few_at_a_time(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand prompts of a MiB each in one batch would take tens of gigabytes."""
    monkeypatch.setattr("batchgen.text.tokenize.BATCH_CHARS", 10)
    sizes: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda texts, add: sizes.append(sum(map(len, texts))) or encode(texts, add))
    prompts = [Prompt(i, i, text="abcd" * (1 + 4 * (i == 5))) for i in range(9)]
    store, _ = run(iter(prompts), tokenizer, tmp_path / "t", batch_rows=100, max_prompt_tokens=50)
    assert sizes == [12, 4 + 4 + 20, 12] and store.lengths.tolist() == [4] * 5 + [20] + [4] * 3


def test_offsets_that_lead_out_of_the_data_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TokenStoreWriter(path) as writer:
        writer.append([0, 1], [0, 1], [ids(7, 8, 9), ids(10)], [None, None])
    image, offsets = path.read_bytes(), np.array([0, 3, 4], np.int32).tobytes()
    assert image.count(offsets) == 1
    path.write_bytes(image.replace(offsets, np.array([0, 3, 2**30], np.int32).tobytes()))
    with pytest.raises(CorruptRunError, match="damaged token store"):
        TokenStore.open(path)
