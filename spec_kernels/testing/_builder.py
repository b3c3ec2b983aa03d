"""The interpreter's operations, corrected where their numbers differ from compiled code.

`Builder` overrides Triton's `InterpreterBuilder`: bfloat16 and 8-bit float arithmetic, rounding,
comparisons that yield booleans, and a hook at every memory access. `Semantic` checks 32-bit
arithmetic for overflow. Nothing of Triton is changed by importing this module.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from ._formats import Array, decode, encode, fma, is_emulated
from .errors import IntegerOverflowError, source_line


class AccessHook(Protocol):
    """What the builder tells about each memory access before it happens."""

    def access(
        self,
        kind: str,
        pointers: Array,
        nbytes: int,
        mask: Array | None,
        origin: frozenset[str] | None,
    ) -> None:
        """Note an access.

        Args:
            kind: "load", "store" or "atomic".
            pointers: one address a lane.
            nbytes: bytes at each.
            mask: active lanes, or None for all.
            origin: the arguments that the pointers were made from; None if unknown.
        """


ORIGIN = "origin"
"""Attribute of a pointer handle: the names of the arguments that it was made from."""


def _inherit(handle: Any, *sources: Any) -> Any:
    """Give a pointer the origin of the pointers that it was made from."""
    origins = [s.attr.get(ORIGIN) for s in sources]
    if all(origins):
        handle.attr[ORIGIN] = frozenset[str]().union(*origins)
    return handle


class Builder(stock.InterpreterBuilder):  # type: ignore[misc]
    """`InterpreterBuilder` with the numbers of the hardware."""

    def __init__(self) -> None:
        super().__init__()
        self.options = stock.InterpreterOptions(debug=True)  # device_assert fires
        self.hook: AccessHook | None = None

    # ------------------------------------------------------------------ arithmetic

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if not is_emulated(source) and not is_emulated(target):
            return super().cast_impl(src, dst_type)
        values = decode(src.data, source)
        if is_emulated(target):
            return stock.TensorHandle(encode(values, target), target)
        return stock.TensorHandle(values.astype(stock._get_np_dtype(target)), target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        dtype = lhs.dtype.scalar
        if is_emulated(dtype):
            output = op(decode(lhs.data, dtype), decode(rhs.data, rhs.dtype.scalar))
            if output.dtype == np.bool_:
                return stock.TensorHandle(output, tl.int1)
            return stock.TensorHandle(encode(output, dtype), dtype)
        handle = super().binary_op(lhs, rhs, op)
        if handle.data.dtype == np.bool_:
            handle.dtype = tl.int1  # a comparison; splats and masks go by this type
        return handle

    def unary_op(self, arg: Any, op: Any) -> Any:
        dtype = arg.dtype.scalar
        if is_emulated(dtype):
            return stock.TensorHandle(encode(op(decode(arg.data, dtype)), dtype), dtype)
        return super().unary_op(arg, op)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        dtype = other.dtype.scalar
        if is_emulated(dtype) and op is not np.where:
            values = [decode(x.data, x.dtype.scalar) for x in (lhs, rhs, other)]
            return stock.TensorHandle(encode(op(*values), dtype), dtype)
        return super().ternary_op(lhs, rhs, other, op)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        if is_emulated(dtype):
            a, b, c = (decode(v.data, v.dtype.scalar).astype(np.float64) for v in (x, y, z))
            return stock.TensorHandle(encode((a * b + c).astype(np.float32), dtype), dtype)
        return stock.TensorHandle(fma(x.data, y.data, z.data), dtype)  # 3.6 would round twice

    def get_bf16(self, value: float) -> Any:  # Triton 3.6 has none
        return stock.TensorHandle(encode(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    def create_dot(
        self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        if is_emulated(a.dtype.scalar) or is_emulated(b.dtype.scalar):
            product = np.matmul(decode(a.data, a.dtype.scalar), decode(b.data, b.dtype.scalar))
            total = (product + d.data).astype(d.data.dtype)
            return stock.TensorHandle(total, d.dtype.scalar)
        return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        dtype = arg.dtype.scalar if isinstance(arg.dtype, tl.block_type) else arg.dtype
        value = arg.data.reshape(-1)[0]
        handle = stock.TensorHandle(np.full(ret_ty.shape, value, arg.data.dtype), dtype)
        return _inherit(handle, arg)

    # ------------------------------------------------------------------ where pointers come from

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        return _inherit(super().create_addptr(ptr, offset), ptr)

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        return _inherit(super().create_broadcast(arg, shape), arg)

    def create_expand_dims(self, arg: Any, axis: Any) -> Any:
        return _inherit(super().create_expand_dims(arg, axis), arg)

    def create_reshape(self, arg: Any, shape: Any, allow_reorder: Any) -> Any:
        handle = stock.TensorHandle(arg.data.reshape(shape), arg.dtype.scalar)
        return _inherit(handle, arg)

    def create_trans(self, arg: Any, perm: Any) -> Any:
        return _inherit(super().create_trans(arg, perm), arg)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        return _inherit(super().create_bitcast(src, dst_type), src)

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> Any:
        return _inherit(self.ternary_op(cond, lhs, rhs, np.where), lhs, rhs)

    # ------------------------------------------------------------------ memory

    def _tell(self, kind: str, pointers: Any, mask: Any) -> None:
        if self.hook is not None:
            nbytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            active = None if mask is None else mask.data
            self.hook.access(kind, pointers.data, nbytes, active, pointers.attr.get(ORIGIN))

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        self._tell("load", ptrs, mask)
        return super().create_masked_load(ptrs, mask, other, *rest, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._tell("store", ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        self._tell("atomic", ptr, mask)
        return super().create_atomic_rmw(op, ptr, val, mask, *rest)

    def create_atomic_cas(self, ptr: Any, *rest: Any) -> Any:
        self._tell("atomic", ptr, None)
        return super().create_atomic_cas(ptr, *rest)


_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


class Semantic(TritonSemantic):  # type: ignore[misc]
    """Triton's semantics, with the overflow check in numpy instead of six interpreted steps."""

    def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Any) -> None:
        bits = lhs.type.scalar.int_bitwidth
        if bits >= 64 or lhs.handle.data.dtype == np.bool_:
            return
        name = binary_op.__name__
        wide = _WIDE[name](
            lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64), dtype=np.int64
        )
        limits = np.iinfo(lhs.handle.data.dtype)
        if wide.size and (wide.min() < limits.min or wide.max() > limits.max):
            worst = int(wide.max()) if wide.max() > limits.max else int(wide.min())
            raise IntegerOverflowError(
                f"{source_line()}: {lhs.handle.data.dtype} overflow in {name}, would be {worst}"
            )
