"""Makes a token's logits on CPUs independent of how many neighbours its step happens to have.

A BLAS picks its kernel, the order of its sums and the split over threads by the shape of the whole product, so a row's last
bits change with the number of rows. MKL has a mode in which they do not, at any row count and any number of threads
(MKL_CBWR=AUTO,STRICT, see environment.py; measured on AVX-512: all of 1 to 700 rows bitwise equal, and no slower from 8
rows on). Without it rows are equal only from some count on (16 with AVX-512, 56 with AVX2, on one thread); so are those of
oneDNN (2). Every step is then padded to that count, which is measured for each product in use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_PADDED_ROWS = 64  # more padding than this would cost more than it is worth
ROW_COUNTS = (*range(1, 9), 12, 16, 24, 33, 48, 57, 64)
MORE_ROW_COUNTS = (127, 400)  # also probed where that takes no time
SMALL = 1 << 22  # elements of a weight


@torch.inference_mode()
def first_independent_rows(product: Callable[[torch.Tensor], torch.Tensor], num_out: int, num_in: int) -> int:
    """The row count from which on a row's result is bitwise the same at any row count, here and now; 1 to 65.

    product: [n, num_in] -> [n, num_out] float32. Row counts are probed, not proved. 65 says that no count was found up to
    64: then no padding helps.
    """
    counts = ROW_COUNTS + (MORE_ROW_COUNTS if num_in * num_out <= SMALL else ())
    x = torch.randn(counts[-1] + 3, num_in, generator=torch.Generator().manual_seed(0))
    whole = product(x)
    different = [n for n in counts if not torch.equal(product(x[:n]), whole[:n])]
    return min(max(different, default=0), MAX_PADDED_ROWS) + 1
