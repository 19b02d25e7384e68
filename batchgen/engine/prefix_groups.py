"""Which requests of a step can read which blocks together. Host side, numpy, no torch.

The requests of a step stand in plan order, so those that share blocks are neighbours, and the blocks that neighbours
share give the whole tree with one stack (the LCP-interval tree of suffix arrays, Abouelhoda et al. 2004):

    request      0    1    2    3    4            groups: blocks [0, 2) for requests 0-4, blocks [2, 5) for 1-3
    shared blocks  2    5    5    2               request 1's private part begins at block 5, request 0's at block 2

A member's queries must lie after the group's blocks, so a request shares no more than it has computed before this step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PrefixGroups(NamedTuple):
    """G groups over the requests of one step."""

    request_start: np.ndarray  # [G] int32
    request_end: np.ndarray  # [G] int32
    block_start: np.ndarray  # [G] int32, in blocks of the members' block tables
    block_end: np.ndarray  # [G] int32
    private_start: np.ndarray  # [R] int32, in blocks: where each request's own part begins

    @staticmethod
    def none(num_requests: int) -> PrefixGroups:
        empty = np.empty(0, np.int32)
        return PrefixGroups(empty, empty, empty, empty, np.zeros(num_requests, np.int32))


def shared_with_previous(block_table: np.ndarray, num_full_blocks: np.ndarray) -> np.ndarray:
    """[R] int32: leading blocks that each request has in common with the one before it, within num_full_blocks of both.

    block_table: [R, max_blocks]; num_full_blocks: [R] int32, blocks filled before this step's queries.
    """
    shared = np.zeros(len(block_table), np.int32)
    if len(block_table) > 1:
        different = block_table[1:] != block_table[:-1]
        first = np.where(different.any(1), different.argmax(1), block_table.shape[1])
        shared[1:] = np.minimum(first, np.minimum(num_full_blocks[1:], num_full_blocks[:-1]))
    return shared


def find_groups(shared: np.ndarray, min_saving: int) -> PrefixGroups:
    """Groups from `shared` (shared_with_previous). A node is a group if it spares at least `min_saving` block reads,
    (members - 1) * blocks; else its blocks are left to its children."""
    num_requests = len(shared)
    nodes: list[tuple[int, int, int]] = []  # (first request, one past the last, blocks)
    stack: list[tuple[int, int]] = []  # (first request, blocks)
    for r, blocks in enumerate([*shared.tolist(), 0]):
        start = r - 1
        while stack and stack[-1][1] > blocks:
            start, depth = stack.pop()
            nodes.append((start, r, depth))
        if blocks and (not stack or stack[-1][1] < blocks):
            stack.append((start, blocks))
    private_start = np.zeros(num_requests, np.int32)
    groups: list[tuple[int, int, int, int]] = []
    for start, end, depth in sorted(nodes, key=lambda n: n[2]):  # parents first
        above = int(private_start[start])  # all members have the same parent
        if (end - start - 1) * (depth - above) >= min_saving:
            groups.append((start, end, above, depth))
            private_start[start:end] = depth
    columns = np.array(groups, np.int32).reshape(-1, 4).T
    return PrefixGroups(columns[0], columns[1], columns[2], columns[3], private_start)
