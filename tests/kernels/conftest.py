"""Every test here runs under the guard: bounds, races, poison and random program order in Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") != "1" else []
if not collect_ignore_glob:
    sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib leaves it out
    import batchgen_kernels._triton  # noqa: F401  repairs the interpreter, which the guard then wraps
    import interpreter_guard


@pytest.fixture(autouse=True)
def guard():
    """Kernel launches are checked, and torch.empty gives NaN: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with interpreter_guard.active():
        yield
    torch.use_deterministic_algorithms(False)
