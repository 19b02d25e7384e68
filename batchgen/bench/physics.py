"""What the machine and the model allow: static costs, the rate of the model's own matrix products, where a step's time goes.

FLOPs = 2 N (U + O - R) + 2 Nh O + 4 L H D (Ap + Ad)        U prompt tokens to compute, O output tokens, R rows,
                                                            Ap, Ad sums of context lengths over both
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from batchgen.models.config import ModelConfig, kv_bytes_per_token, num_matmul_parameters
from batchgen.models.cpu_linear import available_products
from batchgen.models.decoder import Decoder
from batchgen.models.layers import Linear
from batchgen.records import Window

ROW_COUNTS = (1, 16, 32, 64, 128, 256, 512)  # rows at which the matrix products are timed
PARTS = {  # op of batchgen_kernels -> line of the profile
    "rms_norm": "elementwise",
    "add_rms_norm": "elementwise",
    "silu_and_mul": "elementwise",
    "rope_and_write_kv": "rotary embedding and KV writes",
    "plan_attention": "attention",
}


class StaticCost(NamedTuple):
    """What follows from config.json alone."""

    layer_parameters: int  # multiplied with every computed token
    head_parameters: int  # multiplied with every sampled token
    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    flops_per_sampled_token: int


def static_cost(config: ModelConfig, dtype: torch.dtype) -> StaticCost:
    layers = num_matmul_parameters(config, lm_head=False)
    head = num_matmul_parameters(config) - layers
    kv = kv_bytes_per_token(config, dtype)
    return StaticCost(layers, head, (layers + head) * dtype.itemsize, kv, 2 * layers, 2 * head)


class JobFlops(NamedTuple):
    """Floating-point operations of a workload, once its answers are known."""

    linear: int
    linear_without_sharing: int
    attention: int


def job_flops(cost: StaticCost, config: ModelConfig, window: Window, num_outputs: np.ndarray) -> JobFlops:
    """num_outputs: [n] int64, tokens generated for each row of the window."""
    decoded = int((num_outputs - 1).sum())
    head = cost.flops_per_sampled_token * int(num_outputs.sum())
    lengths, cached = window.lengths.astype(np.int64), window.num_cached().astype(np.int64)
    context = (lengths * (lengths + 1) - cached * (cached + 1)) // 2  # of the prompt tokens to compute
    context += (num_outputs - 1) * lengths + num_outputs * (num_outputs - 1) // 2
    return JobFlops(
        cost.flops_per_token * (window.num_computed() + decoded) + head,
        cost.flops_per_token * (int(lengths.sum()) + decoded) + head,
        4 * config.num_layers * config.num_heads * config.head_dim * int(context.sum()),
    )


class LinearSeconds(NamedTuple):
    """Seconds of one step's matrix products alone, by row count: all layers, and the head."""

    rows: list[int]
    layers: list[float]
    head: list[float]

    def of(self, num_tokens: int, num_sampled: int) -> float:
        """Of a step of so many tokens, so many of them sampled; between the measured counts by interpolation."""
        seconds = float(np.interp(num_tokens, self.rows, self.layers))
        return seconds + (float(np.interp(num_sampled, self.rows, self.head)) if num_sampled else 0.0)

    def gflops(self, cost: StaticCost) -> list[float]:
        """[len(rows)], of the layers."""
        return [cost.flops_per_token * n / s / 1e9 for n, s in zip(self.rows, self.layers)]


@torch.inference_mode()
def time_linears(model: Decoder, max_rows: int) -> LinearSeconds:
    """The fastest of some passes through all linear layers of `model` in order, so that caches hold what they would."""
    rows = [n for n in ROW_COUNTS if n < max_rows] + [max_rows]
    config = model.config
    layers, heads = [], []
    for n in rows:
        x = torch.randn(n, config.hidden_size, device=model.device, dtype=model.dtype)
        attended = torch.randn(n, config.num_heads * config.head_dim, device=model.device, dtype=model.dtype)
        inner = torch.randn(n, config.intermediate_size, device=model.device, dtype=model.dtype)

        def body(x: torch.Tensor = x, attended: torch.Tensor = attended, inner: torch.Tensor = inner) -> None:
            for layer in model.layers:
                layer.attention.qkv(x)
                layer.attention.output(attended)
                layer.mlp.gate_up(x)
                layer.mlp.down(inner)

        def head(x: torch.Tensor = x) -> None:
            model.lm_head(x)

        body()
        repeats = 6 if n <= 64 else 3
        layers.append(min(seconds_of(body) for _ in range(repeats)))
        heads.append(min(seconds_of(head) for _ in range(repeats)))
    return LinearSeconds(rows, layers, heads)


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextlib.contextmanager
def seconds_on(threads: int) -> Iterator[list[float]]:
    """Yields a list that gets the seconds of the block: CPU time of one thread, which other work disturbs least, or wall
    time of more."""
    clock = time.process_time if threads == 1 else time.perf_counter
    spent: list[float] = []
    begin = clock()
    yield spent
    spent.append(clock() - begin)


@torch.inference_mode()
def time_best_linears(model: Decoder, max_rows: int, threads: int) -> LinearSeconds:
    """As time_linears, of bare products of the model's shapes: at each row count the fastest of what this machine has."""
    config = model.config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = [
        (config.hidden_size, heads),
        (config.num_heads * config.head_dim, config.hidden_size),
        (config.hidden_size, 2 * config.intermediate_size),
        (config.intermediate_size, config.hidden_size),
    ]
    rows = [n for n in ROW_COUNTS if n < max_rows] + [max_rows]
    layers = [sum(best_product(n, *shape, threads) for shape in shapes) * config.num_layers for n in rows]
    heads_seconds = [best_product(n, config.hidden_size, config.vocab_size, threads) for n in rows]
    return LinearSeconds(rows, layers, heads_seconds)


def best_product(num_rows: int, num_in: int, num_out: int, threads: int) -> float:
    """Seconds of x W^T, x [num_rows, num_in], W [num_out, num_in], by the fastest implementation, weights in no cache that
    the rest of a model would not leave them in."""
    copies = max(1, min(30, (64 << 20) // (4 * num_in * num_out)))
    weights = [torch.randn(num_out, num_in) for _ in range(copies)]
    x = torch.randn(num_rows, num_in)
    best = float("inf")
    for pack in available_products().values():
        products = [pack(weight, None) for weight in weights]
        for _ in range(4):
            with seconds_on(threads) as spent:
                for product in products:
                    product(x)
            best = min(best, spent[0] / copies)
    return best


@contextlib.contextmanager
def profiled(ops: Any) -> Iterator[dict[str, float]]:
    """Time what a decoder's forward calls on a CPU: yields seconds by part, filled as it runs. (torch's own profiler keeps
    every event and takes gigabytes.)"""
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # attributes too: backends say with them what they can do
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - begin

        return call

    plan_attention = ops.plan_attention

    @functools.wraps(plan_attention)
    def plan(*args: Any) -> Any:
        return timed("attention", timed("attention plan", plan_attention)(*args))

    originals = {name: getattr(ops, name) for name in PARTS}
    linear = Linear.forward
    for name, function in originals.items():
        setattr(ops, name, plan if name == "plan_attention" else timed(PARTS[name], function))
    Linear.forward = timed("matrix products", linear)  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Linear.forward = linear  # type: ignore[method-assign]
        for name, function in originals.items():
            setattr(ops, name, function)
