"""Kernels of batchgen: functions over tensors, each with a plain reference. Depends on torch and triton only."""

from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.registry import Choice, Ops, select_ops

__all__ = ["AttentionMetadata", "Choice", "Ops", "select_ops"]
