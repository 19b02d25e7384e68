"""Makes a token's logits on CPUs independent of how many neighbours its step happens to have.

A BLAS picks its kernel, the order of its sums and the split over threads by the shape of the whole product, so a row's last
bits change with the number of rows. MKL has a mode in which they do not, at any row count and any number of threads
(MKL_CBWR=AUTO,STRICT, see environment.py; measured on AVX-512: all of 1 to 700 rows bitwise equal, and no slower from 8
rows on). Without it rows are equal only from some count on (16 with AVX-512, 56 with AVX2, on one thread): then every step
is padded to that count, which is measured.
"""

from __future__ import annotations

import torch

MAX_PADDED_ROWS = 64  # more padding than this would cost more than it is worth
PROBES = ((576, 960), (1536, 576))  # (in, out) of linear maps of a small model: both show the effect


def min_independent_rows() -> int:
    """The row count from which on a row's result is bitwise the same at any row count, here and now; 1 to 65.

    65 says that no count was found up to 64: then no padding helps.
    """
    return max(_min_independent_rows(num_in, num_out) for num_in, num_out in PROBES)


def _min_independent_rows(num_in: int, num_out: int) -> int:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator)
    x = torch.randn(2 * MAX_PADDED_ROWS, num_in, generator=generator)
    whole = torch.nn.functional.linear(x, weight)
    for num_rows in range(MAX_PADDED_ROWS, 0, -1):
        if not torch.equal(torch.nn.functional.linear(x[:num_rows], weight), whole[:num_rows]):
            return num_rows + 1
    return 1
