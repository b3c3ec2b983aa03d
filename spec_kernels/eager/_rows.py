"""What one row of logits is asked for: sums per tile, largest values, ids that reach a cutoff.

Comparing every id of a large row costs more than its exponentials; the maxima of groups tell which
ids need to be compared.
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
    SamplingParams,
)

TILE: Final = 512
"""Ids per partial sum."""

GROUP: Final = 64
"""Ids per group maximum: ids at or above a cutoff lie in the groups whose maximum reaches it."""

BINS: Final = 4096
BINS_PER_NAT: Final = 128
"""Bins of weights for top-p; the last one holds every id of less than e^-32 of the largest."""

LOG2_E: Final = math.log2(math.e)


def to_float32(value: float) -> float:
    """Round to float32."""
    return ctypes.c_float(value).value


COLDEST: Final = to_float32(GREEDY_TEMPERATURE)
HOTTEST: Final = to_float32(MAX_TEMPERATURE)
"""Temperatures of sampled rows, as parameters hold them."""


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

    def is_greedy(self) -> bool:
        """Say whether the temperature is below the bound, which is a float32 value too."""
        return self.temperature < COLDEST

    def is_in_range(self) -> bool:
        """Say whether every parameter is; comparisons with NaN are false."""
        return (
            0.0 <= self.temperature <= HOTTEST
            and 0.0 < self.top_p <= 1.0
            and 0.0 <= self.min_p <= 1.0
        )


class Weights(NamedTuple):
    """Non-negative numbers for ids in ascending order; ids left out have weight 0."""

    ids: Tensor | None  # [kept] int64, None = every id
    mass: Tensor  # [kept] or [vocab] float32
    tiles: Tensor | None = None  # [tiles, TILE]: mass, then zeros, if it lies in whole tiles
    known: list[float] | None = None  # the sum of every tile, if it was asked for before

    def sums(self) -> list[float]:
        """Return the sum of every tile."""
        if self.known is not None:
            return self.known.copy()
        if self.tiles is None:
            return tile_sums(self.mass)
        sums: list[float] = self.tiles.sum(1).tolist()
        return sums


def room_for(vocab: int, device: torch.device, width: int = 0) -> Weights:
    """Return weights to be written, one per id, in whole tiles; their zeros reach up to `width`."""
    padded = torch.empty(-(-max(vocab, width, 1) // TILE) * TILE, device=device)
    padded[vocab:].zero_()
    return Weights(None, padded[:vocab], padded.view(-1, TILE))


def float32_below(cutoff: float) -> float:
    """Return the largest float32 below a cutoff."""
    rounded = torch.tensor(cutoff, dtype=torch.float32)
    if float(rounded) < cutoff:
        return float(rounded)
    return float(torch.nextafter(rounded, torch.tensor(-math.inf)))


def row_params(params: SamplingParams) -> list[RowParams]:
    """Return the parameters of every request."""
    temperature: list[float] = params.temperature.tolist()
    inverse = [to_float32(1.0 / t) if t else math.inf for t in temperature]
    filters = zip((params.top_k, params.top_p, params.min_p), (0, 1.0, 0.0), strict=True)
    lists = [[off] * len(temperature) if f is None else f.tolist() for f, off in filters]
    return [RowParams(*p) for p in zip(temperature, inverse, *lists, strict=True)]


def scalar(value: float) -> Tensor:
    """Return a number as an operand: one that torch does not convert at each operation."""
    return torch.full((), value, dtype=torch.float32)


def exponent_scale(inv_temperature: float) -> Tensor:
    """Return by how much `exponentials` multiplies."""
    return scalar(inv_temperature * LOG2_E)


def exponentials(values: Tensor, row_max: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write the weights of every id to `out`, and return it; `scale` as `exponent_scale` gives."""
    return torch.sub(values, row_max, out=out).mul_(scale).exp2_()


def tile_sums(weights: Tensor) -> list[float]:
    """Return the sum of every tile of `TILE` weights, at least one; a short one comes last."""
    whole = weights.numel() // TILE * TILE
    sums: list[float] = weights[:whole].view(-1, TILE).sum(1).tolist()
    if whole < weights.numel() or not sums:
        sums.append(float(weights[whole:].sum()))
    return sums


def tile_sum_without(weights: Tensor, tile: int, places: list[int]) -> float:
    """Return the sum of one tile of weights off some places, which are numbered over all tiles."""
    start = tile * TILE
    part = weights[start : start + TILE].clone()
    part[[place - start for place in places if place // TILE == tile]] = 0.0
    return float(part.sum())


def places_of(ids: Tensor | None, wanted: list[int], width: int) -> list[int]:
    """Return where some ids stand among `width` weights; ids without a weight are left out."""
    if ids is None:
        return [x for x in wanted if 0 <= x < width]
    is_wanted = torch.isin(ids, torch.tensor(wanted, dtype=torch.int64, device=ids.device))
    places: list[int] = is_wanted.nonzero()[:, 0].tolist()
    return places


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


def group_maxima(values: Tensor) -> Tensor:
    """Return the maximum of every whole group."""
    groups = values.numel() // GROUP
    return values[: groups * GROUP].view(groups, GROUP).amax(1)


def ids_from(values: Tensor, maxima: Tensor, cutoff: float) -> Tensor | None:
    """Return the ids at or above the cutoff; None if most groups hold one."""
    groups = (maxima >= cutoff).nonzero().flatten()
    if groups.numel() * 8 > maxima.numel() or not maxima.numel():
        return None
    whole = maxima.numel() * GROUP
    places = (values[:whole].view(-1, GROUP)[groups] >= cutoff).nonzero()
    ids = groups[places[:, 0]] * GROUP + places[:, 1]
    tail = (values[whole:] >= cutoff).nonzero().flatten() + whole
    return torch.cat((ids, tail))


def values_from(values: Tensor, maxima: Tensor, cutoff: float) -> Tensor:
    """Return the values at or above the cutoff."""
    ids = ids_from(values, maxima, cutoff)
    return values[values >= cutoff] if ids is None else values[ids]


def kth_largest(values: Tensor, maxima: Tensor, top_k: int) -> float:
    """Return the top_k-th largest value.

    top_k groups hold a value at or above the top_k-th largest group maximum: the largest values
    are among those from there on.
    """
    if top_k * 8 <= maxima.numel():
        ids = ids_from(values, maxima, float(maxima.topk(top_k).values[-1]))
        values = values if ids is None else values[ids]
    return float(values.topk(top_k).values[-1])


def value_reaching(
    values: Tensor, row_max: float, inv_temperature: float, mass: float
) -> float | None:
    """Return the value at which the weights, added from the largest down, reach `mass`."""
    descending = values.sort(descending=True).values
    reached = ((descending.double() - row_max) * inv_temperature).exp().cumsum(0)
    place = int(torch.searchsorted(reached, mass))
    return float(descending[place]) if place < descending.numel() else None
