"""Which requests of a step can read which blocks together. Host side, numpy, no torch.

The requests of a step stand in plan order, so those that share blocks are neighbours, and the blocks that neighbours
share give the whole tree with one stack (the LCP-interval tree of suffix arrays, Abouelhoda et al. 2004):

    request      0    1    2    3    4            groups: blocks [0, 2) for requests 0-4, blocks [2, 5) for 1-3
    shared blocks  2    5    5    2               request 1's private part begins at block 5, request 0's at block 2

A member's queries must lie after the group's blocks, so a request shares no more than it has computed before this step.
Which nodes of the tree become groups is for a rule to say: that of the attention's kernels, or `spares_enough_reads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

MIN_SPARED_TOKEN_READS = 64  # below this many spared token reads a group costs more than it spares

Ints = Sequence[int]
# (first request, one past the last, keys shared, parent or -1) of each node, parents first, and query tokens of each request
# -> whether each node is a group; its keys are those that no group above it has. Else they are left to the nodes below it.
GroupRule = Callable[[Ints, Ints, Ints, Ints, Ints], Sequence[bool]]


class PrefixGroups(NamedTuple):
    """G groups over the requests of one step."""

    request_start: np.ndarray  # [G] int32
    request_end: np.ndarray  # [G] int32
    block_start: np.ndarray  # [G] int32, in blocks of the members' block tables
    block_end: np.ndarray  # [G] int32
    private_start: np.ndarray  # [R] int32, in blocks: where each request's own part begins
    block_ids: np.ndarray  # [sum of block_end - block_start] int32, group after group
    block_ids_start: np.ndarray  # [G + 1] int32

    @staticmethod
    def none(num_requests: int) -> PrefixGroups:
        empty = np.empty(0, np.int32)
        return PrefixGroups(empty, empty, empty, empty, np.zeros(num_requests, np.int32), empty, np.zeros(1, np.int32))


def find_groups(
    shared: np.ndarray, query_lens: np.ndarray, block_table: np.ndarray, slots: np.ndarray, block_size: int, rule: GroupRule
) -> PrefixGroups:
    """The groups that `rule` chooses.

    shared: [R] int32, full blocks that each request has in common with the one before it; query_lens: [R] int32;
    block_table: [max_requests, max_blocks] int32, of which the requests have the rows `slots` ([R] int32).
    """
    num_requests = len(shared)
    nodes: list[tuple[int, int, int]] = []  # (blocks, first request, one past the last)
    stack: list[tuple[int, int]] = []  # (first request, blocks)
    turns = np.flatnonzero(shared[1:] != shared[:-1]) + 1  # the only requests at which a node begins or ends
    for r, blocks in zip([*turns.tolist(), num_requests], [*shared[turns].tolist(), 0]):
        start = r - 1
        while stack and stack[-1][1] > blocks:
            start, depth = stack.pop()
            nodes.append((depth, start, r))
        if blocks and (not stack or stack[-1][1] < blocks):
            stack.append((start, blocks))
    if not nodes:
        return PrefixGroups.none(num_requests)
    nodes.sort()  # parents first
    deepest = np.full(num_requests, -1, np.int32)
    parent = []
    for node, (_, start, end) in enumerate(nodes):
        parent.append(int(deepest[start]))  # all members have the same
        deepest[start:end] = node
    depth, start, end = np.array(nodes, np.int32).T
    chosen = rule(start.tolist(), end.tolist(), (depth * block_size).tolist(), parent, query_lens.tolist())
    private_start = np.zeros(num_requests, np.int32)
    above = np.zeros(len(nodes), np.int32)
    groups = np.flatnonzero(chosen)
    for g in groups.tolist():
        above[g] = private_start[start[g]]
        private_start[start[g] : end[g]] = depth[g]
    begin, end_block = above[groups], depth[groups]
    ids = [block_table[slots[r], a:b] for r, a, b in zip(start[groups].tolist(), begin.tolist(), end_block.tolist())]
    ids_start = np.zeros(len(groups) + 1, np.int32)
    np.cumsum(end_block - begin, out=ids_start[1:])
    block_ids = np.concatenate(ids) if ids else np.empty(0, np.int32)
    return PrefixGroups(start[groups], end[groups], begin, end_block, private_start, block_ids, ids_start)


def spares_enough_reads(first: Ints, last: Ints, num_keys: Ints, parent: Ints, query_lens: Ints) -> list[bool]:
    """A node is a group if that spares MIN_SPARED_TOKEN_READS reads of a token, (members - 1) * keys."""
    above = [0] * len(first)  # keys of groups above
    chosen: list[bool] = []
    for v, up in enumerate(parent):
        if up >= 0:
            above[v] = num_keys[up] if chosen[up] else above[up]
        chosen.append((last[v] - first[v] - 1) * (num_keys[v] - above[v]) >= MIN_SPARED_TOKEN_READS)
    return chosen
