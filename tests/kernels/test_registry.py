"""The table of ops: which implementation is chosen, why, and what is imported for it."""

import subprocess
import sys

import pytest
import torch
from batchgen_kernels import registry, select_ops
from batchgen_kernels.registry import BACKENDS, OPS, load


@pytest.mark.parametrize("op", OPS)
def test_every_entry_loads(op):
    assert set(OPS[op]) <= set(BACKENDS) and {"reference", "torch"} <= set(OPS[op])
    for implementation in OPS[op]:
        assert callable(load(op, implementation))


def test_auto_on_the_cpu_is_torch_with_a_reason():
    ops = select_ops("auto", "cpu")
    assert {c.implementation for c in ops.choices} == {"torch"} and [c.op for c in ops.choices] == list(OPS)
    assert "chosen for device cpu" in ops.backend_reason


def test_auto_on_a_gpu_is_triton(monkeypatch):
    monkeypatch.setattr(registry, "triton_available", lambda: (True, "a GPU is there (test)"))
    ops = select_ops("auto", "cuda")
    assert ops.backend == "triton" and ops.backend_reason == "chosen for device cuda: a GPU is there (test)"
    assert ops.shares_prefix_reads is True


def test_batch_invariance_is_refused_where_it_would_not_hold(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_ops("triton", batch_invariant=True).batch_invariant
    for backend in ("auto", "torch", "reference"):
        with pytest.raises(ValueError, match="batch_invariant needs the backend triton, and this one is"):
            select_ops(backend, batch_invariant=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_can_be_asked_for(backend, monkeypatch):
    monkeypatch.setattr(registry, "triton_available", lambda: (True, ""))
    ops = select_ops(backend)
    assert {c.implementation for c in ops.choices} == {backend} and ops.backend_reason == "asked for"
    assert ops.rms_norm is load("rms_norm", backend)


def test_a_missing_op_falls_back_by_name(monkeypatch):
    monkeypatch.setattr(registry, "triton_available", lambda: (True, ""))
    monkeypatch.delitem(OPS["silu_and_mul"], "triton")
    ops = select_ops("triton")
    choice = next(c for c in ops.choices if c.op == "silu_and_mul")
    assert choice.implementation == "torch" and choice.reason == "triton has no silu_and_mul"
    assert ops.silu_and_mul is load("silu_and_mul", "torch")
    assert [c.implementation for c in ops.choices].count("triton") == len(OPS) - 1


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown backend 'cuda'; there are auto, reference, torch, triton"):
        select_ops("cuda")
    with pytest.raises(AttributeError, match="no op 'gelu'; there are rms_norm"):
        _ = select_ops("torch").gelu


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="backend triton cannot run here: no GPU and TRITON_INTERPRET is not 1"):
        select_ops("triton")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # what an import then finds is ModuleNotFoundError
import torch
from batchgen_kernels import registry, select_ops
ops = select_ops("auto")
assert {c.implementation for c in ops.choices} == {"torch"}
assert "triton is not installed" in ops.backend_reason, ops.backend_reason
print(ops.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).sum().item())
for op in registry.OPS:
    for implementation in registry.OPS[op]:
        registry.load(op, implementation)  # imports
try:
    select_ops("triton")
except ValueError as error:
    print(error)
try:
    heads, cache = torch.ones(1, 1, 1), torch.ones(1, 1, 1, 1)
    registry.load("write_kv", "triton")(heads, heads, cache, cache, torch.zeros(1, dtype=torch.int64))
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_package_works_with_torch_alone():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total, refused, missing = done.stdout.splitlines()
    assert total == "8.0"
    assert refused == "backend triton cannot run here: triton is not installed"
    assert "which is not installed: pip install" in missing
