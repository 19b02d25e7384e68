"""Planted bugs: each is one that a GPU would not report, and each must turn a check red, or the checks prove little."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from batchgen_kernels.cases import CASES
from batchgen_kernels.cases.case import relative_error, tolerance
from batchgen_kernels.registry import load


def make_mutate(monkeypatch, tmp_path):
    """mutate("paged_tile", old, new, entry="paged_decode") -> module paged_decode as if paged_tile had that text."""

    def copy_of(module, edit=lambda text: text):
        original = importlib.import_module(f"batchgen_kernels.{module}")
        path = tmp_path / f"{module}.py"
        path.write_text(edit(Path(original.__file__).read_text()))
        spec = importlib.util.spec_from_file_location(f"batchgen_kernels.{module}", path)
        mutant = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutant)
        return mutant

    def mutate(module, old, new, entry=None):
        def edit(text):
            assert old in text, f"{module} no longer has {old!r}: plant the bug anew"
            return text.replace(old, new)

        mutant = copy_of(module, edit)
        if entry is None:
            return mutant
        importlib.import_module(f"batchgen_kernels.{entry}")  # or its first import would be of the mutant, for good
        monkeypatch.setitem(sys.modules, f"batchgen_kernels.{module}", mutant)
        return copy_of(entry)

    return mutate


def assert_caught(run):
    """An error out of tolerance (1 is the tolerance), or the guard or the interpreter raising."""
    try:
        error = run()
    except Exception as fault:
        assert type(fault).__name__ in ("KernelFault", "InterpreterError"), repr(fault)
    else:
        assert error > 1, f"survived with {error:.2g} of the tolerance"


class Bug(NamedTuple):
    name: str
    module: str
    run: str  # the op, or "decode" or "prefill"
    old: str
    new: str
    options: dict = {}  # noqa: RUF012  of `attention`


def assert_op_bug_is_caught(mutate, bug, dtype=torch.bfloat16):
    """The Triton op with the bug, over all its cases."""
    mutant = getattr(mutate(bug.module, bug.old, bug.new), f"{bug.run}_triton")
    allowed = max(tolerance(bug.run, "triton", dtype), 1e-9)

    def run():
        errors = []
        for case in CASES[bug.run](dtype, "cpu"):
            outputs = zip(case.run(mutant), case.run(load(bug.run, "reference")))
            errors += [relative_error(out, want) / allowed for out, want in outputs]
        return max(errors)

    assert_caught(run)
