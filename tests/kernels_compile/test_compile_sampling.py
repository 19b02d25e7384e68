"""The ops on logits, compiled through their launchers for GPUs that are not here, and how many variants serve a job."""

import contextlib
import re

import cross_compile
import pytest
import torch
from batchgen_kernels import gather_logprobs, sampling
from batchgen_kernels._triton import tl, triton
from batchgen_kernels.cases.sampling import sample_tokens_case
from gates import BF16, FP16, FP32, TARGETS

SAMPLE = ("threshold_kernel", "score_chunk_kernel", "merge_chunks_kernel")
GATHER = ("sum_chunk_kernel", "gather_logprobs_kernel")
READ_THE_ROW = ("threshold_kernel", "score_chunk_kernel", "sum_chunk_kernel")  # the others read a few numbers
VOCAB = 128_256


def compile_ops(architecture, dtype, vocab=VOCAB):
    """{kernel name: compiled kernel} of a filtered draw and of a look-up of log-probabilities."""
    _, *rest = sample_tokens_case(2, 8, dtype).make()
    logits = torch.empty(2, vocab, dtype=dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cross_compile.target(*TARGETS[architecture]))
        compiled = [stack.enter_context(cross_compile.capture(sampling, *SAMPLE))]
        compiled.append(stack.enter_context(cross_compile.capture(gather_logprobs, *GATHER)))
        sampling.sample_tokens_triton(logits, *rest)
        gather_logprobs.gather_logprobs_triton(logits, torch.zeros(2, 5, dtype=torch.int64))
        return {kernel.metadata.name: kernel for kernels in compiled for kernel in kernels}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", TARGETS)
def test_nothing_spills_and_rows_are_read_wide(architecture, dtype, table):
    compiled = compile_ops(architecture, dtype)
    assert set(compiled) == {*SAMPLE, *GATHER}
    for name, kernel in compiled.items():
        r = cross_compile.report(kernel)
        table(name, f"{architecture} {str(dtype)[6:]} {VOCAB}", r)
        assert r["spills"] == 0 and r["shared"] <= r["shared_limit"], r
        # with 64 threads a warp, a thread of the search has but 4 logits of a tile: 64 bits in bfloat16
        if name in READ_THE_ROW and (architecture, name, dtype) != ("gfx942", "threshold_kernel", BF16):
            assert r["wide_loads"] > 0, r


def fused_products(kernel):
    """How many fused multiply-adds on float32 the machine code has; packed ones count once."""
    if "cubin" in kernel.asm:
        return len(re.findall(r"\bFFMA2?\b", cross_compile._tool("nvdisasm", "-c", cubin=kernel.asm["cubin"])))
    return len(re.findall(r"\bv_(?:pk_)?fma(?:c|k|ak|mk)?_f32", kernel.asm["amdgcn"]))


@pytest.mark.parametrize("architecture", TARGETS)
def test_no_product_is_fused_that_was_not_asked_for(architecture, monkeypatch):
    """A compiler that may fuse finds nothing to fuse: noise and weights round alike on every GPU, whatever its defaults.

    (`enable_fp_fusion=False` would not do: for sm_100, ptxas 12.9 fuses packed products and sums all the same.)
    """
    counts = []
    for fuse in ("0", "1"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", fuse)
        compiled = compile_ops(architecture, FP32, vocab=4096)
        counts.append([fused_products(compiled[name]) for name in SAMPLE[:2]])
    assert counts[0] == counts[1] and min(counts[0]) > 5, counts
    code = compiled["score_chunk_kernel"].asm
    assert not any(f"{name}.approx" in code.get("ptx", "") for name in ("ex2", "lg2", "div"))


def test_a_product_that_may_be_fused_is_seen(monkeypatch):
    """The gate above can fail."""
    counts = []
    for fuse in ("0", "1"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", fuse)
        with cross_compile.target("cuda", 90):
            counts.append(fused_products(unfused_kernel.warmup(FP32, FP32, N=128, grid=(1,))))
    assert counts == [0, 1]


@triton.jit
def unfused_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x * x + x)


def test_few_variants_serve_every_batch():
    """Over batch sizes, alignments and seeds: one of each kernel, two where a job may or may not filter."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cross_compile.target("cuda", 90))
        variants = stack.enter_context(cross_compile.count_variants())
        stack.enter_context(cross_compile.capture(sampling, *SAMPLE))
        stack.enter_context(cross_compile.capture(gather_logprobs, *GATHER))
        for num_rows in [*range(1, 19), 31, 32, 33, 140]:
            for offset, seed in ((0, 0), (1, 1), (1, 16), (2, 2**31), (3, 2**64 - 1)):
                _, *rows, _, _ = sample_tokens_case(num_rows + offset, 8, FP16).make()
                rows = [t[offset:] for t in rows]
                logits = torch.empty(num_rows, 4096, dtype=FP16)
                for filtered in (False, True):
                    sampling.sample_tokens_triton(logits, *rows, seed, filtered)
                ids = torch.zeros(num_rows + offset, 1 + num_rows % 5, dtype=torch.int64)[offset:]
                gather_logprobs.gather_logprobs_triton(logits, ids)
    counts = {name: len(keys) for name, keys in variants.items()}
    assert counts == {**dict.fromkeys((*SAMPLE, *GATHER), 1), "score_chunk_kernel": 2}
