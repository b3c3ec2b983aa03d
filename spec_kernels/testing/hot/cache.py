"""Hot calls of the cache: append, plain and quantised; compact; select; gather hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from spec_kernels.kernels import append_cache, compact_cache, compact_hidden, select_state
from spec_kernels.types import CacheTensors

from ._call import HotCall

PATH: Final = (0, 2, 4, 5, 7, 9)
"""A path of which all but the root move."""

NODES: Final = 10
"""Nodes of the draft that it is a path of."""

ROW: Final = (8, 128)
"""Heads and size of a head."""


def _rows(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _numbers(device: str, *values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def make_append(dtype: torch.dtype, scale: str, device: str) -> Callable[[], object]:
    """Prepare rows of K and V for one layer."""
    tokens, blocks = (256, 4096) if device == "meta" else (4, 4)
    cache = _rows(device, blocks, 16, *ROW, dtype=dtype)
    new = _rows(device, tokens, *ROW)
    shape = (1,) if scale == "cache" else (blocks, 16, ROW[0])
    scales = None if scale == "none" else torch.ones(shape, device=device)
    slots = torch.arange(tokens, device=device)
    more = None if scales is None else scales.clone()
    return partial(
        append_cache, cache, cache.clone(), new, new, slots, key_scale=scales, value_scale=more
    )


def make_compact(width: int, form: str, device: str) -> Callable[[], object]:
    """Prepare one path per request through all layers; form "hnd" has rows in pieces."""
    layers, batch, blocks = (32, 32, 4096) if device == "meta" else (1, 1, 4)
    shape = (blocks, ROW[0], 16, ROW[1]) if form == "hnd" else (blocks, 16, *ROW)
    tensors = [_rows(device, *shape) for _ in range(2 * layers)]
    if form == "hnd":
        tensors = [tensor.transpose(1, 2) for tensor in tensors]
    if form == "odd":
        tensors = [tensor[..., 1:-1] for tensor in tensors]
    table = torch.arange(blocks, dtype=torch.int32, device=device).view(batch, -1)
    path = [*PATH, *[-1] * (width - len(PATH))]
    lens = _numbers(device, *[len(PATH) - 1] * batch)
    context = _numbers(device, *[7] * batch)
    num_nodes = _numbers(device, *[NODES] * batch) if form == "clears" else None
    paths = _numbers(device, *[path] * batch)
    caches = CacheTensors.make(tensors)
    return partial(compact_cache, caches, table, context, paths, lens, num_nodes=num_nodes)


def make_select(device: str) -> Callable[[], object]:
    """Prepare states of a recurrent layer: heads x head_dim x state."""
    batch, shape = (32, (64, 64, 128)) if device == "meta" else (1, (4, 64, 128))
    states = CacheTensors.make([_rows(device, batch, 1, *shape, dtype=torch.float32)])
    after = CacheTensors.make([_rows(device, batch, 6, *shape, dtype=torch.float32)])
    paths, lens = _numbers(device, *[PATH[:3]] * batch), _numbers(device, *[2] * batch)
    return partial(select_state, states, after, paths, lens)


def make_hidden(device: str) -> Callable[[], object]:
    """Prepare the hidden states of a step."""
    batch, size = (32, 4096) if device == "meta" else (1, 4096)
    hidden = _rows(device, 10 * batch, size)
    row = torch.arange(10 * batch, dtype=torch.int32, device=device).view(batch, 10)
    paths, lens = _numbers(device, *[PATH] * batch), _numbers(device, *[3] * batch)
    return partial(compact_hidden, hidden, row, paths, lens)


def _reachable(call: Any) -> Sequence[Tensor]:
    """Return the tensors behind the pointer tables of a prepared call."""
    return [x for arg in call.args if isinstance(arg, CacheTensors) for x in arg.tensors]


def _append(name: str, dtype: torch.dtype, scale: str, row_bytes: int) -> HotCall:
    """`row_bytes`: half of what one token moves, of K and V together."""
    make = partial(make_append, dtype, scale)
    return HotCall("append_cache", name, make, 1, counts={"tokens": 4, "row_bytes": row_bytes})


def _compact(name: str, width: int, form: str, row_bytes: int = 2 * 2048) -> HotCall:
    return HotCall(
        "compact_cache",
        name,
        partial(make_compact, width, form),
        launches=1,
        counts={
            "moved": len(PATH) - 1,
            "cleared": NODES - len(PATH) if form == "clears" else 0,
            "row_bytes": row_bytes,
        },
        reachable=_reachable,
    )


CALLS: Final = (
    _append("bf16", torch.bfloat16, "none", 4096),
    _append("e4m3-row", torch.float8_e4m3fn, "row", 3072),
    _append("int8-cache", torch.int8, "cache", 3072),
    _compact("bf16", 6, "nhd"),
    _compact("bf16-hnd", 6, "hnd"),
    _compact("bf16-odd", 6, "odd", row_bytes=2 * 8 * 126 * 2),
    _compact("bf16-clears", 33, "clears"),
    _compact("bf16-wide", 200, "nhd"),
    HotCall(
        "select_state",
        "f32",
        make_select,
        launches=1,
        counts={"state_bytes": 4 * 64 * 128 * 4},
        reachable=_reachable,
    ),
    HotCall(
        "compact_hidden",
        "bf16",
        make_hidden,
        launches=1,
        counts={"kept": 4, "width": 6, "row_bytes": 8192},
    ),
)
