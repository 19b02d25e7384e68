"""How much of the machine the engine takes: device, dtype, threads, KV blocks. Each choice has a reason in words."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import torch

from batchgen.errors import UsageError
from batchgen.records import Window

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_MEMORY_SHARE = 0.5  # of what is available after the weights
GPU_MEMORY_SHARE = 0.85
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 1024, 8192
CPU_RUNNING, GPU_RUNNING = 128, 1024


class EngineSize(NamedTuple):
    """num_blocks counts the null block."""

    num_blocks: int
    max_num_batched_tokens: int
    max_running_requests: int
    kv_bytes: int
    reason: str


def choose_device(name: str) -> torch.device:
    """auto takes a GPU if there is one. Raises UsageError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(f"engine.device: {name} is not there; torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto is exact float32 on CPUs and bfloat16 on GPUs. int8 is float32 but for the products (models/cpu_linear.py).

    Raises UsageError for int8 on a GPU.
    """
    if name == "int8":
        if device.type != "cpu":
            raise UsageError(f"engine.dtype: int8 runs on CPUs only, not on {device}; take auto, or engine.device: cpu")
        return torch.float32
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """auto is the model's own dtype; fp8 is float8_e4m3fn with a scale for each token and head."""
    return dtype if name == "auto" else torch.float8_e4m3fn


def num_threads(threads: int | str) -> int:
    """auto: the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if threads == "auto" else int(threads)


def prepare_cpu(threads: int | str) -> int:
    """Set torch's threads and keep freed memory in the process."""
    count = num_threads(threads)
    torch.set_num_threads(count)
    # glibc returns large blocks to the kernel at once, and each step would fault its activations in again: 10 to 25 % of
    # a small model's step. M_MMAP_THRESHOLD (-3) and M_TRIM_THRESHOLD (-1); other C libraries have no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 1 << 30)
        mallopt(-1, (1 << 31) - 1)
    return count


def useful_blocks(window: Window, max_tokens: int, num_samples: int, max_running: int) -> int:
    """Blocks beyond which more memory changes nothing: the whole tree, all running answers, and the null block."""
    size = window.block_size
    tree = int((-(-(window.lengths - window.num_cached()) // size)).sum())
    answers = min(len(window) * num_samples, max_running) * (-(-max_tokens // size) + 1)
    return tree + answers + 1


def available_memory(device: torch.device) -> int:
    """Bytes free for the KV cache after the weights are loaded, less a reserve for activations."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_MEMORY_SHARE)
    try:
        with open("/proc/meminfo") as f:
            available = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(available * CPU_MEMORY_SHARE)


def choose_size(
    device: torch.device,
    window: Window,
    bytes_per_token: int,
    kv_memory: int | str,
    max_num_batched_tokens: int | str,
    max_running_requests: int | str,
    max_tokens: int,
    num_samples: int,
    more_follow: bool = False,
    largest: int | None = None,
) -> EngineSize:
    """Fit the pool into `kv_memory` bytes (auto: a share of what is free), but make it no larger than is of use for
    `window`; with more_follow, for any window, or for those of at most `largest` blocks of prompts.

    Raises UsageError if not even one block fits.
    """
    on_cpu = device.type == "cpu"
    budget = (CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS) if max_num_batched_tokens == "auto" else max_num_batched_tokens
    running = (CPU_RUNNING if on_cpu else GPU_RUNNING) if max_running_requests == "auto" else max_running_requests
    budget, running = int(budget), int(running)
    if not more_follow:
        running = min(running, max(1, len(window) * num_samples))
    memory = available_memory(device) if kv_memory == "auto" else int(kv_memory)
    block_bytes = bytes_per_token * window.block_size
    fits, useful = memory // block_bytes, useful_blocks(window, max_tokens, num_samples, running)
    if fits < 2:
        what = "the free memory" if kv_memory == "auto" else "engine.kv_memory"
        raise UsageError(
            f"engine.kv_memory: {what} ({memory} bytes) holds {fits} KV blocks of {block_bytes} bytes; at least 2 are needed"
        )
    if more_follow and largest is None:
        useful = fits + 1
    elif more_follow and largest is not None:
        useful = largest + running * (-(-max_tokens // window.block_size) + 1) + 1
    num_blocks = min(fits, useful)
    reason = "all that this job can use" if useful <= fits else ("free memory" if kv_memory == "auto" else "as asked")
    return EngineSize(num_blocks, budget, running, num_blocks * block_bytes, reason)
