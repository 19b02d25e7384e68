"""What a GPU would not forgive, found in Triton's interpreter, which forgives it.

* An unmasked lane of a load or store outside every tensor of the launch: KernelFault (else: a corrupted heap).
* Two program instances touching one element, at least one with a plain store: KernelFault (atomics are exempt).
* Lanes masked off in a load without `other=` read NaN or a large number (else 0; on a GPU: anything).
* Program instances run in a seeded random order (else always 0, 1, 2, ...).
* What is loaded is counted, if asked for (`count_loads`).
* tl.device_assert fires, and with it triton's own checks for int32 overflow (else never).
"""

import bisect
import collections
import contextlib
import random
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

RACE_MAP_LIMIT = 1 << 26  # bytes of a tensor; larger ones are checked for bounds only


class KernelFault(AssertionError):
    """What the kernel did, and in which program instance."""


_counts: collections.Counter | None = None  # bytes loaded by address of the tensor, if anybody asked
_on = False
_installed = False
_launch = SimpleNamespace(starts=[], regions=[], instance=0, program=0, grid=None, order=[])


@contextlib.contextmanager
def active():
    """Inside, launches are guarded."""
    global _on
    _install()
    _on, before = True, _on
    interpreter.interpreter_builder.options.__dict__["debug"] = True
    try:
        yield
    finally:
        _on = before
        interpreter.interpreter_builder.options.__dict__["debug"] = before


@contextlib.contextmanager
def count_loads():
    """Yields a counter: bytes that launches inside load from each tensor, by data_ptr(); masked lanes load nothing. Views
    that overlap count as one, at the lowest address."""
    global _counts
    before, _counts = _counts, collections.Counter()
    try:
        yield _counts
    finally:
        _counts = before


def _install():
    global _installed
    if _installed:
        return
    _installed = True
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    init_args, call, set_grid_idx = executor._init_args_hst, executor.__call__, builder.set_grid_idx
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def init_args_hst(self, args, kwargs):
        args, kwargs = init_args(self, args, kwargs)
        if _on:
            _enter([*args, *kwargs.values()])
        return args, kwargs

    def launch(self, *args, **kwargs):
        try:
            return call(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            cause = error
            while cause is not None and not isinstance(cause, KernelFault):
                cause = cause.__cause__
            if cause is not None:
                raise cause from None
            raise
        finally:
            _launch.starts, _launch.regions, _launch.grid = [], [], None

    def set_grid_index(self, x, y, z):
        if not _on:
            return set_grid_idx(self, x, y, z)
        gx, gy, gz = self.grid_dim
        if _launch.grid != (gx, gy, gz):
            _launch.grid = (gx, gy, gz)
            _launch.order = random.Random(gx * gy * gz).sample(range(gx * gy * gz), gx * gy * gz)
        instance = _launch.order[(x * gy + y) * gz + z]
        _launch.instance = instance
        _launch.program = (instance // (gy * gz), instance // gz % gy, instance % gz)
        set_grid_idx(self, *_launch.program)

    def create_masked_load(self, pointers, mask, other, *rest, **kwargs):
        if _on:
            kind = pointers.get_element_ty()
            dtype = interpreter._get_np_dtype(kind)
            _check("load", pointers.data, mask.data, dtype.itemsize)
            if other is None and not mask.data.all():
                other = interpreter.TensorHandle(_poison(pointers.data.shape, dtype, kind), kind)
        return masked_load(self, pointers, mask, other, *rest, **kwargs)

    def create_masked_store(self, pointers, value, mask, *rest, **kwargs):
        if _on:
            _check("store", pointers.data, mask.data, interpreter._get_np_dtype(pointers.get_element_ty()).itemsize)
        return masked_store(self, pointers, value, mask, *rest, **kwargs)

    executor._init_args_hst, executor.__call__, builder.set_grid_idx = init_args_hst, launch, set_grid_index
    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store


def _poison(shape, dtype, kind):
    poison = np.zeros(shape, dtype)
    if dtype.kind == "f":
        poison[...] = np.nan
    elif kind == tl.bfloat16:
        poison[...] = 0x7FC0
    elif dtype.itemsize > 1:
        poison[...] = 0x5A5A
    return poison


def _enter(args):
    """The byte ranges of the tensors of this launch; views of one buffer overlap and become one."""
    spans = []
    for arg in args:
        tensor = getattr(arg, "base", arg) if not hasattr(arg, "numel") else arg
        if not hasattr(tensor, "data_ptr") or tensor.numel() == 0:
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    merged = []
    for start, end in sorted(spans):
        if merged and start < merged[-1].end:
            merged[-1].end = max(merged[-1].end, end)
        else:
            merged.append(SimpleNamespace(start=start, end=end, writer=None, reader=None))
    _launch.starts, _launch.regions = [r.start for r in merged], merged


def _check(kind, pointers, mask, size):
    shape = np.broadcast_shapes(pointers.shape, mask.shape)
    touched = np.broadcast_to(pointers, shape)[np.broadcast_to(mask, shape).astype(bool)].astype(np.int64)
    if touched.size == 0 or not _launch.regions:
        return
    low, high = int(touched.min()), int(touched.max()) + size
    i = bisect.bisect_right(_launch.starts, low) - 1
    region = _launch.regions[i] if i >= 0 else None
    if region is None or low >= region.end or high > region.end:
        raise KernelFault(f"{kind} outside the tensors of this launch, program {_launch.program}")
    if kind == "load" and _counts is not None:
        _counts[region.start] += touched.size * size
    if region.end - region.start > RACE_MAP_LIMIT:
        return
    if region.writer is None:
        region.writer = np.full(region.end - region.start, -1, np.int32)
        region.reader = np.full(region.end - region.start, -1, np.int32)
    at, me = touched - region.start, _launch.instance
    writer, reader = region.writer[at], region.reader[at]
    if ((writer != -1) & (writer != me)).any():
        raise KernelFault(f"race: program {_launch.program} {kind}s an element that another instance stores")
    if kind == "store":
        if ((reader != -1) & (reader != me)).any():
            raise KernelFault(f"race: program {_launch.program} stores an element that another instance reads")
        region.writer[at] = me
    else:
        region.reader[at] = np.where((reader == -1) | (reader == me), me, -2)
