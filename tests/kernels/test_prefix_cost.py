"""The choice of groups against every possible choice on small random trees, and where it must share and where not."""

import itertools
import random

import pytest
import torch
from batchgen_kernels import prefix_cost
from batchgen_kernels.prefix_cost import HARDWARE, PrefixCost


def random_tree(rng, num_requests, max_nodes):
    """(first, last, depth, parent) of nested ranges of requests, parents before children; some of one request."""
    nodes = []

    def grow(first, last, above, parent):
        at = first
        while at < last and len(nodes) < max_nodes:
            end = rng.randint(at + 1, last)
            if rng.random() < 0.7:
                depth = above + rng.choice([16, 64, 256, 1024, 4096])
                nodes.append((at, end, depth, parent))
                if (at, end) != (first, last) or parent < 0:
                    grow(at, end, depth, len(nodes) - 1)
            at = end

    grow(0, num_requests, 0, -1)
    return list(zip(*nodes)) or [(), (), (), ()]


def total_cost(cost, tree, query_lens, chosen):
    """As the module's docstring says it, request by request and key range by key range."""
    first, last, depth, parent = tree
    begin = [0] * len(first)
    seconds = cost.any_group(sum(query_lens)) if any(chosen) else 0.0
    for v, up in enumerate(parent):
        if up >= 0:
            begin[v] = depth[up] if chosen[up] else begin[up]
        if chosen[v]:
            seconds += cost.group(sum(query_lens[first[v] : last[v]]), depth[v] - begin[v])
    for r, query_len in enumerate(query_lens):
        nodes = [v for v in range(len(first)) if first[v] <= r < last[v]]
        shared = max([depth[v] for v in nodes], default=0)
        covered = max([depth[v] for v in nodes if chosen[v]], default=0)
        seconds += cost.alone(query_len) * (shared - covered)
    return seconds


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (71, 1, 64)], ids=str)
def test_no_other_choice_is_cheaper(heads):
    rng = random.Random(0)
    some = partly = 0
    for hardware in HARDWARE.values():
        for _ in range(12):
            tree = random_tree(rng, rng.randint(2, 60), 6)
            query_lens = [rng.choice([1, 1, 1, 1, 5, 300]) for _ in range(60)]
            cost = PrefixCost(hardware, *heads, 2, rng.choice([1, 2]))
            chosen = cost(*tree, query_lens)
            best = min(total_cost(cost, tree, query_lens, c) for c in itertools.product([False, True], repeat=len(tree[0])))
            assert total_cost(cost, tree, query_lens, chosen) <= best * (1 + 1e-9) + 1e-15
            assert not any(c and b - a < 2 for a, b, c in zip(tree[0], tree[1], chosen)), "a group of one"
            some += any(chosen)
            partly += any(chosen) and not all(chosen)
    assert 0 < partly <= some, "the trees decide nothing"


def test_deep_trees_are_cut_to_a_bound(monkeypatch):
    """40 nodes in each other, the last requests leaving one by one: with few stretches within 10 % of the exact choice, and
    with as many as there are nodes exact by definition."""
    num = 40
    tree = ([0] * num, [2 * num - v for v in range(num)], [100 * (v + 1) for v in range(num)], list(range(-1, num - 1)))
    query_lens = [1] * (2 * num)
    cost = PrefixCost(HARDWARE["H200"], 32, 8, 128, 2, 2)
    few = total_cost(cost, tree, query_lens, cost(*tree, query_lens))
    monkeypatch.setattr(prefix_cost, "MAX_STRETCHES", num)
    exact = total_cost(cost, tree, query_lens, cost(*tree, query_lens))
    assert exact <= few <= 1.1 * exact


def one_node(num_requests, num_keys, name="H200", heads=(32, 8, 128)):
    cost = PrefixCost(HARDWARE[name], *heads, 2, 2)
    return cost([0], [num_requests], [num_keys], [-1], [1] * num_requests)[0]


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_where_hopper_shares(name):
    assert not one_node(8, 256, name) and not one_node(8, 511, name) and not one_node(2, 512, name)
    assert not one_node(1, 10**6, name)
    assert one_node(64, 1024, name) and one_node(256, 512, name) and one_node(8, 8192, name)


def test_more_sharers_and_longer_prefixes_never_speak_against_a_group():
    for sizes in ([2, 4, 8, 16, 32, 64, 128, 256], [512] * 8):
        for keys in ([64, 128, 512, 1024, 2048, 4096, 8192, 2**14], [1024] * 8):
            choices = [one_node(n, k) for n, k in zip(sizes, keys)]
            assert choices == sorted(choices)


def test_a_device_that_is_not_in_the_table(monkeypatch):
    monkeypatch.setattr(prefix_cost, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GH200 480GB")
    gpu = torch.device("cuda")
    assert prefix_cost.hardware_of(gpu) is HARDWARE["H200"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "something")
    monkeypatch.setattr(prefix_cost, "current_architecture", lambda: "sm_90")
    assert prefix_cost.hardware_of(gpu) is HARDWARE["H100"]
    monkeypatch.setattr(prefix_cost, "current_architecture", lambda: "sm_86")
    assert prefix_cost.hardware_of(gpu) is HARDWARE["A100"]
    assert prefix_cost.hardware_of(torch.device("cpu")) is HARDWARE["cpu"]
