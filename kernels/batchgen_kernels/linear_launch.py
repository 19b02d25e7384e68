"""How linear layers are launched: tiles by architecture, size of an element of x, and how many tokens there are.

The numbers come from what the compiler reports, as in launch.py; no row has been timed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class LinearLaunch(NamedTuple):
    """Tile of block_n channels and block_t tokens, block_k inputs at a time (int4 takes the size of a group)."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


CLASSES = (16, 64, 128)  # tokens of a tile: up to so many tokens take the first that holds them
INVARIANT = 64  # the class that serves any number of tokens

# (architecture, bytes of an element of x, class) -> launch
LINEAR: dict[tuple[str, int, int], LinearLaunch] = {
    ("sm_80", 2, 16): LinearLaunch(64, 16, 128, 4, 4),
    ("sm_80", 2, 64): LinearLaunch(64, 64, 64, 4, 4),
    ("sm_80", 2, 128): LinearLaunch(128, 128, 64, 8, 3),
    ("sm_90", 2, 16): LinearLaunch(64, 16, 128, 4, 4),
    ("sm_90", 2, 64): LinearLaunch(64, 64, 64, 4, 4),
    ("sm_90", 2, 128): LinearLaunch(128, 128, 64, 8, 3),
    ("sm_100", 2, 16): LinearLaunch(128, 16, 128, 4, 4),
    ("sm_100", 2, 64): LinearLaunch(128, 64, 64, 4, 4),
    ("sm_100", 2, 128): LinearLaunch(128, 128, 64, 8, 3),
    ("gfx942", 2, 16): LinearLaunch(64, 16, 64, 4, 2),
    ("gfx942", 2, 64): LinearLaunch(64, 64, 64, 4, 2),
    ("gfx942", 2, 128): LinearLaunch(128, 128, 32, 8, 2),
    ("sm_80", 4, 16): LinearLaunch(32, 16, 32, 4, 3),
    ("sm_80", 4, 64): LinearLaunch(32, 32, 32, 4, 3),
    ("sm_80", 4, 128): LinearLaunch(32, 32, 32, 4, 3),
    ("sm_90", 4, 16): LinearLaunch(32, 16, 32, 4, 3),
    ("sm_90", 4, 64): LinearLaunch(32, 32, 32, 4, 3),
    ("sm_90", 4, 128): LinearLaunch(32, 32, 32, 4, 3),
    ("sm_100", 4, 16): LinearLaunch(32, 16, 32, 4, 3),
    ("sm_100", 4, 64): LinearLaunch(32, 32, 32, 4, 3),
    ("sm_100", 4, 128): LinearLaunch(32, 32, 32, 4, 3),
    ("gfx942", 4, 16): LinearLaunch(32, 16, 32, 4, 2),
    ("gfx942", 4, 64): LinearLaunch(64, 64, 32, 4, 2),
    ("gfx942", 4, 128): LinearLaunch(64, 64, 32, 4, 2),
}
ANYWHERE = {2: LinearLaunch(64, 32, 32, 4, 2), 4: LinearLaunch(32, 16, 32, 4, 2)}
INTERPRETER = LinearLaunch(32, 16, 32, 4, 1)


def linear_launch(architecture: str, dtype: torch.dtype, kind: str, num_tokens: int | None) -> LinearLaunch:
    """dtype: of x; kind: of the weight; num_tokens None: the launch must not depend on it."""
    if architecture == "interpreter":
        return INTERPRETER
    size = INVARIANT if num_tokens is None else next((c for c in CLASSES if num_tokens <= c), CLASSES[-1])
    return LINEAR.get((architecture, dtype.itemsize, size), ANYWHERE[dtype.itemsize])
