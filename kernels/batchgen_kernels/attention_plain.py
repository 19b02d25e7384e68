"""Attention with a window, a soft cap, sinks or a float8 cache on the CPU: a request at a time, in plain torch.

The equation is that of attention_reference.py, in float32. Shared-prefix groups are not used: each request reads all that it
sees of its keys and values from its block table.
"""

from __future__ import annotations

import torch

from batchgen_kernels.attention_options import AttentionOptions, read_tokens
from batchgen_kernels.metadata import AttentionMetadata

CHUNK = 256  # query tokens of which the scores are held at a time


def attention_plain(
    metadata: AttentionMetadata,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    options: AttentionOptions,
) -> torch.Tensor:
    """-> [T, num_q_heads, D] of query's dtype; arguments as those of an AttentionPlan."""
    block_size, num_kv_heads = key_cache.shape[1:3]
    out = torch.empty_like(query)
    starts, lens = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    for r, seq_len in enumerate(lens):
        for begin in range(starts[r], starts[r + 1], CHUNK):
            end = min(begin + CHUNK, starts[r + 1])
            last = seq_len - (starts[r + 1] - end)  # one past the position of the last token of the chunk
            position = torch.arange(last - (end - begin), last)
            first_seen = max(0, int(position[0]) - options.window + 1) if options.window else 0
            first_key = first_seen // block_size * block_size
            blocks = metadata.block_table[r, first_key // block_size : -(-last // block_size)].long()
            k = read_tokens(key_cache, options.key_scale, blocks, last - first_key, torch.float32)
            v = read_tokens(value_cache, options.value_scale, blocks, last - first_key, torch.float32)
            key = torch.arange(first_key, last)
            visible = key <= position[:, None]
            if options.window:
                visible &= key > position[:, None] - options.window
            # heads of one key/value head together: [num_kv_heads, group, tokens, D]
            q = query[begin:end].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).float()
            sinks = None if options.sinks is None else options.sinks.view(num_kv_heads, -1)
            result = attend(q, k.transpose(0, 1), v.transpose(0, 1), visible, scale, options.soft_cap, sinks)
            out[begin:end] = result.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
    return out


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [H, G, n, D]; key, value [H, L, D]; visible [n, L]; sinks [H, G] or None -> [H, G, n, D], all float32."""
    num_heads, group, num_tokens, head_dim = query.shape
    scores = (query.reshape(num_heads, -1, head_dim) @ key.transpose(1, 2)).view(num_heads, group, num_tokens, -1) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh_()
    finite = value.isfinite().all(-1)
    if not bool(finite.all()):  # a row that does not see such a value would get 0 * NaN
        scores = scores.masked_fill(~finite[:, None, None], torch.nan)
        value = value.masked_fill(~finite[..., None], 0.0)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks[:, :, None, None].expand(num_heads, group, num_tokens, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.reshape(num_heads, group * num_tokens, -1) @ value).view(query.shape)
