"""One checking helper, one message form. Checks look at shapes, dtypes and devices, never at
tensor values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
IDS = (torch.int64, torch.int32)


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
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    expected = f"{name} must be [{', '.join(map(str, shape))}] {describe(allowed)}"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{expected}, got {type(tensor).__name__}")
    got = f"got {list(tensor.shape)} {describe((tensor.dtype,))}"
    fits = tensor.dim() == len(shape) and all(
        isinstance(want, str) or want == size
        for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{expected}, {got}")
    if tensor.dtype not in allowed:
        raise TypeError(f"{expected}, {got}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{expected} on {device}, {got} on {tensor.device}")


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)
