"""Set before anything imports a kernel: Triton runs in its interpreter unless the caller says otherwise, on one thread.

`TRITON_INTERPRET=0 pytest tests/kernels_compile` is the other way to run: there kernels are compiled, not run.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from batchgen.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402 (reads the variables set above)

torch.set_num_threads(1)
