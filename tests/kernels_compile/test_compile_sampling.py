"""The ops on logits, compiled through their launchers for GPUs that are not here, and how many variants serve a job."""

import contextlib

import cross_compile
import pytest
import torch
from batchgen_kernels import gather_logprobs, sampling
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


@pytest.mark.parametrize("architecture", TARGETS)
def test_products_and_sums_that_decide_a_token_are_not_fused(architecture):
    """Fused, they round once and not twice: other noise on each kind of GPU, and not that of the reference."""
    compiled = compile_ops(architecture, FP32, vocab=4096)
    for name in SAMPLE[:2]:
        code = compiled[name].asm
        assert "contract" not in code["llir"] and "llvm.fma" not in code["llir"] and "llvm.fmuladd" not in code["llir"]
        if "ptx" in code:
            assert "fma.rn.f32" not in code["ptx"] and "ex2.approx" not in code["ptx"] and "lg2.approx" not in code["ptx"]


def test_fusing_would_be_seen(monkeypatch):
    """The gate above can fail: without the option there are fused products in the code."""
    args = sample_tokens_case(2, 64, FP32, filtered=False).make()
    kernel = sampling.score_chunk_kernel

    class Fusing:
        def __getitem__(self, grid):
            return lambda *a, **options: compiled.append(
                kernel.warmup(*a, grid=grid, **options | {"enable_fp_fusion": True})
            )

    compiled = []
    monkeypatch.setattr(sampling, "score_chunk_kernel", Fusing())
    with cross_compile.target("cuda", 90), cross_compile.capture(sampling, "merge_chunks_kernel"):
        sampling.sample_tokens_triton(*args)
    sass = cross_compile._tool("nvdisasm", "-c", cubin=compiled[0].asm["cubin"])
    assert sass.count("FFMA") > 20


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_ptxas_fuses_nothing_either(architecture):
    """ptxas may fuse what PTX has apart, unless told. What FFMA there is belongs to the one division a row."""
    compiled = compile_ops(architecture, FP32, vocab=4096)
    sass = cross_compile._tool("nvdisasm", "-c", cubin=compiled["score_chunk_kernel"].asm["cubin"])
    assert sass.count("FFMA") <= 20 < sass.count("FMUL"), sass.count("FFMA")


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
