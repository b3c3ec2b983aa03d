"""Choose gamma as the decoder runs: measure what rounds cost and accept, and let the model decide.

Before each round `GammaController.choose`

1. takes v, c and o from a `CostMeter` (medians of recent rounds, in plain steps) or as given, and
   alpha of each position from the rounds so far, old ones forgotten by and by;
2. predicts the speed-up of every gamma (`cost_model.speedups`), 0 = plain decoding among them;
3. leaves the gamma in use only for one that is predicted to be faster by more than `MARGIN`;
4. asks the purse for what the round would lose against plain decoding, were nothing accepted.
   Gains fill the purse, losses empty it, and every token adds `SHARE` of a plain step, once the
   `ADVANCE` that it holds at first is earned; it may be overdrawn by `OVERDRAFT`, but not for
   probes. So, at the costs as measured, a text loses at most 1.25 % against plain decoding, or
   1.25 plain steps if that is more, and 0.75 plain steps: no more than 2 % from 100 tokens on;
5. if plain decoding is predicted to be fastest, spends the purse on probes: rounds with drafts, to
   notice a text that begins to repeat. One that pays fills the purse for the next ones. Until
   the purse can pay for one, rounds are plain and nothing is predicted.

The first round with drafts of a decoder is an exception: what it costs is not known before.

Exactness: gamma is chosen before anything of the round is drafted, from rounds that are over and
from the clock. The coins of a round are keyed by the position of its root, which no earlier round
had, so they know nothing of the choice; and given all earlier tokens, a round of any gamma emits
tokens of the target's law. Greedy and coupled output does not depend on gamma at all. Sampled
*text* does: with measured costs that of a seed depends on the clock, with given ones it does not.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

import torch

from spec_kernels._check import require
from spec_kernels.cost_model import StepCosts, speedups
from spec_kernels.stats import Lap, Seconds
from spec_kernels.types import Draft

MARGIN: Final = 0.02
"""Hysteresis: another gamma must be predicted to be faster by this share."""

SHARE: Final = 0.0125
"""Share of a plain step that every token adds to the purse, once the advance is earned."""

ADVANCE: Final = 1.25
"""What the purse holds at first, in plain steps: an advance on the first 100 tokens."""

MEMORY: Final = 0.95
"""Weight that a round keeps in the acceptance with every later one with drafts. With fewer than
its 20 rounds the estimate wanders; with more a change of text is noticed late."""

PRIOR: Final = 0.8
"""Acceptance of the first draft before anything was seen: hopeful, since the purse bounds what
failing costs, and nothing what small gammas miss."""

WEIGHT: Final = 2.0
"""Drafts that this prior counts as."""

RECENT: Final = 15
"""Timings of each kind that the medians are taken of."""

REFRESH: Final = 100
"""Rounds after which a plain step is measured again."""

OVERDRAFT: Final = 0.75
"""What rounds that are predicted to pay may overdraw the purse by, in plain steps."""

SPARE: Final = 6.0
"""What the purse holds at most, in plain steps, beyond the loss of the largest gamma."""

FIRST: Final = 4
"""Largest gamma tried before any cost of drafts is known; later twice what was measured."""


class Judged(NamedTuple):
    """What a round judged of one request.

    Attributes:
        drafts: whether there were any.
        accepted: drafts that were kept.
        rejected: whether a draft behind them was judged and rejected.
    """

    drafts: bool
    accepted: int
    rejected: bool

    @property
    def is_full(self) -> bool:
        """Whether there were drafts, and all were kept."""
        return self.drafts and not self.rejected

    @staticmethod
    def of(parents: Sequence[int], path: Sequence[int]) -> Judged:
        """Read it from the parents of the judged nodes, -1 elsewhere, and the kept path.

        Example:
            >>> Judged.of([-1, 0, 1], [0, 1]), Judged.of([-1], [0])
            (Judged(drafts=True, accepted=1, rejected=True),
             Judged(drafts=False, accepted=0, rejected=False))
        """
        drafts = any(parent >= 0 for parent in parents)
        return Judged(drafts, len(path) - 1, path[-1] in parents)


class CostMeter:
    """Measures v, c and o of a decoder: medians of recent rounds, in units of a plain step.

    With F(n) the median forward over n nodes, R what else a plain round takes and P = F(1) + R:
    v(n) = (F(n) + R) / P, c is the median time per draft asked for over P, and o what acceptance
    and state take beyond a plain round's, over P. A round that asked for drafts and got none
    counts as plain. Where a proposer may have to catch up, what drafting takes beyond that c counts
    apart: behind a round that accepted every draft as `catch_up`, behind a plain one as `resume`.

    Args:
        warm_up: rounds of each depth that do not count: kernels may be compiled in them.

    Example:
        >>> meter = CostMeter()
        >>> meter.take(0, 0, Seconds(verify=1.8, accept=0.2))
        >>> meter.take(2, 2, Seconds(draft=0.4, verify=2.8, accept=0.4))
        >>> meter.costs()
        StepCosts(v={1: 1.0, 3: 1.5}, c=0.1, o=0.1, catch_up=0.0)
    """

    def __init__(self, *, warm_up: int = 0) -> None:
        self._warm_up = warm_up
        self._seen: Counter[int] = Counter()
        self._waiting: deque[tuple[int, int, bool, Lap]] = deque()
        self._forward: dict[int, deque[float]] = {}
        self._rest, self._drafting_rest = _window(), _window()
        self._draft, self._caught_up, self._resumed = _window(), _window(), _window()
        self._was_full = self._was_plain = False
        self._costs: StepCosts | None = None
        self.plain_age = 0  # rounds since a plain step was measured

    def add(self, gamma: int, depth: int, lap: Lap, *, is_full: bool = False) -> None:
        """Take in a round, as soon as the device has timed it.

        Args:
            gamma: drafts that were asked for.
            depth: drafts that were there, the most of any request.
            lap: its times.
            is_full: whether a request accepted all of its drafts.
        """
        self._waiting.append((gamma, depth, is_full, lap))
        while self._waiting and (seconds := self._waiting[0][3].seconds()) is not None:
            gamma, depth, is_full, _ = self._waiting.popleft()
            self.take(gamma, depth, seconds, is_full=is_full)

    def take(self, gamma: int, depth: int, seconds: Seconds, *, is_full: bool = False) -> None:
        """Take in a round whose times are known."""
        self._seen[depth] += 1
        behind = self._resumed if self._was_plain else self._caught_up if self._was_full else None
        self._was_plain, self._was_full = gamma == 0, is_full
        self.plain_age += 1
        if self._seen[depth] <= self._warm_up:
            return
        rest = seconds.accept + seconds.state
        self._forward.setdefault(depth, _window()).append(seconds.verify)
        if gamma == 0:
            rest += seconds.draft
        elif behind is not None and self._draft:
            behind.append(seconds.draft - gamma * _median(self._draft))
        else:
            self._draft.append(seconds.draft / gamma)
        (self._drafting_rest if depth else self._rest).append(rest)
        if depth == 0:
            self.plain_age = 0
        self._costs = None

    def borrow(self, plain: CostMeter) -> None:
        """Take the plain steps of another meter, if this one has none."""
        if 0 not in self._forward and 0 in plain._forward:
            self._forward[0], self._rest = plain._forward[0], plain._rest
            self._costs = None

    @property
    def deepest(self) -> int:
        """Most drafts that a forward was measured with; -1 before the first."""
        return max(self._forward, default=-1)

    @property
    def plain_seconds(self) -> float | None:
        """Median time of a plain step, None before one was measured."""
        if 0 not in self._forward:
            return None
        return _median(self._forward[0]) + _median(self._rest)

    @property
    def resume(self) -> float:
        """What drafting costs more behind a plain round, in plain steps."""
        return max(_median(self._resumed or [0.0]), 0.0) / (self.plain_seconds or inf)

    def costs(self) -> StepCosts | None:
        """Return what was measured, None before the first plain step."""
        plain = self.plain_seconds
        if self._costs is None and plain:
            rest = _median(self._rest)
            drafting = _median(self._drafting_rest or [rest])
            forward = sorted(self._forward.items())
            self._costs = StepCosts(
                {depth + 1: (_median(times) + rest) / plain for depth, times in forward},
                c=_median(self._draft or [0.0]) / plain,
                o=max(drafting - rest, 0.0) / plain,
                catch_up=max(_median(self._caught_up or [0.0]), 0.0) / plain,
            )
        return self._costs


class Acceptance:
    """Estimates the acceptance of each position, and how often there are drafts at all.

    Counts fade by `MEMORY` with each round that drafts. The first position has `PRIOR` with the
    weight of one draft behind it, every other one the estimate of the one before.

    Args:
        max_gamma: positions.

    Example:
        >>> seen = Acceptance(2)
        >>> seen.add([Judged(drafts=True, accepted=1, rejected=True)])
        >>> [round(alpha, 2) for alpha in seen.alphas()], seen.drafted
        ([0.87, 0.58], 1.0)
    """

    def __init__(self, max_gamma: int) -> None:
        self._tried, self._accepted = [0.0] * max_gamma, [0.0] * max_gamma
        self._asked, self._answered = 1.0, 1.0

    def add(self, judged: Sequence[Judged]) -> None:
        """Add a round that asked for drafts: what was judged of each request."""
        answered = sum(one.drafts for one in judged)
        self._asked = MEMORY * self._asked + len(judged)
        self._answered = MEMORY * self._answered + answered
        if not answered:
            return
        for counts in (self._tried, self._accepted):
            counts[:] = [MEMORY * count for count in counts]
        for one in judged:
            for position in range(one.accepted + one.rejected):
                self._tried[position] += 1
                self._accepted[position] += position < one.accepted

    def alphas(self) -> list[float]:
        """Return the acceptance of each position, given that the ones before were accepted."""
        alpha, alphas = PRIOR, []
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            alpha = (accepted + WEIGHT * alpha) / (tried + WEIGHT)
            alphas.append(alpha)
        return alphas

    @property
    def drafted(self) -> float:
        """Share of the requests that got drafts when there was asked for them."""
        return self._answered / self._asked


class GammaController:
    """Chooses gamma round by round; the module says how, and why the output stays exact.

    Args:
        max_gamma: largest gamma chosen.
        costs: a `CostMeter` that the decoder feeds, or v, c and o as `StepCosts`: then every
            choice, and a seeded output, can be repeated.

    Raises:
        ValueError: max_gamma is below 1.

    Example:
        >>> controller = GammaController(4, StepCosts({1: 1.0, 5: 1.5}))
        >>> controller.choose()
        4
        >>> controller.observe(4, 4, [Judged(drafts=True, accepted=0, rejected=True)])
        >>> controller.choose()
        2
    """

    def __init__(self, max_gamma: int, costs: CostMeter | StepCosts) -> None:
        require(max_gamma >= 1, f"max_gamma must be at least 1, got {max_gamma}")
        self.max_gamma = max_gamma
        self._source = costs
        self._seen = Acceptance(max_gamma)
        self._gamma = 0  # the settled choice, probes left out
        self._was_plain, self._was_full = True, False
        self._purse, self._earned = ADVANCE, 0.0
        self._idle = 0  # plain rounds to come, before which no choice can change

    def choose(self) -> int:
        """Return gamma for the next round."""
        if self._idle > 0:
            self._idle -= 1
            return 0
        costs, reach = self._costs(), self._reach()
        if costs is None or (self._meter is not None and self._meter.plain_age >= REFRESH):
            return 0
        gains = speedups(
            self._seen.alphas()[:reach], costs, max_gamma=reach, drafted=self._seen.drafted
        )
        best = max(range(reach + 1), key=gains.__getitem__)
        if self._gamma > reach or gains[best] > (1.0 + MARGIN) * gains[self._gamma]:
            self._gamma = best
        lacks = {g: self._loss(g, g, costs) - self._purse for g in range(1, reach + 1)}
        if self._gamma and lacks[self._gamma] <= OVERDRAFT:
            return self._gamma
        funded = [gamma for gamma, lack in lacks.items() if lack <= 0.0]
        if not funded:
            wait = min(*lacks.values(), lacks.get(self._gamma, inf) - OVERDRAFT) / SHARE
            self._idle = min(int(wait), RECENT)  # then the costs have changed too
        return max(funded, key=gains.__getitem__, default=0)

    def observe(self, gamma: int, depth: int, judged: Sequence[Judged]) -> None:
        """Take in what a round came to.

        Args:
            gamma: drafts that were asked for.
            depth: drafts that were there, the most of any request.
            judged: of each request that took part.
        """
        tokens = 1.0 + sum(one.accepted for one in judged) / len(judged)
        self._earned += tokens
        if self._earned > ADVANCE / SHARE:
            self._purse += SHARE * tokens
        costs = None if gamma == 0 else self._costs()
        if costs is None:
            self._was_plain, self._was_full = True, False
            return
        self._seen.add(judged)
        self._purse += tokens - 1.0 - self._loss(gamma, depth, costs)
        most = self._loss(self.max_gamma, self.max_gamma, costs) + SPARE
        self._purse, self._idle = min(self._purse, most), 0
        self._was_plain, self._was_full = False, any(one.is_full for one in judged)

    @property
    def _meter(self) -> CostMeter | None:
        return self._source if isinstance(self._source, CostMeter) else None

    def _costs(self) -> StepCosts | None:
        """Return the costs; a forward wider than measured ones is taken to cost no more: tried."""
        if isinstance(self._source, StepCosts):
            return self._source
        costs, deepest = self._source.costs(), self._source.deepest
        if costs is None or deepest >= self.max_gamma:
            return costs
        flat = {self.max_gamma + 1: costs.v[deepest + 1]}
        return replace(costs, v={**costs.v, **flat})

    def _reach(self) -> int:
        """Return the largest gamma that may be tried."""
        if self._meter is None:
            return self.max_gamma
        return min(self.max_gamma, max(FIRST, 2 * self._meter.deepest))

    def _loss(self, gamma: int, depth: int, costs: StepCosts) -> float:
        """Return what a round loses if nothing is accepted, in plain steps; where no forward was
        measured, as if drafts cost what they cost before, or one step."""
        meter = self._meter
        deepest = depth if meter is None else meter.deepest
        if depth <= deepest:
            extra = costs.verify(depth + 1) - costs.verify(1)
        elif deepest > 0:
            extra = (costs.verify(deepest + 1) - costs.verify(1)) * depth / deepest
        else:
            extra = 1.0
        behind = costs.catch_up if self._was_full else 0.0
        if self._was_plain and meter is not None:
            behind = meter.resume
        return max(extra, 0.0) + gamma * costs.c + (costs.o if depth else 0.0) + behind


class GammaPolicy:
    """What a decoder was told about gamma; each of its runs opens a `Pace`.

    Args:
        gamma: a number, or "auto".
        max_gamma: largest gamma of "auto".
        costs: v, c and o for "auto"; None = measured, for each size of batch.

    Raises:
        TypeError: gamma is neither an integer nor "auto".
        ValueError: gamma is negative, max_gamma is below 1, or costs are given to a fixed gamma.

    Attributes:
        most: the largest gamma of any round.
    """

    def __init__(self, gamma: int | str, max_gamma: int, costs: StepCosts | None) -> None:
        self._is_auto = gamma == "auto"
        require(
            self._is_auto or not isinstance(gamma, str),
            f'gamma must be an integer or "auto", got {gamma!r}',
        )
        require(self._is_auto or costs is None, 'costs need gamma="auto"')
        self.most = operator.index(max_gamma if self._is_auto else gamma)  # type: ignore[arg-type]
        require(self.most >= 0, f"gamma must be at least 0, got {gamma}")
        require(self.most >= self._is_auto, f"max_gamma must be at least 1, got {max_gamma}")
        self._given = costs
        self._meters: dict[int, CostMeter] = {}

    def open(self, batch: int, device: torch.device, *, has_proposer: bool) -> Pace:
        """Start on a batch; what earlier ones of this size cost is known."""
        fresh = CostMeter(warm_up=int(device.type == "cuda"))
        if not (self._is_auto and has_proposer):
            return Pace(self.most if has_proposer else 0, fresh)
        meter = self._meters.setdefault(batch, fresh)
        return Pace(GammaController(self.most, self._given or meter), meter)


class Pace:
    """The gammas of one run, and the meter that its rounds feed.

    Attributes:
        controller: of an adaptive run, else None.
        meter: what rounds cost.
        rounds: how many had each gamma.
    """

    def __init__(self, gamma: int | GammaController, meter: CostMeter) -> None:
        self._gamma = gamma
        self.controller = gamma if isinstance(gamma, GammaController) else None
        self.meter = meter
        self.rounds: Counter[int] = Counter()
        self._asked = 0

    def begin(self, room: int) -> int:
        """Return the most drafts of the coming round, at most `room`."""
        gamma = self._gamma if isinstance(self._gamma, int) else self._gamma.choose()
        self._asked = min(gamma, room)
        return self._asked

    def end(self, draft: Draft, judged: Iterable[Judged], lap: Lap) -> None:
        """Take in what came of it: a chain as wide as computed, a tree as deep as asked."""
        nodes, judged = draft.tokens.shape[1], list(judged)
        depth = nodes - 1 if draft.parents is None else min(self._asked, nodes - 1)
        self.rounds[self._asked] += 1
        self.meter.add(self._asked, depth, lap, is_full=any(one.is_full for one in judged))
        if self.controller is not None:
            self.controller.observe(self._asked, depth, judged)


def _window() -> deque[float]:
    return deque(maxlen=RECENT)


def _median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]  # an odd number of them, when there are many
