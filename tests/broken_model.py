"""Makes the model of this process fail, for runs that a WarmServer forks."""

from __future__ import annotations

import time
from typing import Any

import torch

from batchgen.models.decoder import Decoder


def install(token: int | None = None, after_steps: int = 0, hangs: bool = False, message: str = "broken") -> None:
    """Steps that compute `token` (None: all), after the first `after_steps`, raise ValueError(message), or never end."""
    forward, num_steps = Decoder.forward, 0

    def broken(self: Decoder, inputs: Any, *rest: Any) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps > after_steps and (token is None or (inputs.token_ids == token).any()):
            if hangs:
                time.sleep(3600)
            raise ValueError(message)
        return forward(self, inputs, *rest)

    Decoder.forward = broken  # type: ignore[method-assign]
