"""Kernels compiled for GPUs that are not here: `TRITON_INTERPRET=0 pytest tests/kernels_compile`, in its own process."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib leaves it out

# the interpreter takes the place of @triton.jit when triton is imported, so nothing could be compiled in that process
collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []

# a cache of its own: what is compiled here must not depend on what was compiled before
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-cache-")

TABLE: list[str] = []


@pytest.fixture(scope="session")
def table():
    """Adds a line to the table at the end of the run."""

    def add(kernel, what, r):
        TABLE.append(
            f"{kernel:25} {what:38} {r['registers']:4} registers {r['spills']:4} spills "
            f"{r['shared']:7} of {r['shared_limit']} shared {r['wide_loads']:4} of {r['loads']:3} loads wide, "
            f"in flight {r['async_waits'] or '-'}, {r['mma'] or '-'}"
        )

    return add


def pytest_terminal_summary(terminalreporter):
    if TABLE:
        terminalreporter.section("compiled kernels")
        for line in TABLE:
            terminalreporter.write_line(line)
    elif collect_ignore_glob:
        terminalreporter.write_line("tests/kernels_compile is left out, it needs a process with TRITON_INTERPRET=0")
