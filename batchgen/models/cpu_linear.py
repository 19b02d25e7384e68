"""Which product a float32 linear layer runs on a CPU: one for each shape, measured here and now, with weights packed once.

No library is the fastest everywhere. On one core of a Sapphire Rapids, oneDNN with packed weights is 1.1 to 1.7 times as
fast as MKL at 8 to 64 rows, and no faster from 256 on. So the candidates are timed on the model's own weights, and one of
them is taken for a shape whatever the row count, because their last bits differ. A candidate must give a row equal bits at
any row count from some small one on (cpu_math.py), else it is out. OpenBLAS, which numpy brings along and which leads on
some AMD cores, is none: it has other kernels for small products, and a row's bits change at counts that a probe misses.

The choice may fall otherwise in another run. A run folder keeps it, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from batchgen.models.cpu_math import first_independent_rows

Product = Callable[[torch.Tensor], torch.Tensor]  # [n, in] -> [n, out]
Pack = Callable[[torch.Tensor, torch.Tensor | None], Product]  # weight [out, in] and bias [out]

ROW_COUNTS = (8, 16, 64, 256)  # decode steps of small and large batches, and prefill
MAX_LAYERS = 4  # so many layers of a shape are timed in turn, so that their weights are no more at hand than in a step
MAX_OUT = 6144  # of a vocabulary's head a slice is timed
CLEAR_GAIN = 0.95  # another product than torch's is taken where it needs less than this share of the time
MAX_PADDING = 16  # a product whose rows are independent from more rows on is no candidate
SECONDS_PER_COUNT = 0.03
SMALLEST_SCALE = 1e-30  # of a row of zeros
SMALL = 1 << 16  # weights of so few elements stay with torch: nothing to gain, and timers cannot tell


def torch_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """torch's own, MKL in the official builds; weight as it lies."""
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def onednn_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """oneDNN with the weight in the layout of its kernels."""
    multiply = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)
    return lambda x: multiply(x, packed, bias, "none", [], "")


def int8_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """FBGEMM with weights of 8 bits, one scale an output, and inputs of 8 bits, one scale a row; sums are exact integers.

    A scale for each row and not, as usual, for all rows: a row's result depends on no other row. Where the CPU's products
    saturate (AVX2 adds pairs of products in 16 bits) inputs get 7 bits. A row with a NaN or an infinity becomes NaN.
    """
    packed = _pack_int8(weight.detach())
    largest = 127.0 if sums_are_exact() else 63.0

    def product(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).div_(largest).clamp_(min=SMALLEST_SCALE)
        y = _multiply_int8(x / scale, 1.0, 128, packed).mul_(scale)
        return y if bias is None else y.add_(bias)

    return product


_multiply_int8 = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32


def _pack_int8(weight: torch.Tensor) -> Any:
    scale = weight.abs().amax(1).div_(127).clamp_(min=SMALLEST_SCALE).double()
    zero_point = torch.zeros(len(scale), dtype=torch.int64)
    warnings.filterwarnings(
        "ignore", message="torch.quantize_per_tensor, torch.quantize_per_channel"
    )  # deprecated, no heir yet
    return torch.ops.quantized.linear_prepack(torch.quantize_per_channel(weight, scale, zero_point, 0, torch.qint8), None)


@functools.cache
def sums_are_exact() -> bool:
    """Whether products of full 8 bits do not saturate here."""
    weight, x = torch.full((64, 256), 127.0), torch.full((16, 256), 127.0)
    return torch.equal(_multiply_int8(x, 1.0, 128, _pack_int8(weight)), x @ weight.t())


def available_products() -> dict[str, Pack]:
    """Name -> pack, of what this machine has; "torch" comes first."""
    found: dict[str, Pack] = {"torch": torch_product}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        found["onednn"] = onednn_product
    return found


class Choice(NamedTuple):
    """What the layers of a shape run on."""

    product: str
    min_rows: int  # from which on a row's bits do not depend on the number of rows


def shape_of(weight: torch.Tensor) -> str:
    """Such as "576x960", in x out."""
    num_out, num_in = weight.shape
    return f"{num_in}x{num_out}"


def choose_products(
    weights: Iterable[torch.Tensor], recorded: Mapping[str, str], found: Mapping[str, Pack]
) -> dict[str, Choice]:
    """Shape -> what it runs on, of `found`. weights: [out, in] each, float32, filled.

    recorded: shape -> product of an earlier run, which is kept wherever this machine has it.
    """
    by_shape: dict[str, list[torch.Tensor]] = {}
    for weight in weights:
        by_shape.setdefault(shape_of(weight), []).append(weight)
    return {shape: _choose(found, same, recorded.get(shape)) for shape, same in by_shape.items()}


def _choose(found: Mapping[str, Pack], weights: Sequence[torch.Tensor], recorded: str | None) -> Choice:
    num_out, num_in = weights[0].shape
    if recorded is not None and recorded in found:
        order = [recorded]
    elif weights[0].numel() <= SMALL or len(found) == 1:
        order = [next(iter(found))]
    else:
        seconds = _seconds(found, weights)
        order = sorted(found, key=lambda name: seconds[name] * (CLEAR_GAIN if name == "torch" else 1))
    for name in order:
        choice = Choice(name, first_independent_rows(found[name](weights[0], None), num_out, num_in))
        if choice.min_rows <= MAX_PADDING or name == order[-1]:
            return choice
    raise AssertionError


def _seconds(found: Mapping[str, Pack], weights: Sequence[torch.Tensor]) -> dict[str, float]:
    """Geometric mean over ROW_COUNTS of the seconds of a product, candidates in turn, the fastest of some passes."""
    packed = {name: [pack(w[:MAX_OUT], None) for w in weights[:MAX_LAYERS]] for name, pack in found.items()}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    logs = dict.fromkeys(found, 0.0)
    for n in ROW_COUNTS:
        x = torch.randn(n, weights[0].shape[1])
        best = dict.fromkeys(found, float("inf"))
        give_up = time.perf_counter() + SECONDS_PER_COUNT
        for done in itertools.count():
            if done >= 3 and time.perf_counter() > give_up:
                break
            for name, products in packed.items():
                begin = clock()
                for product in products:
                    product(x)
                best[name] = min(best[name], clock() - begin)
        for name in found:
            logs[name] += math.log(best[name])
    return {name: math.exp(log / len(ROW_COUNTS)) for name, log in logs.items()}
