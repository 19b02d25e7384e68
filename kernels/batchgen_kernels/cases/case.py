"""What a case is, and how far its result may be from the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# ||out - reference|| / ||reference|| that two or three roundings to the dtype explain (one is about 0.4 of 2^-24, 2^-11
# or 2^-8): torch's ops round between steps, attention rounds the probabilities, and float32 sums in another order.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 7e-4, torch.bfloat16: 5e-3}
EXACT = ("write_kv", "copy_blocks", "sample_tokens")  # they move data, or decide in exact arithmetic


def tolerance(op: str, implementation: str, dtype: torch.dtype) -> float:
    """The relative error that this implementation of an op may have.

    The ops of EXACT have none. The Triton ops compute in float32 and round where the reference rounds, so that in a
    16-bit dtype only a rare last digit may differ; attention is the exception.
    """
    if op in EXACT:
        return 0.0
    if implementation == "triton" and op != "plan_attention" and dtype.itemsize == 2:
        return TOLERANCE[dtype] / 10
    return TOLERANCE[dtype]


class Case(NamedTuple):
    label: str
    make: Callable[[], tuple[Any, ...]]  # fresh arguments
    call: Callable[[Any, tuple[Any, ...]], list[torch.Tensor]]  # (implementation, arguments) -> tensors to compare

    def run(self, implementation: Any) -> list[torch.Tensor]:
        return self.call(implementation, self.make())


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; infinite where one has a NaN or an infinity and the other hasn't the same."""
    out, expected = out.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(out.isfinite(), finite) or not torch.equal(out[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        return float("inf")
    out, expected = out[finite], expected[finite]
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    """Standard normal values, the same ones each time; where they are few, the same ones on every device."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    maker = device if math.prod(shape) > 2**22 else "cpu"  # a bench's inputs take a CPU longer than the whole bench
    generator = torch.Generator(maker).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=maker).to(dtype).to(device)
