"""Inputs of every op, for tests and benches alike: `CASES[op](dtype, device)` gives small, mean cases.

A case knows how to make its arguments (the same ones each time, so that an in-place op can be run on fresh copies), how to
call an implementation with them, and what to compare. Benches use the same `*_case` functions with the sizes of a model.

Mean means: sizes that no tile divides, strided views, NaN wherever nothing may be read, sentinels wherever nothing may be
written, block ids in random order, block tables as tight as they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch

from batchgen_kernels.cases import attention, cache, elementwise, experts, linear, sampling, shared_prefix
from batchgen_kernels.cases.case import Case

CASES: dict[str, Callable[[torch.dtype, str], Iterator[Case]]] = {
    "rms_norm": elementwise.rms_norm_cases,
    "add_rms_norm": elementwise.add_rms_norm_cases,
    "rotary_embedding": elementwise.rotary_embedding_cases,
    "silu_and_mul": elementwise.silu_and_mul_cases,
    "gelu_and_mul": elementwise.gelu_and_mul_cases,
    "rope_and_write_kv": cache.rope_and_write_kv_cases,
    "write_kv": cache.write_kv_cases,
    "copy_blocks": cache.copy_blocks_cases,
    "merge_states": attention.merge_states_cases,
    "plan_attention": lambda *args: chain(attention.plan_attention_cases(*args), shared_prefix.shared_prefix_cases(*args)),
    "sample_tokens": sampling.sample_tokens_cases,
    "gather_logprobs": sampling.gather_logprobs_cases,
    "linear_invariant": linear.linear_invariant_cases,
    "linear_int8": linear.linear_int8_cases,
    "linear_int4": linear.linear_int4_cases,
    "linear_fp8": linear.linear_fp8_cases,
    "grouped_linear": experts.grouped_linear_cases,
    "combine_experts": experts.combine_experts_cases,
}
