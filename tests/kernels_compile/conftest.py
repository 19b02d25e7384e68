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

ROOT = Path(__file__).parents[2]
TABLE: dict[tuple[str, str], str] = {}


@pytest.fixture(scope="session")
def table():
    """Adds a line to the table at the end of the run."""

    def add(kernel, what, r):
        resident = r["occupancy"] if r["occupancy"] is not None else "-"
        loop = f"{r['loop']['wide_loads']} of {r['loop']['loads']}" if r["loop"] else "-"
        mma = " ".join(f"{n} {kind}" for kind, n in r["mma"].items()) or "-"
        TABLE[kernel, what] = (
            f"{r['registers']:>9} {r['spills']:>6} {r['shared']:>6} {resident:>8} {loop:>10} "
            f"{','.join(map(str, r['async_waits'])) or '-':>9}  {mma}"
        )

    return add


def table_lines():
    """Sorted by kernel, then by target and configuration."""
    width = max(len(what) for _, what in TABLE)
    head = f"{'target and configuration':{width}} registers spills shared resident wide loads in flight  mma"
    lines, last = [f"  {head}"], None
    for (kernel, what), figures in sorted(TABLE.items()):
        if kernel != last:
            lines.append(kernel)
        lines.append(f"  {what:{width}} {figures}")
        last = kernel
    lines.append(
        "(registers of a thread; shared bytes of a block; resident: blocks a processor holds; wide loads: those of 128 bits"
    )
    lines.append(
        " among all in the inner loop; in flight: copies that each wait in a loop leaves under way; mma: of the whole)"
    )
    return lines


def pytest_terminal_summary(terminalreporter):
    if TABLE:
        import triton

        file = ROOT / f"build/compile-table-{triton.__version__}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(table_lines()) + "\n")
        terminalreporter.section(f"compiled kernels, triton {triton.__version__}: {file.relative_to(ROOT)}")
        for line in table_lines():
            terminalreporter.write_line(line)
    elif collect_ignore_glob:
        terminalreporter.write_line("tests/kernels_compile is left out, it needs a process with TRITON_INTERPRET=0")
