"""Steps whose requests share prefixes: random trees, with decodes and prefills under the same nodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from batchgen_kernels.attention_options import NO_OPTIONS
from batchgen_kernels.cases.attention import PagedInputs, attention_case, paged_inputs
from batchgen_kernels.cases.case import Case


def shared_inputs(
    depth: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    kept: float = 0.7,
) -> PagedInputs:
    """A tree of `depth` levels with requests below its inner nodes, too, and groups for a share `kept` of its nodes.

    A node that is no group leaves its blocks to the groups and requests below it. NaN in every slot that nobody owns, blocks
    in random order, -1 in unused entries of the tables.
    """
    rng = random.Random(seed)
    query_lens: list[int] = []
    seq_lens: list[int] = []
    kv_start: list[int] = []  # in blocks, as are the nodes' and groups'
    nodes: list[tuple[int, int, int, int]] = []  # first request, one past the last, first block, one past the last
    groups: list[tuple[int, int, int, int]] = []

    def add_request(num_blocks: int, private_from: int) -> None:
        query_lens.append(rng.choice([1, 1, 1, 2, 7, 12]))
        seq_lens.append(num_blocks * block_size + rng.choice([0, 3, block_size, 2 * block_size + 1]) + query_lens[-1])
        kv_start.append(private_from)

    def grow(level: int, num_blocks: int, private_from: int) -> None:
        if level == depth:
            for _ in range(rng.randint(2, 3)):
                add_request(num_blocks, private_from)
            return
        for _ in range(rng.randint(1, 2)):
            first, index = len(query_lens), len(groups)
            end = num_blocks + max(1, rng.randint(8, 90) // block_size)
            keep = rng.random() < kept or (level == 0 and not groups)
            grow(level + 1, end, end if keep else private_from)
            nodes.append((first, len(query_lens), num_blocks, end))
            if keep:
                groups.insert(index, (first, len(query_lens), private_from, end))
        if rng.random() < 0.5:
            add_request(num_blocks, private_from)

    grow(0, 0, 0)
    inputs = paged_inputs(query_lens, seq_lens, num_q_heads, num_kv_heads, head_dim, block_size, dtype, padding=-1)
    table = inputs.metadata.block_table
    for first, last, begin, end in nodes:
        table[first:last, begin:end] = table[first, begin:end].clone()
    unowned = torch.ones(inputs.key_cache.shape[0], dtype=torch.bool)
    unowned[table[table >= 0].long()] = False
    inputs.key_cache[unowned] = inputs.value_cache[unowned] = float("nan")
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    ranges = torch.tensor(groups).view(-1, 4)
    blocks = [table[first, begin:end] for first, _, begin, end in groups]
    metadata = inputs.metadata._replace(
        kv_start=block_size * torch.tensor(kv_start, dtype=torch.int32),
        group_query_start=starts[ranges[:, 0]],
        group_query_end=starts[ranges[:, 1]],
        group_block_start=torch.tensor([0, *itertools.accumulate(map(len, blocks))], dtype=torch.int32),
        group_blocks=torch.cat(blocks),
    )
    return to_device(inputs._replace(metadata=metadata), device)


def to_device(inputs: PagedInputs, device: str) -> PagedInputs:
    """Everything but the groups, which stay on the CPU."""
    metadata = inputs.metadata
    moved: dict[str, Any] = {
        name: value.to(device)
        for name, value in metadata._asdict().items()
        if isinstance(value, torch.Tensor) and not name.startswith("group_")
    }
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in inputs._asdict().items() if isinstance(value, torch.Tensor)
    }
    return inputs._replace(metadata=metadata._replace(**moved), **tensors)


def shared_prefix_case(depth: int, heads: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> Case:
    """heads: query heads, key/value heads, head_dim."""

    def make() -> tuple[Any, ...]:
        return *shared_inputs(depth, *heads, 16, dtype, device), *NO_OPTIONS

    return attention_case(f"prefix tree of depth {depth}, {heads[0]}/{heads[1]} heads of {heads[2]}", make)


def shared_prefix_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Of plan_attention, with groups."""
    yield shared_prefix_case(1, (4, 2, 64), dtype, device)
    yield shared_prefix_case(3, (3, 1, 80), dtype, device)
