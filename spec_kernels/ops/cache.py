"""The KV cache: append new rows, keep the accepted path, select states, all in place."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from spec_kernels._check import FLOATS, check, floats_of
from spec_kernels.ops._arguments import detached
from spec_kernels.ops._register import checked_once, register
from spec_kernels.types import CacheTensors

_QUANTISED: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@checked_once()
def append_cache(
    key_cache: Tensor,
    value_cache: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Append new K/V rows to a paged or contiguous cache, by slot, quantising if the cache is.

        row slots[t] of the cache  <-  round(x[t] / scale)        scale = 1, given, or amax / limit

    Args:
        key_cache: `[blocks, block_size, kv_heads, head_dim]`, or `[batch, max_len, ...]`, any
            strides; float32, float16, bfloat16, or quantised: float8_e4m3fn, float8_e5m2, int8.
        value_cache: likewise, possibly with another head_dim; None for a cache of latent rows.
        key: `[tokens, kv_heads, head_dim] float32/float16/bfloat16`.
        value: likewise; None where value_cache is None.
        slots: `[tokens] int64`: block * block_size + place in the block. A slot outside the cache,
            as a negative one, skips the row. Different tokens must have different slots.
        key_scale: None; `[1] float32`, one scale of the whole cache, which is read; or
            `[blocks, block_size, kv_heads] float32`, any strides, which is written: the largest
            magnitude of the row divided by the largest number of the dtype. Only beside a
            quantised cache.
        value_scale: likewise.

    Raises:
        TypeError: a dtype is not among those above.
        ValueError: shapes or devices do not fit; only one of value and value_cache is given; or a
            scale is given for a cache that is not quantised.

    Note:
        x / scale is rounded to float32, then to the nearest number of the cache, ties to even,
        saturating. NaN stays NaN in an 8-bit float and becomes 0 in int8; a row with its own scale
        that holds NaN gets the scale NaN. One launch, no synchronisation, no gradient.

    Example:
        >>> cache = torch.zeros(2, 4, 1, 2, dtype=torch.int8)  # two blocks of four rows
        >>> scale, row = torch.zeros(2, 4, 1), torch.tensor([[[1.0, -0.5]]])
        >>> append_cache(cache, None, row, None, torch.tensor([6]), key_scale=scale)
        >>> cache[1, 2], scale[1, 2] * 127
        (tensor([[127, -64]], dtype=torch.int8), tensor([1.]))
    """
    if (value_cache is None) != (value is None):
        raise ValueError("value and value_cache must be given together, got one of them")
    check("slots", slots, ("tokens",), torch.int64, key_cache.device)
    tokens = slots.shape[0]
    _check_append("key", key_cache, key, tokens, key_scale)
    if value_cache is not None:
        _check_append("value", value_cache, value, tokens, value_scale)
        value = None if value is None else detached(value)
    _append_cache(key_cache, value_cache, detached(key), value, slots, key_scale, value_scale)


def _check_append(
    name: str, cache: Tensor, rows: Tensor | None, tokens: int, scale: Tensor | None
) -> None:
    shape = ("blocks", "block_size", "kv_heads", "head_dim")
    floats = floats_of(cache) if isinstance(cache, Tensor) else FLOATS
    check(f"{name}_cache", cache, shape, (*floats, *_QUANTISED))
    check(name, rows, (tokens, *cache.shape[2:]), floats, cache.device)
    if scale is None:
        return
    if cache.dtype not in _QUANTISED:
        raise ValueError(f"{name}_scale must be None beside a {cache.dtype} cache")
    per_row = scale.dim() != 1
    check(f"{name}_scale", scale, cache.shape[:3] if per_row else (1,), torch.float32, cache.device)


@checked_once()
def compact_cache(
    caches: CacheTensors,
    block_table: Tensor | None,
    context_lens: Tensor,
    path: Tensor,
    accepted_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
) -> None:
    """Roll the KV cache back to the accepted path: compact its rows, in place, in one launch.

        row context_lens[b] + i  <-  row context_lens[b] + path[b, i]       i <= accepted_lens[b]

    in every tensor: K, V and scales of all layers. A chain needs no call, since its path is
    0, 1, 2, ...; calling it anyway moves nothing. Lengths are the caller's to advance.

    Args:
        caches: the tensors, made once by `CacheTensors.make`; any dtype, moved byte by byte.
        block_table: `[batch, max_blocks] int32`, -1 = none; `[groups, batch, max_blocks]` if
            tensors have tables of their own; None for contiguous tensors.
        context_lens: `[batch] int32`, committed rows before this step.
        path: `[batch, max_depth + 1] int32`: kept nodes, root first, then -1. A request whose
            first entry is negative is absent.
        accepted_lens: `[batch] int32`: accepted drafts; one entry more of the path counts.
        num_nodes: `[batch] int32`, nodes of the draft. If given, the dead rows between the path
            and num_nodes are set to zero bytes.

    Raises:
        TypeError: caches is no `CacheTensors`, or a dtype differs from the above.
        ValueError: shapes or devices do not fit, there are fewer tables than groups, or (on a
            GPU) a tensor is no longer where it was.

    Note:
        The first 128 entries of a path may have any order: all their rows are read before one
        is written. Longer paths go 128 entries at a time, which is the same for ascending ones.
        An entry without a row (negative, behind the table, block -1, not below num_nodes) is
        skipped. Requests must not share the blocks behind their context. Only rows that change
        place are read and written. No synchronisation, safe in CUDA graphs. On a GPU under
        `torch.compile`, tensors that the compiler replaced by copies are refused.

    Example:
        >>> cache = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])  # two blocks of four
        >>> table, context = torch.tensor([[1, 0]]).int(), torch.tensor([2]).int()
        >>> path, accepted = torch.tensor([[0, 3, -1]]).int(), torch.tensor([1]).int()
        >>> compact_cache(CacheTensors.make([cache]), table, context, path, accepted)
        >>> cache  # row 5, in block 0, moved to row 3, in block 1
        tensor([[10, 11, 12, 13],
                [20, 21, 22, 11]])
    """
    batch, device = _check_path(path, accepted_lens)
    _check_caches("caches", caches, device)
    check("context_lens", context_lens, (batch,), torch.int32, device)
    if block_table is not None:
        shape: tuple[int | str, ...] = (batch, "max_blocks")
        if block_table.dim() == 3 or caches.groups > 1:
            shape = (max(caches.groups, len(block_table)), *shape)
        check("block_table", block_table, shape, torch.int32, device)
    if num_nodes is not None:
        check("num_nodes", num_nodes, (batch,), torch.int32, device)
    _compact_cache(*_pack(caches), block_table, context_lens, path, accepted_lens, num_nodes)


def _check_path(path: Tensor, accepted_lens: Tensor) -> tuple[int, torch.device]:
    check("path", path, ("batch", "max_depth + 1"), torch.int32)
    batch, width = path.shape
    if width == 0:
        raise ValueError(f"path must have a column for the root, got [{batch}, 0]")
    check("accepted_lens", accepted_lens, (batch,), torch.int32, path.device)
    return batch, path.device


def _check_caches(name: str, caches: object, device: torch.device) -> None:
    if not isinstance(caches, CacheTensors):
        raise TypeError(f"{name} must be CacheTensors, got {type(caches).__name__}")
    check(f"{name}.table", caches.table, (len(caches.tensors), 10), torch.int64, device)


@checked_once()
def compact_hidden(
    hidden: Tensor, target_row: Tensor, path: Tensor, accepted_lens: Tensor
) -> Tensor:
    """Gather the hidden states of the accepted path, for proposers that read them (MTP, EAGLE).

        out[b, i] = hidden[target_row[b, path[b, i]]]       i <= accepted_lens[b],   else 0

    Args:
        hidden: `[rows, size]`, packed in any order, any dtype and strides.
        target_row: `[batch, nodes] int32`, row of each node, as `accept` takes it.
        path: `[batch, max_depth + 1] int32`: kept nodes, root first, then -1.
        accepted_lens: `[batch] int32`.

    Returns:
        `[batch, max_depth + 1, size]` of the dtype of hidden; zeros behind the path and where a
        node or its row does not exist.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: shapes or devices do not fit.

    Note:
        One launch, no synchronisation, no gradient.

    Example:
        >>> hidden = torch.tensor([[1.0], [2.0], [3.0]])
        >>> row, path = torch.tensor([[0, 1, 2]]).int(), torch.tensor([[0, 2, -1]]).int()
        >>> compact_hidden(hidden, row, path, torch.tensor([1]).int()).flatten()
        tensor([1., 3., 0.])
    """
    batch, device = _check_path(path, accepted_lens)
    check("hidden", hidden, ("rows", "size"), (hidden.dtype,), device)
    check("target_row", target_row, (batch, "nodes"), torch.int32, device)
    out: Tensor = _compact_hidden(detached(hidden), target_row, path, accepted_lens)
    return out


@checked_once()
def select_state(
    states: CacheTensors,
    checkpoints: CacheTensors,
    path: Tensor,
    accepted_lens: Tensor,
    *,
    state_slots: Tensor | None = None,
) -> None:
    """Roll recurrent states back to the last accepted token: Mamba, linear attention, convolution.

        states[state_slots[b], 0]  <-  checkpoints[b, path[b, accepted_lens[b]]]

    in every tensor, in one launch. The forward left the state behind each node as a checkpoint,
    chain and tree alike.

    Args:
        states: each `[slots, 1, ...]`; any dtype, copied byte by byte.
        checkpoints: each `[batch, nodes, ...]`, rows like those of the same tensor of states.
        path: `[batch, max_depth + 1] int32`: kept nodes, root first, then -1. A request whose
            first entry is negative is absent: its state stays.
        accepted_lens: `[batch] int32`.
        state_slots: `[batch] int32`, where the state of each request lies, -1 = skip; None:
            request b has state b. Different requests must have different slots.

    Raises:
        TypeError: states or checkpoints are no `CacheTensors`, or a dtype differs.
        ValueError: shapes or devices do not fit, or (on a GPU) a tensor is no longer where it was.

    Note:
        A state whose node or slot does not exist stays. No synchronisation, safe in CUDA graphs.

    Source:
        Wu et al. 2024, "Snakes and ladders: accelerating SSM inference with speculative decoding".

    Example:
        >>> states, after = torch.zeros(1, 1, 2), torch.tensor([[[1.0, 1.0], [2.0, 2.0]]])
        >>> path, accepted = torch.tensor([[0, 1]]).int(), torch.tensor([1]).int()
        >>> select_state(CacheTensors.make([states]), CacheTensors.make([after]), path, accepted)
        >>> states
        tensor([[[2., 2.]]])
    """
    batch, device = _check_path(path, accepted_lens)
    for name, caches in (("states", states), ("checkpoints", checkpoints)):
        _check_caches(name, caches, device)
    if states.rows != checkpoints.rows:
        raise ValueError(
            f"checkpoints must have the rows of states, {states.rows}, got {checkpoints.rows}"
        )
    for state, checkpoint in zip(states.tensors, checkpoints.tensors, strict=True):
        check("states", state, (state.shape[0], 1, *checkpoint.shape[2:]), checkpoint.dtype)
    if state_slots is not None:
        check("state_slots", state_slots, (batch,), torch.int32, device)
    _select_state(*_pack(states), *_pack(checkpoints), path, accepted_lens, state_slots)


_Flat = tuple[list[Tensor], Tensor, list[int], list[int], int]


def _pack(caches: CacheTensors) -> _Flat:
    """Make the flat form of `CacheTensors`."""
    return (
        list(caches.tensors),
        caches.table,
        list(caches.addresses),
        list(caches.rows),
        caches.groups,
    )


def _unpack(
    tensors: Sequence[Tensor],
    table: Tensor,
    addresses: Sequence[int],
    rows: Sequence[int],
    groups: int,
) -> CacheTensors:
    """Undo `_pack`."""
    return CacheTensors(tuple(tensors), table, tuple(addresses), tuple(rows), groups)


def _call_append_cache(
    layer: ModuleType,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    layer.append_cache(
        key_cache,
        value_cache,
        key,
        value,
        slots,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def _call_compact_cache(
    layer: ModuleType,
    tensors: Sequence[Tensor],
    table: Tensor,
    addresses: Sequence[int],
    rows: Sequence[int],
    groups: int,
    block_table: Tensor | None,
    context_lens: Tensor,
    path: Tensor,
    accepted_lens: Tensor,
    num_nodes: Tensor | None,
) -> None:
    caches = _unpack(tensors, table, addresses, rows, groups)
    layer.compact_cache(caches, block_table, context_lens, path, accepted_lens, num_nodes=num_nodes)


def _call_compact_hidden(
    layer: ModuleType, hidden: Tensor, target_row: Tensor, path: Tensor, accepted_lens: Tensor
) -> Tensor:
    out: Tensor = layer.compact_hidden(hidden, target_row, path, accepted_lens)
    return out


def _call_select_state(
    layer: ModuleType,
    states: Sequence[Tensor],
    states_table: Tensor,
    states_addresses: Sequence[int],
    states_rows: Sequence[int],
    states_groups: int,
    checkpoints: Sequence[Tensor],
    checkpoints_table: Tensor,
    checkpoints_addresses: Sequence[int],
    checkpoints_rows: Sequence[int],
    checkpoints_groups: int,
    path: Tensor,
    accepted_lens: Tensor,
    state_slots: Tensor | None,
) -> None:
    layer.select_state(
        _unpack(states, states_table, states_addresses, states_rows, states_groups),
        _unpack(
            checkpoints,
            checkpoints_table,
            checkpoints_addresses,
            checkpoints_rows,
            checkpoints_groups,
        ),
        path,
        accepted_lens,
        state_slots=state_slots,
    )


def _fake_nothing(*_: object) -> None:
    return None


def _fake_compact_hidden(
    hidden: Tensor, target_row: Tensor, path: Tensor, accepted_lens: Tensor
) -> Tensor:
    return hidden.new_empty((*path.shape, hidden.shape[1]))


_append_cache = register(
    "append_cache(Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor key, Tensor? value,"
    " Tensor slots, Tensor(c!)? key_scale, Tensor(d!)? value_scale) -> ()",
    _call_append_cache,
    _fake_nothing,
)
_compact_cache = register(
    "compact_cache(Tensor(a!)[] tensors, Tensor table, SymInt[] addresses, SymInt[] rows,"
    " SymInt groups, Tensor? block_table, Tensor context_lens, Tensor path,"
    " Tensor accepted_lens, Tensor? num_nodes) -> ()",
    _call_compact_cache,
    _fake_nothing,
)
_compact_hidden = register(
    "compact_hidden(Tensor hidden, Tensor target_row, Tensor path, Tensor accepted_lens) -> Tensor",
    _call_compact_hidden,
    _fake_compact_hidden,
)
_select_state = register(
    "select_state(Tensor(a!)[] states, Tensor states_table, SymInt[] states_addresses,"
    " SymInt[] states_rows, SymInt states_groups, Tensor[] checkpoints,"
    " Tensor checkpoints_table, SymInt[] checkpoints_addresses, SymInt[] checkpoints_rows,"
    " SymInt checkpoints_groups, Tensor path, Tensor accepted_lens, Tensor? state_slots) -> ()",
    _call_select_state,
    _fake_nothing,
)
