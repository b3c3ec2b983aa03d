"""Number formats that numpy lacks: bfloat16 and the 8-bit floats, as bit patterns.

Rounding is that of the hardware's conversions: nearest even, and saturating for the 8-bit floats
with a finite range (`cvt.rn.satfinite`).
"""

from __future__ import annotations

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
