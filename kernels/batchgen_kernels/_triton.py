"""The one place that imports triton: `from batchgen_kernels._triton import triton, tl`.

Where triton is not installed both names are stand-ins: a kernel can be defined but not launched, so every module of the
package imports with torch alone. Where TRITON_INTERPRET=1 is set (before the first import), the interpreter is repaired
here, once, before any kernel can run.
"""

from __future__ import annotations

import os
from typing import Any

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:

    class _Absent:
        """Takes the place of triton, triton.language and of every kernel; complains when something is asked of it."""

        def jit(self, fn: Any = None, **options: Any) -> Any:
            return self if fn is not None or not options else lambda fn: self

        def __getitem__(self, grid: Any) -> Any:
            raise ModuleNotFoundError("this kernel needs triton, which is not installed: pip install 'triton>=3.6'")

        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError(f"triton.{name} needs triton, which is not installed: pip install 'triton>=3.6'")

    triton = tl = _Absent()
else:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from batchgen_kernels import interpreter

        interpreter.repair()

__all__ = ["interpreting", "tl", "triton"]


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
