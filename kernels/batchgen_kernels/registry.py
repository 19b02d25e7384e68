"""Which implementation of each op runs, and why. One table, one choice per process, printed by the CLI.

An op has up to three implementations: `reference` (plain, slow, the oracle of the tests), `torch` (the CPU backend) and
`triton`. A backend that lacks an op falls back to `torch` for that op, by name, and `Choice.reason` says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# op -> {implementation: "module:function"}; the module is imported when the op is chosen, not before
OPS: dict[str, dict[str, str]] = {
    "rms_norm": {
        "reference": "rms_norm:rms_norm_reference",
        "torch": "rms_norm:rms_norm_torch",
        "triton": "rms_norm:rms_norm_triton",
    },
    "add_rms_norm": {
        "reference": "rms_norm:add_rms_norm_reference",
        "torch": "rms_norm:add_rms_norm_torch",
        "triton": "rms_norm:add_rms_norm_triton",
    },
    "rotary_embedding": {
        "reference": "rotary:rotary_embedding_reference",
        "torch": "rotary:rotary_embedding_torch",
        "triton": "rotary:rotary_embedding_triton",
    },
    "silu_and_mul": {
        "reference": "activation:silu_and_mul_reference",
        "torch": "activation:silu_and_mul_torch",
        "triton": "activation:silu_and_mul_triton",
    },
    "gelu_and_mul": {
        "reference": "activation:gelu_and_mul_reference",
        "torch": "activation:gelu_and_mul_torch",
        "triton": "activation:gelu_and_mul_triton",
    },
    "rope_and_write_kv": {
        "reference": "rope_write:rope_and_write_kv_reference",
        "torch": "rope_write:rope_and_write_kv_torch",
        "triton": "rope_write:rope_and_write_kv_triton",
    },
    "write_kv": {
        "reference": "kv_cache:write_kv_reference",
        "torch": "kv_cache:write_kv_torch",
        "triton": "kv_cache:write_kv_triton",
    },
    "copy_blocks": {
        "reference": "kv_cache:copy_blocks_reference",
        "torch": "kv_cache:copy_blocks_torch",
        "triton": "kv_cache:copy_blocks_triton",
    },
    "merge_states": {
        "reference": "merge_states:merge_states_reference",
        "torch": "merge_states:merge_states_torch",
        "triton": "merge_states:merge_states_triton",
    },
    "plan_attention": {
        "reference": "attention_reference:plan_attention_reference",
        "torch": "attention_torch:plan_attention_torch",
        "triton": "attention_triton:plan_attention_triton",
    },
    "sample_tokens": {
        "reference": "sampling:sample_tokens_reference",
        "torch": "sampling:sample_tokens_torch",
        "triton": "sampling:sample_tokens_triton",
    },
    "gather_logprobs": {
        "reference": "gather_logprobs:gather_logprobs_reference",
        "torch": "gather_logprobs:gather_logprobs_torch",
        "triton": "gather_logprobs:gather_logprobs_triton",
    },
    "linear_invariant": {
        "reference": "linear:linear_invariant_reference",
        "torch": "linear:linear_invariant_torch",
        "triton": "linear:linear_invariant_triton",
    },
    "linear_int8": {
        "reference": "linear:linear_int8_reference",
        "torch": "linear:linear_int8_torch",
        "triton": "linear:linear_int8_triton",
    },
    "linear_int4": {
        "reference": "linear:linear_int4_reference",
        "torch": "linear:linear_int4_torch",
        "triton": "linear:linear_int4_triton",
    },
    "linear_fp8": {
        "reference": "linear:linear_fp8_reference",
        "torch": "linear:linear_fp8_torch",
        "triton": "linear:linear_fp8_triton",
    },
    "grouped_linear": {
        "reference": "grouped_linear:grouped_linear_reference",
        "torch": "grouped_linear:grouped_linear_torch",
        "triton": "grouped_linear:grouped_linear_triton",
    },
    "combine_experts": {
        "reference": "grouped_linear:combine_experts_reference",
        "torch": "grouped_linear:combine_experts_torch",
        "triton": "grouped_linear:combine_experts_triton",
    },
}
BACKENDS = ("reference", "torch", "triton")


class Choice(NamedTuple):
    """The implementation chosen for one op, and the reason in words."""

    op: str
    implementation: str
    reason: str


class Ops:
    """The chosen functions as attributes (`ops.rms_norm(...)`), with `choices` for the report.

    batch_invariant: see select_ops; layers ask it which product to call.
    """

    def __init__(self, backend: str, backend_reason: str, batch_invariant: bool = False) -> None:
        self.backend = backend
        self.backend_reason = backend_reason
        self.batch_invariant = batch_invariant
        self.choices: list[Choice] = []
        for op, implementations in OPS.items():
            name, reason = backend, backend_reason
            if backend not in implementations:
                name, reason = "torch", f"{backend} has no {op}"
            self.choices.append(Choice(op, name, reason))
            setattr(self, op, load(op, name))
        if batch_invariant:
            self.plan_attention: Any = functools.partial(load("plan_attention", backend), batch_invariant=True)

    def __getattr__(self, op: str) -> Any:  # only reached for a name that is not an op
        raise AttributeError(f"no op {op!r}; there are {', '.join(OPS)}")

    @property
    def shares_prefix_reads(self) -> bool:
        """Whether the attention of this backend reads shared-prefix groups (`group_*` of the metadata)."""
        return not self.batch_invariant and bool(getattr(self.plan_attention, "shares_prefix_reads", False))

    def group_rule(
        self, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Callable[..., list[bool]] | None:
        """The rule by which the attention of this backend has its shared-prefix groups chosen (see prefix_cost); None if it
        has none of its own."""
        rule = getattr(self.plan_attention, "group_rule", None)
        return rule(num_q_heads, num_kv_heads, head_dim, dtype, device) if rule else None


def load(op: str, implementation: str) -> Any:
    """The function that implements `op`; KeyError for an op or implementation that is not in the table."""
    module, function = OPS[op][implementation].split(":")
    return getattr(importlib.import_module(f"batchgen_kernels.{module}"), function)


def triton_available() -> tuple[bool, str]:
    """Whether Triton kernels can run on this machine (a GPU, or the interpreter), and why or why not."""
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "the Triton interpreter is on (TRITON_INTERPRET=1)"
    if torch.cuda.is_available():
        return True, f"a GPU is there ({torch.cuda.get_device_name()})"
    return False, "no GPU and TRITON_INTERPRET is not 1"


def select_ops(backend: str = "auto", device: str | torch.device = "cpu", batch_invariant: bool = False) -> Ops:
    """Choose a backend for `device`: triton on a GPU, torch on the CPU, or the one that is named.

    batch_invariant: a token's result has the same bits whatever else its step holds (attention without groups and splits,
    `linear_invariant` for products; the other ops are so anyway). Only triton can.

    Raises ValueError for an unknown backend, for triton where it cannot run, and for batch_invariant without triton.
    """
    on_gpu = torch.device(device).type != "cpu"
    available, why = triton_available()
    if backend == "auto":
        backend, reason = "triton" if on_gpu and available else "torch", f"chosen for device {device}: {why}"
    else:
        reason = "asked for"
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; there are auto, {', '.join(BACKENDS)}")
    if backend == "triton" and not available:
        raise ValueError(f"backend triton cannot run here: {why}")
    if batch_invariant and backend != "triton":
        raise ValueError(f"batch_invariant needs the backend triton, and this one is {backend} ({reason})")
    return Ops(backend, reason, batch_invariant)
