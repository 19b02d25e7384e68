"""The GPU check without a GPU: what it says, that its stages work in the interpreter, and how little it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchgen.bench import gpu_check, gpu_stages

ROOT = Path(__file__).parents[2]
NOT_NEEDED = ("datasets", "pydantic", "gguf", "transformers", "pyarrow", "yaml", "typer", "safetensors", "jinja2")


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
    assert {"machine", "ops", "toy_engine", "engine"} <= result.keys()


def test_a_wrong_kernel_and_a_stage_that_breaks_fail_the_check(monkeypatch, capsys, tmp_path):
    def breaks():
        raise RuntimeError("no such driver")

    wrong = ("ops", lambda: ({"error": 1.0}, ["rms_norm is wrong"]))
    monkeypatch.setattr(gpu_stages, "self_test_stages", lambda: [wrong, ("engine", breaks), ("late", lambda: ({}, []))])
    assert gpu_check.main(["--self-test", "--out", str(tmp_path)]) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["failed"] == ["ops: rms_norm is wrong", "engine: RuntimeError: no such driver"] and "late" in result
    assert gpu_check.main(["--self-test", "--out", str(tmp_path), "--minutes", "0"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["skipped"] == ["ops", "engine", "late"]


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
