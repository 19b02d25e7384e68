"""The benchmark's workloads have the properties that they are named for, and a whole run works on a toy model."""

import itertools
import json

import numpy as np
import pytest
import torch
import transformers
from moody import Moody
from toy import make_toy_model

from batchgen.bench import __main__ as bench
from batchgen.bench.limits import Limits
from batchgen.bench.measure import SYSTEMS
from batchgen.bench.peers import counted_hits
from batchgen.bench.physics import LinearSeconds, job_flops, profiled, static_cost
from batchgen.bench.systems import SystemFailed, SystemProcess, first_difference
from batchgen.bench.workloads import JOBS, RECIPES, Workload, load_workload
from batchgen.errors import UsageError
from batchgen.models.config import ModelConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    return str(make_toy_model(folder, max_position_embeddings=8192))


def workload_of(name, model, rows):
    return load_workload(name, model, rows)


def test_ids_are_those_of_the_job_file_for_everybody(model):
    """Against the tokenizer of transformers, on text put together by hand."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    import pyarrow.parquet as pq

    questions = pq.read_table(JOBS / "data/gsm8k_test.parquet").column("question").to_pylist()[:3]
    prefix = (JOBS / "data/gsm8k_8shot_prefix.txt").read_text()
    for name, texts in (
        ("gsm8k-8shot", [f"{prefix}Question: {q}\nAnswer:" for q in questions]),
        ("gsm8k-0shot", questions),
    ):
        got = load_workload(name, model, 3)
        assert [p.tolist() for p in got.prompts] == [tokenizer.encode(t) for t in texts]
        assert len(np.unique(got.row_keys)) == 3
    docqa = load_workload("docqa", model, 12)
    assert all("help center" in tokenizer.decode(p) and "<|im_start|>user" in tokenizer.decode(p) for p in docqa.prompts)


def test_sharing_is_what_the_names_promise(model):
    windows = {name: load_workload(name, model, 12).window() for name in RECIPES}
    saved = {name: 1 - w.num_computed() / w.lengths.sum() for name, w in windows.items()}
    assert saved["docqa"] > 0.7  # 12 rows on 2 documents
    assert saved["gsm8k-8shot"] > 0.8
    assert saved["orderlines"] > 0.6 and saved["tool-chat"] > 0.4
    assert saved["gsm8k-0shot"] < 0.01
    in_file_order = load_workload("docqa", model, 120).prompts
    neighbours = [np.array_equal(a[:900], b[:900]) for a, b in itertools.pairwise(in_file_order)]
    assert sum(neighbours) < 30, "the file is not shuffled: its order would give the sharing away"


def test_fewer_docqa_rows_are_whole_documents(model):
    assert [len(load_workload("docqa", model, rows).prompts) for rows in (6, 30)] == [6, 30]
    assert len({tuple(p[:600]) for p in load_workload("docqa", model, 6).prompts}) == 1


def test_bad_names_and_folders_are_told(model, tmp_path, capsys):
    with pytest.raises(UsageError, match="unknown workload docs; there are gsm8k-8shot, docqa"):
        load_workload("docs", model)
    with pytest.raises(UsageError, match="no job files"):
        load_workload("docqa", model, jobs=tmp_path)
    with pytest.raises(SystemExit):
        bench.parse(["--systems", "vlm"])
    assert "unknown 'vlm'" in capsys.readouterr().err


def test_samples_and_memory_of_a_workload(model):
    w = load_workload("humaneval-n10", model, 2, max_tokens=5)
    requests = w.requests()
    assert len(requests) == 20 and all(r is w.prompts[i // 10] for i, r in enumerate(requests))
    assert w.num_prompt_tokens == sum(map(len, requests))
    blocks = w.memory_settings()
    assert blocks["ample"] == sum(-(-(len(r) + 5) // 16) for r in requests)
    assert blocks["scarce"] == w.num_prompt_tokens // 10 // 16
    one = toy_workload([160])  # a tenth would not hold it
    assert one.memory_settings() == {"ample": 11, "scarce": 12}


def test_tool_chat_is_shuffled_alike_each_time(model):
    a, b = (load_workload("tool-chat", model, 8) for _ in range(2))
    assert a.row_keys.tolist() == b.row_keys.tolist() != sorted(a.row_keys.tolist())
    assert all(map(np.array_equal, a.prompts, b.prompts))


def test_every_data_file_has_a_licence_line():
    told = (JOBS / "data/LICENSES.md").read_text()
    files = [f.name for f in (JOBS / "data").iterdir() if f.name != "LICENSES.md"]
    assert len(files) >= 6 and [f for f in files if f"`{f}`" not in told] == []


def toy_workload(lengths, max_tokens=3):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).astype(np.int32) for n in lengths]
    return Workload("toy", "", prompts, np.arange(len(lengths), dtype=np.uint64), max_tokens)


def test_flops_by_hand():
    config = ModelConfig.from_hf(
        dict(model_type="llama", vocab_size=10, hidden_size=8, intermediate_size=4, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    )  # fmt: skip
    cost = static_cost(config, torch.float32)
    assert cost.layer_parameters == 2 * (8 * (2 + 2) * 4 + 8 * 8 + 3 * 8 * 4) and cost.head_parameters == 80
    assert cost.kv_bytes_per_token == 2 * 2 * 1 * 4 * 4
    flops = job_flops(cost, config, toy_workload([3, 2]).window(), np.array([3, 3]))
    assert flops.linear == flops.linear_without_sharing == 2 * cost.layer_parameters * (5 + 4) + 2 * 80 * 6
    contexts = (1 + 2 + 3) + (4 + 5) + (1 + 2) + (3 + 4)  # prompt and decoded tokens of each row see themselves too
    assert flops.attention == 4 * 2 * 2 * 4 * contexts


def test_limit_counts_padding_and_interpolates():
    linears = LinearSeconds([1, 16, 32], [1.0, 2.0, 4.0], [0.1, 0.2, 0.4])
    assert linears.of(24, 0) == 3.0 and linears.of(16, 32) == pytest.approx(2.4)
    limits = Limits(None, None, linears, min_rows=16)
    assert limits.seconds([[16, 16, 1]]) == pytest.approx(2.2)
    assert limits.seconds([[3, 3, 10], [32, 0, 1]], min_rows=16) == pytest.approx(10 * 2.2 + 4.0)


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_profile_puts_everything_back(model):
    from batchgen_kernels import select_ops

    from batchgen.models.layers import Linear

    ops = select_ops("torch")
    layer = Linear(8, 3, False, ops, torch.device("cpu"), torch.float32)
    before, forward = dict(vars(ops)), Linear.forward
    with profiled(ops) as seconds:
        assert ops.plan_attention.shares_prefix_reads is before["plan_attention"].shares_prefix_reads
        ops.silu_and_mul(torch.ones(2, 8))
        layer(torch.ones(2, 8))
    assert vars(ops) == before and Linear.forward is forward
    assert seconds.keys() == {"elementwise", "matrix products"}


def test_a_system_that_fails_says_why_and_goes_on():
    with pytest.raises(SystemFailed, match=r"^ValueError: no such model$"):
        SystemProcess(Moody, "absent", 1).ready()
    process = SystemProcess(Moody, "toy", 1)
    with pytest.raises(SystemFailed, match=r"^RuntimeError: negative$"):
        process.call("run", -1)
    assert process.call("run", 1) == 2
    with pytest.raises(SystemFailed, match="ended with exit code 3"):
        process.call("die")
    process.close()


def test_hits_of_continuous_batching_are_still_reported_under_that_name():
    with counted_hits() as hits:
        assert hits == []


@pytest.mark.slow
def test_a_whole_run_on_a_toy_model(model, capsys, tmp_path):
    file = tmp_path / "bench.json"
    arguments = ["--model", model, "--rows", "4", "--max-tokens", "5", "--threads", "1", "--profile", "--json", str(file)]
    arguments += ["--peers", str(tmp_path), "--systems", "batchgen,generate,continuous,vllm"]  # llama.cpp takes no toy
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    assert result == json.loads(file.read_text())
    assert result["threads"] == 1 and result["workloads"].keys() == RECIPES.keys()
    assert "make bench-peers" in result["missing"]["vllm"]
    for name, workload in result["workloads"].items():
        assert workload["settings"].keys() == {"ample", "scarce"}
        for setting, measured in workload["settings"].items():
            systems = measured["systems"]
            assert {k.split()[0] for k in systems} == {"batchgen", "generate", "continuous"} < SYSTEMS.keys()
            for system, facts in systems.items():
                if setting == "scarce" and system.startswith("continuous"):
                    continue  # it keeps some blocks free, and may not take what the others can
                assert "error" not in facts, f"{system} on {name}: {facts['error']}"
                assert facts["seconds"] > 0 and facts["times_batchgen"] > 0
                if system != "batchgen":
                    assert facts["agreement"]["identical"] == 1.0
            assert systems["generate"]["prefill_computed"] >= workload["prompt_tokens"]
            assert systems["batchgen"]["share_of_matmul_limit"] > 0
            assert measured["limits"]["matrix_products_seconds"] > 0 and "attention" in measured["profile"]
        assert workload["settings"]["ample"]["systems"]["batchgen"]["prefill_computed"] == workload["planned_prefill"]
