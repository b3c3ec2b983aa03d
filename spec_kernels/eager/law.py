"""Laws of rows of logits: temperature, top-k, top-p and min-p, penalties, bias and masks.

    p(x) = exp((l(x) - row_max) * inv_temperature - log_sum)   if l(x) >= cutoff, else 0

Filters only raise `cutoff`; ids equal to it are all kept. A row that a filter thinned out is held
as its kept ids and their weights, any other as one dense float32 vector in a buffer that is used
again. Sums run over tiles in float32, and over the tiles of a row in float64.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from spec_kernels.eager._penalties import Penalties, penalise, unpack
from spec_kernels.eager._rows import (
    BINS,
    BINS_PER_NAT,
    GROUP,
    INVALID,
    LOG2_E,
    PROBABILITIES,
    RowLaw,
    RowParams,
    Weights,
    exponent_scale,
    exponentials,
    first_argmax,
    float32_below,
    group_maxima,
    ids_from,
    kth_largest,
    room_for,
    row_params,
    scalar,
    tile_sums,
    to_float32,
    value_reaching,
    values_from,
)
from spec_kernels.types import OK, PAD_TOKEN, TOP_P_SLACK, Law, SamplingParams


def tile_stats(values: Tensor, row_max: Tensor, scale: Tensor, out: Weights) -> list[float]:
    """Write the weights `exp2((l - row_max) * scale)` to `out`, and return the sum of every tile.

    Example:
        >>> values = torch.tensor([1.0, 1.0])
        >>> out = room_for(2, values.device)
        >>> tile_stats(values, values.amax(), exponent_scale(0.5), out), out.mass
        ([2.0], tensor([1., 1.]))
    """
    exponentials(values, row_max, scale, out.mass)
    return out.sums()


def _top_p_cutoff(
    values: Tensor, maxima: Tensor, row_max: float, inv_temperature: float, share: float
) -> float:
    """Return the value at which the weights of a row reach `share` of their sum.

    A peaked row gets there within its largest groups. Otherwise the weights are summed in bins
    of equal width, and only the bin that reaches the share is sorted.
    """
    weights = room_for(values.numel(), values.device)
    scale = exponent_scale(inv_temperature)
    total = math.fsum(tile_stats(values, scalar(row_max), scale, weights))
    if maxima.numel() >= 8 * GROUP:
        largest = values_from(values, maxima, float(maxima.topk(GROUP).values[-1]))
        cutoff = value_reaching(largest, row_max, inv_temperature, share * total)
        if cutoff is not None:
            return cutoff
    bins = torch.sub(values, row_max).mul_(-inv_temperature * BINS_PER_NAT)
    places = bins.clamp_max_(BINS - 1).long()
    sums = torch.zeros(BINS, dtype=torch.float64, device=values.device)
    cumulative = sums.scatter_add_(0, places, weights.mass.double()).cumsum(0)
    mass = share * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, mass))
    inside = values[places == place]
    before = float(cumulative[place - 1]) if place else 0.0
    cutoff = value_reaching(inside, row_max, inv_temperature, mass - before)
    return float(inside.min()) if cutoff is None else cutoff


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
    cutoff, share = -math.inf, params.top_p * (1.0 - TOP_P_SLACK)
    has_top_k = 0 < params.top_k < values.numel()
    if has_top_k or params.top_p < 1.0:
        maxima = group_maxima(values)
    if has_top_k:
        cutoff = kth_largest(values, maxima, params.top_k)
    if has_top_k and params.top_p < 1.0:
        kept = values_from(values, maxima, cutoff)
        mass = ((kept.double() - row_max) * params.inv_temperature).exp().sum()
        reached = value_reaching(kept, row_max, params.inv_temperature, share * float(mass))
        cutoff = cutoff if reached is None else reached
    elif params.top_p < 1.0:
        cutoff = _top_p_cutoff(values, maxima, row_max, params.inv_temperature, share)
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
        finds_argmax: whether computed laws of sampled rows name their argmax: not for free.
    """

    def __init__(
        self,
        logits: Tensor,
        law: Law | SamplingParams | None,
        width: int = 0,
        *,
        finds_argmax: bool = False,
    ) -> None:
        self.logits = logits.detach() if logits.requires_grad else logits
        self.rows, self.vocab = logits.shape
        self.holds_probabilities = law is None
        self._laws: list[RowLaw] | None = None
        self._params: list[RowParams] = []
        self._finds_argmax = finds_argmax
        if isinstance(law, SamplingParams):
            self._params = row_params(law)
        elif law is not None:
            self._laws = [RowLaw(*f) for f in zip(*(x.tolist() for x in law), strict=True)]
        self._width = width
        # The row whose unfiltered weights lie in the buffer, and at which temperature.
        self._weighed: tuple[int, float] | None = None
        self._sums: list[float] | None = None  # of their tiles
        self._scales: dict[float, Tensor] = {}

    @functools.cached_property
    def _buffer(self) -> Weights:
        """Holds a row."""
        return room_for(self.vocab, self.logits.device, self._width)

    @functools.cached_property
    def _spare(self) -> Weights:
        """Holds what is made of a row whose weights stay."""
        return room_for(self.vocab, self.logits.device)

    def _scale(self, inv_temperature: float) -> Tensor:
        """Return what `exponent_scale` does, made once."""
        found = self._scales.get(inv_temperature)
        if found is None:
            found = self._scales[inv_temperature] = exponent_scale(inv_temperature)
        return found

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
        if self._weighed != (row, law.inv_temperature):
            values, row_max = self._values(row), scalar(law.row_max)
            exponentials(values, row_max, self._scale(law.inv_temperature), self._buffer.mass)
            self._weighed, self._sums = (row, law.inv_temperature), None
        return self._buffer._replace(known=self._sums)

    def scaled(self, row: int, law: RowLaw, scale: float, *, keeps: bool = False) -> Weights:
        """Return `scale` times the law of a valid row, to be written until the next call; `keeps`
        asks for the weights of that row to stay for it."""
        weights = self.weights(row, law)
        if law.inv_temperature != 0.0:
            scale *= math.exp(-law.log_sum)
        if weights.ids is not None:
            return Weights(weights.ids, weights.mass * scale)
        if not keeps:
            self._weighed = None
        out = self._spare if keeps else self._buffer
        torch.mul(weights.mass, scalar(scale), out=out.mass)
        return out

    def dense(self, row: int, law: RowLaw) -> Tensor:
        """Return the law of a valid row as a vector that ends in zeros: see `width`."""
        weights = self.scaled(row, law, 1.0)
        if weights.ids is not None:
            self._weighed = None
            self._buffer.mass.zero_()[weights.ids] = weights.mass
        assert self._buffer.tiles is not None
        return self._buffer.tiles.view(-1)

    def at(self, row: int, law: RowLaw, columns: Tensor) -> Tensor:
        """Return the float32 probabilities of a few ids of a valid row; 0 outside the row."""
        inside = (columns >= 0) & (columns < self.vocab)
        columns = columns.clamp(0, self.vocab - 1)
        if law.inv_temperature == 0.0:
            return ((columns == law.argmax) & inside).float()
        values = self.logits[row][columns].float()
        if self.holds_probabilities:
            return torch.where(inside, values, 0.0)
        exponents = (values - law.row_max) * (law.inv_temperature * LOG2_E)
        mass = exponents.exp2_().mul_(math.exp(-law.log_sum))
        return torch.where(inside & (values >= law.cutoff), mass, 0.0)

    def _values(self, row: int) -> Tensor:
        """Return a row as contiguous float32: itself, or a copy in the buffer."""
        values = self.logits[row]
        if values.dtype == torch.float32 and values.is_contiguous():
            return values
        self._weighed = None
        return self._buffer.mass.copy_(values)

    def _filtered(
        self, values: Tensor, cutoff: float, row_max: float, inv_temperature: float
    ) -> Weights:
        """Return the weights of the ids at or above the cutoff."""
        ids = ids_from(values, group_maxima(values), cutoff)
        if ids is not None:
            mass = torch.empty(ids.numel(), device=values.device)
            exponentials(values[ids], scalar(row_max), self._scale(inv_temperature), mass)
            return Weights(ids, mass)
        self._weighed = None
        kept = self._buffer.mass.copy_(values)
        torch.threshold_(kept, float32_below(cutoff), -math.inf)
        exponentials(kept, scalar(row_max), self._scale(inv_temperature), kept)
        return self._buffer

    def _compute(self, row: int, request: int) -> RowLaw:
        """Return the law of a row under the parameters of its request."""
        if not 0 <= request < len(self._params) or not self._params[request].is_in_range():
            return INVALID
        params, values = self._params[request], self._values(row)
        is_greedy, argmax = params.is_greedy(), PAD_TOKEN
        if is_greedy or self._finds_argmax:
            argmax = first_argmax(values)
        largest = values.amax() if argmax == PAD_TOKEN else values[argmax].clone()
        row_max = float(largest)
        if not math.isfinite(row_max):  # NaN if any logit is
            return INVALID
        if is_greedy:
            return RowLaw(0.0, row_max, row_max, 0.0, argmax, OK)
        inv_temperature = params.inv_temperature
        if params.has_filter(self.vocab):
            cutoff = find_cutoff(values, row_max, params)
            kept = self._filtered(values, cutoff, row_max, inv_temperature)
            sums = kept.sums()
        else:
            cutoff = -math.inf
            sums = tile_stats(values, largest, self._scale(inv_temperature), self._buffer)
            self._weighed, self._sums = (row, inv_temperature), sums
        log_sum = to_float32(math.log(math.fsum(sums)))
        return RowLaw(inv_temperature, cutoff, row_max, log_sum, argmax, OK)


def row_law(logits: Tensor, params: SamplingParams, row_request: Tensor) -> Law:
    """Compute the law of each row of logits.

    Args:
        logits: `[rows, vocab]` float32, float16 or bfloat16, any strides.
        params: sampling parameters of the requests.
        row_request: `[rows] int32`, the request that each row belongs to.

    Returns:
        The laws; a row with a NaN or `+inf` logit, without a finite one, or whose request does
        not exist or has parameters out of range, has status `INVALID_TARGET`.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
        >>> law = row_law(logits, SamplingParams.make(1.0, top_k=2), torch.tensor([0]))
        >>> float(law.cutoff), float(law.row_max), int(law.argmax)
        (2.0, 3.0, 1)
    """
    reader = RowReader(logits, params, finds_argmax=True)
    laws = [reader.law(row, request) for row, request in enumerate(row_request.tolist())]
    columns: list[tuple[float, ...]] = list(zip(*laws, strict=True)) or [()] * len(Law._fields)
    dtypes = (torch.float32,) * 4 + (torch.int64, torch.int32)
    return Law(
        *(
            torch.tensor(column, dtype=dtype, device=logits.device)
            for column, dtype in zip(columns, dtypes, strict=True)
        )
    )


def on_same_ids(
    weights: Weights, reader: RowReader, row: int, law: RowLaw, columns: Tensor | None
) -> Tensor:
    """Return a draft law at the ids of target `weights`: 0 where an id has no draft column.

    Args:
        weights: of a target row.
        reader: of the draft rows, as wide as the target's.
        row, law: a valid draft row.
        columns: `[vocab] int64`, the draft column of every target id, out of range = none; None =
            columns are ids.
    """
    if weights.ids is not None:
        return reader.at(row, law, weights.ids if columns is None else columns[weights.ids])
    q = reader.dense(row, law)
    if columns is None:
        return q[: weights.mass.numel()]
    known = (columns >= 0) & (columns < reader.vocab)
    return q[columns.where(known, 0)].mul_(known)


def overlap(
    target_logits: Tensor,
    target_law: Law | None,
    draft_logits: Tensor,
    draft_law: Law | None,
    *,
    target_to_draft: Tensor | None = None,
) -> Tensor:
    """Return the acceptance probability of each pair of rows: `beta = sum_x min(p(x), q(x))`.

    Args:
        target_logits: `[rows, vocab]` float.
        target_law: laws of the target rows; None if they are probabilities.
        draft_logits: `[rows, draft_vocab]` float, row i against row i.
        draft_law: likewise.
        target_to_draft: `[vocab] int32`, draft column of each target id, -1 = none.

    Returns:
        `[rows] float32`, NaN where either row is invalid.

    Example:
        >>> p, q = torch.tensor([[0.6, 0.2, 0.2]]), torch.tensor([[0.5, 0.5]])
        >>> overlap(p, None, q, None)
        tensor([0.7000])
    """
    target = RowReader(target_logits, target_law)
    draft = RowReader(draft_logits, draft_law, width=target.vocab)
    columns = None if target_to_draft is None else target_to_draft.long()
    beta = [math.nan] * target.rows
    for row in range(target.rows):
        p_law, q_law = target.law(row), draft.law(row)
        if p_law.status == OK and q_law.status == OK:
            p = target.scaled(row, p_law, 1.0)
            q = on_same_ids(p, draft, row, q_law, columns)
            beta[row] = math.fsum(tile_sums(torch.minimum(p.mass, q)))
    return torch.tensor(beta, dtype=torch.float32, device=target_logits.device)


def adjust_logits_(
    logits: Tensor,
    row_request: Tensor,
    *,
    allowed_words: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    output_counts: Tensor | None = None,
    prompt_words: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    row_node: Tensor | None = None,
) -> None:
    """Apply penalties, then bias, then the mask of allowed ids to logits, in place.

    The counts at the row of node i are those of the committed output plus the drafts at nodes
    1..i of the request: a row sees the text that leads to it, the root included.

    Args:
        logits: `[rows, vocab]` float, written.
        row_request: `[rows] int32`; rows with a request that does not exist are left alone.
        allowed_words: `[rows, ceil(vocab / 32)] int32`, a set bit allows an id.
        bias_ids: `[batch, max_bias] int64`; ids outside the vocabulary are skipped.
        bias_values: `[batch, max_bias] float32`; duplicates add.
        output_counts: `[batch, vocab] int32`, occurrences in the committed output.
        prompt_words: `[batch, ceil(vocab / 32)] int32`, ids that the prompt holds.
        repetition_penalty: `[batch] float32`; divides positive and multiplies negative logits of
            the ids seen in prompt, output or drafts.
        presence_penalty: `[batch] float32`, subtracted from ids counted at least once.
        frequency_penalty: `[batch] float32`, subtracted once per occurrence.
        draft_tokens: `[batch, nodes]` int64 or int32, a chain.
        row_node: `[rows] int32`, the node that each row belongs to.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
        >>> words = torch.tensor([[0b011]], dtype=torch.int32)
        >>> adjust_logits_(logits, torch.tensor([0]), allowed_words=words)
        >>> logits
        tensor([[1., 2., -inf]])
    """
    vocab = logits.shape[1]
    penalties = Penalties(
        output_counts, prompt_words, repetition_penalty, presence_penalty, frequency_penalty
    )
    per_request = [t for t in (*penalties, bias_ids, draft_tokens) if t is not None]
    batch = min((t.shape[0] for t in per_request), default=None)
    nodes = None if row_node is None else row_node.tolist()
    nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
    for row, request in enumerate(row_request.tolist()):
        if request < 0 or (batch is not None and request >= batch):
            continue
        drafts = nothing
        if draft_tokens is not None and nodes is not None:
            drafts = draft_tokens[request, 1 : max(nodes[row], 0) + 1]
        values = penalise(logits[row].float(), penalties, request, drafts)
        if bias_ids is not None and bias_values is not None:
            known = (bias_ids[request] >= 0) & (bias_ids[request] < vocab)
            values = values.index_add(0, bias_ids[request][known], bias_values[request][known])
        if allowed_words is not None:
            values = values.masked_fill(~unpack(allowed_words[row], vocab), -math.inf)
        logits[row] = values.to(logits.dtype)
