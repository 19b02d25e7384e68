"""The native decoder: one step of token rows through all layers, logits of the sampled rows out. Knows no requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from batchgen.models.config import ModelConfig
from batchgen.models.cpu_linear import available_products, choose_products, int8_product, shape_of
from batchgen.models.inputs import BatchInputs
from batchgen.models.layers import DecoderLayer, Linear, norm_weight, pad_rows


class Decoder(nn.Module):
    """A pre-norm transformer of the Llama kind over a paged key/value cache.

    `ops` is what `batchgen_kernels.select_ops` returns. Weights are uninitialized until `load_decoder` fills them.
    """

    def __init__(
        self, config: ModelConfig, ops: Any, device: torch.device, dtype: torch.dtype, max_model_len: int | None = None
    ) -> None:
        super().__init__()
        config.check_model_len(max_model_len or 0)
        self.config, self.ops, self.device, self.dtype = config, ops, device, dtype
        self.embedding = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype), requires_grad=False
        )
        # of DecoderLayer, which the type of ModuleList cannot say
        self.layers: Any = nn.ModuleList(DecoderLayer(config, ops, device, dtype) for _ in range(config.num_layers))
        self.final_norm = norm_weight(config.hidden_size, device, dtype)
        tied = self.embedding if config.tie_word_embeddings else None
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, ops, device, dtype, tied)
        self.min_rows = 1  # steps are padded to it
        self.products: dict[str, str] = {}  # shape -> product, where pack_weights chose
        self.rope = rope_tables(config, max_model_len or config.max_supported_len, device)

    def linears(self) -> Iterator[Linear]:
        """All linear layers, the head last."""
        for layer in self.layers:
            yield from (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        yield self.lm_head

    def pack_weights(self, recorded: Mapping[str, str], int8: bool = False) -> None:
        """Choose products for a CPU, or those of `recorded` (an earlier `products`), and pack the filled weights for them.

        One layer's weight is held twice meanwhile; a tied head that is packed stays beside the embedding for good.
        """
        found = {"int8": int8_product} if int8 else available_products()
        choices = choose_products([linear.weight for linear in self.linears() if linear.weight is not None], recorded, found)
        for linear in self.linears():
            assert linear.weight is not None
            linear.pack(found[choices[shape_of(linear.weight)].product])
        self.min_rows = max(choice.min_rows for choice in choices.values())
        self.products = {shape: choice.product for shape, choice in choices.items()}

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs, kv_cache: torch.Tensor, kv_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one step; keys and values of its tokens are written into the cache.

        kv_cache: `kv_cache_shape(config, ...)` of the model's dtype, or of float8_e4m3fn together with kv_scale, the same
        shape without head_dim, float32. Returns logits [num_sampled, vocab_size] float32, row i
        for token row inputs.logits_indices[i]. On a CPU, the result for a token is bitwise the same in any step.
        """
        config, ops = self.config, self.ops
        num_rows = max(inputs.token_ids.shape[0], self.min_rows)
        attend = ops.plan_attention(inputs.attention, config.num_heads, config.num_kv_heads, config.head_dim)
        residual = nn.functional.embedding(pad_rows(inputs.token_ids, num_rows), self.embedding)
        x = ops.rms_norm(residual, self.layers[0].input_norm, config.rms_norm_eps)
        next_norms = [layer.input_norm for layer in self.layers][1:] + [self.final_norm]
        scales = [None] * config.num_layers if kv_scale is None else kv_scale
        for layer, layer_cache, layer_scale, next_norm in zip(self.layers, kv_cache, scales, next_norms, strict=True):
            x = layer.attention(x, self.rope, inputs.positions, inputs.slot_mapping, layer_cache, layer_scale, attend)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, config.rms_norm_eps)
            x = layer.mlp(x)
            x, residual = ops.add_rms_norm(x, residual, next_norm, config.rms_norm_eps)
        return self.logits(x[inputs.logits_indices])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_sampled, hidden], after the final norm -> [num_sampled, vocab_size] float32."""
        num_sampled = x.shape[0]
        if num_sampled == 0:  # a step of prefill chunks only
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        rows = pad_rows(x, max(num_sampled, self.min_rows))
        return self.lm_head(rows)[:num_sampled].float()


def rope_tables(config: ModelConfig, max_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_len, head_dim / 2] float32."""
    inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    factor = config.rope_attention_factor
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
