"""Paged attention on the CPU: the three forms of a step as a few large calls of torch's own operators.

    shared prefix   one product for all members of a group: their query heads are packed into the rows of one matrix, and
                    the group's keys and values are read once (Hydragen, Juravsky et al. 2024; cascade in FlashInfer)
    prefill         one causal call a request for its new tokens, one full call for its private context before them
    decode          keys and values are read where they lie: scores are the entries of a sparse matrix (query heads times
                    rows of the cache) at the keys that each request sees, answers are weighted sums of rows of the cache

The parts are merged by log-sum-exp: softmax over a union of key sets is the mean of the parts weighted by exp(lse).

Packed layout: with G = num_q_heads / num_kv_heads, row t * G + g of head k is query head k * G + g of token t, so a
range of tokens is a range of rows and a group is a view. Blocks whose ids are consecutive are read in place.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import NamedTuple

import torch

from batchgen_kernels.attention_options import AttentionOptions, check_options
from batchgen_kernels.attention_plain import attention_plain
from batchgen_kernels.attention_reference import AttentionPlan
from batchgen_kernels.metadata import AttentionMetadata

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")

# Decodes are padded to the longest of their bucket; a bucket is closed where padding would pass this share.
MAX_PADDING = 0.25
MIN_BUCKET = 4
PADDED_TO = 16  # keys of a decode; sums over them are made of this many, so that padding changes no bit


class BlockRange(NamedTuple):
    """Where a run of key/value tokens lies: in place, if its blocks are consecutive, or to be gathered."""

    first_slot: int  # of the first token, if in place
    block_ids: torch.Tensor | None  # [num_blocks] int64, if gathered
    num_tokens: int

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """cache [num_blocks, block_size, num_kv_heads, D] -> [num_kv_heads, num_tokens, D], a view where possible."""
        if self.block_ids is None:
            _, _, num_kv_heads, head_dim = cache.shape
            _, token, head, _ = cache.stride()
            offset = cache.storage_offset() + self.first_slot * token
            return cache.as_strided((num_kv_heads, self.num_tokens, head_dim), (head, token, 1), offset)
        return cache.index_select(0, self.block_ids).flatten(0, 1)[: self.num_tokens].transpose(0, 1)


def block_range(blocks: torch.Tensor, num_tokens: int, block_size: int) -> BlockRange:
    """blocks: the ids of consecutive blocks of a sequence, from a block boundary on."""
    ids = blocks[: -(-num_tokens // block_size)].long()
    first, last = int(ids[0]), int(ids[-1])
    in_place = last - first == len(ids) - 1 and bool((ids[1:] - ids[:-1] == 1).all())
    return BlockRange(first * block_size, None if in_place else ids, num_tokens)


class GroupLevel(NamedTuple):
    """Groups with disjoint query ranges, merged together. `tokens` is a slice if the ranges leave no gap."""

    queries: list[tuple[int, int]]  # token ranges
    keys: list[BlockRange]
    tokens: slice | torch.Tensor  # of all ranges


class Prefill(NamedTuple):
    tokens: slice
    context: BlockRange | None  # private keys before the new tokens
    keys: BlockRange  # private keys up to and with the new tokens


class DecodeBucket:
    """Requests with one query token each and about equally many private keys; B of them, padded to L keys."""

    def __init__(self, requests: slice, blocks: torch.Tensor, num_tokens: torch.Tensor, block_size: int) -> None:
        """requests: of all decodes. blocks [B, max_blocks] int64, of private keys; num_tokens [B] int64."""
        self.requests, self.block_size = requests, block_size
        # a table's entries behind a request's own blocks may be anything
        own = torch.arange(blocks.shape[1]) * block_size < num_tokens[:, None]
        self.blocks = torch.where(own, blocks, blocks[:, :1])
        num_keys = -(-int(num_tokens.max()) // PADDED_TO) * PADDED_TO
        self.key = torch.arange(num_keys)
        self.invisible = self.key >= num_tokens[:, None]  # [B, L]
        self._scores: torch.Tensor | None = None

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """cache [num_blocks, block_size, num_kv_heads, D] as float32 rows [num_blocks * block_size * num_kv_heads, D]:
        the cache itself, or a copy of the bucket's blocks."""
        if not self.copies(cache):
            return cache.view(-1, cache.shape[-1])
        return cache.index_select(0, self.blocks_to_copy(cache)).float().view(-1, cache.shape[-1])

    def copies(self, cache: torch.Tensor) -> bool:
        """A sparse matrix has no more entries in a row than it has columns, so a cache of few rows is copied too."""
        return cache.dtype != torch.float32 or math.prod(cache.shape[:3]) < len(self.key)

    def blocks_to_copy(self, cache: torch.Tensor) -> torch.Tensor:
        """The bucket's blocks, and its first one again until there are as many rows as keys."""
        blocks = self.blocks.flatten()
        needed = -(-len(self.key) // math.prod(cache.shape[1:3]))
        return torch.cat([blocks, blocks[:1].expand(max(0, needed - len(blocks)))])

    def scores(self, cache: torch.Tensor, group_size: int) -> torch.Tensor:
        """Sparse [B * num_q_heads, rows], L entries a row: the keys of each query head, all layers alike. Made once."""
        if self._scores is None:
            num_kv_heads = cache.shape[2]
            blocks, num_blocks = self.blocks, cache.shape[0]
            if self.copies(cache):
                blocks, num_blocks = torch.arange(blocks.numel()).view(blocks.shape), len(self.blocks_to_copy(cache))
            at = (self.key // self.block_size).clamp_(max=blocks.shape[1] - 1)
            slots = blocks[:, at] * self.block_size + self.key % self.block_size
            slots = torch.where(self.invisible, slots[:, :1], slots)  # padding reads a key that is its own, at weight 0
            num_rows = num_blocks * self.block_size * num_kv_heads
            columns = slots[:, None, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None, None]
            columns = columns.expand(-1, -1, group_size, -1).reshape(-1)
            starts = torch.arange(0, len(columns) + 1, len(self.key))
            index = torch.int32 if max(num_rows, len(columns)) < 1 << 31 else torch.int64
            self._scores = torch.sparse_csr_tensor(
                starts.to(index), columns.to(index), torch.zeros(len(columns)), (len(starts) - 1, num_rows),
                check_invariants=False,
            )  # fmt: skip
        return self._scores

    def attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [B, num_kv_heads, G, D] float32 -> [B, num_kv_heads, G, D] and [B, num_kv_heads, G] float32."""
        sparse = self.scores(key_cache, query.shape[2])
        keys = self.rows(key_cache).t()
        torch.sparse.sampled_addmm(sparse, query.flatten(0, 2), keys, beta=0.0, alpha=scale, out=sparse)
        weights = sparse.values()
        by_request = weights.view(len(query), -1, len(self.key))
        by_request.masked_fill_(self.invisible[:, None], float("-inf"))
        largest = by_request.amax(-1, keepdim=True)
        by_request.sub_(largest).exp_()
        total = by_request.unflatten(-1, (-1, PADDED_TO)).sum(2).sum(-1)
        starts, columns = sparse.crow_indices(), sparse.col_indices()
        out = torch.embedding_bag(self.rows(value_cache), columns, starts, False, 0, False, weights, True)[0]
        lse = total.log().add_(largest.squeeze(-1))
        return out.view(query.shape).div_(total.view(query.shape[:3])[..., None]), lse.view(query.shape[:3])


def group_levels(metadata: AttentionMetadata) -> list[GroupLevel]:
    """Split the groups into levels of disjoint query ranges, in the order in which they are given."""
    levels: list[list[int]] = []
    start, end = metadata.group_query_start.tolist(), metadata.group_query_end.tolist()
    for g in sorted(range(len(start)), key=lambda g: start[g]):
        for level in levels:
            if end[level[-1]] <= start[g]:
                level.append(g)
                break
        else:
            levels.append([g])
    offsets = metadata.group_block_start.tolist()
    result = []
    for level in levels:
        queries = [(start[g], end[g]) for g in level]
        keys = []
        for g in level:
            blocks = metadata.group_blocks[offsets[g] : offsets[g + 1]]
            keys.append(block_range(blocks, len(blocks) * metadata.block_size, metadata.block_size))
        tokens: slice | torch.Tensor
        if all(a[1] == b[0] for a, b in itertools.pairwise(queries)):
            tokens = slice(queries[0][0], queries[-1][1])
        else:
            tokens = torch.cat([torch.arange(a, b) for a, b in queries])
        result.append(GroupLevel(queries, keys, tokens))
    return result


def decode_buckets(metadata: AttentionMetadata) -> tuple[torch.Tensor, list[DecodeBucket]]:
    """Requests with one query token, cut where padding would cost more than MAX_PADDING, longest first if there are cuts.

    Also returns their query tokens, [num_decodes] int64, in that order.
    """
    requests = metadata.decode_requests
    if len(requests) == 0:
        return requests, []
    block_size = metadata.block_size
    first_block = metadata.kv_start[requests].long() // block_size
    num_tokens = metadata.seq_lens[requests].long() - metadata.kv_start[requests].long()
    order = torch.argsort(num_tokens, descending=True, stable=True)
    sizes = num_tokens[order].tolist()
    cuts = [0]
    for i, size in enumerate(sizes):
        if i - cuts[-1] >= MIN_BUCKET and size < (1 - MAX_PADDING) * sizes[cuts[-1]]:
            cuts.append(i)
    if len(cuts) == 1:
        order = torch.arange(len(sizes))
    buckets = []
    for begin, end in itertools.pairwise([*cuts, len(sizes)]):
        chosen = order[begin:end]
        column = torch.arange(-(-sizes[begin] // block_size))
        index = (first_block[chosen, None] + column).clamp_(max=metadata.block_table.shape[1] - 1)
        blocks = metadata.block_table[requests[chosen, None], index].long()
        buckets.append(DecodeBucket(slice(begin, end), blocks, num_tokens[chosen], block_size))
    return metadata.query_start[requests[order]].long(), buckets


def prefills(metadata: AttentionMetadata) -> list[Prefill]:
    result = []
    block_size = metadata.block_size
    for r in metadata.prefill_requests.tolist():
        begin, end = int(metadata.query_start[r]), int(metadata.query_start[r + 1])
        kv_start, seq_len = int(metadata.kv_start[r]), int(metadata.seq_lens[r])
        blocks = metadata.block_table[r, kv_start // block_size :]
        num_context = seq_len - (end - begin) - kv_start
        context = block_range(blocks, num_context, block_size) if num_context else None
        result.append(Prefill(slice(begin, end), context, block_range(blocks, seq_len - kv_start, block_size)))
    return result


def cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def merge_into(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a part into (out, lse) in place. out, part [..., D]; lse, part_lse [...]; natural logarithms."""
    total = torch.logaddexp(lse, part_lse)
    out.lerp_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of n tokens among themselves. query [num_kv_heads, G, n, D]; key, value [num_kv_heads, n, D].

    Returns [num_kv_heads, G, n, D] and [num_kv_heads, G, n]. A value that is not finite spoils the tokens from it on, as
    it must, but none before it: there its weight is 0, and 0 * NaN would be NaN.
    """
    shape = query.shape
    # one cheap pass; which token it was is asked only if the sum is not finite
    finite = None if math.isfinite(value.sum(dtype=torch.float32)) else torch.isfinite(value).all(-1).all(0)
    if finite is not None and not bool(finite.all()):
        n = int(finite.int().argmin())
        out, lse = query.new_full(shape, torch.nan), query.new_full(shape[:3], torch.nan, dtype=torch.float32)
        if n:
            out[:, :, :n], lse[:, :, :n] = causal_attention(query[:, :, :n], key[:, :n], value[:, :n], scale)
        return out, lse
    # the query heads of one key/value head see the same keys: expanded, not copied
    k, v = key[:, None].expand(shape), value[:, None].expand(shape)
    return flash_attention(query, k, v, is_causal=True, scale=scale)


def plan_attention_torch(metadata: AttentionMetadata, num_q_heads: int, num_kv_heads: int, head_dim: int) -> AttentionPlan:
    """See AttentionPlan for what it returns. Options (a window, ...) are for attention_plain.py, which shares no reads."""
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    group_size = num_q_heads // num_kv_heads
    levels = group_levels(metadata)
    prefill_list = prefills(metadata)
    decode_tokens, buckets = decode_buckets(metadata)
    needs_packed = bool(levels) or any(p.context is not None for p in prefill_list)

    def run(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options = AttentionOptions(window, soft_cap, sinks, key_scale, value_scale)
        check_options("attention", query, key_cache, options)
        if any(options.used):
            return attention_plain(metadata, query, key_cache, value_cache, scale, options)
        num_tokens = query.shape[0]
        by_head = query.view(num_tokens, num_kv_heads, group_size, head_dim)
        packed = by_head.transpose(0, 1).reshape(num_kv_heads, -1, head_dim) if needs_packed else query
        out = torch.empty(by_head.shape, dtype=torch.float32)
        lse = torch.empty(by_head.shape[:3], dtype=torch.float32)

        def attend(begin: int, end: int, keys: BlockRange) -> tuple[torch.Tensor, torch.Tensor]:
            """Tokens [begin, end) against a whole key range: [num_kv_heads, tokens, G, D] and [num_kv_heads, tokens, G]."""
            rows = packed[None, :, begin * group_size : end * group_size]
            part, part_lse = flash_attention(rows, keys.read(key_cache)[None], keys.read(value_cache)[None], scale=scale)
            shape = (num_kv_heads, end - begin, group_size)
            return part.view(*shape, head_dim), part_lse.view(shape)

        for p in prefill_list:
            n = p.tokens.stop - p.tokens.start
            k, v = p.keys.read(key_cache)[:, -n:], p.keys.read(value_cache)[:, -n:]
            part, part_lse = causal_attention(by_head[p.tokens].permute(1, 2, 0, 3), k, v, scale)
            out[p.tokens], lse[p.tokens] = part.permute(2, 0, 1, 3), part_lse.permute(2, 0, 1)
            if p.context is not None:
                part, part_lse = attend(p.tokens.start, p.tokens.stop, p.context)
                merge_into(out[p.tokens], lse[p.tokens], part.transpose(0, 1), part_lse.transpose(0, 1))

        if buckets:
            decode_queries = by_head.index_select(0, decode_tokens).float()
            parts = [b.attend(decode_queries[b.requests], key_cache, value_cache, scale) for b in buckets]
            out.index_copy_(0, decode_tokens, cat([part for part, _ in parts], 0))
            lse.index_copy_(0, decode_tokens, cat([part for _, part in parts], 0))

        for level in levels:
            parts = [attend(begin, end, keys) for (begin, end), keys in zip(level.queries, level.keys)]
            part = cat([part for part, _ in parts], 1).transpose(0, 1)
            part_lse = cat([part for _, part in parts], 1).transpose(0, 1)
            if isinstance(level.tokens, slice):
                merge_into(out[level.tokens], lse[level.tokens], part, part_lse)
            else:
                some, some_lse = out[level.tokens], lse[level.tokens]
                merge_into(some, some_lse, part, part_lse)
                out[level.tokens], lse[level.tokens] = some, some_lse
        return out.view(num_tokens, num_q_heads, head_dim).to(query.dtype)

    return run


plan_attention_torch.shares_prefix_reads = True  # type: ignore[attr-defined]
