"""Log-probabilities of given tokens, without writing the others.

    logprob[i, j] = logits[i, ids[i, j]] - lse[i],     lse[i] = ln sum_v exp(logits[i, v])

logits: [K, vocab]; ids: [K, n] int64 or int32. -> (logprob [K, n] float32, lse [K] float32). Chunks of a row are summed
apart, each below its own maximum, and put together in a fixed order: a row's result does not depend on the batch.
The maximum leaves the logit before the logarithm does, so large logits cost no digits.
A row of nothing but -inf has lse -inf and no meaning; a NaN or +inf in a row makes lse and logprob NaN.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.sampling import check_logits

CHUNK = 4096  # tokens of a program


def gather_logprobs_reference(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.double()
    lse = x.logsumexp(-1)
    lse = torch.where(x.isposinf().any(-1), torch.nan, lse)
    return (x.gather(1, ids.long()) - lse[:, None]).float(), lse.float()


def gather_logprobs_torch(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.float()
    base = x.amax(-1).nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=0.0)
    log_sum = (x - base[:, None]).exp_().sum(-1).log_()
    return x.gather(1, ids.long()) - base[:, None] - log_sum[:, None], base + log_sum


@triton.jit
def sum_chunk_kernel(logits_ptr, top_ptr, sum_ptr, vocab, stride_row, CHUNK: tl.constexpr):
    """Maximum of a chunk of a row, and the sum of exp(logit - maximum)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(top_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - base), 0))  # a NaN is in the sum, whatever the maximum says


@triton.jit(
    do_not_specialize=["num_ids", "stride_id_row", "stride_id"],
    do_not_specialize_on_alignment=["id_ptr", "logprob_ptr"],
)
def gather_logprobs_kernel(
    logits_ptr,
    id_ptr,
    top_ptr,
    sum_ptr,
    logprob_ptr,
    lse_ptr,
    num_ids,
    stride_row,
    stride_id_row,
    stride_id,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED_CHUNKS)
    chunk_ok = chunk < NUM_CHUNKS
    top = tl.load(top_ptr + row * NUM_CHUNKS + chunk, mask=chunk_ok, other=float("-inf"))
    total = tl.load(sum_ptr + row * NUM_CHUNKS + chunk, mask=chunk_ok, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    log_sum = tl.log(tl.sum(total * tl.exp(top - base), 0))
    tl.store(lse_ptr + row, base + log_sum)
    for start in range(0, num_ids, BLOCK_IDS):
        j = start + tl.arange(0, BLOCK_IDS)
        token = tl.load(id_ptr + row * stride_id_row + j.to(tl.int64) * stride_id, mask=j < num_ids, other=0).to(tl.int64)
        x = tl.load(logits_ptr + row * stride_row + token, mask=j < num_ids, other=0.0).to(tl.float32)
        tl.store(logprob_ptr + row * num_ids + j, x - base - log_sum, mask=j < num_ids)


def gather_logprobs_triton(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; rows of logits, and ids, may be strided. An id outside the vocabulary is undefined."""
    num_rows, vocab = check_logits("gather_logprobs", logits)
    if ids.dim() != 2 or ids.shape[0] != num_rows or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"gather_logprobs: ids must be [{num_rows}, n] int64 or int32, got {tuple(ids.shape)} {ids.dtype}")
    device = logits.device
    logprob = torch.empty(ids.shape, dtype=torch.float32, device=device)
    lse = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return logprob, lse
    num_chunks = -(-vocab // CHUNK)
    top = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    total = torch.empty_like(top)  # not a view of one tensor with top: its alignment would follow the batch
    sum_chunk_kernel[(num_rows, num_chunks)](logits, top, total, vocab, logits.stride(0), CHUNK=CHUNK, num_warps=8)
    gather_logprobs_kernel[(num_rows,)](
        logits, ids, top, total, logprob, lse, ids.shape[1], logits.stride(0), ids.stride(0), ids.stride(1),
        NUM_CHUNKS=num_chunks, PADDED_CHUNKS=triton.next_power_of_2(num_chunks), BLOCK_IDS=64, num_warps=1,
    )  # fmt: skip
    return logprob, lse
