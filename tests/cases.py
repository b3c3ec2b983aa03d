"""Makers of random inputs for the contract tests.

A step is what one call of `accept` judges. Its rows are packed in random order between rows of
NaN, its requests are ragged, and one of them is absent whenever there are at least two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import (
    PAD_TOKEN,
    Acceptance,
    Draft,
    Law,
    SamplingParams,
    invert_id_map,
)

LAST_COIN = 1.0 - 2.0**-53

EPSILON = 1e-6
"""How far float32 sums may move the boundary between two outcomes, in units of the coin."""

LAYOUTS = ("packed", "padded", "odd", "columns", "transposed")


class Case(NamedTuple):
    """The shape and the kind of a step."""

    batch: int
    gamma: int
    vocab: int
    dtype: torch.dtype = torch.float32
    layout: str = "packed"
    drafts: str = "mixed"  # sampled, fixed or mixed
    filters: str = "all"  # none or all
    ids: torch.dtype = torch.int64
    draft_vocab: int = 0  # 0 = the target's
    is_mapped: bool = False
    is_probabilities: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """Return an id like `b3-g4-v257-bfloat16-odd`."""
        parts = [f"b{self.batch}", f"g{self.gamma}", f"v{self.vocab}"]
        if self.draft_vocab:
            parts.append(f"d{self.draft_vocab}")
        parts += [str(self.dtype).removeprefix("torch."), self.layout, self.drafts]
        flags = {"filtered": self.filters == "all", "int32": self.ids == torch.int32}
        flags |= {"map": self.is_mapped, "probabilities": self.is_probabilities}
        return "-".join(parts + [name for name, is_set in flags.items() if is_set])


class Step(NamedTuple):
    """The arguments of `accept`, and what they were made from."""

    draft: Draft
    target_logits: Tensor
    params: SamplingParams
    target_law: Law | None
    target_row: Tensor
    accept_coins: Tensor
    final_coins: Tensor
    max_depth: int
    target_to_draft: Tensor | None
    row_request: Tensor  # [rows] int32, of the target's rows; -1 = a row that nothing points to
    replacement: bool = False

    def accept(self, layer: Any, rule: str, **changes: Any) -> Acceptance:
        """Call a layer's `accept` with these arguments."""
        values = self._asdict() | changes
        names = ("draft", "target_logits", "target_law", "target_row", "accept_coins")
        result: Acceptance = layer.accept(
            *(values[name] for name in (*names, "final_coins")),
            rule=rule,
            replacement=values["replacement"],
            max_depth=values["max_depth"],
            target_to_draft=values["target_to_draft"],
        )
        return result


def lay_out(values: Tensor, layout: str) -> Tensor:
    """Return equal values in another memory layout; the gaps hold NaN.

    Args:
        values: `[rows, vocab]` float.
        layout: "packed"; "padded": rows end on a multiple of 64; "odd": rows start at odd
            addresses; "columns": every third element of a row; "transposed": rows lie across.
    """
    rows, vocab = values.shape
    stride = {
        "packed": vocab,
        "padded": -(-(vocab + 1) // 64) * 64,
        "odd": vocab + 1 + vocab % 2,
        "columns": 3 * vocab,
    }
    if layout == "transposed":
        return values.T.contiguous().T
    offset = 3 if layout == "odd" else 0
    column = 3 if layout == "columns" else 1
    storage = torch.full((rows * stride[layout] + offset,), math.nan, dtype=values.dtype)
    laid = storage.as_strided((rows, vocab), (stride[layout], column), offset)
    laid.copy_(values)
    return laid


def spread_columns(tensor: Tensor) -> Tensor:
    """Return every second column of a wider tensor, whose other columns hold other values."""
    wide = torch.full((tensor.shape[0], 2 * tensor.shape[1]), 77, dtype=tensor.dtype)
    wide[:, ::2] = tensor
    return wide[:, ::2]


def random_params(batch: int, filters: str, generator: torch.Generator) -> SamplingParams:
    """Return parameters of a mixed batch: greedy, cold, plain and hot requests."""
    temperatures = [1.0, 0.0, 0.7, 1.4, 1e-12, 0.3]
    temperature = [temperatures[b % len(temperatures)] for b in range(batch)]
    if filters == "none":
        return SamplingParams.make(temperature, batch=batch)

    def pick(values: list[Any]) -> list[Any]:
        chosen = torch.randint(len(values), (batch,), generator=generator)
        return [values[i] for i in chosen.tolist()]

    return SamplingParams.make(
        temperature, pick([0, 1, 3, 20, 10**6]), pick([1.0, 0.9, 0.5]), pick([0.0, 0.05, 0.3])
    )


def float32_law(law: Law) -> Law:
    """Round the fields of an oracle's law to the dtypes of `Law`."""
    return Law(*(f.float() if f.dtype == torch.float64 else f for f in law))


def scatter_rows(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows in random order with two rows of NaN among them, and where each one went."""
    rows = values.shape[0]
    place = torch.randperm(rows + 2, generator=generator)[:rows]
    packed = torch.full((rows + 2, values.shape[1]), math.nan, dtype=values.dtype)
    packed[place] = values
    return packed, place


def make_step(case: Case) -> Step:
    """Return a random step of a kind; drafts are drawn from their laws by the oracle."""
    generator = torch.Generator().manual_seed(1000 * case.seed + case.vocab + case.gamma)
    batch, nodes, vocab = case.batch, case.gamma + 1, case.vocab
    draft_vocab = case.draft_vocab or vocab
    params = random_params(batch, case.filters, generator)
    request = torch.arange(batch).repeat_interleave(nodes)
    target = torch.randn(batch * nodes, vocab, generator=generator) * 2.5
    own = torch.randn(batch * nodes, draft_vocab, generator=generator)
    shared = min(vocab, draft_vocab)
    own[:, :shared] += target[:, :shared]
    id_map = None
    if case.is_mapped:
        id_map = invert_id_map(torch.randperm(vocab, generator=generator)[:draft_vocab], vocab)
        known = id_map >= 0
        own[:, id_map[known].long()] = target[:, known] + 0.5 * own[:, id_map[known].long()]
    if case.is_probabilities:
        target, own = target.softmax(1), own.softmax(1)
    target, own = target.to(case.dtype), own.to(case.dtype)

    logits, place = scatter_rows(target, generator)
    row_request = torch.full((len(logits),), -1, dtype=torch.int32)
    row_request[place] = request.int()
    target_row = place.view(batch, nodes).int()
    draft_logits, draft_place = scatter_rows(own, generator)
    draft_request = torch.full((len(draft_logits),), -1, dtype=torch.int32)
    draft_request[draft_place] = request.int()

    law = draft_law = None
    if not case.is_probabilities:
        law = float32_law(reference.row_law(logits, params, row_request))
        draft_law = float32_law(reference.row_law(draft_logits, params, draft_request))
    coins = torch.rand(len(draft_logits), dtype=torch.float64, generator=generator)
    drawn = reference.sample(draft_logits.nan_to_num(0.0), draft_law, coins=coins)[:, 0]
    if id_map is not None:
        to_target = torch.full((draft_vocab,), PAD_TOKEN)
        to_target[id_map[known].long()] = known.nonzero()[:, 0]
        drawn = torch.where(drawn >= 0, to_target[drawn], drawn)
    row = torch.full((batch, nodes), -1, dtype=torch.int32)
    row[:, 1:] = draft_place.view(batch, nodes)[:, :-1].int()
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    tokens[:, 1:] = drawn[draft_place].view(batch, nodes)[:, :-1]

    is_fixed = torch.rand(batch, nodes, generator=generator) < {"mixed": 0.3, "fixed": 2.0}.get(
        case.drafts, 0.0
    )
    best = target.float().argmax(1).view(batch, nodes).roll(1, 1)
    tokens = torch.where(is_fixed, best, tokens)
    row[is_fixed] = -1
    num_nodes = torch.randint(1, nodes + 1, (batch,), generator=generator, dtype=torch.int32)
    if batch:
        num_nodes[0] = nodes
    if batch > 1:
        num_nodes[1] = 0
    tokens[torch.arange(nodes) >= num_nodes[:, None]] = PAD_TOKEN
    is_all_fixed = case.drafts == "fixed"
    draft = Draft(
        tokens.to(case.ids),
        num_nodes,
        None,
        None if is_all_fixed else lay_out(draft_logits, case.layout),
        None if is_all_fixed else draft_law,
        None if is_all_fixed else row,
    )
    return Step(
        draft,
        lay_out(logits, case.layout),
        params,
        law,
        target_row,
        torch.rand(batch, nodes, dtype=torch.float64, generator=generator),
        torch.rand(batch, dtype=torch.float64, generator=generator),
        case.gamma,
        id_map,
        row_request,
    )


def nearby(coins: Tensor, epsilon: float) -> Tensor:
    """Return coins moved by epsilon, inside [0, 1)."""
    return (coins + epsilon).clamp(0.0, LAST_COIN)


def oracle_answers(step: Step, rule: str) -> Iterator[Acceptance]:
    """Yield the oracle's answer, then those for coins on either side of the given ones."""
    for accept_shift in (0.0, -EPSILON, EPSILON):
        for final_shift in (0.0, -EPSILON, EPSILON):
            yield step.accept(
                reference,
                rule,
                accept_coins=nearby(step.accept_coins, accept_shift),
                final_coins=nearby(step.final_coins, final_shift),
            )


def assert_equal(result: Acceptance, expected: Acceptance) -> None:
    for field, given, wanted in zip(Acceptance._fields, result, expected, strict=True):
        assert torch.equal(given, wanted), field


def assert_accepts(result: Acceptance, step: Step, rule: str) -> None:
    """Compare with the oracle: equal for every request, or its coin lies within `EPSILON` of the
    boundary between the two answers."""
    open_requests = set(range(len(result.status)))
    expected = None
    for answer in oracle_answers(step, rule):
        expected = expected or answer
        for b in list(open_requests):
            if all(torch.equal(x[b], y[b]) for x, y in zip(result, answer, strict=True)):
                open_requests.remove(b)
        if not open_requests:
            break
    for field, x in zip(Acceptance._fields, result, strict=True):
        assert expected is None or x.dtype == getattr(expected, field).dtype, field
        assert expected is None or x.shape == getattr(expected, field).shape, field
    b = min(open_requests, default=-1)
    assert not open_requests, (
        f"request {b}: {[x[b].tolist() for x in result]}, "
        f"the oracle says {[x[b].tolist() for x in expected or ()]}"
    )


def assert_tokens(tokens: Tensor, logits: Tensor, law: Law | None, coins: Tensor) -> None:
    """Compare drawn tokens with the oracle: equal, or the coin lies within `EPSILON` of the
    boundary between the two."""
    expected = reference.sample(logits, law, coins=coins)
    assert tokens.dtype == torch.int64
    assert tokens.shape == expected.shape
    low = reference.sample(logits, law, coins=nearby(coins, -EPSILON))
    high = reference.sample(logits, law, coins=nearby(coins, EPSILON))
    is_near = ((tokens >= low) & (tokens <= high)) & (low >= 0)
    wrong = (tokens != expected) & ~is_near
    assert not bool(wrong.any()), (tokens[wrong], expected[wrong])
    picked = tokens.clamp(min=0)
    for row in (tokens != expected).nonzero()[:, 0].tolist():
        assert reference.law.probabilities(logits, law, row)[picked[row, 0]] > 0
