"""The batch-invariant mode: the same bits for a request, alone or among others, where the default would choose otherwise."""

import pytest
import torch
from batchgen_kernels import paged_decode, paged_prefill, select_ops
from batchgen_kernels._triton import interpreting
from batchgen_kernels.cases.attention import paged_inputs
from batchgen_kernels.cases.shared_prefix import shared_inputs

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
FP32 = torch.float32


def attend(ops, inputs, requests):
    """Rows of `requests` alone, as a step of their own."""
    metadata, query, key_cache, value_cache, scale = inputs
    lens = metadata.query_start.diff().tolist()
    starts = metadata.query_start.tolist()
    rows = torch.cat([torch.arange(starts[r], starts[r] + lens[r]) for r in requests])
    counts = torch.tensor([lens[r] for r in requests])
    index = torch.tensor(requests, device=DEVICE)
    some = metadata._replace(
        block_table=metadata.block_table[index],
        query_start=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().to(DEVICE),
        seq_lens=metadata.seq_lens[index],
        kv_start=metadata.kv_start[index],
        decode_requests=(counts == 1).nonzero()[:, 0].to(DEVICE),
        prefill_requests=(counts > 1).nonzero()[:, 0].to(DEVICE),
        max_query_len=int(counts.max()),
    )
    plan = ops.plan_attention(some, query.shape[1], key_cache.shape[2], query.shape[2])
    return plan(query[rows.to(DEVICE)], key_cache, value_cache, scale), rows


@pytest.fixture
def many_processors(monkeypatch):
    """So that few requests are split and take small tiles, and many are not: what the mode must not do."""
    for module in (paged_decode, paged_prefill):
        monkeypatch.setattr(module, "num_processors", lambda device: 12)


def test_a_request_has_the_same_bits_in_any_step(many_processors):
    inputs = paged_inputs([1, 9, 1, 1, 40], [700, 60, 33, 300, 90], 4, 2, 64, 16, FP32, DEVICE)
    ops = select_ops("triton", DEVICE, batch_invariant=True)
    whole, _ = attend(ops, inputs, [0, 1, 2, 3, 4])
    for requests in ([0], [1], [2, 4], [3, 0, 1]):
        alone, rows = attend(ops, inputs, requests)
        assert torch.equal(alone, whole[rows])


def test_without_the_mode_bits_do_change(many_processors):
    """Else the test above tests nothing."""
    inputs = paged_inputs([1, 1, 1, 1, 1, 1], [700, 600, 600, 600, 600, 600], 8, 4, 64, 16, FP32, DEVICE)
    ops = select_ops("triton", DEVICE)
    whole, _ = attend(ops, inputs, list(range(6)))
    assert not torch.equal(attend(ops, inputs, [0])[0], whole[:1])


def test_groups_are_refused_and_not_offered():
    ops = select_ops("triton", DEVICE, batch_invariant=True)
    assert not ops.shares_prefix_reads and select_ops("triton", DEVICE).shares_prefix_reads
    assert ops.group_rule(4, 2, 64, FP32, torch.device(DEVICE)) is None
    inputs = shared_inputs(1, 4, 2, 64, 16, FP32, DEVICE)
    with pytest.raises(ValueError, match="batch_invariant takes no shared-prefix groups"):
        ops.plan_attention(inputs.metadata, 4, 2, 64)
