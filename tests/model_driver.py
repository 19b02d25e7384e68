"""Runs a Decoder over sequences through a paged cache with shuffled blocks, in steps of given sizes; the tests' engine."""

from __future__ import annotations

import torch
from batchgen_kernels import AttentionMetadata

from batchgen.engine.kv_cache import KVCache
from batchgen.models.config import kv_cache_shape
from batchgen.models.decoder import Decoder
from batchgen.models.inputs import BatchInputs


class PagedDriver:
    """One cache, any number of sequences; `step` appends tokens to some of them and returns the logits of all of these."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int = 96,
        block_size: int = 4,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,  # the decoder's own
    ) -> None:
        self.decoder, self.block_size = decoder, block_size
        # NaN everywhere: whatever is read without having been written shows up
        shape, kv_dtype = kv_cache_shape(decoder.config, num_blocks, block_size), kv_dtype or decoder.dtype
        self.kv_cache = KVCache(shape, kv_dtype, decoder.device, decoder.ops, fill=float("nan"))
        self.free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}

    def step(self, work: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """work: sequence -> its next tokens. Returns sequence -> logits [num_tokens, vocab] of those tokens."""
        token_ids, positions, slots, query_start = [], [], [], [0]
        for sequence, tokens in work.items():
            start = self.lens.get(sequence, 0)
            blocks = self.blocks.setdefault(sequence, [])
            while len(blocks) * self.block_size < start + len(tokens):
                blocks.append(self.free.pop())
            for position in range(start, start + len(tokens)):
                positions.append(position)
                slots.append(blocks[position // self.block_size] * self.block_size + position % self.block_size)
            token_ids += tokens
            self.lens[sequence] = start + len(tokens)
            query_start.append(len(token_ids))
        logits = self.decoder(
            BatchInputs(
                torch.tensor(token_ids),
                torch.tensor(positions),
                torch.tensor(slots),
                torch.arange(len(token_ids)),
                self._metadata(list(work), query_start),
            ),
            self.kv_cache.tensor,
            self.kv_cache.scale,
        )
        assert logits.dtype == torch.float32
        parts = logits.split([len(tokens) for tokens in work.values()])
        return dict(zip(work, parts, strict=True))

    def _metadata(self, sequences: list[int], query_start: list[int]) -> AttentionMetadata:
        table = torch.zeros(len(sequences), max(len(self.blocks[s]) for s in sequences), dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(self.blocks[sequence])] = torch.tensor(self.blocks[sequence], dtype=torch.int32)
        query_lens = torch.tensor(query_start).diff()
        lens = torch.tensor([self.lens[s] for s in sequences], dtype=torch.int32)
        empty = torch.zeros(0, dtype=torch.int32)
        return AttentionMetadata(
            block_size=self.block_size,
            block_table=table,
            query_start=torch.tensor(query_start, dtype=torch.int32),
            seq_lens=lens,
            kv_start=torch.zeros_like(lens),
            decode_requests=(query_lens == 1).nonzero().flatten(),
            prefill_requests=(query_lens > 1).nonzero().flatten(),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(lens.max()),
            group_query_start=empty,
            group_query_end=empty,
            group_block_start=torch.zeros(1, dtype=torch.int32),
            group_blocks=empty,
        )


def run_whole(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] of one prefill."""
    return PagedDriver(decoder).step({0: tokens})[0]
