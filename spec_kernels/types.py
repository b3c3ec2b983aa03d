"""The values that the layers exchange: sampling parameters, laws, drafts, acceptances.

Everything here is a `NamedTuple` of tensors on one device. `batch` counts requests, `nodes` is
the width of the padded
draft (1 + gamma on a chain), `rows` counts the rows of logits of this step, packed in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

PAD_TOKEN: Final = -1
"""Fills unused places of token tensors: behind the draft, and behind the emitted tokens."""

GREEDY_TEMPERATURE: Final = 1e-5
"""A temperature below this one is greedy: the one-hot law at the first argmax. Nothing is
divided by it."""

MAX_TEMPERATURE: Final = 1e30
"""Largest temperature; above it a row is invalid (its inverse would vanish in float32)."""

TOP_P_SLACK: Final = 1e-6
"""Relative slack of `mass >= top_p`: float32 rounding of the parameter must not keep one id too
many."""

OK: Final = 0
INVALID_TARGET: Final = 1
INVALID_DRAFT: Final = 2
ZERO_Q: Final = 4
BAD_TREE: Final = 8


class SamplingParams(NamedTuple):
    """Per-request parameters that turn logits into a law, applied in the order of the fields.

    Attributes:
        temperature: `[batch] float32`; below `GREEDY_TEMPERATURE` the request is greedy. NaN,
            negative or above
            `MAX_TEMPERATURE` makes the rows of that request invalid.
        top_k: `[batch] int32`, or None. Values <= 0 and values >= vocab keep every id. Ties at
            the cutoff are all kept.
        top_p: `[batch] float32` in (0, 1], or None. 1 keeps every id; else the smallest set
            whose mass under the top-k
            law reaches top_p, always with the argmax. A value outside makes the rows of that
            request invalid.
        min_p: `[batch] float32` in [0, 1], or None. 0 keeps every id; else the ids with at
            least min_p times the largest
            probability. A value outside makes the rows of that request invalid.
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
            temperature, top_k, top_p, min_p: one number for all requests, or one per request.
            batch: number of requests; by default the length of the first sequence given, else 1.
            device: where the tensors go.

        Raises:
            ValueError: a temperature is NaN, negative or above `MAX_TEMPERATURE`; top_k is
            negative; top_p is outside
                (0, 1]; min_p is outside [0, 1]; or a sequence has another length than `batch`.

        Example:
            >>> SamplingParams.make([0.7, 0.0], top_k=50).top_k
            tensor([50, 50], dtype=torch.int32)
        """
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        if batch is None:
            batch = next((len(v) for v in given.values() if isinstance(v, Sequence)), 1)
        limits = {
            "temperature": (0.0, MAX_TEMPERATURE),
            "top_k": (0, 2**31 - 1),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
        }
        tensors: dict[str, Tensor | None] = {}
        for name, value in given.items():
            if value is None:
                tensors[name] = None
                continue
            values = list(value) if isinstance(value, Sequence) else [value] * batch
            if len(values) != batch:
                raise ValueError(
                    f"{name} must have {batch} values, one per request, got {len(values)}"
                )
            low, high = limits[name]
            for v in values:
                outside = not low <= v <= high or (name == "top_p" and v == 0.0)
                if math.isnan(v) or outside:
                    left = "(" if name == "top_p" else "["
                    raise ValueError(f"{name} must be in {left}{low:g}, {high:g}], got {v}")
            dtype = torch.int32 if name == "top_k" else torch.float32
            tensors[name] = torch.tensor(values, dtype=dtype, device=device)
        assert tensors["temperature"] is not None
        return SamplingParams(
            tensors["temperature"], tensors["top_k"], tensors["top_p"], tensors["min_p"]
        )


class Law(NamedTuple):
    """The distribution of each row of logits: `p(x) = exp((l(x) - row_max) * inv_temperature -
    log_sum)` where kept.

    An id x is kept iff `l(x) >= cutoff`; `-inf` logits have probability 0. A greedy row
    (`inv_temperature == 0`) is
    one-hot at `argmax`, whatever else is stored.

    Attributes:
        inv_temperature: `[rows] float32`, 1 / temperature; 0 marks a greedy row.
        cutoff: `[rows] float32`, smallest kept logit; `-inf` without a filter.
        row_max: `[rows] float32`, largest logit.
        log_sum: `[rows] float32`, natural log of the sum of `exp((l - row_max) *
            inv_temperature)` over kept ids.
        argmax: `[rows] int64`, first id with the largest logit; `PAD_TOKEN` in an invalid row.
        status: `[rows] int32`, `OK` or `INVALID_TARGET`: a NaN or `+inf` logit, no finite
            logit, or parameters outside
            their range.
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
            root, the last
            committed token; `PAD_TOKEN` stands behind `num_nodes`, and inside a chain closes it
            there.
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
            bonus token, then
            `PAD_TOKEN`.
        accepted_lens: `[batch] int32`, accepted drafts; `accepted_lens + 1` tokens are emitted
            where status lacks
            `INVALID_TARGET` and the request is present.
        path: `[batch, max_depth + 1] int32`, kept nodes, root first, then -1.
        status: `[batch] int32`, bit flags. A flag is set iff the walk reached the fault:
            `INVALID_TARGET`: the final token would come from an invalid row; its place holds
            `PAD_TOKEN`.
            `INVALID_DRAFT`: the node behind the last kept one has an id outside the vocabulary
            or an invalid draft law;
            the chain was closed before it and the final token comes from the plain target law.
            `ZERO_Q`: that node is sampled but its draft law gives it probability 0; it was
            rejected.
            `BAD_TREE`: the tree is malformed.
    """

    output_tokens: Tensor
    accepted_lens: Tensor
    path: Tensor
    status: Tensor
