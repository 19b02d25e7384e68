"""What a job asks of a device, in floating-point operations and bytes, from counts of its steps. No torch.

FLOPs   = 2 N T + 2 Nh K + 4 L H D C           N, Nh parameters of layers and head; T query tokens, K of them sampled;
bytes   = S (N + Nh) w + kv (R + T)            C sum over query tokens of the keys that each sees; S steps, R tokens of
T_seq   = FLOPs / F + bytes / B                KV read; w bytes of a weight, kv of a token's keys and values;
T_overlap = max(FLOPs / F, bytes / B)          F, B rates of the device
"""

from __future__ import annotations

from typing import NamedTuple


class ModelShape(NamedTuple):
    """What of a model the cost of a step depends on."""

    layer_parameters: int
    head_parameters: int
    num_layers: int
    num_heads: int
    head_dim: int
    weight_bytes: int  # of one parameter
    kv_bytes: int  # of one token


class Work(NamedTuple):
    """Counts summed over steps."""

    steps: int
    query_tokens: int
    sampled: int
    context: int  # sum over query tokens of the keys that each sees
    kv_read: int  # tokens of keys and values

    def linear_flops(self, m: ModelShape) -> int:
        return 2 * m.layer_parameters * self.query_tokens + 2 * m.head_parameters * self.sampled

    def attention_flops(self, m: ModelShape) -> int:
        return 4 * m.num_layers * m.num_heads * m.head_dim * self.context

    def flops(self, m: ModelShape) -> int:
        return self.linear_flops(m) + self.attention_flops(m)

    def weight_bytes(self, m: ModelShape) -> int:
        return self.steps * (m.layer_parameters + m.head_parameters) * m.weight_bytes

    def kv_bytes(self, m: ModelShape) -> int:
        return m.kv_bytes * (self.kv_read + self.query_tokens)

    def bytes(self, m: ModelShape) -> int:
        return self.weight_bytes(m) + self.kv_bytes(m)
