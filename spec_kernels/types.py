"""The values that the layers exchange: sampling parameters, laws, drafts, acceptances.

Each one is a `NamedTuple` of tensors on one device. `batch` counts requests, `nodes` is the width
of the padded draft (1 + gamma on a chain), `rows` counts the rows of logits of this step, packed
in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels._check import check, require

PAD_TOKEN: Final = -1
"""Fills unused places of token tensors: behind the draft, and behind the emitted tokens."""

GREEDY_TEMPERATURE: Final = 1e-5
"""A temperature below this one is greedy: the one-hot law at the first argmax.

Nothing is ever divided by such a temperature.
"""

MAX_TEMPERATURE: Final = 1e30
"""Largest temperature; above it a row is invalid (its inverse would vanish in float32)."""

TOP_P_SLACK: Final = 1e-6
"""Relative slack of `mass >= top_p`, so that float32 rounding does not keep one id too many."""

OK: Final = 0
"""Status: nothing to report."""

INVALID_TARGET: Final = 1
"""Status bit: a row of the target has no law (NaN, +inf, nothing allowed, bad parameters)."""

INVALID_DRAFT: Final = 2
"""Status bit: a draft token is outside the vocabulary, or its draft law is invalid."""

ZERO_Q: Final = 4
"""Status bit: a sampled draft token has probability 0 under the law it claims to come from."""

BAD_TREE: Final = 8
"""Status bit: the parents do not describe a tree."""


class SamplingParams(NamedTuple):
    """Per-request parameters that turn logits into a law, applied in the order of the fields.

    Attributes:
        temperature: `[batch] float32`; below `GREEDY_TEMPERATURE` the request is greedy. NaN, a
            negative value or one above `MAX_TEMPERATURE` makes that request's rows invalid.
        top_k: `[batch] int32`, or None. Values <= 0 and values >= vocab keep every id. Ties at
            the cutoff are all kept.
        top_p: `[batch] float32` in (0, 1], or None. 1 keeps every id; else the smallest set whose
            mass under the top-k law reaches top_p, always with the argmax. A value outside makes
            that request's rows invalid.
        min_p: `[batch] float32` in [0, 1], or None. 0 keeps every id; else the ids with at least
            min_p times the largest probability. A value outside makes that request's rows
            invalid.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @staticmethod
    def make(
        temperature: float | Sequence[float],
        top_k: int | Sequence[int] | None = None,
        top_p: float | Sequence[float] | None = None,
        min_p: float | Sequence[float] | None = None,
        *,
        batch: int | None = None,
        device: torch.device | str | None = None,
    ) -> SamplingParams:
        """Build the tensors from Python numbers, checking every value.

        Args:
            temperature: one number for all requests, or one per request.
            top_k: likewise; 0 is off.
            top_p: likewise; 1 is off.
            min_p: likewise; 0 is off.
            batch: number of requests; by default the length of the first sequence given, else 1.
            device: where the tensors go.

        Raises:
            TypeError: a value is no number, or a top_k no int.
            ValueError: a temperature is NaN, negative or above `MAX_TEMPERATURE`; top_k is
                negative; top_p is outside (0, 1]; min_p is outside [0, 1]; or a sequence has
                another length than `batch`.

        Example:
            >>> SamplingParams.make([0.7, 0.0], top_k=50).top_k
            tensor([50, 50], dtype=torch.int32)
        """
        given = (temperature, top_k, top_p, min_p)
        if batch is None:
            batch = next((len(value) for value in given if isinstance(value, Sequence)), 1)
        return SamplingParams(
            _column("temperature", temperature, batch, device),
            None if top_k is None else _column("top_k", top_k, batch, device),
            None if top_p is None else _column("top_p", top_p, batch, device),
            None if min_p is None else _column("min_p", min_p, batch, device),
        )


def _column(
    name: str,
    value: float | Sequence[float],
    batch: int,
    device: torch.device | str | None,
) -> Tensor:
    """Check one sampling parameter and make its `[batch]` tensor."""
    values = list(value) if isinstance(value, Sequence) else [value] * batch
    if len(values) != batch:
        raise ValueError(f"{name} must have {batch} values, one per request, got {len(values)}")
    kind = Integral if name == "top_k" else Real
    high = {"temperature": MAX_TEMPERATURE, "top_k": 2**31 - 1}.get(name, 1.0)
    for v in values:
        if not isinstance(v, kind) or isinstance(v, bool):
            expected = "an int" if name == "top_k" else "a number"
            raise TypeError(f"{name} must be {expected}, got {type(v).__name__}")
        if not 0 <= v <= high or (name == "top_p" and v == 0):
            left = "(" if name == "top_p" else "["
            raise ValueError(f"{name} must be in {left}0, {high:g}], got {v}")
    column = torch.tensor(
        values, dtype=torch.int32 if name == "top_k" else torch.float32, device=device
    )
    # A positive top_p may round to 0 in float32, which the ops would have to refuse.
    return column.clamp_(min=torch.finfo(torch.float32).tiny) if name == "top_p" else column


class Law(NamedTuple):
    """The distribution of each row of logits, in a few numbers beside the logits themselves.

        p(x) = exp((l(x) - row_max) * inv_temperature - log_sum)   if l(x) >= cutoff, else 0

    `-inf` logits have probability 0. A greedy row (`inv_temperature == 0`) is one-hot at
    `argmax`, whatever else is stored.

    Attributes:
        inv_temperature: `[rows] float32`, 1 / temperature; 0 marks a greedy row.
        cutoff: `[rows] float32`, smallest kept logit; `-inf` without a filter.
        row_max: `[rows] float32`, largest logit.
        log_sum: `[rows] float32`, natural log of the sum over kept ids of
            `exp((l - row_max) * inv_temperature)`.
        argmax: `[rows] int64`, first id with the largest logit; `PAD_TOKEN` in an invalid row.
        status: `[rows] int32`, `OK` or `INVALID_TARGET`: a NaN or `+inf` logit, no finite logit,
            or parameters outside their range.
    """

    inv_temperature: Tensor
    cutoff: Tensor
    row_max: Tensor
    log_sum: Tensor
    argmax: Tensor
    status: Tensor


class Draft(NamedTuple):
    """Draft tokens of a step, with the laws that they were drawn from.

    Attributes:
        tokens: `[batch, nodes] int64 or int32`, ids of the *target's* vocabulary. Node 0 is the
            root, the last committed token; `PAD_TOKEN` stands behind `num_nodes`, and inside a
            chain closes it there.
        num_nodes: `[batch] int32`; 1 = no drafts, 0 = absent request.
        parents: `[batch, nodes] int32`, or None for a chain; `parents[:, 0] == -1` and
            `parents[b, i] < i`.
        logits: `[draft_rows, draft_vocab]` float, or None when every draft is fixed.
        law: the laws of `logits`; None beside logits means that the rows already are probabilities.
        row: `[batch, nodes] int32`, row of `logits` that the node was drawn from; -1 or None =
            fixed (one-hot law).
    """

    tokens: Tensor
    num_nodes: Tensor
    parents: Tensor | None = None
    logits: Tensor | None = None
    law: Law | None = None
    row: Tensor | None = None


class Acceptance(NamedTuple):
    """What a verifier decided.

    Attributes:
        output_tokens: `[batch, max_depth + 1] int64`: accepted drafts, then one recovered or
            bonus token, then `PAD_TOKEN`.
        accepted_lens: `[batch] int32`, accepted drafts; `accepted_lens + 1` tokens are emitted
            where status lacks `INVALID_TARGET` and the request is present.
        path: `[batch, max_depth + 1] int32`, kept nodes, root first, then -1.
        status: `[batch] int32`, bit flags. A flag is set iff the walk ends at the fault.
            `INVALID_TARGET`: the final token would come from an invalid row; its place holds
            `PAD_TOKEN`. `INVALID_DRAFT`: the node behind the last kept one has an id outside the
            vocabulary or an invalid draft law; the chain was closed before it, and the final
            token comes from the plain target law. `ZERO_Q`: the node behind the last kept one is
            sampled but its draft law gives it probability 0; it was rejected. `BAD_TREE`: the
            tree is malformed.
    """

    output_tokens: Tensor
    accepted_lens: Tensor
    path: Tensor
    status: Tensor


class OutOfBlocks(RuntimeError):  # noqa: N818  (named by what happened, as StopIteration is)
    """A cache has too few free blocks for what was asked; raised before anything changed.

    Attributes:
        missing: blocks that must be freed before the same call can succeed.
    """

    def __init__(self, needed: int, free: int) -> None:
        self.missing = needed - free
        super().__init__(f"{needed} blocks needed, {free} free: {self.missing} missing")


class CacheTensors(NamedTuple):
    """Tensors whose rows move together, with the table by which one launch reaches them all.

    Keys, values, scales, latent rows or recurrent states of every layer. Made once per cache by
    `make`; the tensors stay where they are as long as it is used.

    Attributes:
        tensors: each `[blocks, block_size, ...]`, or `[batch, max_len, ...]` if contiguous; any
            dtype. A *row* is what two indices leave.
        table: `[tensors, 10] int64` on their device: address; bytes from one block, slot and head
            to the next; bytes of one head's row; heads; bytes of one move (16 or 1); block size;
            blocks; group.
        addresses: of each tensor, to notice that one was moved.
        rows: heads and bytes of one head's row of each tensor, one after the other.
        groups: number of block tables that the tensors use.
    """

    tensors: tuple[Tensor, ...]
    table: Tensor
    addresses: tuple[int, ...]
    rows: tuple[int, ...]
    groups: int

    @staticmethod
    def make(tensors: Sequence[Tensor], groups: Sequence[int] | None = None) -> CacheTensors:
        """Describe tensors where they lie.

        Args:
            tensors: at least one, on one device; at least two dimensions, any strides by which a
                row is a number of equally distant pieces of adjacent elements (heads).
            groups: which block table each tensor uses; None = table 0 for all.

        Raises:
            ValueError: there is no tensor; devices differ; a tensor has too few dimensions, no
                element, elements above 8 bytes, rows that overlap, or rows scattered in more than
                one way; or groups are not one non-negative int per tensor.

        Example:
            >>> keys = torch.zeros(8, 16, 2, 64)  # [blocks, block_size, kv_heads, head_dim]
            >>> CacheTensors.make([keys, keys.clone()]).rows
            (1, 512, 1, 512)
        """
        tensors = tuple(tensors)
        require(len(tensors) > 0, "tensors must have at least one tensor, got none")
        groups = [0] * len(tensors) if groups is None else list(groups)
        fits = len(groups) == len(tensors) and min(groups) >= 0
        require(fits, f"groups must be {len(tensors)} numbers of block tables, got {groups}")
        devices = {tensor.device for tensor in tensors}
        require(len(devices) == 1, f"tensors must be on one device, got {len(devices)}")
        table = [[*_geometry(x), group] for x, group in zip(tensors, groups, strict=True)]
        return CacheTensors(
            tensors,
            torch.tensor(table, dtype=torch.int64, device=tensors[0].device),
            tuple(row[0] for row in table),
            tuple(number for row in table for number in (row[5], row[4])),
            max(groups) + 1,
        )


def _geometry(tensor: Tensor) -> list[int]:
    """Return the first nine columns of `CacheTensors.table`."""
    layout = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
    has_rows = tensor.dim() >= 2 and tensor.numel() > 0
    require(has_rows, f"tensors must be [blocks, block_size, ...] with elements, got {layout}")
    item, size = tensor.element_size(), list(tensor.shape)
    require(item <= 8, f"elements of tensors must have at most 8 bytes, got {item}")
    step = [item * s if n > 1 else 0 for n, s in zip(size, tensor.stride(), strict=True)]
    apart = all(s > 0 for n, s in zip(size, step, strict=True) if n > 1)
    require(apart, f"rows of tensors must not overlap, got {layout}")
    parts: list[tuple[int, int]] = []  # count and distance of pieces, outermost first
    for n, s in zip(size[2:], step[2:], strict=True):
        if n > 1 and parts and parts[-1][1] == n * s:
            parts[-1] = (parts[-1][0] * n, s)
        elif n > 1:
            parts.append((n, s))
    row = parts.pop()[0] * item if parts and parts[-1][1] == item else item
    require(len(parts) < 2, f"a row of a tensor must be pieces at one distance, got {layout}")
    heads, head_step = parts[0] if parts else (1, 0)
    address = tensor.data_ptr()
    aligned = all(x % 16 == 0 for x in (address, step[0], step[1], head_step, row))
    move = 16 if aligned else 1
    return [address, *step[:2], head_step, row, heads, move, size[1], size[0]]


def invert_id_map(draft_to_target: Tensor, vocab: int) -> Tensor:
    """Turn a draft -> target id map into the map that `accept` and `overlap` read.

    Runs once on the host, when a draft model with its own, smaller vocabulary is loaded.

    Args:
        draft_to_target: `[draft_vocab] int64`, the target id of each column of the draft logits.
        vocab: size of the target's vocabulary.

    Returns:
        `[vocab] int32`, the draft column of each target id; -1 where the draft has none.

    Raises:
        TypeError: draft_to_target is no int64 tensor.
        ValueError: draft_to_target is not one-dimensional, holds an id outside [0, vocab), or
            holds an id twice.

    Example:
        >>> invert_id_map(torch.tensor([4, 0, 2]), vocab=6)
        tensor([ 1, -1,  2, -1,  0, -1], dtype=torch.int32)
    """
    check("draft_to_target", draft_to_target, ["draft_vocab"], torch.int64)
    ids = draft_to_target.tolist()
    outside = next((x for x in ids if not 0 <= x < vocab), None)
    require(outside is None, f"draft_to_target must hold ids in [0, {vocab}), got {outside}")
    target_to_draft = [-1] * vocab
    for column, target in enumerate(ids):
        other = target_to_draft[target]
        require(
            other == -1,
            f"draft_to_target must name each target id once, got {target} in columns "
            f"{other} and {column}",
        )
        target_to_draft[target] = column
    return torch.tensor(target_to_draft, dtype=torch.int32, device=draft_to_target.device)
