"""Number formats that numpy lacks: bfloat16 and the 8-bit floats, as bit patterns.

Rounding is that of the hardware's conversions: nearest even, and saturating for the 8-bit floats
with a finite range (`cvt.rn.satfinite`). Also the fused multiply-add, which numpy lacks too.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import torch
import triton.language as tl

Array = np.ndarray[Any, Any]

FLOAT8: Final[dict[str, torch.dtype]] = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def is_emulated(dtype: Any) -> bool:
    """Return whether values of this scalar type are kept as bit patterns."""
    return bool(dtype == tl.bfloat16 or dtype.name in FLOAT8)


def bfloat16_to_float32(bits: Array) -> Array:
    """Widen bfloat16 bit patterns; exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """Round to bfloat16 bit patterns, ties to even.

    Example:
        >>> hex(int(float32_to_bfloat16(np.float32(1.005859375))))  # 1 + 1.5 * 2^-8: rounds up
        '0x3f81'
    """
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _float8_to_float32(bits: Array, name: str) -> Array:
    codes = torch.from_numpy(np.ascontiguousarray(bits))
    decoded: Array = codes.view(FLOAT8[name]).to(torch.float32).numpy()
    return decoded


def _float32_to_float8(values: Array, name: str) -> Array:
    dtype = FLOAT8[name]
    limit = torch.finfo(dtype).max
    clipped = np.where(np.isnan(values), values, np.clip(values, -limit, limit))
    source = torch.from_numpy(np.ascontiguousarray(clipped, np.float32))
    bits: Array = source.to(dtype).view(torch.uint8).numpy()
    return bits


def decode(bits: Array, dtype: Any) -> Array:
    """Return the numbers behind the bit patterns of an emulated type; others unchanged."""
    if dtype == tl.bfloat16:
        return bfloat16_to_float32(bits)
    if dtype.name in FLOAT8:
        return _float8_to_float32(bits, dtype.name)
    return bits


def encode(values: Array, dtype: Any) -> Array:
    """Round numbers to the bit patterns of an emulated type."""
    if dtype == tl.bfloat16:
        return float32_to_bfloat16(values)
    return _float32_to_float8(np.asarray(values, np.float32), dtype.name)


_LIBM: Final = ctypes.CDLL("libm.so.6")
_LIBM.fma.restype = ctypes.c_double
_LIBM.fma.argtypes = [ctypes.c_double] * 3
_fma64: Final = np.frompyfunc(_LIBM.fma, 3, 1)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once, in the type of a.

    A product of two float32 is exact in float64. The sum is rounded to odd there: where something
    was cut off, the last bit is set, so that rounding to float32 can't take it for a tie.

    Example:
        >>> x = np.float32(1 + 2**-12)
        >>> float(fma(x, x, np.float32(-1 - 2**-11))) == 2**-24, float(x * x - (1 + 2**-11))
        (True, 0.0)
    """
    a, b, c = np.asarray(a), np.asarray(b), np.asarray(c)
    if a.dtype == np.float64:
        return np.asarray(_fma64(a, b, c), np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = np.asarray(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
    is_cut = np.isfinite(total) & ((error > 0) | (error < 0)) & (total.view(np.int64) & 1 == 0)
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(is_cut, np.nextafter(total, towards), total)
    result: Array = odd.astype(a.dtype)
    return result
