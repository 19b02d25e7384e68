"""One compiled variant serves every batch."""

import contextlib

import cross_compile
import torch
from batchgen_kernels import (
    activation,
    attention_triton,
    kv_cache,
    merge_states,
    paged_decode,
    paged_prefill,
    rms_norm,
    rotary,
)
from batchgen_kernels.cases.attention import paged_inputs
from gates import BF16


def test_one_variant_serves_every_batch(monkeypatch):
    """A further variant is seconds of compilation in the middle of a job. Aligned or not, one request or many."""
    cos = torch.zeros(300, 32)

    def run(num_decodes, offset):
        lens = [1] * num_decodes + [3] * (num_decodes % 3)
        inputs = paged_inputs(lens, [600 + 17 * num_decodes] * len(lens), 8, 2, 64, 16, BF16, poison=False)
        shifted = {
            field: torch.cat([t.new_zeros(offset), t.flatten()])[offset:].view(t.shape)
            for field, t in inputs.metadata._asdict().items()
            if field in ("block_table", "query_start", "seq_lens", "kv_start", "decode_requests", "prefill_requests")
        }
        metadata = inputs.metadata._replace(max_seq_len=100_000, **shifted)  # as if there were keys for many parts
        plan = attention_triton.plan_attention_triton(metadata, 8, 2, 64)
        plan(*inputs[1:])
        tokens = torch.zeros(sum(lens) + offset, dtype=torch.int64)[offset:]
        x = torch.empty(len(tokens), 64, dtype=BF16)
        rms_norm.add_rms_norm_triton(x, x.clone(), x[0], 1e-5)
        rotary.rotary_embedding_triton(inputs.query, inputs.query, cos, cos, tokens)
        activation.silu_and_mul_triton(x)
        kv_cache.write_kv_triton(inputs.query[:, :2], inputs.query[:, :2], inputs.key_cache, inputs.value_cache, tokens)
        kv_cache.copy_blocks_triton(inputs.key_cache[None, None].expand(2, 2, -1, -1, -1, -1), tokens, tokens)
        merge_states.merge_states_triton(*[torch.empty(len(tokens), 8, 64, dtype=BF16), torch.empty(len(tokens), 8)] * 2)

    kernels = [
        (paged_decode, "paged_decode_kernel"),
        (paged_decode, "merge_splits_kernel"),
        (paged_prefill, "paged_prefill_kernel"),
        (rms_norm, "rms_norm_kernel"),
        (rotary, "rotary_embedding_kernel"),
        (activation, "act_and_mul_kernel"),
        (kv_cache, "write_kv_kernel"),
        (kv_cache, "copy_blocks_kernel"),
        (merge_states, "merge_states_kernel"),
    ]
    monkeypatch.setattr(paged_decode, "num_processors", lambda device: 132)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cross_compile.target("cuda", 90))
        variants = stack.enter_context(cross_compile.count_variants())
        for module, name in kernels:
            stack.enter_context(cross_compile.capture(module, name))
        for num_decodes in [*range(1, 19), 31, 32, 33, 70, 140]:
            for offset in (0, 1):
                run(num_decodes, offset)
    # decode has two: with and without parts
    assert {name: len(keys) for name, keys in variants.items()} == {
        name: 2 if name == "paged_decode_kernel" else 1 for _, name in kernels
    }
