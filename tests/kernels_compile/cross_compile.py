"""Compiling Triton kernels for GPUs that are not here, through the real launchers, and reading what came out.

    with target("cuda", 90), capture(paged_decode, "paged_decode_kernel") as compiled:
        paged_decode.paged_decode(...)          # CPU tensors; nothing is run
    report(compiled[0])                         # registers, spills, shared memory, matrix instructions, load widths ...

Needs a process without TRITON_INTERPRET=1: there @triton.jit gives functions that cannot be compiled.
"""

import collections
import contextlib
import itertools
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

# shared memory a block may have, in bytes
SHARED_MEMORY = {80: 166912, 86: 101376, 90: 232448, 100: 232448, "gfx942": 65536}


_drivers = itertools.count()


class _Utils:
    def __init__(self, target):
        self.target = target

    def get_device_properties(self, device):
        return {
            "max_shared_mem": SHARED_MEMORY[self.target.arch],
            "multiprocessor_count": 132,
            "warpSize": self.target.warp_size,
        }


class CompileOnlyDriver:
    """Answers what JITFunction.warmup asks; there is nothing to launch on."""

    def __init__(self, target):
        self._target, self.utils, self._number = target, _Utils(target), next(_drivers)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return self._number  # key of a kernel's cache in memory: each driver begins with an empty one

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name):
        return name


@contextlib.contextmanager
def target(backend, arch):
    """Inside, kernels are compiled for this GPU: ("cuda", 90) or ("hip", "gfx942")."""
    previous = driver._active
    driver.set_active(CompileOnlyDriver(GPUTarget(backend, arch, 32 if backend == "cuda" else 64)))
    try:
        yield
    finally:
        driver._active = previous


@contextlib.contextmanager
def capture(module, *names):
    """Inside, launches of these kernels of `module` compile instead of run; yields the list of what was compiled."""
    compiled, originals = [], {name: getattr(module, name) for name in names}

    class Compile:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, **kwargs: compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

    for name, kernel in originals.items():
        setattr(module, name, Compile(kernel))
    try:
        yield compiled
    finally:
        for name, kernel in originals.items():
            setattr(module, name, kernel)


@contextlib.contextmanager
def count_variants():
    """Inside, nothing is compiled; yields {kernel name: set of the keys it would have been compiled under}."""
    keys = collections.defaultdict(set)

    def hook(*, key, fn, **rest):
        keys[fn.name.split(".")[-1]].add(str(key))
        return True  # skips the compilation

    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield keys
    finally:
        triton.knobs.runtime.jit_cache_hook = None


INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]{4,}\*/)?\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")


def report(kernel):
    """What the compiler made of it, as a dict; keys differ a little between NVIDIA and AMD."""
    metadata = kernel.metadata
    arch = metadata.target.arch
    r = {
        "warps": metadata.num_warps,
        "shared": metadata.shared,
        "shared_limit": SHARED_MEMORY[arch],
        "async_waits": async_waits(kernel.asm["ttgir"]),
    }
    if metadata.target.backend == "cuda":
        usage = _tool("cuobjdump", "-res-usage", cubin=kernel.asm["cubin"])
        sass = _tool("nvdisasm", "-c", cubin=kernel.asm["cubin"])
        ops = [m.group(1) for m in map(INSTRUCTION.match, sass.splitlines()) if m]
        kinds = collections.Counter(op.split(".")[0] for op in ops)
        r["mma"] = {k: n for k, n in kinds.items() if k.endswith("MMA")}
        r["registers"] = int(re.search(r"REG:(\d+)", usage).group(1))
        r["spills"] = kinds["LDL"] + kinds["STL"]  # instructions on local memory; the kernels have no arrays of their own
        r["wide_loads"] = sum(1 for op in ops if op.split(".")[0] in ("LDG", "LDGSTS") and ("128" in op or "256" in op))
        r["loads"] = kinds["LDG"] + kinds["LDGSTS"]
        r["wide_stores"] = sum(1 for op in ops if op.split(".")[0] == "STG" and ("128" in op or "256" in op))
    else:  # scalar registers may spill into lanes of vector registers, which costs little and is not counted
        text = kernel.asm["amdgcn"]
        number = lambda pattern: int(re.search(pattern, text).group(1))  # noqa: E731
        r["registers"] = number(r"\.vgpr_count:\s+(\d+)")
        r["spills"] = number(r"\.vgpr_spill_count:\s+(\d+)") + number(r"\.private_segment_fixed_size:\s+(\d+)")
        r["mma"] = dict(collections.Counter("MFMA" for _ in re.findall(r"\bv_mfma_\w+", text)))
        loads = re.findall(r"\b((?:global|buffer)_load_\w+)", text)
        r["loads"], r["wide_loads"] = len(loads), sum("dwordx4" in x or "b128" in x for x in loads)
        stores = re.findall(r"\b((?:global|buffer)_store_\w+)", text)
        r["wide_stores"] = sum("dwordx4" in x or "b128" in x for x in stores)
    return r


def async_waits(ttgir):
    """For each wait on copies inside a loop, how many later copies it leaves in flight: 0 is no overlap at all."""
    loops = ttgir.split("scf.for")[1:]
    return [int(n) for body in loops for n in re.findall(r"ttg\.async_wait[^\n]*num = (\d+)", body.split("scf.yield")[0])]


def _tool(name, *options, cubin):
    """Output of one of the tools in triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
        return subprocess.run([str(tool), *options, f.name], capture_output=True, text=True, check=True).stdout
