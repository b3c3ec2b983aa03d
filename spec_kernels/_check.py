"""One checking helper, one message form.

Checks look at shapes, dtypes and devices, never at tensor values: they cost no synchronisation
and hold under `torch.compile` and fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CPU_FLOATS = (*FLOATS, torch.float64)
"""Also float64, for models that are decoded to prove something."""
IDS = (torch.int64, torch.int32)


def floats_of(tensor: Tensor) -> tuple[torch.dtype, ...]:
    """Return the floating dtypes that caches and attention take on a tensor's device."""
    return CPU_FLOATS if tensor.is_cpu else FLOATS


def describe(dtypes: Sequence[torch.dtype]) -> str:
    """Join dtype names the way messages print them: `float32/float16`."""
    return "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check(
    name: str,
    tensor: object,
    shape: Sequence[int | str],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Raise unless `tensor` has this shape, one of these dtypes, and this device.

    Args:
        name: the argument's name, for the message.
        tensor: the argument.
        shape: one entry per dimension: an int fixes it, a string only names it.
        dtypes: allowed dtypes.
        device: required device, or None for any.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device.

    Example:
        >>> check("num_nodes", torch.zeros(3, dtype=torch.int32), ["batch"], torch.int32)
    """
    if not isinstance(tensor, Tensor):
        _fail(TypeError, name, shape, dtypes, type(tensor).__name__)
    sizes, dtype = tensor.shape, tensor.dtype
    if sizes != shape and not _has_shape(sizes, shape):
        _fail(ValueError, name, shape, dtypes, tensor)
    if dtype is not dtypes and (isinstance(dtypes, torch.dtype) or dtype not in dtypes):
        _fail(TypeError, name, shape, dtypes, tensor)
    if device is not None and tensor.device != device:
        _fail(ValueError, name, shape, dtypes, tensor, device)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def _has_shape(sizes: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(sizes) != len(shape):
        return False
    for size, want in zip(sizes, shape, strict=True):
        if not isinstance(want, str) and want != size:
            return False
    return True


def _fail(
    error: type[Exception],
    name: str,
    shape: Sequence[int | str],
    dtypes: torch.dtype | Sequence[torch.dtype],
    got: Tensor | str,
    device: torch.device | None = None,
) -> NoReturn:
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    expected = f"{name} must be [{', '.join(map(str, shape))}] {describe(allowed)}"
    if isinstance(got, str):
        raise error(f"{expected}, got {got}")
    found = f"got {list(got.shape)} {describe((got.dtype,))}"
    if device is None:
        raise error(f"{expected}, {found}")
    raise error(f"{expected} on {device}, {found} on {got.device}")
