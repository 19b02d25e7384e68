"""Continuous batching over a paged KV cache. scheduler, block_pool and batch_state are host side and know no torch."""
