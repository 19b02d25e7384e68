"""Compiling Triton kernels for GPUs that are not here, through the real launchers, and reading what came out.

    with target("cuda", 90), capture_launches() as launches:
        rms_norm_triton(x, weight, 1e-5)        # tensors of the CPU or of no device at all ("meta"); nothing is run
    report(launches[0].kernel)                  # registers, spills, shared memory, matrix instructions, load widths ...

Needs a process without TRITON_INTERPRET=1: there @triton.jit gives functions that cannot be compiled. The disassemblers
that it calls are in triton's wheel. Limits and occupancy rules: CUDA C++ programming guide, table of compute capabilities.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchgen_kernels import launch
from batchgen_kernels._triton import triton

# shared memory a block may have, in bytes
SHARED_MEMORY = {80: 166912, 86: 101376, 90: 232448, 100: 232448, "gfx942": 65536}
# of one multiprocessor: 32-bit registers are 65536 everywhere; shared memory in bytes, warps, blocks
PROCESSOR = {80: (167936, 64, 32), 86: (102400, 48, 16), 90: (233472, 64, 32), 100: (233472, 64, 32)}
REGISTERS, REGISTER_UNIT = 65536, 256  # a warp is given registers in units of 256
SHARED_RESERVED, SHARED_UNIT = 1024, 128  # bytes that a block takes besides its own, and what is rounded up to

_drivers = itertools.count()


class _Utils:
    def __init__(self, target: Any) -> None:
        self.target = target

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_MEMORY[self.target.arch],
            "multiprocessor_count": 132,
            "warpSize": self.target.warp_size,
        }


class CompileOnlyDriver:
    """Answers what JITFunction.warmup asks; there is nothing to launch on."""

    def __init__(self, target: Any) -> None:
        self._target, self.utils, self._number = target, _Utils(target), next(_drivers)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._number  # key of a kernel's cache in memory: each driver begins with an empty one

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def current_target() -> tuple[str, int | str]:
    """What kernels are compiled for at this moment, in the form that `target` takes."""
    from triton.runtime.driver import driver

    current = driver.active.get_current_target()
    return current.backend, current.arch


def current_launcher() -> Any:
    """What makes a kernel's launcher on the GPU of this process: (source, metadata) -> launcher, kept in triton's cache."""
    from triton.runtime.driver import driver

    return driver.active.launcher_cls


@contextlib.contextmanager
def target(backend: str, arch: int | str, processors: int | None = None) -> Iterator[None]:
    """Inside, kernels are compiled for this GPU: ("cuda", 90) or ("hip", "gfx942").

    processors: how many multiprocessors the launchers are told that it has; without it, what `num_processors` says.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    previous = driver._active
    driver.set_active(CompileOnlyDriver(GPUTarget(backend, arch, 32 if backend == "cuda" else 64)))
    launch.assumed_processors, assumed = processors, launch.assumed_processors
    try:
        yield
    finally:
        driver._active = previous
        launch.assumed_processors = assumed


class Launched(NamedTuple):
    """A kernel as it was compiled, and the grid it was to run on."""

    kernel: Any
    grid: tuple[int, ...]


@contextlib.contextmanager
def capture_launches() -> Iterator[list[Launched]]:
    """Inside, every launch of a kernel compiles it instead; yields the list of them, in order."""
    from triton.runtime.jit import JITFunction

    launches: list[Launched] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launched(kernel, tuple(grid(kwargs) if callable(grid) else grid)))
        return kernel

    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run


@contextlib.contextmanager
def capture(module: Any, *names: str) -> Iterator[list[Any]]:
    """Inside, launches of these kernels of `module` compile instead of run; yields the list of what was compiled."""
    compiled: list[Any] = []
    originals = {name: getattr(module, name) for name in names}

    class Compile:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

    for name, kernel in originals.items():
        setattr(module, name, Compile(kernel))
    try:
        yield compiled
    finally:
        for name, kernel in originals.items():
            setattr(module, name, kernel)


@contextlib.contextmanager
def count_variants() -> Iterator[dict[str, set[str]]]:
    """Inside, nothing is compiled; yields {kernel name: set of the keys it would have been compiled under}."""
    keys: dict[str, set[str]] = collections.defaultdict(set)

    def hook(*, key: Any, fn: Any, **rest: Any) -> bool:
        keys[fn.name.split(".")[-1]].add(str(key))
        return True  # skips the compilation

    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield keys
    finally:
        triton.knobs.runtime.jit_cache_hook = None


# ---- reading ----------------------------------------------------------------------------------------------------------


def report(kernel: Any) -> dict[str, Any]:
    """What the compiler made of it.

    registers a thread; spills (instructions on local memory; bytes on AMD); shared, shared_limit in bytes; mma, loads,
    wide_loads, wide_stores (128 bits and more) of the whole kernel, and the same of its `loop`: the innermost loop with the
    most matrix instructions, else with the most loads; None where there is no loop. async_waits: see there.
    occupancy: blocks a multiprocessor holds (None on AMD), and what limits them.
    """
    metadata = kernel.metadata
    arch = metadata.target.arch
    r: dict[str, Any] = {
        "warps": metadata.num_warps,
        "stages": metadata.num_stages,
        "shared": metadata.shared,
        "shared_limit": SHARED_MEMORY[arch],
        "async_waits": async_waits(kernel.asm["ttgir"]),
    }
    if metadata.target.backend == "cuda":
        usage = _tool("cuobjdump", "-res-usage", cubin=kernel.asm["cubin"])
        whole, loops = _instructions(_tool("nvdisasm", "-c", cubin=kernel.asm["cubin"]), SASS, SASS_LABEL, SASS_BRANCH)
        count = _count_sass
        r["registers"] = int(re.search(r"REG:(\d+)", usage).group(1))  # type: ignore[union-attr]
        r["occupancy"], r["limited_by"] = occupancy(r["registers"], r["shared"], r["warps"], arch)
    else:  # scalar registers may spill into lanes of vector registers, which costs little and is not counted
        text = kernel.asm["amdgcn"]
        number = lambda pattern: int(re.search(pattern, text).group(1))  # type: ignore[union-attr] # noqa: E731
        whole, loops = _instructions(text, GCN, GCN_LABEL, GCN_BRANCH)
        count = _count_gcn
        r["registers"] = number(r"\.vgpr_count:\s+(\d+)")
        r["occupancy"] = None
    r |= count(whole)
    if metadata.target.backend != "cuda":
        r["spills"] = number(r"\.vgpr_spill_count:\s+(\d+)") + number(r"\.private_segment_fixed_size:\s+(\d+)")
    counted = [count(loop) for loop in loops]
    r["loop"] = max(counted, key=lambda c: (sum(c["mma"].values()), c["loads"]), default=None)
    return r


SASS = re.compile(r"^\s*(?:/\*[0-9a-f]{4,}\*/)?\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
SASS_LABEL = re.compile(r"^(\.L_x_\d+):")
SASS_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
GCN = re.compile(r"^\s+([a-z]\w+)")
GCN_LABEL = re.compile(r"^(\.LBB\w+):")
GCN_BRANCH = re.compile(r"\bs_c?branch\w*\s+(\.LBB\w+)")


def _instructions(
    text: str, instruction: re.Pattern[str], label: re.Pattern[str], branch: re.Pattern[str]
) -> tuple[list[str], list[list[str]]]:
    """(all instructions, those of each innermost loop): a loop is what a backward branch encloses."""
    ops: list[str] = []
    position: dict[str, int] = {}
    end: dict[int, int] = {}  # first instruction of a loop -> one past its last
    for line in text.splitlines():
        if m := label.match(line):
            position[m.group(1)] = len(ops)
        elif m := instruction.match(line):
            ops.append(m.group(1))
            if (b := branch.search(line)) and b.group(1) in position:
                end[position[b.group(1)]] = len(ops)
    # ptxas ends a kernel with a branch to itself
    spans = [(a, b) for a, b in end.items() if b - a > 1]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b for c, d in spans if (a, b) != (c, d))]
    return ops, [ops[a:b] for a, b in inner]


def _width(op: str) -> int:
    """Bytes that a thread moves with this SASS instruction."""
    parts = op.split(".")
    return next((int(p) // 8 for p in parts if p in ("64", "128", "256")), 1 if {"U8", "S8"} & {*parts} else
                2 if {"U16", "S16"} & {*parts} else 4)  # fmt: skip


def _count_sass(ops: list[str]) -> dict[str, Any]:
    kinds = collections.Counter(op.split(".")[0] for op in ops)
    loads = [op for op in ops if op.split(".")[0] in ("LDG", "LDGSTS")]
    return {
        "mma": {k: n for k, n in kinds.items() if k.endswith("MMA")},
        "spills": kinds["LDL"] + kinds["STL"],  # the kernels have no arrays of their own in local memory
        "loads": len(loads),
        "wide_loads": sum(_width(op) >= 16 for op in loads),
        "narrow_loads": sum(_width(op) < 4 for op in loads),
        "widest_load": max(map(_width, loads), default=0),
        "load_bytes": sum(map(_width, loads)),  # of one thread
        "wide_stores": sum(op.split(".")[0] == "STG" and _width(op) >= 16 for op in ops),
    }


def _count_gcn(ops: list[str]) -> dict[str, Any]:
    wide = lambda op: "dwordx4" in op or "b128" in op  # noqa: E731
    loads = [op for op in ops if re.match(r"(?:global|buffer)_load_", op)]
    stores = [op for op in ops if re.match(r"(?:global|buffer)_store_", op)]
    return {
        "mma": dict(collections.Counter("MFMA" for op in ops if op.startswith("v_mfma_"))),
        "spills": sum(op.startswith("scratch_") for op in ops),
        "loads": len(loads),
        "wide_loads": sum(map(wide, loads)),
        "wide_stores": sum(map(wide, stores)),
    }


def async_waits(ttgir: str) -> list[int]:
    """For each wait on copies inside a loop, how many later copies it leaves in flight: 0 is no overlap at all."""
    loops = ttgir.split("scf.for")[1:]
    return [int(n) for body in loops for n in re.findall(r"ttg\.async_wait[^\n]*num = (\d+)", body.split("scf.yield")[0])]


def occupancy(registers: int, shared: int, warps: int, arch: int) -> tuple[int, str]:
    """(blocks that a multiprocessor holds at a time, what limits them): registers a thread, bytes and warps a block."""
    shared_limit, warp_limit, block_limit = PROCESSOR[arch]
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    limits = {
        "registers": REGISTERS // per_warp // warps,
        "shared": shared_limit // (-(-(shared + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT),
        "warps": warp_limit // warps,
        "blocks": block_limit,
    }
    least = min(limits, key=lambda name: limits[name])
    return limits[least], least


def _tool(name: str, *options: str, cubin: bytes) -> str:
    """Output of one of the tools in triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
        return subprocess.run([str(tool), *options, f.name], capture_output=True, text=True, check=True).stdout
