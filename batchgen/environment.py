"""Variables that the maths libraries read once, at their first use: to be set before anything imports torch.

A variable that the user has set is left alone.
"""

from __future__ import annotations

import os

MATHS = {
    # A row of a matrix product then has the same last bits in any batch and on any number of threads (models/cpu_math.py).
    "MKL_CBWR": "AUTO,STRICT",
    # OpenMP threads sleep at the end of each parallel loop and do not spin. On a machine with other work, spinning made
    # a step 7 times slower (146 s against 22 s for one job, 2 threads on 2 busy cores); on an idle one it is no faster.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def prepare_environment() -> None:
    """Set what is not set yet."""
    for name, value in MATHS.items():
        os.environ.setdefault(name, value)
