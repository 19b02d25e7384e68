"""What a device is asked for and how long it takes: a roofline of each step, and the least that a whole job can need.

    linear layers    2 N T + 2 Nh K FLOPs,  (N + Nh) w bytes: each weight once
    attention        4 L H D (sum of the contexts of the T query tokens) FLOPs,  kv (tokens of KV read + T) bytes
    seconds          max(FLOPs / F, bytes / B) of the one, FLOPs / F + bytes / B of the other, + launch

for a step of T query tokens of which K are sampled. Inside a matrix product the reads of weights hide behind the FLOPs or
the other way round. Attention is two launches, prefill bound by its FLOPs and decode by its reads, and they follow each
other, as do all of them layer by layer: nothing hides one behind the other. F and B are what the device sustains: its data
sheet times `compute_share` and `memory_share`.

T_seq is FLOPs / F + bytes / B of the fewest FLOPs, reads and steps that the job can do with, T_overlap the greater of the
two: a step that overlaps lies between them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from batchgen.engine.step import SchedulerConfig, StepPlan
from batchgen.plan.work import ModelShape, Work
from batchgen.records import Window


class DeviceRates(NamedTuple):
    """What a device's data sheet promises, and the share of it that large steps are known to reach."""

    flops: float  # per second, dense, in the model's dtype
    bandwidth: float  # bytes per second
    compute_share: float
    memory_share: float
    launch: float  # seconds of a step that nothing hides: launching, and the host's turn


# Data sheets of the SXM parts; shares as measured by others on 8B-class models (55 % MFU, 80 % MBU). cpu: two AVX2 cores.
DEVICES = {
    "a100": DeviceRates(312e12, 2.04e12, 0.55, 0.80, 0.5e-3),
    "h100": DeviceRates(989e12, 3.35e12, 0.55, 0.80, 0.5e-3),
    "h200": DeviceRates(989e12, 4.8e12, 0.55, 0.80, 0.5e-3),
    "cpu": DeviceRates(140e9, 19e9, 0.80, 0.80, 0.5e-3),
}


def _shape(layers: int, head: int, num_layers: int, heads: int, kv_heads: int, head_dim: int, num_bytes: int) -> ModelShape:
    return ModelShape(
        layers, head, num_layers, heads, head_dim, num_bytes, kv_bytes=2 * num_layers * kv_heads * head_dim * num_bytes
    )


MODELS = {
    "8b": _shape(6_979_321_856, 525_336_576, 32, 32, 8, 128, 2),  # Llama 3.1 8B
    "1b": _shape(973_078_528, 262_668_288, 16, 32, 8, 64, 2),  # Llama 3.2 1B
    "135m": _shape(106_168_320, 28_311_552, 30, 9, 3, 64, 4),  # SmolLM2 135M in float32
}


def step_seconds(work: Work, m: ModelShape, d: DeviceRates) -> float:
    """Of one step."""
    flops, bandwidth = d.flops * d.compute_share, d.bandwidth * d.memory_share
    linear = max(work.linear_flops(m) / flops, work.weight_bytes(m) / bandwidth)
    return linear + work.attention_flops(m) / flops + work.kv_bytes(m) / bandwidth + d.launch


def hidden_tokens(d: DeviceRates, m: ModelShape) -> int:
    """Query tokens of a step whose FLOPs in the layers take as long as reading their weights."""
    return int(d.flops * d.compute_share * m.weight_bytes / (2 * d.bandwidth * d.memory_share))


def limits(work: Work, m: ModelShape, d: DeviceRates) -> tuple[float, float]:
    """(T_seq, T_overlap): seconds to compute and then read, and to do both at once, launches left out."""
    compute, memory = work.flops(m) / (d.flops * d.compute_share), work.bytes(m) / (d.bandwidth * d.memory_share)
    return compute + memory, max(compute, memory)


def work_of(step: StepPlan, kv_read: int) -> Work:
    first, count = step.first_position.astype(np.int64), step.num_scheduled.astype(np.int64)
    context = int((count * first + count * (count + 1) // 2).sum())
    return Work(1, int(count.sum()), len(step.sample_slots), context, kv_read)


def least_work(window: Window, outputs: np.ndarray, kv_tokens: int, config: SchedulerConfig) -> Work:
    """What no engine can do without: each edge of the prefix tree computed once, and read once in each of as many steps as
    the longest answer below it takes; no fewer steps than the longest answer, the slots and the memory allow.

    window in prefix order; outputs: [n] tokens generated for each of its rows.
    """
    lengths, cached, out = window.lengths.astype(np.int64), window.num_cached().astype(np.int64), outputs.astype(np.int64)
    prompt_context = (lengths * (lengths + 1) - cached * (cached + 1)) // 2
    answer_context = (out - 1) * lengths + out * (out - 1) // 2
    private = lengths % window.block_size  # of a prompt's last block, which no other row shares
    held = int((private * out + out * (out - 1) // 2).sum()) + window.block_size * _edge_steps(window, out)
    steps = max(int(out.max()), math.ceil(int(out.sum()) / config.max_running_requests), math.ceil(held / kv_tokens))
    query_tokens = window.num_computed() + int((out - 1).sum())
    return Work(steps, query_tokens, int(out.sum()), int((prompt_context + answer_context).sum()), held)


def _edge_steps(window: Window, outputs: np.ndarray) -> int:
    """Sum over all full blocks of the prefix tree of the longest answer below each, in steps."""
    total = 0
    path: list[list[int]] = []  # of the row before: [first block, longest answer below], root first
    end = 0
    num_blocks = window.lengths // window.block_size
    for shared, length, out in zip(window.shared_blocks.tolist(), num_blocks.tolist(), outputs.tolist()):
        longest = 0
        while path and path[-1][0] >= shared:
            begin, own = path.pop()
            longest = max(longest, own)
            total += (end - begin) * longest
            end = begin
        if path and shared < end:  # the edge splits where this row leaves it
            total += (end - shared) * max(longest, path[-1][1])
        if path:
            path[-1][1] = max(path[-1][1], longest)
        end = shared
        path.append([shared, out])
        end = length
    longest = 0
    while path:
        begin, own = path.pop()
        longest = max(longest, own)
        total += (end - begin) * longest
        end = begin
    return total
