"""The next token of each sampled row. A draw depends on (job seed, row key, sample index, position) and the logits only.

Greedy at temperature 0 (or so low that the scaled logits would overflow). Otherwise, in the order of Hugging Face:
temperature, top-k, top-p, min-p; then, on the triton backend, Gumbel-max on the device (`batchgen_kernels.sampling`), and
else the inverse of the cumulative distribution at one uniform number: noise for each token of the vocabulary would cost a
CPU as much as the model. Both number from Philox4x32-10 (Salmon et al. 2011), keyed by the seed and counted by row, sample
and position; they give different tokens of one distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from batchgen_kernels import Ops
from batchgen_kernels.sampling import MIN_TEMPERATURE

from batchgen.engine.device_state import to_device

TOP_P_CANDIDATES = 256  # sorted first; a row whose nucleus is larger is sorted whole


class SamplingConfig(NamedTuple):
    """temperature 0 = greedy; top_k 0 = off; top_p 1 = off; min_p 0 = off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether an answer depends on its prompt alone, not on its row's seed."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1 or self.top_p <= 0.0


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-10. counter: [n, 4] uint32; seed: the 64-bit key. Returns [n, 4] uint32."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> half) ^ c[1] ^ k0, p1 & low, (p0 >> half) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(c, 1).astype(np.uint32)


def uniforms(seed: int, row_keys: np.ndarray, sample_index: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] float64 in [0, 1), 53 random bits each. row_keys: [n] uint64; sample_index, positions: [n] (output index)."""
    counter = np.empty((len(row_keys), 4), np.uint32)
    counter[:, 0] = row_keys & np.uint64(0xFFFFFFFF)
    counter[:, 1] = row_keys >> np.uint64(32)
    counter[:, 2], counter[:, 3] = sample_index, positions
    bits = philox(counter, seed).astype(np.uint64)
    return ((bits[:, 0] << np.uint64(21)) | (bits[:, 1] >> np.uint64(11))).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor,
    config: SamplingConfig,
    row_keys: np.ndarray,
    sample_index: np.ndarray,
    positions: np.ndarray,
    ops: Ops,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [K, vocab] float -> token ids [K] int32, and whether the row's logits were usable [K] bool, on their device.

    row_keys: [K] uint64; sample_index, positions (of the output): [K].
    """
    if ops.backend == "triton":
        return sample_by_gumbel_max(logits, config, row_keys, sample_index, positions, ops)
    return sample_by_inversion(logits, config, row_keys, sample_index, positions)


def sample_by_gumbel_max(
    logits: torch.Tensor,
    config: SamplingConfig,
    row_keys: np.ndarray,
    sample_index: np.ndarray,
    positions: np.ndarray,
    ops: Ops,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All on the logits' device."""
    keys, samples, indices = to_device(
        [row_keys.view(np.int64), sample_index.astype(np.int32), positions.astype(np.int32)], logits.device
    )

    def in_each_row(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

    ids, finite = ops.sample_tokens(
        logits,
        in_each_row(config.temperature, torch.float32),
        in_each_row(min(config.top_k, 2**31 - 1), torch.int32),
        in_each_row(config.top_p, torch.float32),
        in_each_row(config.min_p, torch.float32),
        keys,
        samples,
        indices,
        config.seed,
        filtered=config.temperature >= MIN_TEMPERATURE and (config.top_k > 0 or config.top_p < 1.0 or config.min_p > 0.0),
    )
    return ids, finite


def sample_by_inversion(
    logits: torch.Tensor,
    config: SamplingConfig,
    row_keys: np.ndarray,
    sample_index: np.ndarray,
    positions: np.ndarray,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In plain torch, with the random numbers made on the host."""
    top, best = logits.max(dim=-1)
    finite = torch.isfinite(top)
    if config.is_greedy:
        return best.to(torch.int32), finite
    scaled = (logits.float() - top[:, None].float()) / config.temperature
    probabilities = torch.softmax(torch.nan_to_num(scaled, nan=0.0), dim=-1)
    keep_top(probabilities, config.top_k, config.top_p, config.min_p)
    u = torch.from_numpy(uniforms(config.seed, row_keys, sample_index, positions)).to(logits.device)
    # in float64, so that the tail of a large vocabulary is not lost; renormalised by the total
    cumulative = probabilities.double().cumsum(dim=-1)
    ids = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    ids = ids.clamp_(max=logits.shape[-1] - 1)
    dropped = probabilities.gather(1, ids[:, None])[:, 0] == 0  # u fell on the last edge: take the most likely
    return torch.where(dropped, best, ids).to(torch.int32), finite


def keep_top(probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> None:
    """Zero, in place, what top-k, then top-p (over what top-k left, renormalised), then min-p drop.

    probabilities: [K, vocab]. top-p keeps the smallest set of most likely tokens whose sum reaches top_p, ties with its
    least likely included; min-p what is at least min_p times as likely as the most likely.
    """
    vocab = probabilities.shape[-1]
    if 0 < top_k < vocab:
        smallest = probabilities.topk(top_k, dim=-1).values[:, -1:]
        probabilities.masked_fill_(probabilities < smallest, 0.0)
    if top_p < 1.0:
        total = probabilities.sum(-1, keepdim=True)
        ranked = probabilities.topk(min(TOP_P_CANDIDATES, vocab), dim=-1).values
        if bool((ranked.sum(-1, keepdim=True) < top_p * total).any()):
            ranked = probabilities.sort(dim=-1, descending=True).values
        reached = ranked.cumsum(-1) >= top_p * total
        last = reached.int().argmax(-1, keepdim=True)  # the first rank at which the sum is reached
        last = torch.where(reached.any(-1, keepdim=True), last, ranked.shape[-1] - 1)
        probabilities.masked_fill_(probabilities < ranked.gather(1, last), 0.0)
    if min_p > 0.0:
        probabilities.masked_fill_(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0.0)
