"""Caches of compiled kernels in a folder of this process's own, on the node's disk.

In the home folder, where they are by default, the tasks of an array would write the same files at once, over a file system
that may not lock. Whoever sets these variables (to a folder of the node, to compile once) is left alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}


@contextlib.contextmanager
def own_caches() -> Iterator[None]:
    """To be entered before torch and triton are imported. The folder is below TMPDIR, and gone afterwards."""
    unset = {variable: name for variable, name in CACHES.items() if not os.environ.get(variable)}
    with tempfile.TemporaryDirectory(prefix="batchgen-", ignore_cleanup_errors=True) as folder:
        for variable, name in unset.items():
            os.environ[variable] = str(Path(folder) / name)
        try:
            yield
        finally:
            for variable in unset:
                del os.environ[variable]
