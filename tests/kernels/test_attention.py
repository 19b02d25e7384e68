"""The attention launchers alone: splits, private ranges, log-sum-exp, block sizes against tile sizes, offsets past 2^31."""

import math

import pytest
import torch
from batchgen_kernels import kv_cache, paged_decode, paged_prefill
from batchgen_kernels._triton import interpreting
from batchgen_kernels.attention_reference import plan_attention_reference
from batchgen_kernels.attention_triton import plan_attention_triton
from batchgen_kernels.cases.attention import paged_inputs
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.launch import Launch
from batchgen_kernels.merge_states import merge_states_reference, merge_states_torch, merge_states_triton

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
BF16 = torch.bfloat16


def reference_state(inputs, kv_start):
    """(out, lse) over the keys [kv_start[r], own position], in float64."""
    metadata, query, key_cache, value_cache, scale = inputs
    group = query.shape[1] // key_cache.shape[2]
    out, lse = torch.zeros(query.shape, dtype=torch.float64), torch.zeros(query.shape[:2], dtype=torch.float64)
    for r, n in enumerate(metadata.seq_lens.tolist()):
        begin, end = metadata.query_start[r : r + 2].tolist()
        blocks = metadata.block_table[r, : -(-n // metadata.block_size)].long()
        k, v = (c[blocks].flatten(0, 1)[kv_start[r] : n].double().cpu() for c in (key_cache, value_cache))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->qhk", query[begin:end].double().cpu(), k) * scale
        visible = torch.arange(kv_start[r], n)[None] <= torch.arange(n - (end - begin), n)[:, None]
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        lse[begin:end] = scores.logsumexp(-1)
        weights = (scores - lse[begin:end].nan_to_num(neginf=0.0)[..., None]).exp()
        out[begin:end] = torch.einsum("qhk,khd->qhd", weights, v)
    return out, lse


def launch_all(inputs, kv_start=None, out=None, launch=None, num_splits=None):
    """Both launchers over the requests of the metadata -> (out, lse), NaN where nothing was written."""
    metadata, query, key_cache, value_cache, scale = inputs
    start = metadata.kv_start if kv_start is None else torch.tensor(kv_start, dtype=torch.int32, device=DEVICE)
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device=DEVICE) if out is None else out
    lse = torch.full(query.shape[:2], math.nan, device=DEVICE)
    index = (metadata.block_table, metadata.query_start, metadata.seq_lens, start)
    shared = (query, key_cache, value_cache, *index)
    paged_decode.paged_decode(
        *shared, metadata.decode_requests, metadata.max_seq_len, scale, out, lse, num_splits=num_splits, launch=launch
    )
    paged_prefill.paged_prefill(*shared, metadata.prefill_requests, metadata.max_query_len, scale, out, lse, launch=launch)
    return out, lse


def assert_state(got, want, dtype):
    assert relative_error(got[0].cpu(), want[0]) < TOLERANCE[dtype]
    assert relative_error(got[1].cpu(), want[1]) < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("num_splits", [1, 2, 5, 16])
def test_decode_splits_and_lse(num_splits, dtype):
    """Requests of one token up to several tiles a part; more parts than tiles, so that some parts are empty."""
    inputs = paged_inputs([1, 1, 1, 1], [200, 1, 32, 65], 6, 2, 64, 16, dtype, DEVICE, padding=-1)
    state = launch_all(inputs, launch=Launch(16, 16, 4, 1), num_splits=num_splits)
    assert_state(state, reference_state(inputs, [0] * 4), dtype)


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
def test_any_block_size_with_any_tile_size(block_size, block_n):
    """-1 in the unused entries of a table as tight as can be, NaN in the slots of nobody: neither is ever read."""
    inputs = paged_inputs([1, 20, 1], [67, 52, 16], 4, 2, 64, block_size, BF16, DEVICE, padding=-1)
    state = launch_all(inputs, launch=Launch(16, block_n, 4, 1), num_splits=1)
    assert_state(state, reference_state(inputs, [0] * 3), BF16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("num_splits", [1, 3])
def test_private_range(num_splits, dtype):
    """kv_start in the middle: a multiple of the block size, not of the tile size."""
    inputs = paged_inputs([1, 7, 1, 40], [83, 55, 49, 90], 8, 2, 64, 16, dtype, DEVICE)
    kv_start = [48, 16, 48, 48]
    assert_state(launch_all(inputs, kv_start, num_splits=num_splits), reference_state(inputs, kv_start), dtype)


@pytest.mark.parametrize("merge", [merge_states_reference, merge_states_torch, merge_states_triton])
def test_shared_and_private_part_merge_to_the_whole(merge):
    """The shared part is what decode gives for a request that ends where the private part begins."""
    inputs = paged_inputs([1, 1], [83, 55], 8, 2, 64, 16, torch.float32, DEVICE)
    private = launch_all(inputs, [48, 32])
    shorter = inputs.metadata._replace(seq_lens=torch.tensor([48, 32], dtype=torch.int32, device=DEVICE))
    shared = launch_all(inputs._replace(metadata=shorter))
    assert_state(merge(*shared, *private), reference_state(inputs, [0, 0]), torch.float32)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_empty_private_range_is_the_identity_of_merging(num_splits):
    inputs = paged_inputs([1, 1], [64, 20], 4, 2, 64, 16, BF16, DEVICE)
    out, lse = launch_all(inputs, [64, 0], num_splits=num_splits)
    assert torch.equal(out[0], torch.zeros_like(out[0])) and bool((lse[0] == -math.inf).all())
    assert bool(lse[1].isfinite().all())


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(20, 1), (71, 1), (10, 2)])
def test_groups_that_no_tile_holds(num_q_heads, num_kv_heads):
    inputs = paged_inputs([1, 3], [19, 21], num_q_heads, num_kv_heads, 16, 16, BF16, DEVICE)
    assert_state(launch_all(inputs), reference_state(inputs, [0, 0]), BF16)


def test_only_rows_of_the_given_requests_are_written():
    inputs = paged_inputs([1, 5, 1, 4], [20, 30, 40, 6], 4, 2, 64, 16, BF16, DEVICE)
    some = inputs.metadata._replace(
        decode_requests=torch.tensor([2], device=DEVICE), prefill_requests=torch.tensor([1], device=DEVICE)
    )
    out, lse = launch_all(inputs._replace(metadata=some), num_splits=2)
    written = torch.tensor([False] + [True] * 6 + [False] * 4)
    assert torch.equal(out.isfinite().all(-1).all(-1).cpu(), written) and torch.equal(lse.isfinite().all(-1).cpu(), written)
    assert torch.equal(out.isnan().all(-1).all(-1).cpu(), ~written)


def test_large_scores_do_not_overflow():
    inputs = paged_inputs([1, 6], [40, 40], 4, 2, 64, 16, torch.float32, DEVICE)
    inputs = inputs._replace(query=inputs.query * 1000)
    assert_state(launch_all(inputs, num_splits=2), reference_state(inputs, [0, 0]), torch.float32)


def test_a_row_does_not_depend_on_the_batch():
    """Bitwise: the same request alone and among others, with the same number of parts."""
    inputs = paged_inputs([1, 9, 1], [50, 60, 33], 4, 2, 64, 16, torch.float32, DEVICE)
    together, _ = launch_all(inputs, num_splits=2)
    for r, rows in enumerate([slice(0, 1), slice(1, 10), slice(10, 11)]):
        metadata = inputs.metadata
        alone = metadata._replace(
            decode_requests=metadata.decode_requests[metadata.decode_requests == r],
            prefill_requests=metadata.prefill_requests[metadata.prefill_requests == r],
        )
        out, _ = launch_all(inputs._replace(metadata=alone), num_splits=2)
        assert torch.equal(out[rows], together[rows])


def test_cache_of_more_than_2_to_the_31_elements():
    """Never touched but for a few blocks, so it costs address space, not memory. Every kernel that reads or writes it."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # NaN everywhere would be 4 GB of real memory
    shape = (2**31 // (16 * 2 * 64) + 8, 16, 2, 64)
    cache = torch.empty(shape, dtype=BF16, device=DEVICE)
    small = paged_inputs([1, 3], [20, 18], 4, 2, 64, 16, BF16, DEVICE, poison=False)
    last = shape[0] - 1
    table = torch.tensor([[last, last - 1], [last - 2, last - 3]], dtype=torch.int32, device=DEVICE)
    for r, n in enumerate([20, 18]):
        blocks = small.metadata.block_table[r].long()
        key = small.key_cache[blocks].flatten(0, 1)[:n]
        slots = table[r].long().repeat_interleave(16)[:n] * 16 + torch.arange(n, device=DEVICE) % 16
        kv_cache.write_kv_triton(key, key, cache, cache, slots)
    want = reference_state(small._replace(value_cache=small.key_cache), [0, 0])
    moved = small._replace(metadata=small.metadata._replace(block_table=table), key_cache=cache, value_cache=cache)
    for launch in (Launch(16, 16, 4, 1), Launch(16, 32, 4, 1)):  # a block id per tile, and one per key
        assert_state(launch_all(moved, launch=launch, num_splits=2), want, BF16)

    layers = cache.view(1, 2, -1, 16, 2, 64)  # [layers, 2, blocks, ...]: the values begin past 2^30 elements
    source, destination = torch.tensor([layers.shape[2] - 1], device=DEVICE), torch.tensor([3], device=DEVICE)
    kv_cache.copy_blocks_triton(layers, source, destination)
    assert torch.equal(layers[0, 1, 3], layers[0, 1, -1])
    both = cache[None, None].expand(1, 2, *shape)  # one plane that serves as keys and values: blocks lie past 2^31
    kv_cache.copy_blocks_triton(both, *torch.tensor([[last], [7]], device=DEVICE))
    assert torch.equal(cache[7], cache[last])


def test_splits_only_where_processors_would_idle():
    choose = paged_decode.choose_num_splits
    assert choose(264, 100_000, 132) == 1
    assert choose(263, 100_000, 132) == 2
    assert choose(8, 100_000, 132) == 33
    assert choose(8, 300, 132) == 1  # too short to share out
    assert choose(1, 10**7, 132) == paged_decode.MAX_SPLITS


def test_plan_refuses_other_shapes():
    inputs = paged_inputs([1], [20], 4, 2, 64, 16, BF16, DEVICE)
    with pytest.raises(ValueError, match=r"num_q_heads \(5\) must be a multiple of num_kv_heads \(2\)"):
        plan_attention_triton(inputs.metadata, 5, 2, 64)
    with pytest.raises(ValueError, match=r"planned for query \('T', 4, 32\)"):
        plan_attention_triton(inputs.metadata, 4, 2, 32)(*inputs[1:])
    assert plan_attention_triton.shares_prefix_reads is True


def test_plan_runs_once_a_layer():
    inputs = paged_inputs([1, 3], [20, 18], 4, 2, 64, 16, torch.float32, DEVICE)
    other = paged_inputs([1, 3], [20, 18], 4, 2, 64, 16, torch.float32, DEVICE)._replace(query=inputs.query * -0.5)
    plan = plan_attention_triton(inputs.metadata, 4, 2, 64)
    for layer in (inputs, other):
        expected = plan_attention_reference(layer.metadata, 4, 2, 64)(*layer[1:])
        assert relative_error(plan(*layer[1:]), expected) < TOLERANCE[torch.float32]


def with_index(inputs, **changes):
    return inputs._replace(metadata=inputs.metadata._replace(**changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i._replace(query=i.query[:, :3]), r"num_q_heads \(3\) must be a multiple of num_kv_heads \(2\)"),
        (lambda i: i._replace(query=i.query[..., :32]), "head_dim is 32 in query and 64 in the cache"),
        (lambda i: i._replace(query=i.query.float()), "share one dtype"),
        (lambda i: i._replace(query=i.query[0]), r"query must be \[num_tokens, num_q_heads, head_dim\]"),
        (lambda i: i._replace(value_cache=i.value_cache[1:]), "key_cache and value_cache must be"),
        (lambda i: i._replace(value_cache=i.value_cache.transpose(1, 2).contiguous().transpose(1, 2)), "the same strides"),
        (lambda i: with_index(i, seq_lens=i.metadata.seq_lens.float()), "seq_lens must be int32 or int64"),
        (lambda i: with_index(i, query_start=i.metadata.query_start[:1]), r"query_start must be \[2\] for 1 requests"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        launch_all(change(paged_inputs([1], [20], 4, 2, 64, 16, BF16, DEVICE)))
