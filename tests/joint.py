"""Small problems whose joint output law is summed exactly, for exactness tests and mutants.

Rows of logits are tables over prefixes: every sequence of tokens has its own random row, so a
verifier that reads a wrong row is caught. Prefixes are numbered like a heap: the children of
number n are n * width + 1 + token. The expected law is computed here, on Python numbers, from the
definition of the filters; nothing of it comes from the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft, Law, SamplingParams, invert_id_map
from tests.forking import outcomes

Accept = Callable[..., Acceptance]


@dataclass(frozen=True)
class Filters:
    """Sampling parameters as Python numbers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def params(self) -> SamplingParams:
        return SamplingParams.make(self.temperature, self.top_k, self.top_p, self.min_p)

    def apply(self, logits: list[float]) -> list[float]:
        """Return the law of a row by its definition."""
        top = max(logits)
        temperature = float(self.params().temperature)  # rounded to float32
        if temperature < 1e-5:
            return [float(x == logits.index(top)) for x in range(len(logits))]
        weights = [math.exp((value - top) / temperature) for value in logits]
        if self.top_k:
            least = sorted(weights, reverse=True)[: self.top_k][-1]
            weights = [w if w >= least else 0.0 for w in weights]
        if self.top_p < 1.0:
            order = sorted(weights, reverse=True)
            size = 1
            while sum(order[:size]) < self.top_p * sum(weights):
                size += 1
            weights = [w if w >= order[size - 1] else 0.0 for w in weights]
        weights = [w if w >= self.min_p * max(weights) else 0.0 for w in weights]
        return [w / sum(weights) for w in weights]


class Measured(NamedTuple):
    """What enumeration found."""

    distance: float  # total variation between the output's joint law and the target's
    mean_accepted: float


@dataclass(frozen=True)
class Problem:
    """Target and draft tables with everything that decides how drafts are made and judged."""

    name: str
    vocab: int
    gamma: int
    target: Filters = Filters()
    draft: Filters = Filters()
    kinds: str = "sss"  # per depth: s = drawn from the draft law, f = fixed
    draft_vocab: int | None = None
    draft_to_target: tuple[int, ...] | None = None
    max_depth: int | None = None
    stop_behind: int | None = None  # drafting ends once this token was drawn, and kept
    as_probabilities: bool = False
    law_on_the_way: bool = False  # hand over parameters instead of laws
    seed: int = 0
    tables: Callable[[Tensor, Tensor], None] | None = field(default=None, compare=False)

    @property
    def width(self) -> int:
        return max(self.vocab, self.draft_vocab or 0)

    def number(self, prefix: tuple[int, ...]) -> int:
        number = 0
        for token in prefix:
            number = number * self.width + 1 + token
        return number

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor]:
        """Target and draft rows, one per prefix; float64 probabilities if so asked."""
        rows = sum(self.width**depth for depth in range(self.gamma + 1))
        generator = torch.Generator().manual_seed(self.seed)
        target = 1.5 * torch.randn(rows, self.vocab, generator=generator)
        draft = 1.5 * torch.randn(rows, self.draft_vocab or self.vocab, generator=generator)
        if self.tables is not None:
            self.tables(target, draft)
        if not self.as_probabilities:
            return target, draft
        return target.double().softmax(1), draft.double().softmax(1)

    @cached_property
    def laws(self) -> tuple[Law | None, Law | None]:
        if self.as_probabilities:
            return None, None
        target, draft = self.logits
        owner = torch.zeros(len(target), dtype=torch.int32)
        return (
            reference.row_law(target, self.target.params(), owner),
            reference.row_law(draft, self.draft.params(), owner),
        )

    @cached_property
    def target_to_draft(self) -> Tensor | None:
        if self.draft_to_target is None:
            return None
        return invert_id_map(torch.tensor(self.draft_to_target), self.vocab)

    def plain(self, prefix: tuple[int, ...]) -> list[float]:
        """Return the target's law after `prefix`, by definition."""
        row = self.logits[0][self.number(prefix)].tolist()
        return row if self.as_probabilities else self.target.apply(row)

    @cached_property
    def tails(self) -> dict[tuple[int, ...], Tensor]:
        """What `tail` found so far."""
        return {}

    def tail(self, prefix: tuple[int, ...]) -> Tensor:
        """Return the target's joint law of the tokens behind `prefix`, gamma + 1 in all."""
        if len(prefix) == self.gamma + 1:
            return torch.ones((), dtype=torch.float64)
        if prefix not in self.tails:
            law = self.plain(prefix)
            behind = [law[x] * self.tail((*prefix, x)) for x in range(self.vocab)]
            self.tails[prefix] = torch.stack(behind)
        return self.tails[prefix]

    def propose(self) -> list[int]:
        """Draft a chain with the reference's own `sample`; call it under `outcomes`."""
        tokens: list[int] = []
        while len(tokens) < self.gamma and (not tokens or tokens[-1] != self.stop_behind):
            number = self.number(tuple(tokens))
            row = self.logits[1][number][None]
            if self.kinds[len(tokens)] == "f":
                token = int(row.argmax()) if number % 2 else number % self.vocab
            else:
                law = self.laws[1]
                law = None if law is None else Law(*(f[number][None] for f in law))
                token = int(reference.sample(row, law, coins=torch.zeros(1, dtype=torch.float64)))
                token = token if self.draft_to_target is None else self.draft_to_target[token]
            tokens.append(token)
        return tokens

    def step(self, tokens: list[int]) -> tuple[Draft, Tensor]:
        """Pack a chain as `accept` takes it: the draft and target_row."""
        padding = [PAD_TOKEN] * (self.gamma - len(tokens))
        numbers = [self.number(tuple(tokens[:depth])) for depth in range(len(tokens) + 1)]
        rows = [-1 if kind == "f" else n for kind, n in zip(self.kinds, numbers[:-1], strict=False)]
        draft = Draft(
            torch.tensor([[0, *tokens, *padding]]),
            torch.tensor([len(tokens) + 1], dtype=torch.int32),
            logits=self.logits[1],
            law=self.laws[1],
            row=torch.tensor([[-1, *rows, *padding]], dtype=torch.int32),
        )
        target_row = torch.tensor([numbers + [0] * len(padding)], dtype=torch.int32)
        return draft, target_row

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `accept` besides the rule."""
        depth = self.gamma if self.max_depth is None else self.max_depth
        return {"max_depth": depth, "target_to_draft": self.target_to_draft}

    def results(self, accept: Accept, rule: str) -> Iterator[tuple[float, Acceptance]]:
        """Yield every outcome of drafting and verifying with its probability."""
        for drafted, tokens in outcomes(self.propose):
            draft, target_row = self.step(tokens)

            def verify(draft: Draft = draft, target_row: Tensor = target_row) -> Acceptance:
                coins = torch.full(target_row.shape, 0.5, dtype=torch.float64)  # not looked at
                return accept(
                    draft,
                    self.logits[0],
                    self.target.params() if self.law_on_the_way else self.laws[0],
                    target_row,
                    coins,
                    coins[:, 0],
                    rule=rule,
                    **self.options,
                )

            for weight, result in outcomes(verify):
                yield drafted * weight, result

    def measure(self, accept: Accept, rule: str) -> Measured:
        """Compare the law of every outcome with the target's."""
        return self.sum_up(self.results(accept, rule))

    def sum_up(self, results: Iterator[tuple[float, Acceptance]]) -> Measured:
        """Sum every outcome: the law of the next gamma + 1 tokens is that of the emitted ones,
        then the target's own."""
        joint = torch.zeros([self.vocab] * (self.gamma + 1), dtype=torch.float64)
        mean = 0.0
        for weight, result in results:
            n = int(result.accepted_lens[0])
            mean += weight * n
            emitted = tuple(result.output_tokens[0, : n + 1].tolist())
            if all(0 <= token < self.vocab for token in emitted):
                joint[emitted] += weight * self.tail(emitted)
        return Measured(float((joint - self.tail(())).abs().sum()) / 2, mean)


def _equal(target: Tensor, draft: Tensor) -> None:
    draft.copy_(target)


def _disjoint(target: Tensor, draft: Tensor) -> None:
    half = target.shape[1] // 2
    target[:, half:] = -math.inf
    draft[:, :half] = -math.inf


def _ban(target: Tensor, draft: Tensor) -> None:
    """Mask another id in every row of either side, through the op that does so."""
    full = (1 << target.shape[1]) - 1
    for logits, step in ((target, 1), (draft, 2)):
        rows = torch.arange(len(logits))
        words = full - (1 << (rows * step % logits.shape[1]))
        owner = torch.zeros(len(logits), dtype=torch.int32)
        reference.adjust_logits_(logits, owner, allowed_words=words[:, None].int())


def _tied(target: Tensor, draft: Tensor) -> None:
    target.round_()
    draft.round_()


def _below(target: Tensor, draft: Tensor) -> None:
    """Give the draft all but one of the target's ids: the residual is one id wide."""
    draft.copy_(target)
    draft[:, 0] = -math.inf


SIZES = ((5, 1), (4, 2), (3, 3))

_KINDS: dict[str, dict[str, object]] = {
    "sampled": {},
    "temperature": {"target": Filters(0.6), "draft": Filters(1.7)},
    "top-k": {"target": Filters(0.9, top_k=2), "draft": Filters(1.3, top_k=2)},
    "top-p": {"target": Filters(top_p=0.7), "draft": Filters(top_p=0.6)},
    "min-p": {"target": Filters(min_p=0.25), "draft": Filters(min_p=0.2)},
    "mixed-filters": {
        "target": Filters(0.8, top_k=3, top_p=0.85, min_p=0.1),
        "draft": Filters(1.2, top_k=3, top_p=0.9, min_p=0.05),
    },
    "target-filter-only": {"target": Filters(top_k=2)},
    "draft-filter-only": {"draft": Filters(top_k=2)},
    "greedy-target": {"target": Filters(0.0)},
    "greedy-draft": {"draft": Filters(0.0)},
    "greedy-both": {"target": Filters(0.0), "draft": Filters(0.0)},
    "greedy-ties": {"target": Filters(0.0), "draft": Filters(0.0), "tables": _tied},
    "ties": {"target": Filters(top_k=2), "draft": Filters(top_p=0.7), "tables": _tied},
    "masked": {"tables": _ban, "target": Filters(0.7)},
    "fixed": {"kinds": "fff"},
    "fixed-then-sampled": {"kinds": "fsf"},
    "sampled-then-fixed": {"kinds": "sfs"},
    "same-law": {"tables": _equal},
    "disjoint": {"tables": _disjoint},
    "one-id-missing": {"tables": _below},
    "probabilities": {"as_probabilities": True},
    "parameters": {
        "target": Filters(0.75, top_k=3, top_p=0.8, min_p=0.05),
        "law_on_the_way": True,
    },
    "narrower-draft": {"draft_vocab": 2},
    "wider-draft": {"draft_vocab": 6},
    "mapped-draft": {"draft_vocab": 2, "draft_to_target": (2, 0)},
    "early-stop": {"stop_behind": 1},
    "early-stop-mixed": {"stop_behind": 0, "kinds": "sfs"},
    "shallow": {"max_depth": 1},
}


def problems(sizes: Sequence[tuple[int, int]] = SIZES) -> list[Problem]:
    """Return every kind at every size; a wide draft only where its prefixes are few."""
    made: list[Problem] = []
    for (name, kind), (vocab, gamma) in product(_KINDS.items(), sizes):
        if name == "wider-draft" and gamma == 3:
            continue
        seed = len(made) + 1
        label = f"{name}-v{vocab}-g{gamma}"
        made.append(Problem(label, vocab, gamma, seed=seed, **kind))  # type: ignore[arg-type]
    return made
