"""The demo job with the real model against transformers' generate, one prompt at a time, in float32. Takes minutes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from commands import ROOT, results, run_cold
from fake_device import trie_edge_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from batchgen.job import load_job
from batchgen.models.files import eos_token_ids, resolve_model
from batchgen.text.token_store import TokenStore

MAX_TOKENS = 16
CLEAR_GAP = 1e-4  # between the two largest logits
NUM_CHECKED_WHOLE = 4  # rows for which the oracle's own shortcut is compared with doing without it

pytestmark = [pytest.mark.model, pytest.mark.slow]


class Oracle:
    """generate of transformers. The keys and values of a document are computed once and copied for each of its questions:
    transformers' own cache, of which the test shows on some rows that it changes nothing."""

    def __init__(self, folder: Path, eos: frozenset[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.eos = sorted(eos)

    def prefix_cache(self, prefix: list[int]) -> DynamicCache:
        with torch.inference_mode():
            return self.model(torch.tensor([prefix]), use_cache=True, logits_to_keep=1).past_key_values

    def greedy(self, prompt: list[int], prefix: DynamicCache | None = None) -> tuple[list[int], list[float]]:
        """Tokens, the end token included, and the gap between the two largest logits of each."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0,
                eos_token_id=self.eos, past_key_values=copy.deepcopy(prefix), output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        top = torch.stack(out.logits)[:, 0].topk(2).values
        return out.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist()


class Demo:
    """The demo job, run once through the command line, and the oracle for the same rows."""

    def __init__(self, out: Path) -> None:
        settings = (f"sampling.max_tokens={MAX_TOKENS}", f"output.path={out}", "engine.threads=1", "engine.device=cpu")
        self.outcome = run_cold("run", ROOT / "jobs/demo.yaml", *(a for s in settings for a in ("--set", s)), cwd=out.parent)
        assert self.outcome.code == 0, self.outcome.stderr
        self.rows: list[dict[str, Any]] = results(out).to_pylist()
        self.summary = json.loads((out / "summary.json").read_text())
        self.store = TokenStore.open(out / "tokens.arrow")
        files = resolve_model("packaged:smollm2")
        self.tokenizer = AutoTokenizer.from_pretrained(files.folder)
        self.oracle = Oracle(files.folder, eos_token_ids(files))

    def prompt(self, row: dict[str, Any]) -> list[int]:
        """As transformers makes it, from the columns."""
        job = load_job(ROOT / "jobs/demo.yaml")
        chat = [
            {"role": "system", "content": job.prompt.system},
            {"role": "user", "content": f"# {row['title']}\n{row['document']}\n\n{row['question']}"},
        ]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def common_prefix(prompts: list[list[int]]) -> list[int]:
    shortest = min(prompts, key=len)
    n = next((i for i, column in enumerate(zip(*prompts)) if len(set(column)) > 1), len(shortest) - 1)
    return shortest[:n]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    torch.set_num_threads(1)
    return Demo(tmp_path_factory.mktemp("demo") / "out")


def test_all_rows_of_the_demo_are_answered_in_input_order(demo: Demo) -> None:
    given = pq.read_table(ROOT / "jobs/data/docqa.parquet").to_pylist()
    wanted = [row for row in given if len(row["document"]) < 1980]
    assert len(wanted) == 120 and len({row["doc_id"] for row in wanted}) == 20
    assert [{key: row[key] for key in wanted[0]} for row in demo.rows] == wanted
    assert {row["status"] for row in demo.rows} == {"ok"} and all(row["generated_text"].strip() for row in demo.rows)
    counts = {"answers": 120, "answered_now": 120, "repeated": 0, "by_status": {"ok": 120}, "by_error_code": {}}
    assert demo.summary["rows"] == counts


def test_prompts_are_those_of_apply_chat_template(demo: Demo) -> None:
    assert [demo.store.tokens(i).tolist() for i in range(demo.store.num_rows)] == [demo.prompt(row) for row in demo.rows]


def test_computed_prefill_tokens_are_the_edges_of_the_trie_and_as_planned(demo: Demo) -> None:
    prompts = [demo.store.tokens(i) for i in range(demo.store.num_rows)]
    tokens = demo.summary["tokens"]
    assert tokens["prompt"] == sum(map(len, prompts))
    assert tokens["computed"] == trie_edge_tokens(prompts, 16) and tokens["recomputed"] == 0
    assert tokens["computed"] + tokens["cached"] == tokens["prompt"]
    assert tokens["saved_predicted"] == tokens["saved_achieved"] > 0.5
    assert tokens["kv_read"] < tokens["kv_visible"]
    assert tokens["output"] == sum(row["num_output_tokens"] for row in demo.rows)


def test_greedy_tokens_equal_generate_one_prompt_at_a_time(demo: Demo) -> None:
    """Wherever the top two logits are clearly apart; after a near tie that fell the other way a row is not compared on."""
    by_document: dict[int, list[dict[str, Any]]] = {}
    for row in demo.rows:
        by_document.setdefault(row["doc_id"], []).append(row)
    num_tokens = num_near_ties = num_fell_otherwise = num_whole = 0
    for rows in by_document.values():
        prompts = [demo.prompt(row) for row in rows]
        prefix = demo.oracle.prefix_cache(common_prefix(prompts))
        for row, prompt in zip(rows, prompts):
            expected, gaps = demo.oracle.greedy(prompt, prefix)
            if num_whole < NUM_CHECKED_WHOLE and row is rows[-1]:
                num_whole += 1
                whole, whole_gaps = demo.oracle.greedy(prompt)
                assert whole == expected, "the oracle's cache of a document must not change its answer"
                np.testing.assert_allclose(gaps, whole_gaps, atol=CLEAR_GAP, rtol=0)
            got = row["token_ids"]
            for i, (token, gap) in enumerate(zip(expected, gaps)):
                num_tokens += 1
                num_near_ties += gap <= CLEAR_GAP
                if i >= len(got) or got[i] != token:
                    assert gap <= CLEAR_GAP, f"row {row['row']}, token {i}: {got}, not {expected}, though {gap} lies between"
                    num_fell_otherwise += 1
                    break
            else:
                assert got == expected
    print(f"\n{num_tokens} tokens of {len(demo.rows)} rows compared; {num_near_ties} near ties, {num_fell_otherwise} differ")
    assert num_near_ties <= 0.01 * num_tokens
