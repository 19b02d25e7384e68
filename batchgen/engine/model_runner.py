"""One step on the device: copies of blocks, inputs, forward, sampling. Returns before the device is done.

Sampled tokens stay on the device, where the next step finds them; a copy for the host is on its way.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch
from batchgen_kernels import Ops

from batchgen.engine.batch_inputs import build_batch_inputs
from batchgen.engine.batch_state import BatchState
from batchgen.engine.device_state import DeviceState, to_device
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.sampler import SamplingConfig, sample
from batchgen.engine.step import StepPlan
from batchgen.models.decoder import Decoder
from batchgen.models.inputs import BatchInputs


class Sampled:
    """The tokens of a step, and whether their logits were finite, on their way to the host."""

    def __init__(self, token_ids: torch.Tensor, finite: torch.Tensor) -> None:
        self._here = [t.to("cpu", non_blocking=True) for t in (token_ids, finite)]
        self._copied = None
        if token_ids.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """([K] int32, [K] bool), once the device has made them."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, finite = (t.numpy() for t in self._here)
        return token_ids, finite


class ModelRunner:
    """Executes the steps of one window. row_keys: [n] uint64 by position in the window.

    seconds: where the time of each stage is added, by name.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        ops: Ops,
        state: BatchState,
        sampling: SamplingConfig,
        row_keys: np.ndarray,
        device: torch.device,
        seconds: dict[str, float],
    ) -> None:
        self.model, self.kv_cache, self.ops, self.state = model, kv_cache, ops, state
        self.sampling, self.row_keys, self.device, self.seconds = sampling, row_keys, device, seconds
        self.device_state = DeviceState(state, device)
        self._inputs: BatchInputs | None = None

    def execute(self, step: StepPlan) -> Sampled:
        times = [perf_counter()]
        self.kv_cache.copy_blocks(step.block_copies)
        self._inputs = inputs = build_batch_inputs(step, self.state, self.device_state, self._inputs)
        times.append(perf_counter())
        logits = self.model.forward(inputs, self.kv_cache.tensor, self.kv_cache.scale)
        times.append(perf_counter())
        sampled = self._sample(step, logits)
        times.append(perf_counter())
        for stage, begin, end in zip(("inputs", "forward", "sample"), times, times[1:]):
            self.seconds[stage] += end - begin
        return sampled

    def _sample(self, step: StepPlan, logits: torch.Tensor) -> Sampled:
        slots = step.sample_slots
        keys, samples = self.row_keys[self.state.position[slots]], self.state.sample_index[slots]
        token_ids, finite = sample(logits, self.sampling, keys, samples, step.output_index, self.ops)
        (slots_there,) = to_device([slots.astype(np.int64)], self.device)
        self.device_state.last_token[slots_there] = token_ids.long()
        return Sampled(token_ids, finite)
