"""Makes matrix products on CPUs independent of their number of rows, as far as the BLAS library lets us.

A BLAS picks its kernel, the order of its sums and the split over threads by the shape of the whole product, so a token's
logits would change in their last bits with the number of neighbours that its step happens to have. MKL has a mode in which
a row's result depends on nothing else, at any row count and any number of threads (measured on AVX-512: all of 1 to 700
rows bitwise equal, and no slower from 8 rows on). Without it they are equal from 16 rows on, on one thread only.
"""

from __future__ import annotations

import os

MKL_MODE = "AUTO,STRICT"


def ask_for_independent_rows() -> str:
    """Set MKL_CBWR unless the user has; returns its value. MKL reads it at its first use, so call this before that."""
    return os.environ.setdefault("MKL_CBWR", MKL_MODE)
