"""Shared prefixes read once: random prefix trees against attention over each request's whole context, in float64."""

import itertools
import random

import pytest
import torch
from batchgen_kernels import attention_triton, kv_reads, paged_decode, paged_prefill, shared_prefix
from batchgen_kernels._triton import interpreting
from batchgen_kernels.attention_options import NO_OPTIONS
from batchgen_kernels.attention_reference import plan_attention_reference
from batchgen_kernels.cases.attention import paged_inputs, with_options
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.cases.shared_prefix import shared_inputs, to_device
from batchgen_kernels.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def reference(inputs, options=NO_OPTIONS):
    """Dense attention over whole contexts in float64; groups are ignored."""
    metadata, query, key_cache, value_cache, scale = inputs
    on_cpu = metadata._replace(**{k: v.cpu() for k, v in metadata._asdict().items() if isinstance(v, torch.Tensor)})
    options = options._replace(**{k: v.cpu() for k, v in options._asdict().items() if isinstance(v, torch.Tensor)})
    heads = (query.shape[1], key_cache.shape[2], query.shape[2])
    query = query.cpu().to(torch.float64 if options.key_scale is None else query.dtype)
    caches = [c.cpu() if options.key_scale is not None else c.cpu().double() for c in (key_cache, value_cache)]
    return plan_attention_reference(on_cpu, *heads)(query, *caches, scale, *options)


def attend(inputs, options=NO_OPTIONS, monkeypatch=None, launch=None, num_programs=None):
    metadata, query, key_cache, value_cache, scale = inputs
    heads = (query.shape[1], key_cache.shape[2], query.shape[2])
    if monkeypatch is not None:
        plan_shared = shared_prefix.plan_shared
        monkeypatch.setattr(
            attention_triton, "plan_shared", lambda *args: plan_shared(*args, launch=launch, num_programs=num_programs)
        )
    return attention_triton.plan_attention_triton(metadata, *heads)(query, key_cache, value_cache, scale, *options)


SHAPES = [  # depth, query heads, kv heads, head dim, block size, dtype, seed
    (1, 8, 2, 64, 16, BF16, 0),
    (2, 3, 3, 80, 32, FP16, 1),
    (3, 7, 1, 64, 24, FP32, 2),
    (4, 6, 2, 96, 16, BF16, 3),
    (2, 3, 1, 128, 64, FP32, 4),
    (3, 20, 1, 16, 7, FP32, 5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_trees(shape):
    """Decodes and prefills below the same nodes, nodes that are no group, gaps, NaN in every slot of nobody.

    16-bit: q, k and v are exact; the probabilities are rounded once, the result once, and the parts not at all, so the bound
    is that of attention without groups.
    """
    *sizes, dtype, seed = shape
    inputs = shared_inputs(*sizes, dtype, DEVICE, seed)
    assert relative_error(attend(inputs).cpu(), reference(inputs)) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_programs", [1, 2, 7, 500])
@pytest.mark.parametrize("launch", [Launch(16, 16, 4, 1), Launch(64, 32, 4, 1)], ids=["16x16", "64x32"])
def test_any_number_of_programs(num_programs, launch, monkeypatch):
    """One program for all, shares that end in the middle of tiles, more programs than units: the others have none."""
    inputs = shared_inputs(2, 4, 2, 64, 16, FP32, DEVICE, seed=6)
    sizes = (len(inputs.query), 4, 2, 64, FP32)
    plan = shared_prefix.plan_shared(inputs.metadata, *sizes, launch=launch, num_programs=num_programs)
    assert num_programs != 500 or plan.num_units < 500
    got = attend(inputs, NO_OPTIONS, monkeypatch, launch, num_programs)
    assert relative_error(got.cpu(), reference(inputs)) < TOLERANCE[FP32]


def one_group(query_lens, num_shared, block_size=16, heads=(4, 2, 64), dtype=FP32, private=3):
    """Requests that all share their first num_shared tokens."""
    seq_lens = [num_shared + private + n for n in query_lens]
    inputs = paged_inputs(query_lens, seq_lens, *heads, block_size, dtype)
    num_blocks = num_shared // block_size
    table = inputs.metadata.block_table
    table[:, :num_blocks] = table[0, :num_blocks].clone()
    metadata = inputs.metadata._replace(
        kv_start=torch.full_like(inputs.metadata.kv_start, num_shared),
        group_query_start=torch.zeros(1, dtype=torch.int32),
        group_query_end=torch.tensor([sum(query_lens)], dtype=torch.int32),
        group_block_start=torch.tensor([0, num_blocks], dtype=torch.int32),
        group_blocks=table[0, :num_blocks].clone(),
    )
    return to_device(inputs._replace(metadata=metadata), DEVICE)


def test_a_tile_cut_by_many_programs(monkeypatch):
    """One tile of rows a kv head, 30 tiles of keys, 13 programs."""
    inputs = one_group([1, 1, 1], 480)
    got = attend(inputs, NO_OPTIONS, monkeypatch, Launch(16, 16, 4, 1), 13)
    assert relative_error(got.cpu(), reference(inputs)) < TOLERANCE[FP32]


def test_a_node_with_thousands_of_rows(monkeypatch):
    """1500 query tokens of two requests: 47 tiles of 64 rows of the group."""
    inputs = one_group([900, 600], 32, heads=(2, 1, 16))
    metadata, query, key_cache, value_cache, scale = inputs
    plan = shared_prefix.plan_shared(metadata, 1500, 2, 1, 16, FP32, launch=Launch(64, 32, 4, 1), num_programs=5)
    assert plan.num_tiles == 47
    out, lse = shared_prefix.attend_shared(query, key_cache, value_cache, scale, plan)
    blocks = metadata.group_blocks.long()
    k, v = (c[blocks].flatten(0, 1).double().cpu()[:, 0] for c in (key_cache, value_cache))
    scores = torch.einsum("qhd,kd->qhk", query.double().cpu(), k) * scale
    # a part of tile t lies at t plus the program that made it: with one tile of keys that is the t-th unit's
    program = torch.tensor([((u + 1) * 5 - 1) // 47 for u in range(47)])
    part = torch.arange(47) + program
    got = out.cpu()[part].view(-1, 2, 16)[:1500], lse.cpu()[part].view(-1, 2)[:1500]
    assert relative_error(got[0], torch.einsum("qhk,kd->qhd", scores.softmax(-1), v)) < TOLERANCE[FP32]
    assert relative_error(got[1], scores.logsumexp(-1)) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (BF16, {"window": 40}),
        (FP32, {"window": 3, "sinks": True}),
        (FP32, {"soft_cap": 2.0, "sinks": True}),
        (BF16, {"fp8": True}),
        (FP32, {"window": 70, "soft_cap": 3.0, "sinks": True, "fp8": True}),
    ],
    ids=str,
)
def test_options(dtype, given):
    """A window may end in the middle of a node, before it, or differ between the rows of a tile; a sink counts once."""
    inputs, options = with_options(shared_inputs(2, 6, 2, 64, 16, dtype, DEVICE, seed=7), **given)
    assert relative_error(attend(inputs, options).cpu(), reference(inputs, options)) < TOLERANCE[dtype]


def test_a_window_hides_values_that_are_not_finite():
    inputs = one_group([1, 9, 1], 64)
    inputs.value_cache[inputs.metadata.group_blocks[0].long(), 3] = float("nan")
    inputs.key_cache[inputs.metadata.group_blocks[1].long(), 5] = float("inf")
    options = NO_OPTIONS._replace(window=48)
    got = attend(inputs, options)
    assert relative_error(got.cpu(), reference(inputs, options)) < TOLERANCE[FP32]


def test_the_same_bits_twice():
    inputs = shared_inputs(2, 6, 2, 64, 16, BF16, DEVICE, seed=8)
    assert torch.equal(attend(inputs), attend(inputs))


def test_without_groups_the_launches_are_those_of_decode_and_prefill(monkeypatch):
    """The same kernels, as often, with the same arguments as a call of both launchers."""
    inputs = paged_inputs([1, 5, 1], [20, 30, 40], 4, 2, 64, 16, BF16, DEVICE)
    metadata, query, key_cache, value_cache, scale = inputs
    calls = []

    class Spy:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: calls.append((self.name, grid, args, kwargs))

    kernels = {paged_decode: ["paged_decode_kernel", "merge_splits_kernel"], paged_prefill: ["paged_prefill_kernel"]}
    kernels[shared_prefix] = ["shared_prefix_kernel", "merge_shared_kernel"]
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, Spy(name))
    attend(inputs)
    planned, calls = calls, []
    out = torch.empty_like(query)
    index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start)
    shared = (query, key_cache, value_cache, *index)
    paged_decode.paged_decode(*shared, metadata.decode_requests, metadata.max_seq_len, scale, out)
    paged_prefill.paged_prefill(*shared, metadata.prefill_requests, metadata.max_query_len, scale, out)
    assert len(planned) == len(calls) == 2

    def plain(call):
        name, grid, args, kwargs = call
        args = [(a.shape, a.dtype, a.stride()) if isinstance(a, torch.Tensor) else a for a in args]
        return name, grid, args, kwargs

    assert [plain(c) for c in planned] == [plain(c) for c in calls]


@pytest.mark.skipif(not interpreting(), reason="counts loads in the interpreter")
def test_counted_reads_are_what_the_programs_load():
    import interpreter_guard

    inputs = shared_inputs(2, 6, 2, 64, 16, BF16, DEVICE, seed=9)
    metadata, query, key_cache, value_cache, scale = inputs
    plan = shared_prefix.plan_shared(metadata, len(query), 6, 2, 64, BF16)
    with interpreter_guard.count_loads() as loaded:
        shared_prefix.attend_shared(query, key_cache, value_cache, scale, plan)
    block_q = plan.launch.block_m // 3
    nodes = zip(metadata.group_query_start.tolist(), metadata.group_query_end.tolist(), metadata.group_block_start.diff())
    tokens = sum(-(-(end - begin) // block_q) * int(blocks) * 16 for begin, end, blocks in nodes)
    token_bytes = 2 * 64 * 2  # of one of keys and values, both heads
    assert loaded[key_cache.data_ptr()] == loaded[value_cache.data_ptr()] == tokens * token_bytes
    reads = kv_reads.count_kv_reads(metadata, 6, 2, 64, BF16)
    assert reads.shared_tokens == tokens
    with interpreter_guard.count_loads() as loaded:
        attend(inputs)
    assert loaded[key_cache.data_ptr()] + loaded[value_cache.data_ptr()] == reads.bytes
    alone = kv_reads.count_kv_reads(without_groups(inputs).metadata, 6, 2, 64, BF16)
    with interpreter_guard.count_loads() as loaded:
        attend(without_groups(inputs))
    assert loaded[key_cache.data_ptr()] + loaded[value_cache.data_ptr()] == alone.bytes > reads.bytes


def without_groups(inputs):
    metadata = inputs.metadata
    none = {name: getattr(metadata, name)[:0] for name in ("group_query_start", "group_query_end", "group_blocks")}
    none |= {"group_block_start": torch.zeros(1, dtype=torch.int32), "kv_start": torch.zeros_like(metadata.kv_start)}
    return inputs._replace(metadata=metadata._replace(**none))


def test_with_one_tile_of_rows_every_distinct_key_is_read_once():
    inputs = one_group([1] * 9, 160, heads=(2, 1, 64))
    plan = shared_prefix.plan_shared(inputs.metadata, 9, 2, 1, 64, FP32, launch=Launch(32, 32, 4, 1))
    assert kv_reads.shared_reads(plan) == 160
    plan = shared_prefix.plan_shared(inputs.metadata, 9, 2, 1, 64, FP32, launch=Launch(16, 32, 4, 1))
    assert kv_reads.shared_reads(plan) == 320


def test_shares_differ_by_one_unit_at_most_and_the_device_agrees():
    """Arithmetic of the kernels in Python: every unit belongs to one program, which program_of finds again."""
    rng = random.Random(0)
    for _ in range(40):
        inputs = shared_inputs(rng.randint(1, 4), 6, 2, 16, 16, FP32, seed=rng.randint(0, 10**6))
        num_programs = rng.choice([1, 3, 7, 64, 132, 264])
        plan = shared_prefix.plan_shared(
            inputs.metadata, len(inputs.query), 6, 2, 16, FP32, launch=Launch(16, 16, 4, 1), num_programs=num_programs
        )
        units = kv_reads.program_units(plan)
        assert sum(units) == plan.num_units and max(units) - min(units) <= 1 and min(units) >= 1
        owner = [p for p, n in enumerate(units) for _ in range(n)]
        assert owner == [((u + 1) * len(units) - 1) // plan.num_units for u in range(plan.num_units)]
        nodes = plan.nodes.tolist()
        tiles = [  # (tile, program) of every part: its index grows along the line
            (a[1] + (u - a[0]) // -(-a[4] // 16), owner[u]) for a, b in itertools.pairwise(nodes) for u in range(a[0], b[0])
        ]
        parts = [t + p for t, p in dict.fromkeys(tiles)]
        assert all(x < y for x, y in itertools.pairwise(parts)) and parts[-1] < plan.num_tiles + plan.num_programs


def test_the_tree_of_a_step():
    """Deepest nodes, parents, first positions, tokens of no group, and the keys that all tokens share."""
    begin, end, keys = [2, 2, 5, 9], [8, 4, 8, 10], [32, 16, 16, 48]
    parent, position, token_node, fewest = shared_prefix.node_tree(begin, end, keys, 11)
    assert parent == [-1, 0, 0, -1] and position == [0, 32, 32, 0] and fewest == 0
    assert token_node.tolist() == [-1, -1, 1, 1, 0, 2, 2, 2, -1, 3, -1]
    assert shared_prefix.node_tree([0, 0], [4, 2], [32, 16], 4)[3] == 32
    same = shared_prefix.node_tree([0, 0], [4, 4], [32, 16], 4)  # the same members: in the order given
    assert same[0] == [-1, 0] and same[1] == [0, 32] and same[2].tolist() == [1] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_query_end": torch.tensor([0], dtype=torch.int32)}, "a group must have query tokens and blocks"),
        ({"group_block_start": torch.tensor([0, 0], dtype=torch.int32)}, "a group must have query tokens and blocks"),
        ({"group_query_end": torch.tensor([9], dtype=torch.int32)}, "groups end at query token 9 of 3"),
        (
            {
                "group_query_start": torch.tensor([0, 1], dtype=torch.int32),
                "group_query_end": torch.tensor([2, 3], dtype=torch.int32),
                "group_block_start": torch.tensor([0, 1, 2], dtype=torch.int32),
            },
            "query tokens of groups 0 and 1 overlap in part",
        ),
    ],
)
def test_wrong_groups_are_named(changes, message):
    inputs = one_group([1, 1, 1], 32)
    with pytest.raises(ValueError, match=message):
        attend(inputs._replace(metadata=inputs.metadata._replace(**changes)))


def test_wrong_inputs_are_named():
    metadata, query, key_cache, value_cache, scale = one_group([1, 1, 1], 32)
    plan = shared_prefix.plan_shared(metadata, 3, 4, 2, 64, FP32)
    with pytest.raises(ValueError, match="shared_prefix: planned for 3 query tokens, got 2"):
        shared_prefix.attend_shared(query[:2], key_cache, value_cache, scale, plan)
    with pytest.raises(ValueError, match="shared_prefix: head_dim is 32 in query and 64 in the cache"):
        shared_prefix.attend_shared(query[..., :32], key_cache, value_cache, scale, plan)


def test_large_tiles_unless_they_would_be_empty(monkeypatch):
    monkeypatch.setattr(shared_prefix, "current_architecture", lambda: "sm_90")

    def rows(num_tokens, num_keys, tile_heads=4):
        sizes = torch.tensor(num_tokens), torch.tensor(num_keys)
        return shared_prefix.choose_shared_launch(*sizes, tile_heads, 128, BF16).block_m

    assert rows([16], [1000]) == 64 and rows([17], [1000]) == 128 and rows([512], [1000]) == 128
    assert rows([4, 500], [10_000, 100]) == 64 and rows([4, 500], [100, 10_000]) == 128


def test_cache_of_more_than_2_to_the_31_elements():
    """Never touched but for a few blocks, so it costs address space, not memory."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # NaN everywhere would be 4 GB of real memory
    small = one_group([1, 2], 32, dtype=BF16)
    shape = (2**31 // (16 * 2 * 64) + 8, 16, 2, 64)
    cache = torch.empty(shape, dtype=BF16, device=DEVICE)
    shift = shape[0] - small.key_cache.shape[0]
    cache[shift:] = small.key_cache
    metadata = small.metadata._replace(
        block_table=small.metadata.block_table + shift, group_blocks=small.metadata.group_blocks + shift
    )
    moved = small._replace(metadata=metadata, key_cache=cache, value_cache=cache)
    want = reference(small._replace(value_cache=small.key_cache))
    assert relative_error(attend(moved).cpu(), want) < TOLERANCE[BF16]
