"""In the interpreter, every test here runs under the guard: bounds, races, poison and random program order.

With TRITON_INTERPRET=0 the same tests run on a GPU, as it is; where there is none, only the registry is left to test.
"""

import sys
from pathlib import Path

import pytest
import torch
from batchgen_kernels._triton import interpreting  # repairs the interpreter, which the guard then wraps

sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib leaves it out
collect_ignore, collect_ignore_glob = [], []
if interpreting():
    import interpreter_guard
else:
    collect_ignore_glob = ["test_mutants_*.py"]  # planted bugs corrupt memory on a GPU
    if not torch.cuda.is_available():
        collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_registry.py"]


@pytest.fixture(autouse=True)
def guard():
    """Kernel launches are checked, and torch.empty gives NaN: what a kernel forgets to write is seen."""
    if not interpreting():
        yield
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with interpreter_guard.active():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def mutate(monkeypatch, tmp_path):
    """mutate("paged_tile", old, new, entry="paged_decode") -> module paged_decode as if paged_tile had that text."""
    from mutants import make_mutate

    return make_mutate(monkeypatch, tmp_path)
