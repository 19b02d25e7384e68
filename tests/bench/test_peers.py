"""A peer in another python's environment, memory and orders of a comparison, the picture; without a peer installed."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchgen.bench import measure
from batchgen.bench.measure import Bench, Spec
from batchgen.bench.peers import GenerateSystem, vllm_process
from batchgen.bench.systems import Run, ScriptProcess, SystemFailed, TooSlow
from batchgen.bench.workloads import Workload

FAKE = Path(__file__).with_name("fake_peer.py")


def toy(lengths=(3, 40, 5), max_tokens=2, num_samples=2):
    prompts = [np.arange(i, i + n, dtype=np.int32) for i, n in enumerate(lengths)]
    workload = Workload("toy", "", prompts, np.arange(len(prompts), dtype=np.uint64), max_tokens, num_samples)
    return replace(workload, num_blocks=workload.memory_settings()["ample"])


def fake(tmp_path, model="toy"):
    return ScriptProcess(Path(sys.executable), FAKE, {"model": model}, tmp_path / "log")


def test_a_peer_in_another_environment_answers_fails_and_is_stopped(tmp_path):
    peer = fake(tmp_path)
    w = toy()
    assert peer.call("calibrate", w) == f"room for {w.num_blocks * 16} tokens"
    run = peer.call("run", w)
    assert run == Run(1.0, [[int(p.sum())] * 2 for p in w.requests()], 96, {"runs": 1})
    with pytest.raises(SystemFailed, match=r"^RuntimeError: unlucky$"):
        peer.call("run", replace(w, max_tokens=13))
    assert peer.call("run", w).facts == {"runs": 2}
    with pytest.raises(TooSlow, match="stopped after 0 s"):
        peer.call("run", replace(w, max_tokens=60), seconds=0.2)
    assert peer.call("run", w).facts == {"runs": 1}, "it starts again after it was stopped"
    peer.close()
    log = (tmp_path / "log").read_text()
    assert "loading toy" in log and "running" in log and "RuntimeError: unlucky" in log
    with pytest.raises(SystemFailed, match=r"^ValueError: no such model$"):
        fake(tmp_path, "absent").call("run", w)


def test_without_vllm_there_is_one_line(tmp_path):
    with pytest.raises(SystemFailed, match="not installed; `make bench-peers`"):
        vllm_process("packaged:smollm2", 1, [toy()], tmp_path)


def test_batches_of_generate_keep_within_the_memory():
    generate = object.__new__(GenerateSystem)
    generate.batch_size = 4
    lengths = [10, 12, 100, 11, 14, 13, 90]
    w = toy(lengths, max_tokens=6, num_samples=1)
    assert generate.batches(w) == [[0, 3, 1, 5], [4, 6, 2]]
    scarce = replace(w, num_blocks=7)  # 112 tokens
    assert generate.batches(scarce) == [[0, 3, 1, 5], [4], [6], [2]]


class Echo:
    """In this process: answers with the sum of the prompt, notes what it was given."""

    def __init__(self):
        self.given = []

    def ready(self): ...

    def call(self, method, workload, *args, seconds=None):
        if method == "calibrate":
            return "nothing to choose"
        tokens = [[int(p.sum())] * workload.max_tokens for p in workload.requests()]
        if method == "one_by_one":
            return tokens
        self.given.append(workload)
        return Run(2.0, tokens, workload.num_prompt_tokens, {"steps": [[4, 2, 3]]})

    def close(self): ...


def bench_of(monkeypatch, processes):
    monkeypatch.setattr(
        measure, "SYSTEMS", {n: Spec(n, None, ("file order", "sorted") if n == "vllm" else ("",)) for n in processes}
    )
    bench = object.__new__(Bench)
    bench.systems, bench.repeats, bench.processes, bench.missing = list(processes), 1, processes, {}
    bench.stops = dict.fromkeys(processes, 0)
    return bench


def test_all_get_the_same_memory_and_sorted_runs_come_back_in_file_order(monkeypatch, capsys):
    processes = {n: Echo() for n in ("batchgen", "generate", "vllm")}
    w = toy((40, 20, 30))
    w.prompts[0][:] = 9  # sorts last
    facts = bench_of(monkeypatch, processes).measure(w, None, False)
    settings = w.memory_settings()
    for setting, measured in facts["settings"].items():
        assert measured["num_blocks"] == settings[setting]
        assert list(measured["systems"]) == ["batchgen", "generate", "vllm file order", "vllm sorted"]
        assert all(s["agreement"]["identical"] == 1.0 for k, s in measured["systems"].items() if k != "batchgen")
    for echo in processes.values():
        assert {g.num_blocks for g in echo.given if g.max_tokens == 2} == set(settings.values())
    orders = [[len(p) for p in g.prompts] for g in processes["vllm"].given if g.max_tokens == 2]
    assert orders == 2 * [[40, 20, 30], [20, 30, 40]]
    assert "vllm, sorted" in capsys.readouterr().out


def test_a_peer_with_wrong_tokens_is_not_timed(monkeypatch):
    class Wrong(Echo):
        def call(self, method, workload, *args, seconds=None):
            result = super().call(method, workload, seconds=seconds)
            if method == "run":
                result.tokens[0][1] += 1
            return result

    class Oracle(Echo):
        def call(self, method, *args, seconds=None):
            return 5.0 if method == "logit_gap" else super().call(method, *args, seconds=seconds)

    processes = {"batchgen": Echo(), "generate": Oracle(), "vllm": Wrong()}
    facts = bench_of(monkeypatch, processes).measure(toy(), None, False)
    for measured in facts["settings"].values():
        assert "other tokens" in measured["systems"]["vllm sorted"]["error"]
        assert "seconds" not in measured["systems"]["vllm sorted"]


def test_a_peer_that_is_stopped_twice_is_not_tried_again(monkeypatch):
    class Slow(Echo):
        def call(self, method, workload, *args, seconds=None):
            if method == "run" and workload.max_tokens == 2:
                assert seconds == 24.0  # 12 times batchgen's 2 s
                raise TooSlow("stopped after 24 s")
            return super().call(method, workload, seconds=seconds)

    bench = bench_of(monkeypatch, {"batchgen": Echo(), "generate": Echo(), "vllm": Slow()})
    facts = bench.measure(toy(), None, False)
    assert facts["settings"]["ample"]["systems"]["vllm sorted"]["stopped_after"] == 24.0
    facts = bench.measure(toy(), None, False)
    assert "not tried" in facts["settings"]["ample"]["systems"]["vllm sorted"]["error"]


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra bench is not installed")
    from batchgen.bench.plot import draw

    systems = {"batchgen": {"seconds": 2.0}, "vllm sorted": {"seconds": 3.0}, "continuous sorted": {"stopped_after": 24.0}}
    setting = {"systems": systems}
    workloads = {n: {"settings": {"ample": setting, "scarce": {"systems": {"batchgen": {"seconds": 2.0}}}}} for n in "ab"}
    file = tmp_path / "new/bench.png"
    draw({"workloads": workloads, "cpu": "some CPU", "threads": 2, "model": "toy"}, file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and file.stat().st_size > 10_000
