"""Cases of the ops on logits: drawing tokens and looking up log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from batchgen_kernels.cases.case import Case, random_tensor

# temperature, top_k, top_p, min_p: every combination that takes another path, in one batch
SETTINGS = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.9, 20, 0.6, 0.05),
    (1.0, 0, 1.0, 0.2),
    (1.0, 1, 1.0, 0.0),
    (2.5, 3, 0.01, 0.0),
    (1e-3, 0, 0.5, 0.0),
    (30.0, 1 << 30, 0.999, 1e-6),
    (1.0, 7, 0.0, 0.0),
)


def strided_logits(num_rows: int, vocab: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """[num_rows, vocab] with values as of a language model, as a view with NaN between the rows."""
    padded = torch.full((num_rows, vocab + 19), float("nan"), dtype=dtype, device=device)
    padded[:, 3:-16] = 3 * random_tensor((num_rows, vocab), dtype, 0, device)
    return padded[:, 3:-16]


def sample_tokens_case(
    num_rows: int,
    vocab: int,
    dtype: torch.dtype,
    device: str = "cpu",
    settings: tuple[tuple[float, int, float, float], ...] = SETTINGS,
    filtered: bool = True,
    seed: int = 0xFEDCBA98_76543210,
    levels: int = 0,
) -> Case:
    """Row i has the i-th setting, and so on around; with levels, logits take so many values: ties. The last rows of more
    than 8 hold what is not finite."""

    def make() -> tuple[Any, ...]:
        logits = strided_logits(num_rows, vocab, dtype, device)
        if levels:
            logits.copy_((logits * levels / 6).round() * (6 / levels))
            logits[:, ::3] *= -1.0  # zeros of both signs
        if num_rows > 8:
            inf = float("inf")
            logits[-1], logits[-2, vocab // 2], logits[-3, -1] = -inf, inf, float("nan")
            logits[-4, : vocab - 1] = -inf
            logits[-5, ::2] = -inf
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
        parameters = [
            torch.tensor([settings[i % len(settings)][j] for i in range(num_rows)], dtype=kind, device=device)
            for j, kind in enumerate(dtypes)
        ]
        keys = torch.arange(num_rows, device=device) * -0x61C88646_80B583EB  # spread over 64 bits
        index = torch.arange(num_rows, dtype=torch.int32, device=device)
        return logits, *parameters, keys, index % 3, index * 1_000_003 % (1 << 24), seed, filtered

    label = f"[{num_rows}, {vocab}]{f' of {levels} levels' if levels else ''}{'' if filtered else ' unfiltered'}"
    return Case(label, make, lambda op, args: list(op(*args)))


def survivors(find_thresholds: Any, logits: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """[K, vocab] bool: which tokens the thresholds of `find_thresholds(logits, *parameters)` leave."""
    bits = (logits.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    key = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    return (key >= find_thresholds(logits, *parameters)[:, None]) & (logits > -float("inf"))


def gather_logprobs_case(
    num_rows: int, vocab: int, num_ids: int, dtype: torch.dtype, device: str = "cpu", index: torch.dtype = torch.int64
) -> Case:
    def make() -> tuple[Any, ...]:
        logits = strided_logits(num_rows, vocab, dtype, device)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, vocab, (num_ids, num_rows), generator=generator).to(index).to(device).T
        if num_rows > 2:
            logits[0] += 1000.0
            logits[1, 1:] = float("-inf")
            logits[2, -1] = float("inf")
        return logits, ids

    return Case(f"{num_ids} of [{num_rows}, {vocab}]", make, lambda op, args: list(op(*args)))


def sample_tokens_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield sample_tokens_case(11, 31, dtype, device, levels=5)
    yield sample_tokens_case(16, 1000, dtype, device)
    yield sample_tokens_case(3, 5003, dtype, device, filtered=False, levels=9, seed=7)  # the best of two chunks may tie
    yield sample_tokens_case(3, 1, dtype, device)
    yield sample_tokens_case(4, 2, dtype, device, settings=((1.0, 1, 0.5, 0.0), (1.0, 2, 0.9, 0.5)))


def gather_logprobs_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield gather_logprobs_case(5, 1000, 3, dtype, device)
    yield gather_logprobs_case(3, 4099, 70, dtype, device, torch.int32)  # a chunk of -inf only
    yield gather_logprobs_case(3, 1, 1, dtype, device)
    yield gather_logprobs_case(2, 31, 0, dtype, device)
