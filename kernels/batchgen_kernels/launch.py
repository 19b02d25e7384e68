"""How the attention kernels are launched: tile sizes, warps and pipeline stages by architecture, head dim and dtype.

One table, which the compile tests walk through entry by entry, so nothing can be launched that was never compiled.
The numbers come from what the compiler reports (no spills, shared memory, tensor core instructions, copies in flight);
they have not been timed on a GPU yet.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from batchgen_kernels._triton import interpreting, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


class Launch(NamedTuple):
    """block_m: rows of the query tile; block_n: keys of a key/value tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (architecture, head_dim padded to a power of two, bytes of an element) -> launch. Head dims below 64 use the row of 64.
# Elements of 4 bytes multiply without tensor cores (float32 means float32 here): small tiles, or the registers spill.
# Fewer than 3 stages leave no copy in flight on NVIDIA; AMD has no asynchronous copies here and 64 KB of shared memory.
PREFILL: dict[tuple[str, int, int], Launch] = {
    ("sm_80", 64, 2): Launch(128, 32, 8, 3),
    ("sm_80", 128, 2): Launch(64, 64, 8, 3),
    ("sm_80", 256, 2): Launch(64, 32, 8, 3),
    ("sm_90", 64, 2): Launch(128, 64, 8, 3),
    ("sm_90", 128, 2): Launch(128, 64, 8, 3),
    ("sm_90", 256, 2): Launch(64, 16, 8, 3),
    ("sm_100", 64, 2): Launch(128, 64, 8, 3),
    ("sm_100", 128, 2): Launch(128, 64, 8, 3),
    ("sm_100", 256, 2): Launch(128, 32, 8, 3),
    ("gfx942", 64, 2): Launch(128, 64, 4, 2),
    ("gfx942", 128, 2): Launch(128, 32, 8, 2),
    ("gfx942", 256, 2): Launch(64, 32, 4, 2),
    ("sm_80", 64, 4): Launch(32, 32, 8, 3),
    ("sm_80", 128, 4): Launch(32, 16, 8, 3),
    ("sm_80", 256, 4): Launch(32, 16, 8, 3),
    ("sm_90", 64, 4): Launch(32, 32, 8, 3),
    ("sm_90", 128, 4): Launch(32, 16, 8, 3),
    ("sm_90", 256, 4): Launch(32, 16, 8, 3),
    ("sm_100", 64, 4): Launch(32, 32, 8, 3),
    ("sm_100", 128, 4): Launch(32, 16, 8, 3),
    ("sm_100", 256, 4): Launch(32, 16, 8, 3),
    ("gfx942", 64, 4): Launch(64, 32, 4, 2),
    ("gfx942", 128, 4): Launch(64, 32, 4, 2),
    ("gfx942", 256, 4): Launch(32, 16, 4, 2),
}
# Tiles of 64 rows for short chunks, where the row of PREFILL has 128.
PREFILL_SHORT: dict[tuple[str, int, int], Launch] = {
    ("sm_80", 64, 2): Launch(64, 32, 4, 3),
    ("sm_90", 64, 2): Launch(64, 64, 4, 3),
    ("sm_90", 128, 2): Launch(64, 64, 8, 3),
    ("sm_100", 64, 2): Launch(64, 64, 4, 3),
    ("sm_100", 128, 2): Launch(64, 64, 4, 3),
    ("sm_100", 256, 2): Launch(64, 32, 8, 3),
    ("gfx942", 64, 2): Launch(64, 64, 4, 2),
    ("gfx942", 128, 2): Launch(64, 32, 4, 2),
}
# With a float8 cache keys and values pass through registers, of which fewer are left: for short chunks and long ones.
PREFILL_FP8: dict[tuple[str, int, int], Launch] = {
    ("sm_80", 64, 2): Launch(128, 32, 8, 3),
    ("sm_80", 128, 2): Launch(64, 64, 8, 3),
    ("sm_80", 256, 2): Launch(32, 32, 8, 3),
    ("sm_90", 64, 2): Launch(128, 64, 8, 3),
    ("sm_90", 128, 2): Launch(128, 32, 8, 3),
    ("sm_90", 256, 2): Launch(32, 32, 8, 3),
    ("sm_100", 64, 2): Launch(64, 64, 8, 3),
    ("sm_100", 128, 2): Launch(128, 32, 8, 3),
    ("sm_100", 256, 2): Launch(64, 32, 8, 3),
    ("gfx942", 64, 2): Launch(64, 32, 4, 2),
    ("gfx942", 128, 2): Launch(64, 16, 4, 2),
    ("gfx942", 256, 2): Launch(64, 16, 8, 2),
    ("sm_80", 64, 4): Launch(32, 16, 8, 3),
    ("sm_80", 128, 4): Launch(16, 16, 8, 3),
    ("sm_90", 64, 4): Launch(32, 16, 8, 3),
    ("sm_90", 128, 4): Launch(16, 16, 8, 3),
    ("sm_100", 64, 4): Launch(32, 16, 8, 3),
    ("sm_100", 128, 4): Launch(16, 16, 8, 3),
}
# Shared prefixes: like prefill, but for these, which need more registers than prefill and would spill there.
SHARED: dict[tuple[str, int, int], Launch] = {
    ("sm_100", 256, 2): Launch(64, 32, 8, 3),
    ("gfx942", 256, 2): Launch(64, 16, 4, 2),
    ("sm_80", 128, 4): Launch(16, 16, 8, 3),
    ("sm_80", 256, 4): Launch(16, 16, 8, 3),
    ("gfx942", 128, 4): Launch(64, 16, 4, 2),
}
SHARED_SHORT: dict[tuple[str, int, int], Launch] = {
    ("sm_100", 64, 2): Launch(64, 64, 8, 3),
}
SHARED_FP8: dict[tuple[str, int, int], Launch] = {}
DECODE: dict[tuple[str, int, int], Launch] = {
    ("sm_80", 64, 2): Launch(16, 64, 4, 4),
    ("sm_80", 128, 2): Launch(16, 64, 4, 3),
    ("sm_80", 256, 2): Launch(16, 32, 4, 3),
    ("sm_90", 64, 2): Launch(16, 64, 4, 3),
    ("sm_90", 128, 2): Launch(16, 64, 4, 4),
    ("sm_90", 256, 2): Launch(16, 64, 4, 3),
    ("sm_100", 64, 2): Launch(16, 64, 4, 4),
    ("sm_100", 128, 2): Launch(16, 64, 4, 4),
    ("sm_100", 256, 2): Launch(16, 64, 4, 3),
    ("gfx942", 64, 2): Launch(16, 64, 4, 2),
    ("gfx942", 128, 2): Launch(16, 64, 4, 2),
    ("gfx942", 256, 2): Launch(16, 32, 4, 2),
    ("sm_80", 64, 4): Launch(16, 32, 8, 3),
    ("sm_80", 128, 4): Launch(16, 16, 8, 3),
    ("sm_80", 256, 4): Launch(16, 16, 8, 3),
    ("sm_90", 64, 4): Launch(16, 32, 8, 3),
    ("sm_90", 128, 4): Launch(16, 16, 8, 3),
    ("sm_90", 256, 4): Launch(16, 16, 8, 3),
    ("sm_100", 64, 4): Launch(16, 32, 8, 3),
    ("sm_100", 128, 4): Launch(16, 16, 8, 3),
    ("sm_100", 256, 4): Launch(16, 16, 8, 3),
    ("gfx942", 64, 4): Launch(16, 32, 4, 2),
    ("gfx942", 128, 4): Launch(16, 32, 4, 2),
    ("gfx942", 256, 4): Launch(16, 16, 4, 2),
}
# With a float8 cache, where the row of DECODE would spill.
DECODE_FP8: dict[tuple[str, int, int], Launch] = {
    ("sm_90", 256, 2): Launch(16, 32, 4, 3),
    ("sm_100", 128, 2): Launch(16, 32, 4, 4),
    ("sm_100", 256, 2): Launch(16, 32, 4, 3),
}
# Whatever else there is (consumer GPUs with 100 KB of shared memory, older or newer chips): small enough to fit anywhere.
PREFILL_ANYWHERE = {2: Launch(64, 32, 4, 2), 4: Launch(32, 16, 8, 2)}
DECODE_ANYWHERE = {2: Launch(16, 32, 4, 2), 4: Launch(16, 16, 8, 2)}
# The interpreter pays per program and tile, not per element; tiles this small still give a short test several of each.
INTERPRETER = Launch(32, 32, 4, 1)


def prefill_launch(architecture: str, head_dim: int, dtype: torch.dtype, short: bool = False, fp8: bool = False) -> Launch:
    """short: for steps whose requests have few query tokens; fp8: for a float8 cache. dtype is that of the query."""
    if architecture == "interpreter":
        return INTERPRETER._replace(block_m=16) if short else INTERPRETER
    key = _key(architecture, head_dim, dtype)
    if fp8 and key in PREFILL_FP8:
        return PREFILL_FP8[key]
    if short and key in PREFILL_SHORT:
        return PREFILL_SHORT[key]
    return PREFILL.get(key, PREFILL_ANYWHERE[dtype.itemsize])


def decode_launch(architecture: str, head_dim: int, dtype: torch.dtype, fp8: bool = False) -> Launch:
    """fp8: for a float8 cache. dtype is that of the query."""
    if architecture == "interpreter":
        return INTERPRETER._replace(block_m=16)
    key = _key(architecture, head_dim, dtype)
    if fp8 and key in DECODE_FP8:
        return DECODE_FP8[key]
    return DECODE.get(key, DECODE_ANYWHERE[dtype.itemsize])


def shared_launch(architecture: str, head_dim: int, dtype: torch.dtype, short: bool = False, fp8: bool = False) -> Launch:
    """For shared prefixes; short: tiles of 64 rows, for nodes with few query tokens; fp8: for a float8 cache."""
    key = _key(architecture, head_dim, dtype)
    if fp8:
        return SHARED_FP8.get(key) or prefill_launch(architecture, head_dim, dtype, short, fp8)
    if short and key in SHARED_SHORT:
        return SHARED_SHORT[key]
    return SHARED.get(key) or prefill_launch(architecture, head_dim, dtype, short)


def current_architecture() -> str:
    """Name of the active target: sm_90, gfx942, ..., or `interpreter`."""
    if interpreting():
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":")[0]


assumed_processors: int | None = None  # of a GPU that is only compiled for: cross_compile.target sets it


def num_processors(device: torch.device) -> int:
    """How many programs run at a time at least: streaming multiprocessors (compute units) of the device."""
    return _count_processors(device) if assumed_processors is None else assumed_processors


@functools.cache
def _count_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def padded_head_dim(head_dim: int) -> int:
    """The next power of two, which is what a tile can have; at least 16, which is what a dot needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _key(architecture: str, head_dim: int, dtype: torch.dtype) -> tuple[str, int, int]:
    return architecture, max(64, padded_head_dim(head_dim)), dtype.itemsize
