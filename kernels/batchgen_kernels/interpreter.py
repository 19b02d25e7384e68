"""Repairs of Triton's interpreter (TRITON_INTERPRET=1), so that it computes what a GPU would.

Without them, with triton 3.6:
  * bfloat16 is kept as 16-bit patterns and arithmetic runs on the *bits*: no error, only garbage;
  * float32 -> bfloat16 truncates and float32 -> float8 loses the carry, where a GPU rounds to nearest even;
  * tl.dot on float32 is exact although a GPU uses tf32 unless told `input_precision="ieee"`: an error of 3e-4 is hidden;
  * tl.fma rounds twice, product and sum, where a GPU rounds once;
  * with numpy >= 2.4 every `range(tensor)` raises "only 0-dimensional arrays can be converted to Python scalars";
  * every call of a nested @triton.jit function patches the whole language again (1.3 to 1.6x of the run time).
Each repair is one function below, to be deleted when triton no longer needs it. `_triton.py` calls `repair()`.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TensorHandle = interpreter.TensorHandle
BFLOAT16 = tl.bfloat16
FLOAT8 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e5: (torch.float8_e5m2, 57344.0)}
_repaired = False


def repair() -> None:
    """Apply every repair, once a process, before any kernel runs."""
    global _repaired
    if _repaired:
        return
    _repaired = True
    _repair_fma()
    _repair_arithmetic()
    _repair_dot()
    _repair_casts()
    _repair_reductions()
    _repair_index()
    _patch_language_once_a_launch()


def bits_to_float(bits: Any) -> Any:
    """bfloat16 bit patterns -> float32 values."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32).reshape(np.shape(bits))


def float_to_bits(x: Any) -> Any:
    """float32 values -> bfloat16 bit patterns, to nearest even; NaN stays NaN."""
    x32 = np.ascontiguousarray(x, dtype=np.float32)
    u = x32.view(np.uint32)
    rounded = ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x32), np.uint16(0x7FC0), rounded).reshape(np.shape(x))


def float_to_tf32(x: Any) -> Any:
    """What a tensor core reads of a float32 operand: 10 bits of mantissa."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (u + np.uint32(0x0FFF) + ((u >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).reshape(np.shape(x))


def _is_bfloat16(handle: Any) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == BFLOAT16


def _values(handle: Any) -> Any:
    return bits_to_float(handle.data) if _is_bfloat16(handle) else handle.data


def _as_float32(handle: Any) -> Any:
    return TensorHandle(bits_to_float(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _repair_fma() -> None:
    builder = interpreter.InterpreterBuilder
    original = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if x.data.dtype != np.float32:
            return original(self, x, y, z)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            product = x.data.astype(np.float64) * y.data  # exact
            total = product + z.data
            added = total - product
            dropped = (product - (total - added)) + (z.data - added)
        # to odd, so that rounding to float32 afterwards is as if there had been no rounding before
        bits = np.atleast_1d(total).view(np.int64).reshape(np.shape(total))
        inexact = (dropped != 0) & np.isfinite(total) & (bits & 1 == 0)
        bits = bits + np.where(inexact, np.where((dropped > 0) == (total > 0), 1, -1), 0)
        return TensorHandle(np.atleast_1d(bits).view(np.float64).reshape(np.shape(bits)).astype(np.float32), x.dtype)

    builder.create_fma = create_fma


def _repair_arithmetic() -> None:
    builder = interpreter.InterpreterBuilder

    def through_numpy(name: str, num_operands: int) -> None:
        original = getattr(builder, name)

        def operation(self: Any, *args: Any) -> Any:
            operands, op = args[:num_operands], args[num_operands]
            if op is np.where or not any(map(_is_bfloat16, operands)):
                return original(self, *args)
            result = op(*map(_values, operands))
            # a comparison keeps its booleans: the layer above gives them their type
            return TensorHandle(result if result.dtype == np.bool_ else float_to_bits(result), BFLOAT16)

        setattr(builder, name, operation)

    def through_float32(name: str) -> None:
        original = getattr(builder, name)

        def operation(self: Any, *handles: Any) -> Any:
            if not any(map(_is_bfloat16, handles)):
                return original(self, *handles)
            return TensorHandle(float_to_bits(original(self, *map(_as_float32, handles)).data), BFLOAT16)

        setattr(builder, name, operation)

    through_numpy("unary_op", 1)
    through_numpy("binary_op", 2)
    through_numpy("ternary_op", 3)
    for name in ("create_fma", "create_rsqrt", "create_erf"):
        through_float32(name)
    builder.get_bf16 = lambda self, v: TensorHandle(float_to_bits(np.array([v], dtype=np.float32)), BFLOAT16)


def _repair_dot() -> None:
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot
    tf32 = interpreter._ir.INPUT_PRECISION.TF32

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        if rest and rest[0] == tf32 and a.data.dtype == np.float32 == b.data.dtype:
            a, b = TensorHandle(float_to_tf32(a.data), a.dtype), TensorHandle(float_to_tf32(b.data), b.dtype)
        result = original(self, _as_float32(a), _as_float32(b), _as_float32(accumulator), *rest)
        return TensorHandle(float_to_bits(result.data), BFLOAT16) if _is_bfloat16(accumulator) else result

    builder.create_dot = create_dot


def _repair_casts() -> None:
    builder = interpreter.InterpreterBuilder
    original_cast, original_float_cast = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        target = target_type.scalar
        if source.dtype.scalar == target:
            return TensorHandle(source.data, target)
        if target == BFLOAT16:
            return TensorHandle(float_to_bits(_values(source).astype(np.float32)), BFLOAT16)
        if _is_bfloat16(source):
            source = _as_float32(source)
            return source if target == tl.float32 else original_cast(self, source, target_type)
        return original_cast(self, source, target_type)

    def create_fp_to_fp(self: Any, source: Any, target_type: Any, rounding_mode: Any) -> Any:
        kind, target = source.dtype.scalar, target_type.scalar
        if target in FLOAT8 and kind in (BFLOAT16, tl.float16, tl.float32):  # a GPU saturates
            dtype, limit = FLOAT8[target]
            x = torch.from_numpy(np.ascontiguousarray(_values(source), dtype=np.float32)).clamp(-limit, limit)
            return TensorHandle(x.to(dtype).view(torch.uint8).numpy(), target)
        if BFLOAT16 in (kind, target) and kind not in FLOAT8 and target not in FLOAT8:
            return cast_impl(self, source, target_type)
        return original_float_cast(self, source, target_type, rounding_mode)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _repair_reductions() -> None:
    def through_float32(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def operation(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
            x = input[0] if isinstance(input, tuple) else input
            if x.dtype.scalar != BFLOAT16:
                return original(self, input, *args, **kwargs)
            result = original(self, self.to_tensor(bits_to_float(x.handle.data), tl.float32), *args, **kwargs)
            if isinstance(result, (tuple, list)):
                return type(result)(map(back, [self] * len(result), result))
            return back(self, result)

        def back(self: Any, t: Any) -> Any:
            if t.dtype.scalar != tl.float32:  # the indices of an argmax
                return t
            bits = float_to_bits(t.handle.data)
            return self.to_tensor(bits if t.type.is_block() else bits.reshape(-1)[0], BFLOAT16)

        setattr(owner, name, operation)

    through_float32(interpreter.ReduceOps, "sum")
    through_float32(interpreter.ReduceOps, "min_max")
    through_float32(interpreter.ScanOps, "cumsum")
    through_float32(interpreter.ScanOps, "cumprod")


def _repair_index() -> None:
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_language_once_a_launch() -> None:
    executor, function = interpreter.GridExecutor, interpreter.InterpretedFunction
    patched: set[Any] = set()
    original = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return original(self, *args, **kwargs)
        finally:
            patched.clear()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = frozenset(id(v) for v in self.fn.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core))
        if modules not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(modules)
        fn = self.rewrite()
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            raise interpreter.InterpreterError(repr(e)) from e

    executor.__call__, function.__call__ = launch, call
