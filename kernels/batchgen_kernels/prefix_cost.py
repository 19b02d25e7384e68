"""Which nodes of a prefix tree are worth a query group of their own, and which are better left to the nodes below them.

A node that is a group reads its keys once a tile of rows. A node that is folded leaves its keys to its children: a child
that is a group reads them before its own, and a request below no other node reads them alone. In seconds:

    group      max(bytes / bandwidth, flops / rate)  with keys x tiles of rows     reading
               + members x heads x (head_dim + 1) x 8 bytes / bandwidth            the part is written, and read to be merged
               + tiles x SEGMENT / processors                                      loading queries, finishing rows
    alone      max(bytes / bandwidth, flops / rate)  of each request by itself
    any group  two launches more, and the private part goes through memory as float32

Reads that the L2 cache would catch are counted in full on both sides. The greedy form of this choice is FastTree's (Pan et
al. 2025); here it is exact, as a key is read by the first group at or below its node: cost(node, first key of the stretch
that it must read) depends on nothing else, and there are as many stretches as ancestors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from batchgen_kernels._triton import interpreting
from batchgen_kernels.launch import current_architecture
from batchgen_kernels.paged_tile import MAX_TILE_HEADS

BANDWIDTH_SHARE = 0.8  # of the peak, that reading a cache gets
FLOPS_SHARE = 0.4  # of the peak, that attention gets
SEGMENT = 2e-6  # seconds of one program that begins and ends a tile of rows
MAX_STRETCHES = 16  # considered a node, so that a tree as deep as it is wide costs no more


class Hardware(NamedTuple):
    """Peaks of the vendor's data sheet; launch is an estimate of a launch on the device, behind another."""

    processors: int
    bandwidth: float  # bytes per second
    flops: dict[int, float]  # dense, by bytes of an element of the query
    launch: float  # seconds


HARDWARE = {
    "A100": Hardware(108, 2.04e12, {2: 312e12, 4: 19.5e12}, 5e-6),
    "H100": Hardware(132, 3.35e12, {2: 989e12, 4: 67e12}, 5e-6),
    "H200": Hardware(132, 4.8e12, {2: 989e12, 4: 67e12}, 5e-6),
    "B200": Hardware(148, 8.0e12, {2: 2250e12, 4: 75e12}, 5e-6),
    "MI300X": Hardware(304, 5.3e12, {2: 1307e12, 4: 163e12}, 8e-6),
    "cpu": Hardware(2, 15e9, {2: 0.02e12, 4: 0.2e12}, 20e-6),  # two cores; a launch is a call of torch
}
BY_ARCHITECTURE = {"sm_90": "H100", "sm_100": "B200", "gfx942": "MI300X"}  # a chip that is not in the table by name


def hardware_of(device: torch.device) -> Hardware:
    """The row of this device: by its name, else by its architecture, else that of the A100."""
    if device.type == "cpu" or interpreting():
        return HARDWARE["cpu"]
    device_name = torch.cuda.get_device_name(device)
    names = [name for name in HARDWARE if name in device_name]
    return HARDWARE[names[0] if names else BY_ARCHITECTURE.get(current_architecture(), "A100")]


class PrefixCost(NamedTuple):
    """The cost model for one model on one device."""

    hardware: Hardware
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_bytes: int  # of an element
    cache_bytes: int

    def group(self, num_tokens: int, num_keys: int) -> float:
        """Seconds that a group of so many query tokens and keys takes."""
        tiles, rows = self._tiles(num_tokens)
        parts = 8 * num_tokens * self.num_q_heads * (self.head_dim + 1) / self._bandwidth
        head_tiles = self.num_kv_heads * self._head_tiles
        return num_keys * self._key(tiles, rows) + parts + tiles * head_tiles * SEGMENT / self.hardware.processors

    def alone(self, query_len: int) -> float:
        """Seconds a key that a request with so many query tokens takes by itself."""
        return self._key(1, 16) if query_len == 1 else self._key(*self._tiles(query_len))

    def any_group(self, num_tokens: int) -> float:
        """Seconds that a step of so many query tokens takes longer for having groups at all."""
        private = 8 * num_tokens * self.num_q_heads * (self.head_dim + 1) / self._bandwidth
        return 2 * self.hardware.launch + private

    def __call__(
        self,
        first: Sequence[int],
        last: Sequence[int],
        depth: Sequence[int],
        parent: Sequence[int],
        query_lens: Sequence[int],
    ) -> list[bool]:
        """For each node of a prefix tree, whether it is to be a group: the cheapest choice of all.

        Node v is the requests [first[v], last[v]) that share depth[v] keys; parent[v] is its node above, or -1, and comes
        before it. query_lens: query tokens of each request. With more than MAX_STRETCHES nodes above each other the first
        key of a stretch is looked for among the start of the context and the nearest of them, no longer among all.
        """
        num_nodes = len(first)
        tokens = [0, *itertools.accumulate(query_lens)]
        rate_of = {n: self.alone(n) for n in set(query_lens)}
        rates = [0.0, *itertools.accumulate(rate_of[n] for n in query_lens)]
        # stretches[v]: first keys that v may have to read from, those of its ancestors' ends; below[v][i]: what its children
        # cost if they begin there, and below[v][-1] if they begin at v's own end; alone[v]: requests of v in no child
        stretches: list[list[int]] = []
        alone = [rates[b] - rates[a] for a, b in zip(first, last)]
        for v in range(num_nodes):
            up = parent[v]
            if up < 0:
                stretches.append([0])
            else:
                alone[up] -= rates[last[v]] - rates[first[v]]
                inherited = stretches[up]
                if len(inherited) == MAX_STRETCHES:
                    inherited = inherited[:1] + inherited[2:]
                stretches.append([*inherited, depth[up]])
        below = [[0.0] * (len(starts) + 1) for starts in stretches]
        is_group: list[list[bool]] = [[]] * num_nodes
        total = alone_total = 0.0
        for v in reversed(range(num_nodes)):
            costs = []
            choices = []
            own = below[v][-1]
            can_be_group = last[v] - first[v] > 1
            members = tokens[last[v]] - tokens[first[v]]
            empty = self.group(members, 0)
            key = self.group(members, 1) - empty
            for start, rest in zip(stretches[v], below[v]):
                num_keys = depth[v] - start
                folded = rest + max(alone[v], 0.0) * num_keys
                group = own + empty + key * num_keys if can_be_group else math.inf
                costs.append(min(folded, group))
                choices.append(group < folded)
            is_group[v] = choices
            up = parent[v]
            if up < 0:
                total += costs[0]
                continue
            if len(costs) == len(below[up]) - 1:  # the parent's second stretch was dropped
                costs.insert(1, math.inf)
            below[up] = [a + b for a, b in zip(below[up], costs)]
        # what the same keys cost if nothing is shared
        for v in range(num_nodes):
            alone_total += max(alone[v], 0.0) * depth[v]
        chosen = [False] * num_nodes
        if num_nodes == 0 or total + self.any_group(tokens[-1]) >= alone_total:
            return chosen
        begins = [0] * num_nodes  # first key that v must read
        for v in range(num_nodes):
            up = parent[v]
            if up >= 0:
                begins[v] = depth[up] if chosen[up] else begins[up]
            chosen[v] = is_group[v][stretches[v].index(begins[v])]
        return chosen

    @property
    def _bandwidth(self) -> float:
        return BANDWIDTH_SHARE * self.hardware.bandwidth

    @property
    def _head_tiles(self) -> int:
        """Tiles that the query heads of one kv head make, each of which reads the keys."""
        return -(-(self.num_q_heads // self.num_kv_heads) // MAX_TILE_HEADS)

    def _tiles(self, num_tokens: int) -> tuple[int, int]:
        """Tiles of rows for so many query tokens of a kv head, and rows of each."""
        tile_heads = min(self.num_q_heads // self.num_kv_heads, MAX_TILE_HEADS)
        rows = 64 if num_tokens * tile_heads <= 64 else 128
        return -(-num_tokens // (rows // tile_heads)), rows

    def _key(self, tiles: int, rows: int) -> float:
        """Seconds a key for tiles of so many rows."""
        elements = 2 * tiles * self._head_tiles * self.num_kv_heads * self.head_dim  # of key and value
        flops = 2 * rows * elements
        rate = FLOPS_SHARE * self.hardware.flops[max(2, self.query_bytes)]  # float8 is decoded to 16 bits
        return max(elements * self.cache_bytes / self._bandwidth, flops / rate)


def group_rule(
    num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, cache_bytes: int = 0
) -> PrefixCost:
    """The rule by which a model's shared-prefix groups are chosen; cache_bytes of an element, 0: like dtype."""
    hardware = hardware_of(device)
    return PrefixCost(hardware, num_q_heads, num_kv_heads, head_dim, dtype.itemsize, cache_bytes or dtype.itemsize)
