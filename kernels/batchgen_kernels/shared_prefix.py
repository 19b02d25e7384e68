"""Attention of query tokens over the prefixes that they share: all nodes of a step's prefix tree in one launch.

A node is a key range and the query tokens [begin, end) that all see it whole. For a query q of its members, over its keys:
    s_j = scale q . k_j;   out = sum_j exp(s_j) v_j / sum_j exp(s_j);   lse = ln sum_j exp(s_j)
and with the parts of all nodes above a token, and its private part (paged_decode, paged_prefill):
    out = sum_parts exp(lse_part) out_part / (sum_parts exp(lse_part) + exp(sink))                  exp(sink) only with sinks

The rows of a tile are tokens of the node times the query heads of one kv head, as in prefill, so a key is read once for all
of them (Hydragen, Juravsky et al. 2024; for trees, DeFT, Yao et al. 2024). The work is one line of *units*, a unit being one
tile of rows against one tile of keys, and every program of a grid that only depends on the hardware takes an equal share of
it (Stream-K, Osama et al. 2023):

    line      | node 0: tile 0 | tile 1 | ... | node 1: tile 0 | ...        keys of a tile are consecutive units
    programs  |  0  |  1  |  2  |  3  | ...                                  shares differ by one unit at most

Where a share ends in the middle of a tile, the next program goes on with the tile's other keys. So each (tile, program)
leaves one part, at index tile + program, which grows along the line and is thus unique. Which programs a tile has follows
from the line alone, so merging needs no flags and no atomics: its order is fixed, and results are the same bits every time.

In a node the line runs over kv heads, then tiles of rows, then keys: tiles that read the same keys are neighbours, and as
programs run side by side, their reads of a key come together and the later ones find it in the L2 cache.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.attention_options import NO_OPTIONS, AttentionOptions, check_options
from batchgen_kernels.launch import Launch, current_architecture, num_processors, padded_head_dim, shared_launch
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.paged_tile import (
    LOG2E,
    MAX_TILE_HEADS,
    attend_range,
    cache_bytes,
    check_attention_inputs,
    dot_precision,
    finish_rows,
    first_state,
    option_scalars,
)

# Fields of a node in the index. After the last node comes one whose FIRST_UNIT is the length of the line.
FIRST_UNIT, FIRST_TILE, QUERY_BEGIN, QUERY_END, NUM_KEYS, BLOCKS, PARENT, POSITION = range(8)
NODE_FIELDS = 8


@triton.jit
def share_begin(program, num_units, num_programs):
    """First unit of a program's share; that of the program after it is the end."""
    return (program.to(tl.int64) * num_units // num_programs).to(tl.int32)


@triton.jit
def program_of(unit, num_units, num_programs):
    """Whose share a unit lies in: the last program with share_begin <= unit."""
    return (((unit + 1).to(tl.int64) * num_programs - 1) // num_units).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_nodes", "window"],
    do_not_specialize_on_alignment=["nodes_ptr", "blocks_ptr", "positions_ptr"],
)
def shared_prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [num_parts, BLOCK_M, HEAD_DIM] float32
    lse_ptr,  # [num_parts, BLOCK_M] float32
    nodes_ptr,  # [num_nodes + 1, 8]
    blocks_ptr,  # ids of all nodes
    positions_ptr,  # [T], or None without a window
    key_scale_ptr,  # float32, for caches of e4m3 bytes, or None
    value_scale_ptr,
    num_nodes,
    scale_log2,
    cap_log2,  # or None
    window,  # or None
    stride_scale_block,
    stride_scale_slot,
    stride_scale_head,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_kv_head,
    GROUP: tl.constexpr,  # query heads of a kv head
    TILE_HEADS: tl.constexpr,  # of which this many share a tile
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    program = tl.program_id(0)
    num_units = tl.load(nodes_ptr + num_nodes * 8)
    num_programs = tl.minimum(tl.num_programs(0), num_units)  # so that none has an empty share
    if program >= num_programs:
        return
    unit = share_begin(program, num_units, num_programs)
    share_end = share_begin(program + 1, num_units, num_programs)

    low = tl.full([], 0, tl.int32)  # the last node that begins at or before the unit lies in [low, high)
    high = num_nodes
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(nodes_ptr + middle * 8) <= unit
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    node_ptr = nodes_ptr + low * 8

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    while unit < share_end:
        first_unit = tl.load(node_ptr)
        query_begin = tl.load(node_ptr + 2)
        query_end = tl.load(node_ptr + 3)
        num_keys = tl.load(node_ptr + 4)
        row_tiles = tl.cdiv(query_end - query_begin, BLOCK_Q)
        key_tiles = tl.cdiv(num_keys, BLOCK_N)
        tile = (unit - first_unit) // key_tiles
        key_tile = (unit - first_unit) % key_tiles
        end_tile = tl.minimum(key_tile + share_end - unit, key_tiles)
        kv_head = tile // row_tiles // HEAD_TILES
        head_tile = tile // row_tiles % HEAD_TILES

        token = query_begin + tile % row_tiles * BLOCK_Q + row // TILE_HEADS
        group_head = head_tile * TILE_HEADS + row % TILE_HEADS
        head = kv_head * GROUP + group_head
        row_ok = (row < BLOCK_Q * TILE_HEADS) & (token < query_end) & (group_head < GROUP)
        cell_ok = row_ok[:, None] & (dim < HEAD_DIM)[None, :]
        q_tile = q_ptr + token.to(tl.int64)[:, None] * stride_q_token + head[:, None] * stride_q_head + dim[None, :]
        q = tl.load(q_tile, mask=cell_ok, other=0.0)

        begin = key_tile * BLOCK_N
        key_end = tl.minimum(end_tile * BLOCK_N, num_keys)
        full_end = begin + (key_end - begin) // BLOCK_N * BLOCK_N
        if window is None:
            position = None
            key_begin = None
            full_begin = begin
        else:  # keys that no row sees any more are not read; those that only some rows see are masked
            position = tl.load(positions_ptr + token, mask=row_ok, other=0) - tl.load(node_ptr + 7)
            row_begin = position - window + 1
            earliest = tl.min(tl.where(row_ok, row_begin, 2147483647), 0)
            latest = tl.max(tl.where(row_ok, row_begin, -2147483648), 0)
            key_begin = tl.minimum(tl.maximum(earliest, begin), key_end)
            begin = tl.where(key_begin < key_end, key_begin // BLOCK_N * BLOCK_N, key_end)
            full_begin = tl.minimum(tl.cdiv(tl.maximum(latest, begin), BLOCK_N) * BLOCK_N, tl.maximum(full_end, begin))
            full_end = tl.maximum(full_end, full_begin)

        kv_offset = kv_head.to(tl.int64) * stride_kv_head
        cache = (k_ptr + kv_offset, v_ptr + kv_offset, stride_block, stride_slot)
        if key_scale_ptr is None:
            scales = None
        else:
            scale_at = kv_head.to(tl.int64) * stride_scale_head
            scales = (key_scale_ptr + scale_at, value_scale_ptr + scale_at, stride_scale_block, stride_scale_slot)
        acc, row_max, row_sum = first_state(None, head, row_ok, BLOCK_M, PADDED_DIM)
        acc, row_max, row_sum = attend_range(
            q, acc, row_max, row_sum, cache, scales, blocks_ptr + tl.load(node_ptr + 5), begin, full_begin, full_end,
            key_begin, key_end, position, window, scale_log2, cap_log2,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        out, lse = finish_rows(acc, row_max, row_sum)
        out_row = (tl.load(node_ptr + 1) + tile + program).to(tl.int64) * BLOCK_M + row
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :], out, mask=cell_ok)
        tl.store(lse_ptr + out_row, lse, mask=row_ok)

        unit += end_tile - key_tile
        node_ptr += tl.where(unit == tl.load(node_ptr + 8), 8, 0)


@triton.jit
def merge_part(acc, top, total, out, lse):
    """One more part: sums relative to the greatest lse so far, which is taken out of all."""
    new_top = tl.maximum(top, lse)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp(top - base)
    weight = tl.exp(lse - base)
    return acc * rescale[:, None] + out * weight[:, None], new_top, total * rescale + weight


@triton.jit(
    do_not_specialize=["num_nodes", "grid"],
    do_not_specialize_on_alignment=["nodes_ptr", "token_node_ptr", "sinks_ptr"],
)
def merge_shared_kernel(
    part_out_ptr,
    part_lse_ptr,
    private_out_ptr,  # [T, NUM_Q_HEADS, HEAD_DIM] float32
    private_lse_ptr,  # [T, NUM_Q_HEADS]
    out_ptr,
    nodes_ptr,
    token_node_ptr,  # [T]: the deepest node of each token, or -1
    sinks_ptr,  # [NUM_Q_HEADS] float32, natural, or None
    num_nodes,
    grid,  # programs that shared_prefix_kernel was launched with
    stride_out_token,
    stride_out_head,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The heads of one tile of one token: its private part, then its nodes from the deepest up, each along the line."""
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    token = tl.program_id(0)
    tile_heads = tl.program_id(1)
    in_tile = tl.arange(0, PADDED_HEADS)
    dim = tl.arange(0, PADDED_DIM)
    group_head = tile_heads % HEAD_TILES * TILE_HEADS + in_tile
    head = tile_heads // HEAD_TILES * GROUP + group_head
    head_ok = (in_tile < TILE_HEADS) & (group_head < GROUP)
    cell_ok = head_ok[:, None] & (dim < HEAD_DIM)[None, :]

    acc = tl.zeros([PADDED_HEADS, PADDED_DIM], tl.float32)
    if sinks_ptr is None:
        top = tl.full([PADDED_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([PADDED_HEADS], tl.float32)
    else:
        top = tl.load(sinks_ptr + head, mask=head_ok, other=0.0)
        total = tl.full([PADDED_HEADS], 1.0, tl.float32)
    private_row = token.to(tl.int64) * NUM_Q_HEADS + head
    lse = tl.load(private_lse_ptr + private_row, mask=head_ok, other=float("-inf"))
    out = tl.load(private_out_ptr + private_row[:, None] * HEAD_DIM + dim[None, :], mask=cell_ok, other=0.0)
    acc, top, total = merge_part(acc, top, total, out, lse)

    num_units = tl.load(nodes_ptr + num_nodes * 8)
    num_programs = tl.minimum(grid, num_units)
    node = tl.load(token_node_ptr + token)
    while node >= 0:
        node_ptr = nodes_ptr + node * 8
        query_begin = tl.load(node_ptr + 2)
        row_tiles = tl.cdiv(tl.load(node_ptr + 3) - query_begin, BLOCK_Q)
        key_tiles = tl.cdiv(tl.load(node_ptr + 4), BLOCK_N)
        tile = tile_heads * row_tiles + (token - query_begin) // BLOCK_Q
        first_unit = tl.load(node_ptr) + tile * key_tiles
        first_program = program_of(first_unit, num_units, num_programs)
        last_program = program_of(first_unit + key_tiles - 1, num_units, num_programs)
        first_row = (token - query_begin) % BLOCK_Q * TILE_HEADS
        for program in range(first_program, last_program + 1):
            part = (tl.load(node_ptr + 1) + tile + program).to(tl.int64)
            part_row = part * BLOCK_M + first_row + in_tile
            lse = tl.load(part_lse_ptr + part_row, mask=head_ok, other=float("-inf"))
            out = tl.load(part_out_ptr + part_row[:, None] * HEAD_DIM + dim[None, :], mask=cell_ok, other=0.0)
            acc, top, total = merge_part(acc, top, total, out, lse)
        node = tl.load(node_ptr + 6)

    safe = tl.where(total == 0.0, 1.0, total)
    out_tile = out_ptr + token.to(tl.int64) * stride_out_token + head[:, None] * stride_out_head + dim[None, :]
    tl.store(out_tile, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=cell_ok)


class SharedPlan(NamedTuple):
    """What is the same for every layer of a step. The tensors on the device are views of one, copied at once."""

    launch: Launch
    num_programs: int
    num_tiles: int  # of rows, all nodes together
    num_units: int
    min_shared: int  # keys that every query token has in common with others
    nodes: torch.Tensor  # [G + 1, 8] int32, see NODE_FIELDS
    blocks: torch.Tensor  # [sum of blocks] int32
    token_node: torch.Tensor  # [T] int32: the deepest node of each query token, or -1


def plan_shared(
    metadata: AttentionMetadata,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool = False,
    launch: Launch | None = None,
    num_programs: int | None = None,
) -> SharedPlan:
    """Lays the groups of a step (at least one) out on the line; unless given, chooses the launch and the programs.

    dtype is that of the query; fp8: for a float8 cache.

    Raises ValueError if a group is empty or the query ranges of two groups overlap without one holding the other.
    """
    device = metadata.seq_lens.device
    tile_heads = min(num_q_heads // num_kv_heads, MAX_TILE_HEADS)
    head_tiles = num_kv_heads * -(-(num_q_heads // num_kv_heads) // tile_heads)
    begin, end = metadata.group_query_start, metadata.group_query_end
    num_keys = metadata.group_block_start.diff() * metadata.block_size
    if bool((end <= begin).any()) or bool((num_keys <= 0).any()):
        raise ValueError("shared_prefix: a group must have query tokens and blocks")
    if launch is None:
        launch = choose_shared_launch(end - begin, num_keys, tile_heads, head_dim, dtype, fp8)
    if num_programs is None:  # tiles of up to 64 rows leave room for two programs on a processor
        num_programs = num_processors(device) * (1 if launch.block_m > 64 else 2)
    parent, position, token_node, min_shared = node_tree(begin.tolist(), end.tolist(), num_keys.tolist(), num_tokens)

    block_q = launch.block_m // tile_heads
    tiles = (end - begin + block_q - 1) // block_q * head_tiles
    units = tiles * ((num_keys + launch.block_n - 1) // launch.block_n)
    num_nodes = len(parent)
    nodes = torch.zeros((num_nodes + 1, NODE_FIELDS), dtype=torch.int32)
    num_units = int(units.sum())
    if num_units >= 2**31:
        raise ValueError(f"shared_prefix: {num_units} tiles of work are more than 2^31 - 1")
    nodes[1:, FIRST_UNIT] = units.cumsum(0)
    nodes[1:, FIRST_TILE] = tiles.cumsum(0)
    fields = {QUERY_BEGIN: begin, QUERY_END: end, NUM_KEYS: num_keys, BLOCKS: metadata.group_block_start[:-1]}
    fields |= {PARENT: torch.tensor(parent), POSITION: torch.tensor(position)}
    for field, values in fields.items():
        nodes[:-1, field] = values
    packed = torch.cat([nodes.flatten(), metadata.group_blocks.int(), token_node])
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    index = packed.split([nodes.numel(), metadata.group_blocks.numel(), num_tokens])
    return SharedPlan(
        launch, num_programs, int(tiles.sum()), num_units, min_shared, index[0].view(-1, NODE_FIELDS), index[1], index[2]
    )


def choose_shared_launch(
    num_tokens: torch.Tensor, num_keys: torch.Tensor, tile_heads: int, head_dim: int, dtype: torch.dtype, fp8: bool = False
) -> Launch:
    """Large tiles of rows read keys less often; small ones where those would be half empty. num_tokens, num_keys: [G]."""
    architecture = current_architecture()
    large, small = (shared_launch(architecture, head_dim, dtype, short, fp8) for short in (False, True))

    def rows(launch: Launch) -> int:
        block_q = launch.block_m // tile_heads
        return int(((num_tokens + block_q - 1) // block_q * num_keys.long()).sum()) * launch.block_m

    return small if 4 * rows(small) <= 3 * rows(large) else large


def node_tree(
    begin: list[int], end: list[int], num_keys: list[int], num_tokens: int
) -> tuple[list[int], list[int], torch.Tensor, int]:
    """The tree in which one query range holds another: (parent of each node or -1, position of its first key, the deepest
    node of each token or -1 [T] int32, the fewest shared keys of a token)."""
    parent, position = [-1] * len(begin), [0] * len(begin)
    nodes: list[int] = []  # runs of tokens with the same deepest node
    ends: list[int] = []
    stack: list[int] = []
    for g in sorted(range(len(begin)), key=lambda g: (begin[g], -end[g])):
        while stack and end[stack[-1]] <= begin[g]:
            ends.append(end[stack[-1]])
            nodes.append(stack.pop())
        ends.append(begin[g])
        nodes.append(stack[-1] if stack else -1)
        if stack:
            if end[g] > end[stack[-1]]:
                raise ValueError(f"shared_prefix: the query tokens of groups {stack[-1]} and {g} overlap in part")
            parent[g], position[g] = stack[-1], position[stack[-1]] + num_keys[stack[-1]]
        stack.append(g)
    for g in reversed(stack):
        ends.append(end[g])
        nodes.append(g)
    ends.append(num_tokens)
    nodes.append(-1)
    lengths = [b - a for a, b in itertools.pairwise([0, *ends])]
    if min(lengths) < 0:
        raise ValueError(f"shared_prefix: groups end at query token {max(end)} of {num_tokens}")
    shared = [position[g] + num_keys[g] if g >= 0 else 0 for g, n in zip(nodes, lengths) if n > 0]
    token_node = torch.repeat_interleave(torch.tensor(nodes, dtype=torch.int32), torch.tensor(lengths))
    return parent, position, token_node, min(shared)


def token_positions(metadata: AttentionMetadata, num_tokens: int) -> torch.Tensor:
    """[T] int32: the position of each query token in its request, on the device and without waiting for it."""
    query_start, seq_lens = metadata.query_start.long(), metadata.seq_lens.long()
    token = torch.arange(num_tokens, device=query_start.device)
    request = torch.searchsorted(query_start[1:], token, right=True)
    return (seq_lens[request] - query_start[1:][request] + token).int()


def attend_shared(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    plan: SharedPlan,
    positions: torch.Tensor | None = None,
    check: bool = True,
    options: AttentionOptions = NO_OPTIONS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of all nodes: (out [num_parts, block_m, D], lse [num_parts, block_m]), float32, for merge_shared.

    query [T, num_q_heads, D]; caches [num_blocks, block_size, num_kv_heads, D]; positions (token_positions) with a window.
    """
    if check:
        check_attention_inputs("shared_prefix", query, key_cache, value_cache, query, None)
        check_options("shared_prefix", query, key_cache, options)
        if query.shape[0] != plan.token_node.shape[0]:
            raise ValueError(f"shared_prefix: planned for {plan.token_node.shape[0]} query tokens, got {query.shape[0]}")
    num_q_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    launch = plan.launch
    num_parts = plan.num_tiles + plan.num_programs
    out = torch.empty((num_parts, launch.block_m, head_dim), dtype=torch.float32, device=query.device)
    lse = torch.empty((num_parts, launch.block_m), dtype=torch.float32, device=query.device)
    shared_prefix_kernel[(plan.num_programs,)](
        query, cache_bytes(key_cache), cache_bytes(value_cache), out, lse, plan.nodes, plan.blocks,
        positions if options.window else None, options.key_scale, options.value_scale,
        plan.nodes.shape[0] - 1, scale * LOG2E, *option_scalars(options), query.stride(0), query.stride(1),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        GROUP=group, TILE_HEADS=min(group, MAX_TILE_HEADS), HEAD_DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, PRECISION=dot_precision(query.dtype),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return out, lse


def merge_shared(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    private_out: torch.Tensor,
    private_lse: torch.Tensor,
    plan: SharedPlan,
    num_kv_heads: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Writes out [T, num_q_heads, D]: the parts of attend_shared and the private part, float32 and contiguous.

    private_out [T, num_q_heads, D]; private_lse [T, num_q_heads], without sinks; sinks [num_q_heads].
    """
    num_tokens, num_q_heads, head_dim = out.shape
    group = num_q_heads // num_kv_heads
    tile_heads = min(group, MAX_TILE_HEADS)
    merge_shared_kernel[(num_tokens, num_kv_heads * -(-group // tile_heads))](
        part_out, part_lse, private_out, private_lse, out, plan.nodes, plan.token_node, sinks,
        plan.nodes.shape[0] - 1, plan.num_programs, out.stride(0), out.stride(1),
        NUM_Q_HEADS=num_q_heads, GROUP=group, TILE_HEADS=tile_heads, PADDED_HEADS=triton.next_power_of_2(tile_heads),
        HEAD_DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim),
        BLOCK_M=plan.launch.block_m, BLOCK_N=plan.launch.block_n, num_warps=1 if tile_heads <= 4 else 4,
    )  # fmt: skip
