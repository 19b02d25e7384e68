"""The parts of a decoder layer: linear maps with merged weights, attention over the paged cache, the gated MLP.

Weights are allocated empty and filled by the loader. Nothing here knows Hugging Face's tensor names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchgen.models.config import ModelConfig
from batchgen.models.cpu_linear import Pack


def pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [n, ...] -> [num_rows, ...] with zero rows at the end; x itself where n == num_rows."""
    missing = num_rows - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


class Linear(nn.Module):
    """y = x W^T + b; weight [out, in] may hold several projections, stacked on `out`."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        bias: bool,
        ops: Any,
        device: torch.device,
        dtype: torch.dtype,
        tied_to: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight: torch.Tensor | None = tied_to
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(num_out, num_in, device=device, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out, device=device, dtype=dtype), requires_grad=False) if bias else None
        multiply: Any = ops.linear_invariant if ops.batch_invariant else nn.functional.linear
        self.product: Callable[[torch.Tensor], torch.Tensor] = lambda x: multiply(x, self.weight, self.bias)

    def pack(self, pack: Pack) -> None:
        """Run on another product from now on. The plain weight is dropped; packed forms hold their own."""
        assert self.weight is not None
        self.product = pack(self.weight.detach(), self.bias)
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


def norm_weight(size: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, device=device, dtype=dtype), requires_grad=False)


class Attention(nn.Module):
    """Projections, QK-norm, rotary embedding and the write into the cache in one op, and attention over the cache."""

    def __init__(self, config: ModelConfig, ops: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.ops = ops
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps, self.scale = config.rms_norm_eps, config.head_dim**-0.5
        num_qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden_size, num_qkv, config.qkv_bias, ops, device, dtype)
        self.output = Linear(config.num_heads * config.head_dim, config.hidden_size, config.output_bias, ops, device, dtype)
        self.q_norm = norm_weight(config.head_dim, device, dtype) if config.qk_norm else None
        self.k_norm = norm_weight(config.head_dim, device, dtype) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,  # [num_rows, hidden]; rows from num_tokens on are padding
        rope: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,  # [num_tokens]
        slot_mapping: torch.Tensor,  # [num_tokens]
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        kv_scale: torch.Tensor | None,  # [2, num_blocks, block_size, num_kv_heads], of a float8 cache
        attend: Any,
    ) -> torch.Tensor:
        heads = self.qkv(x)[: positions.shape[0]].view(positions.shape[0], -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        scales = {} if kv_scale is None else {"key_scale": kv_scale[0], "value_scale": kv_scale[1]}
        self.ops.rope_and_write_kv(
            q, k, v, *kv_cache, slot_mapping, *rope, positions, self.q_norm, self.k_norm, self.eps, **scales
        )
        out = attend(q, *kv_cache, self.scale, **scales)
        return self.output(pad_rows(out.flatten(1), x.shape[0]))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: ModelConfig, ops: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, ops, device, dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, ops, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.silu_and_mul(self.gate_up(x)))


class DecoderLayer(nn.Module):
    """The weights of one layer; Decoder.forward calls its parts, since each norm is fused with the residual before it."""

    def __init__(self, config: ModelConfig, ops: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm = norm_weight(config.hidden_size, device, dtype)
        self.attention = Attention(config, ops, device, dtype)
        self.mlp_norm = norm_weight(config.hidden_size, device, dtype)
        self.mlp = Mlp(config, ops, device, dtype)
