"""`tl.reduce` and `tl.associative_scan` for the interpreter, vectorised.

The stock interpreter folds unknown combine functions one element at a time in Python. Here they
are called on whole halves (a tree of log2(n) calls, neighbours first, as compiled code may do), and
the known ones are one numpy call. NaN follows the hardware: `tl.max` and `tl.min` drop it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from ._formats import Array, decode, encode, is_emulated
from .errors import KernelError, source_line


def _tensor(data: Array, dtype: Any) -> Any:
    """Wrap an array as a Triton tensor of this scalar type; shape () becomes a scalar."""
    data = np.asarray(data)
    if not is_emulated(dtype):
        data = data.astype(stock._get_np_dtype(dtype), copy=False)
    if data.shape:
        kind = tl.block_type(dtype, list(data.shape))
        return tl.core.tensor(stock.TensorHandle(np.ascontiguousarray(data), dtype), kind)
    return tl.core.tensor(stock.TensorHandle(data.reshape(1), dtype), dtype)


def plain(x: Any) -> Any:
    """Return the value of a constexpr; anything else unchanged."""
    return x.value if isinstance(x, tl.constexpr) else x


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else tuple(x) if isinstance(x, tl.tuple) else (x,)


def _combine(fn: Any, left: list[Array], right: list[Array], dtypes: list[Any]) -> list[Array]:
    arguments = [_tensor(a, t) for side in (left, right) for a, t in zip(side, dtypes, strict=True)]
    result = _as_tuple(fn(*arguments))
    shape = left[0].shape
    return [
        np.broadcast_to(r.handle.data if hasattr(r, "handle") else np.asarray(r), shape).astype(
            a.dtype, copy=False
        )
        for r, a in zip(result, left, strict=True)
    ]


def _fold(arrays: list[Array], dtypes: list[Any], axis: int, fn: Any) -> list[Array]:
    """Reduce `axis` to length 1, neighbours first.

    Raises:
        KernelError: the result depends on the order of operands, which compiled code swaps.
    """

    def every_second(array: Array, start: int) -> Array:
        index = [slice(None)] * array.ndim
        index[axis] = slice(start, None, 2)
        return array[tuple(index)]

    while arrays[0].shape[axis] > 1:
        left = [every_second(a, 0) for a in arrays]
        right = [every_second(a, 1) for a in arrays]
        arrays = _combine(fn, left, right, dtypes)
        swapped = _combine(fn, right, left, dtypes)
        pairs = zip(arrays, swapped, strict=True)
        if not all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs):
            raise KernelError(
                f"{source_line()}: the combine function of tl.reduce is not commutative, but "
                "compiled code swaps its operands"
            )
    return arrays


def _arg(data: Array, axis: int, largest: bool) -> tuple[Array, Array]:
    """First index of the extreme value along an axis, NaN only where nothing else stands."""
    pick, lowest = (np.argmax, -np.inf) if largest else (np.argmin, np.inf)
    keys = data
    if data.dtype.kind == "f":
        keys = np.where(np.isnan(data), np.array(lowest, data.dtype), data)
    index = np.expand_dims(pick(keys, axis=axis), axis)
    return np.take_along_axis(data, index, axis), index.astype(np.int32)


_KINDS: Final = {
    id(getattr(tl.standard, name)): kind
    for name, kind in (
        ("_sum_combine", "sum"),
        ("_elementwise_max", "max"),
        ("_elementwise_min", "min"),
        ("_argmax_combine_tie_break_left", "argmax"),
        ("_argmax_combine_tie_break_fast", "argmax"),
        ("_argmin_combine_tie_break_left", "argmin"),
        ("_argmin_combine_tie_break_fast", "argmin"),
    )
}


def _known(fn: Any, arrays: list[Array], dtype: Any, axis: int) -> list[Array] | None:
    """The reductions of the standard library, by numpy; None for others."""
    kind = _KINDS.get(id(fn))
    if kind is None:
        return None
    data = decode(arrays[0], dtype)
    if kind == "sum":
        total = np.sum(data, axis=axis, keepdims=True, dtype=data.dtype)
        return [encode(total, dtype) if is_emulated(dtype) else total]
    if kind in ("max", "min"):
        pick = np.fmax if kind == "max" else np.fmin
        best = pick.reduce(data, axis=axis, keepdims=True)
        return [encode(best, dtype) if is_emulated(dtype) else best]
    value, index = _arg(data, axis, kind == "argmax")
    if (arrays[1] != np.arange(data.shape[axis]).reshape(_along(data.ndim, axis))).any():
        return None  # the indices are not 0, 1, 2, ...: fold
    return [encode(value, dtype) if is_emulated(dtype) else value, index]


def _along(ndim: int, axis: int) -> list[int]:
    shape = [1] * ndim
    shape[axis] = -1
    return shape


def reduce(
    input: Any,  # noqa: A002 - the name in triton.language
    axis: Any,
    combine_fn: Callable[..., Any],
    keep_dims: Any = False,
    **_: Any,
) -> Any:
    """`tl.reduce`."""
    axis, keep_dims = plain(axis), plain(keep_dims)
    given = _as_tuple(input)
    arrays = [x.handle.data for x in given]
    dtypes = [x.dtype for x in given]
    ndim = arrays[0].ndim
    if axis is None:
        arrays = [a.reshape(-1) for a in arrays]
    along = 0 if axis is None else axis % ndim
    folded = _known(combine_fn, arrays, dtypes[0], along)
    if folded is None:
        folded = _fold(arrays, dtypes, along, combine_fn)
    if not keep_dims:
        folded = [a.squeeze(along) for a in folded]
    elif axis is None:
        folded = [a.reshape((1,) * ndim) for a in folded]
    out = tuple(_tensor(a, t) for a, t in zip(folded, dtypes, strict=True))
    return out if isinstance(input, (tuple, tl.tuple)) else out[0]


def associative_scan(
    input: Any,  # noqa: A002 - the name in triton.language
    axis: Any,
    combine_fn: Callable[..., Any],
    reverse: Any = False,
    **_: Any,
) -> Any:
    """`tl.associative_scan`, in log2(n) steps."""
    axis, reverse = plain(axis), plain(reverse)
    given = _as_tuple(input)
    dtypes = [x.dtype for x in given]
    arrays = [x.handle.data for x in given]
    axis %= arrays[0].ndim
    if reverse:
        arrays = [np.flip(a, axis) for a in arrays]
    if combine_fn is tl.standard._sum_combine and not is_emulated(dtypes[0]):
        arrays = [np.cumsum(arrays[0], axis=axis, dtype=arrays[0].dtype)]
    else:
        arrays = _scan(arrays, dtypes, axis, combine_fn)
    if reverse:
        arrays = [np.flip(a, axis) for a in arrays]
    out = tuple(_tensor(a, t) for a, t in zip(arrays, dtypes, strict=True))
    return out if isinstance(input, (tuple, tl.tuple)) else out[0]


def _scan(arrays: list[Array], dtypes: list[Any], axis: int, fn: Any) -> list[Array]:
    length = arrays[0].shape[axis]
    position = np.arange(length).reshape(_along(arrays[0].ndim, axis))
    distance = 1
    while distance < length:
        before = [np.where(position < distance, 0, np.roll(a, distance, axis)) for a in arrays]
        before = [b.astype(a.dtype, copy=False) for b, a in zip(before, arrays, strict=True)]
        combined = _combine(fn, before, arrays, dtypes)
        arrays = [
            np.where(position < distance, a, c) for a, c in zip(arrays, combined, strict=True)
        ]
        distance *= 2
    return arrays
