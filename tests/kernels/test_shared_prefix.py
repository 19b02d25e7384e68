"""Shared prefixes read once: random prefix trees against attention over each request's whole context, in float64."""


import pytest
import torch
from batchgen_kernels import attention_triton, shared_prefix
from batchgen_kernels._triton import interpreting
from batchgen_kernels.attention_options import NO_OPTIONS
from batchgen_kernels.attention_reference import plan_attention_reference
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.cases.shared_prefix import shared_inputs

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


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_first(depth):
    inputs = shared_inputs(depth, 6, 2, 64, 16, FP32, DEVICE)
    assert relative_error(attend(inputs).cpu(), reference(inputs)) < TOLERANCE[FP32]
