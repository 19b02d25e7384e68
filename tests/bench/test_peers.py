"""A peer in another python's environment, memory and orders of a comparison, the picture; without a peer installed."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from batchgen.bench import measure, peer_llama_cpp
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


def llama_system(monkeypatch, tmp_path):
    server = tmp_path / "llama-server"
    server.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_llama_server.py")} "$@"\n')
    server.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER", str(server))
    system = object.__new__(peer_llama_cpp.LlamaCppSystem)
    system.server, system.threads, system.slots, system.gguf = peer_llama_cpp.server_path(), 1, 8, tmp_path / "absent.gguf"
    return system


def test_llama_cpp_gets_the_memory_and_only_the_slots_that_fit(monkeypatch, tmp_path):
    system = llama_system(monkeypatch, tmp_path)
    w = toy(max_tokens=3)
    run = system.run(replace(w, num_blocks=8))  # 128 tokens: room for two of 43
    assert run.tokens == [[128, 2, int(p.sum())] for p in w.requests()] and run.facts == {"slots": 2}
    assert run.num_prefill == w.num_prompt_tokens
    w.prompts[0][0] = 99
    with pytest.raises(RuntimeError, match=r"llama-server: .*no room"):
        system.run(w)


def test_no_server_outlives_a_system_that_is_killed(monkeypatch, tmp_path):
    """As the benchmark kills one that takes too long."""
    llama_system(monkeypatch, tmp_path)
    code = (
        "import subprocess, sys, time; from batchgen.bench.peer_llama_cpp import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = Path("/proc") / parent.stdout.readline().strip()
    assert child.is_dir()
    parent.kill()
    parent.wait()
    until = time.monotonic() + 10
    while child.is_dir() and "Z" not in (child / "stat").read_text().split()[2] and time.monotonic() < until:
        time.sleep(0.05)
    assert not child.is_dir() or (child / "stat").read_text().split()[2] == "Z"


def test_without_llama_cpp_there_is_one_line(monkeypatch):
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemFailed, match="not installed; put llama-server on the PATH"):
        peer_llama_cpp.server_path()


def test_a_server_that_does_not_start_is_told(monkeypatch, tmp_path):
    system = llama_system(monkeypatch, tmp_path)
    (tmp_path / "llama-server").write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(SystemFailed, match="exit code 7"):
        system.run(toy())


def test_float32_gguf_holds_the_values_of_the_packed_one(tmp_path):
    """Q4_1 blocks and a float32 norm, read back as float32; the metadata stays, but for what ends an answer."""
    rng = np.random.default_rng(0)
    weight, norm = rng.standard_normal((4, 64), np.float32), rng.standard_normal(8).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "q4.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "<|end|>"])
    writer.add_eos_token_id(1)
    writer.add_uint32("llama.block_count", 2)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    peer_llama_cpp.write_float32(tmp_path / "q4.gguf", tmp_path / "f32.gguf")
    read = gguf.GGUFReader(tmp_path / "f32.gguf")
    tensors = {t.name: t for t in read.tensors}
    assert all(t.tensor_type == gguf.GGMLQuantizationType.F32 for t in read.tensors)
    assert np.array_equal(tensors["w"].data, gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1))
    assert np.array_equal(tensors["norm"].data, norm)
    assert (
        read.fields["tokenizer.ggml.tokens"].contents() == ["a", "[<|end|>]"]
        and read.fields["llama.block_count"].contents() == 2
    )
    assert read.fields["tokenizer.ggml.eos_token_id"].contents() == peer_llama_cpp.UNLIKELY_TOKEN
