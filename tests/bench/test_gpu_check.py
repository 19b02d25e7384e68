"""The GPU check without a GPU: what it says, that its stages work in the interpreter, and how little it needs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from batchgen.bench import gpu_check, gpu_stages

ROOT = Path(__file__).parents[2]
NOT_NEEDED = (
    *("datasets", "pydantic", "gguf", "transformers", "tokenizers", "huggingface_hub", "pyarrow", "yaml", "typer"),
    *("safetensors", "jinja2", "tqdm", "fsspec", "filelock"),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_so_without_a_gpu(capsys, tmp_path):
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("gpu-check: torch sees no GPU here, so nothing ran.")
    assert "make gpu-check" in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_self_test_passes_in_the_interpreter_without_what_a_gpu_machine_may_lack(tmp_path):
    block = f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED}))"
    code = f"{block}; from batchgen.bench.gpu_check import main; sys.exit(main(['--self-test', '--out', {str(tmp_path)!r}]))"
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "gpu-check.json").read_text())
    assert result["failed"] == [] and result["toy_engine"]["same_tokens"] == result["toy_engine"]["rows"] == 4
    assert {"machine", "ops", "toy_engine", "engine", "kernels"} <= result.keys()
    assert {"share_in_turn", "share_at_once", "prefill_computed"} <= result["engine"]["job"].keys()
    assert [row["kernel"] for row in result["kernels"]["rows"]] == ["decode", "prefill", "rms_norm"]


def test_a_wrong_kernel_and_a_stage_that_breaks_fail_the_check(monkeypatch, capsys, tmp_path):
    def breaks(until):
        raise RuntimeError("no such driver")

    stages = [
        gpu_stages.Stage("ops", 9, lambda until: ({"error": 1.0}, ["rms_norm is wrong"])),
        gpu_stages.Stage("engine", 9, breaks),
        gpu_stages.Stage("late", 9, lambda until: ({}, [])),
    ]
    monkeypatch.setattr(gpu_stages, "self_test_stages", lambda: stages)
    assert gpu_check.main(["--self-test", "--out", str(tmp_path)]) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["failed"] == ["ops: rms_norm is wrong", "engine: RuntimeError: no such driver"] and "late" in result
    assert gpu_check.main(["--self-test", "--out", str(tmp_path), "--minutes", "0"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert json.loads(said[-1])["skipped"] == ["ops", "engine", "late"]
    assert "3 stages were skipped" in said[-2]


def test_a_stage_is_told_its_time_and_one_that_hangs_is_stopped(monkeypatch, capsys, tmp_path):
    told = []
    stages = [
        gpu_stages.Stage("short", 5, lambda until: (told.append(until - time.perf_counter()), ({}, []))[1]),
        gpu_stages.Stage("hangs", 0.1, lambda until: time.sleep(60)),
        gpu_stages.Stage("after", 999, lambda until: (told.append(until - time.perf_counter()), ({}, []))[1]),
    ]
    monkeypatch.setattr(gpu_stages, "self_test_stages", lambda: stages)
    monkeypatch.setattr(gpu_check, "GRACE", 0.1)
    assert gpu_check.main(["--self-test", "--out", str(tmp_path), "--minutes", "1"]) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["failed"] == ["hangs: OutOfTimeError: did not end 0.1 s after its time"] and "after" in result
    assert 4.5 < told[0] <= 5 and 55 < told[1] < 60


def test_what_a_gpu_gets_fits_into_8_minutes_and_begins_with_what_matters():
    stages = gpu_stages.stages("cuda")
    assert [s.name for s in stages][2:5] == ["ops", "toy_engine", "engine_1b"]
    assert sum(s.seconds for s in stages) < 8 * 60
    minutes = gpu_check.parse([]).minutes
    assert 60 * minutes + gpu_check.GRACE < 8 * 60 - 15  # the imports


def test_ops_stop_at_their_time_and_name_what_is_left():
    figures, problems = gpu_stages.check_ops("cpu", {"float32": torch.float32}, ("rms_norm", "silu_and_mul"), until=0.0)
    assert problems == [] and figures == {"not_reached": ["rms_norm float32", "silu_and_mul float32"]}


COMPILE = """
import json, sys, time
from batchgen.bench.gpu_stages import compile_ahead
if __name__ == "__main__":
    things = [("rms_norm", "bfloat16"), ("row", "merge_states 8B 4096 tokens"), ("row", "absent")]
    print(json.dumps(compile_ahead(("cuda", 90), 132, things, time.perf_counter() + 120)))
"""


def test_kernels_are_compiled_ahead_into_the_cache_that_later_stages_read(tmp_path):
    """In processes without a GPU; what they cannot compile is told and stops nothing."""
    (tmp_path / "ahead.py").write_text(COMPILE)
    cache = tmp_path / "cache"
    environment = os.environ | {
        "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }  # fmt: skip
    command = [sys.executable, str(tmp_path / "ahead.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    figures, problems = json.loads(done.stdout.splitlines()[-1])
    assert figures["compiled"] >= 5 and figures["not_reached"] == 0 and problems == []
    assert len(figures["faults"]) == 1 and "row absent" in figures["faults"][0]
    assert {"rms_norm_kernel", "merge_states_kernel"} <= {f.stem for f in cache.rglob("*.cubin")}


def test_make_uses_the_python_that_sees_a_gpu_and_installs_nothing(tmp_path):
    """A stand-in that answers yes to the question of the Makefile, and prints what it is asked to run."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntest "$1" = -c || echo "$PYTHONPATH $*"\n')
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}  # of a make that runs this
    for target, module in (("gpu-check", "gpu_check"), ("bench-kernels", "kernels")):
        command = ["make", target, f"PYTHON={python}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
        assert done.stdout == f".:kernels -m batchgen.bench.{module}\n", done


def test_an_error_in_an_op_is_found(monkeypatch):
    right = gpu_stages.load

    def load(op, implementation):
        return (
            (lambda x, weight, eps: right(op, "torch")(x, 1.01 * weight, eps))
            if implementation == "triton"
            else right(op, "torch")
        )

    monkeypatch.setattr(gpu_stages, "load", load)
    figures, problems = gpu_stages.check_ops("cpu", {"float32": torch.float32}, ("rms_norm",), 2)
    assert len(problems) == 2 and figures["rms_norm float32"]["wrong"] == 2
