"""The paged key/value cache on the device, and how many blocks of it the memory allows."""

from __future__ import annotations

import math

import numpy as np
import torch
from batchgen_kernels import Ops


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory as they are touched (torch.zeros touches all), on a boundary of 64 bytes as torch has them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + 64, np.uint8)  # calloc
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


class KVCache:
    """One tensor [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; block 0 is the null block.

    Where dtype is float8_e4m3fn, `scale` has the same shape without head_dim, in float32; else it is None.
    `fill` is what the blocks hold at first: zero, or NaN in tests, which must change nothing.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ops: Ops, fill: float = 0.0
    ) -> None:
        self.tensor = lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        if fill:
            self.tensor.fill_(fill)
        self.tensor[:, :, 0] = 0
        self.scale = None
        if dtype == torch.float8_e4m3fn:
            self.scale = torch.full(shape[:-1], fill, device=device) if fill else torch.zeros(shape[:-1], device=device)
            self.scale[:, :, 0] = 0
        self.ops = ops

    def copy_blocks(self, block_copies: np.ndarray) -> None:
        """Copy whole blocks in all layers, before a step's writes. block_copies: [m, 2] source and destination."""
        if len(block_copies):
            source, destination = torch.from_numpy(block_copies.T.astype(np.int64)).to(self.tensor.device)
            self.ops.copy_blocks(self.tensor, source, destination)
            if self.scale is not None:
                self.ops.copy_blocks(self.scale, source, destination)
