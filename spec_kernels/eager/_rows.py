"""How a row of logits becomes a law, one row at a time in a reused buffer.

    weight(x) = 2^((l(x) - row_max) * inv_temperature * log2(e))    where l(x) >= cutoff, else 0

A row that a filter thinned out is held as its kept ids and their weights; any other as one dense
float32 vector. Sums run over tiles of `TILE` ids in float32, and over tiles in float64.
"""

from __future__ import annotations

import ctypes
import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels.types import (
    GREEDY_TEMPERATURE,
    INVALID_TARGET,
    MAX_TEMPERATURE,
    OK,
    PAD_TOKEN,
    TOP_P_SLACK,
    Law,
    SamplingParams,
)

TILE: Final = 512
"""Ids per partial sum."""

GROUP: Final = 64
"""Ids per group maximum: ids at or above a cutoff lie in the groups whose maximum reaches it."""

_LOG2_E: Final = math.log2(math.e)


class RowLaw(NamedTuple):
    """The fields of `Law` for one row, as Python numbers."""

    inv_temperature: float
    cutoff: float
    row_max: float
    log_sum: float
    argmax: int
    status: int


INVALID: Final = RowLaw(0.0, math.inf, 0.0, 0.0, PAD_TOKEN, INVALID_TARGET)
PROBABILITIES: Final = RowLaw(1.0, -math.inf, 0.0, 0.0, PAD_TOKEN, OK)
"""Stands for the law of a row that already holds probabilities."""


class RowParams(NamedTuple):
    """The sampling parameters of one request, as Python numbers."""

    temperature: float
    inv_temperature: float
    top_k: int
    top_p: float
    min_p: float

    def has_filter(self, vocab: int) -> bool:
        """Say whether any of the three filters can drop an id."""
        return 0 < self.top_k < vocab or self.top_p < 1.0 or self.min_p > 0.0

    def is_in_range(self) -> bool:
        """Say whether every parameter is; comparisons with NaN are false."""
        return (
            0.0 <= self.temperature <= MAX_TEMPERATURE
            and 0.0 < self.top_p <= 1.0
            and 0.0 <= self.min_p <= 1.0
        )


class Weights(NamedTuple):
    """Non-negative numbers for ids in ascending order; ids left out have weight 0."""

    ids: Tensor | None  # [kept] int64, None = every id
    mass: Tensor  # [kept] or [vocab] float32


def to_float32(value: float) -> float:
    """Round to float32."""
    return ctypes.c_float(value).value


def _below(cutoff: float) -> float:
    """Return the largest float32 below a cutoff."""
    rounded = torch.tensor(cutoff, dtype=torch.float32)
    if float(rounded) < cutoff:
        return float(rounded)
    return float(torch.nextafter(rounded, torch.tensor(-math.inf)))


def _row_params(params: SamplingParams) -> list[RowParams]:
    """Return the parameters of every request."""
    batch, temperature = params.temperature.numel(), params.temperature.float()
    filters = zip((params.top_k, params.top_p, params.min_p), (0, 1.0, 0.0), strict=True)
    lists = [[off] * batch if f is None else f.tolist() for f, off in filters]
    inverse = temperature.reciprocal().tolist()
    return [RowParams(*p) for p in zip(temperature.tolist(), inverse, *lists, strict=True)]


def tile_sums(weights: Tensor) -> Tensor:
    """Return the sum of every tile as float64: `[ceil(n / TILE)]`."""
    whole = weights.numel() // TILE * TILE
    sums = weights[:whole].view(-1, TILE).sum(1).double()
    if whole == weights.numel():
        return sums
    return torch.cat((sums, weights[whole:].sum().double()[None]))


def first_argmax(values: Tensor) -> int:
    """Return the first index of the largest value."""
    whole = values.numel() // TILE * TILE
    if whole == 0:
        return int(values.argmax())
    tops = values[:whole].view(-1, TILE).amax(1)
    if whole < values.numel():
        tops = torch.cat((tops, values[whole:].amax()[None]))
    start = int(tops.argmax()) * TILE
    return start + int(values[start : start + TILE].argmax())


def tile_stats(values: Tensor, row_max: float, inv_temperature: float, out: Tensor) -> float:
    """Write the weights of every id to `out`, and return their sum.

    Example:
        >>> values, out = torch.tensor([1.0, 1.0]), torch.empty(2)
        >>> tile_stats(values, 1.0, 0.5, out), out
        (2.0, tensor([1., 1.]))
    """
    torch.sub(values, row_max, out=out)
    out.mul_(inv_temperature * _LOG2_E).exp2_()
    return float(tile_sums(out).sum())


def _group_maxima(values: Tensor) -> Tensor:
    """Return the maximum of every whole group."""
    groups = values.numel() // GROUP
    return values[: groups * GROUP].view(groups, GROUP).amax(1)


def _members(values: Tensor, maxima: Tensor, cutoff: float) -> Tensor | None:
    """Return the ids at or above the cutoff; None if most groups hold one."""
    groups = (maxima >= cutoff).nonzero().flatten()
    if groups.numel() * 8 > maxima.numel() or not maxima.numel():
        return None
    whole = maxima.numel() * GROUP
    places = (values[:whole].view(-1, GROUP)[groups] >= cutoff).nonzero()
    ids = groups[places[:, 0]] * GROUP + places[:, 1]
    tail = (values[whole:] >= cutoff).nonzero().flatten() + whole
    return torch.cat((ids, tail))


def _largest(values: Tensor, maxima: Tensor, count: int) -> Tensor:
    """Return at least `count` of the largest values, descending, and every value tied with them.

    `count` groups hold a value at or above the count-th largest group maximum, so the values from
    there on are enough; the whole row is sorted only if that is too many of them.
    """
    if count * 8 <= maxima.numel():
        bound = float(maxima.topk(count).values[-1])
        ids = _members(values, maxima, bound)
        if ids is not None:
            return values[ids].sort(descending=True).values
    return values.sort(descending=True).values


def _top_p_cutoff(descending: Tensor, row_max: float, params: RowParams, total: float) -> float:
    """Return the value at which the mass reaches top_p; `-inf` if it never does.

    Args:
        descending: the largest values.
        total: mass of the whole law, of which top_p is a share; NaN = that of `descending`.
    """
    mass = ((descending.double() - row_max) * params.inv_temperature).exp().cumsum(0)
    total = float(mass[-1]) if math.isnan(total) else total
    place = int(torch.searchsorted(mass, params.top_p * (1.0 - TOP_P_SLACK) * total))
    return float(descending[place]) if place < descending.numel() else -math.inf


def find_cutoff(values: Tensor, row_max: float, params: RowParams) -> float:
    """Return the smallest logit that top-k, then top-p, then min-p keep; `-inf` if all are off.

    Args:
        values: `[vocab] float32`, one valid row.
        row_max: its largest logit.
        params: not greedy, in range.

    Example:
        >>> values, params = torch.tensor([3.0, 1.0, 2.0]), RowParams(1.0, 1.0, 2, 1.0, 0.0)
        >>> find_cutoff(values, 3.0, params)
        2.0
    """
    cutoff, vocab = -math.inf, values.numel()
    has_top_k, has_top_p = 0 < params.top_k < vocab, params.top_p < 1.0
    maxima = _group_maxima(values) if has_top_k or has_top_p else values
    if has_top_k:
        descending = _largest(values, maxima, params.top_k)
        cutoff = float(descending[params.top_k - 1])
        if has_top_p:
            kept = int((descending >= cutoff).sum())
            cutoff = _top_p_cutoff(descending[:kept], row_max, params, math.nan)
    elif has_top_p:
        total = tile_stats(values, row_max, params.inv_temperature, torch.empty_like(values))
        count = GROUP
        while cutoff == -math.inf:
            descending = _largest(values, maxima, count)
            cutoff = _top_p_cutoff(descending, row_max, params, total)
            if descending.numel() == vocab:
                break
            count *= 4
    if params.min_p > 0.0:
        cutoff = max(cutoff, to_float32(row_max + params.temperature * math.log(params.min_p)))
    return cutoff


class RowReader:
    """Reads rows of logits and their laws, one at a time.

    Args:
        logits: `[rows, vocab]` float32, float16 or bfloat16, any strides; never written.
        law: given laws, or the parameters of the requests that rows belong to, or None if the
            rows are probabilities.
        width: the dense vectors of this reader end in zeros up to this length.
    """

    def __init__(self, logits: Tensor, law: Law | SamplingParams | None, width: int = 0) -> None:
        self.logits = logits.detach()
        self.rows, self.vocab = logits.shape
        self.holds_probabilities = law is None
        self._laws: list[RowLaw] | None = None
        self._params: list[RowParams] = []
        if isinstance(law, SamplingParams):
            self._params = _row_params(law)
        elif law is not None:
            self._laws = [
                RowLaw(*fields) for fields in zip(*(f.tolist() for f in law), strict=True)
            ]
        self._padded = torch.zeros(max(self.vocab, width), device=logits.device)
        self._buffer = self._padded[: self.vocab]
        self._weighed_row = -1  # the row whose unfiltered weights lie in the buffer

    def law(self, row: int, request: int = -1) -> RowLaw:
        """Return the law of a row; that of an invalid row if there is no such row."""
        if not 0 <= row < self.rows:
            return INVALID
        if self.holds_probabilities:
            return PROBABILITIES
        return self._laws[row] if self._laws is not None else self._compute(row, request)

    def probability(self, row: int, law: RowLaw, column: int) -> float:
        """Return the probability of one id of a valid row, in float64."""
        if law.inv_temperature == 0.0:
            return float(column == law.argmax)
        value = float(self.logits[row, column])
        if self.holds_probabilities:
            return value
        if value < law.cutoff:
            return 0.0
        return math.exp(min((value - law.row_max) * law.inv_temperature - law.log_sum, 0.0))

    def weights(self, row: int, law: RowLaw) -> Weights:
        """Return numbers proportional to the law of a valid row. Read them before the next call;
        never write them."""
        if law.inv_temperature == 0.0:
            one = torch.ones(1, device=self.logits.device)
            return Weights(torch.tensor([law.argmax], device=self.logits.device), one)
        if self.holds_probabilities:
            return Weights(None, self._values(row))
        if law.cutoff > -math.inf:
            return self._filtered(self._values(row), law.cutoff, law.row_max, law.inv_temperature)
        if self._weighed_row != row:
            tile_stats(self._values(row), law.row_max, law.inv_temperature, self._buffer)
            self._weighed_row = row
        return Weights(None, self._buffer)

    def scaled(self, row: int, law: RowLaw, scale: float) -> Weights:
        """Return `scale` times the law of a valid row, to be written until the next call."""
        ids, mass = self.weights(row, law)
        if law.inv_temperature != 0.0:
            scale *= math.exp(-law.log_sum)
        if ids is not None:
            return Weights(ids, mass * scale)
        self._weighed_row = -1
        return Weights(None, torch.mul(mass, scale, out=self._buffer))

    def dense(self, row: int, law: RowLaw) -> Tensor:
        """Return the law of a valid row as a vector that ends in zeros: see `width`."""
        ids, mass = self.scaled(row, law, 1.0)
        if ids is not None:
            self._weighed_row = -1
            self._buffer.zero_()[ids] = mass
        return self._padded

    def at(self, row: int, law: RowLaw, columns: Tensor) -> Tensor:
        """Return the float32 probabilities of a few ids of a valid row; 0 outside the row."""
        inside = (columns >= 0) & (columns < self.vocab)
        columns = columns.clamp(0, self.vocab - 1)
        if law.inv_temperature == 0.0:
            return ((columns == law.argmax) & inside).float()
        values = self.logits[row][columns].float()
        if self.holds_probabilities:
            return torch.where(inside, values, 0.0)
        exponents = (values - law.row_max) * (law.inv_temperature * _LOG2_E)
        mass = exponents.exp2_().mul_(math.exp(-law.log_sum))
        return torch.where(inside & (values >= law.cutoff), mass, 0.0)

    def _values(self, row: int) -> Tensor:
        """Return a row as contiguous float32: itself, or a copy in the buffer."""
        values = self.logits[row]
        if values.dtype == torch.float32 and values.is_contiguous():
            return values
        self._weighed_row = -1
        return self._buffer.copy_(values)

    def _filtered(
        self, values: Tensor, cutoff: float, row_max: float, inv_temperature: float
    ) -> Weights:
        """Return the weights of the ids at or above the cutoff."""
        ids = _members(values, _group_maxima(values), cutoff)
        if ids is not None:
            mass = torch.empty(ids.numel(), device=values.device)
            tile_stats(values[ids], row_max, inv_temperature, mass)
            return Weights(ids, mass)
        self._weighed_row = -1
        kept = torch.threshold_(self._buffer.copy_(values), _below(cutoff), -math.inf)
        tile_stats(kept, row_max, inv_temperature, self._buffer)
        return Weights(None, self._buffer)

    def _compute(self, row: int, request: int) -> RowLaw:
        """Return the law of a row under the parameters of its request."""
        if not 0 <= request < len(self._params) or not self._params[request].is_in_range():
            return INVALID
        params, values = self._params[request], self._values(row)
        row_max = float(values.amax())  # NaN if any logit is
        if not math.isfinite(row_max):
            return INVALID
        argmax = first_argmax(values)
        if params.temperature < GREEDY_TEMPERATURE:
            return RowLaw(0.0, row_max, row_max, 0.0, argmax, OK)
        inv_temperature = params.inv_temperature
        if params.has_filter(self.vocab):
            cutoff = find_cutoff(values, row_max, params)
            kept = self._filtered(values, cutoff, row_max, inv_temperature)
            total = float(tile_sums(kept.mass).sum())
        else:
            cutoff = -math.inf
            total = tile_stats(values, row_max, inv_temperature, self._buffer)
            self._weighed_row = row
        return RowLaw(inv_temperature, cutoff, row_max, to_float32(math.log(total)), argmax, OK)
