"""gamma="auto": the choice in simulated time, and the output of the decoder under it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_kernels import adaptive
from spec_kernels.adaptive import Acceptance, CostMeter, GammaController, Judged
from spec_kernels.cost_model import StepCosts, speedups
from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import DraftModelProposer, NgramProposer
from spec_kernels.stats import Seconds
from spec_kernels.targets import TableTarget
from tests.test_decoder_law import DRAFT_2, SIGNIFICANT, TARGET_2, run
from tests.tiny_models import FixedProposer, gpt, oracle_proposer, plain, random_proposer

PLAIN = 0.1  # seconds of a plain step
HUMP = StepCosts(  # a CPU in float32: three tokens cost more than four
    {1: 1.0, 2: 1.73, 3: 2.08, 4: 1.48, 5: 1.69, 9: 1.75}, c=0.001, o=0.02
)
FLAT = StepCosts({1: 1.0, 9: 1.05}, c=0.001, o=0.02)
STEEP = StepCosts({1: 1.0, 9: 5.3}, c=0.001, o=0.01)
DRAFT_MODEL = StepCosts({1: 1.0, 9: 1.1}, c=0.12, o=0.03)
Share = Callable[[int], float]


class Timed:
    """A lap whose time is known, or becomes known later."""

    def __init__(self, seconds: Seconds, *, is_done: bool = True) -> None:
        self.value, self.is_done = seconds, is_done

    def seconds(self) -> Seconds | None:
        return self.value if self.is_done else None


def always(value: float) -> Share:
    return lambda token: value


def switching(period: int, first: float, second: float) -> Share:
    return lambda token: second if token // period % 2 else first


def spend(
    costs: StepCosts,
    alpha: Share,
    tokens: int,
    gamma: int | CostMeter,
    *,
    seed: int = 0,
    match: float = 1.0,
) -> float:
    """Decode in simulated time, with gamma fixed or chosen; return seconds per token."""
    rng, seconds, done = random.Random(seed), 0.0, 0
    meter = None if isinstance(gamma, int) else gamma
    controller = None if meter is None else GammaController(8, meter)
    while done < tokens:
        asked = gamma if controller is None else controller.choose()
        depth = asked if rng.random() < match else 0
        accepted = 0
        while accepted < depth and rng.random() < alpha(done + accepted):
            accepted += 1
        noise = rng.choice([0.97, 1.0, 1.03])
        lap = Seconds(
            draft=asked * costs.c * PLAIN,
            verify=(costs.verify(depth + 1) - 0.04) * PLAIN * noise,
            accept=(0.03 + (costs.o if depth else 0.0)) * PLAIN,
            state=0.01 * PLAIN,
        )
        seconds, done = seconds + lap.decode, done + accepted + 1
        if controller is not None and meter is not None:
            meter.add(asked, depth, Timed(lap))
            controller.observe(asked, depth, [Judged(depth > 0, accepted, accepted < depth)])
    return seconds / done


def speed(costs: StepCosts, alpha: Share, tokens: int, gamma: int | None, **more: Any) -> float:
    """Tokens per second over two texts; the costs are those of one decoder, learned on a first
    text where every other draft is accepted."""
    meter = CostMeter()
    if gamma is None:
        spend(costs, always(0.5), 100, meter, seed=9)
    each = [
        spend(costs, alpha, tokens, meter if gamma is None else gamma, seed=seed, **more)
        for seed in range(2)
    ]
    return len(each) / sum(each)


@pytest.mark.parametrize("costs", [HUMP, FLAT, STEEP, DRAFT_MODEL])
@pytest.mark.parametrize("match", [1.0, 0.3])
def test_nothing_accepted_costs_at_most_3_percent(costs: StepCosts, match: float) -> None:
    """On a decoder's first text too, whose costs are unknown. What is left of the 3 % is for what
    a decoder that might draft does in plain rounds."""
    for tokens in (100, 300):
        plain_seconds = spend(costs, always(0.0), tokens, 0)
        for seed in range(2):
            seconds = spend(costs, always(0.0), tokens, CostMeter(), seed=seed, match=match)
            assert seconds <= 1.025 * plain_seconds


def test_plain_rounds_that_must_follow_predict_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def count(*arguments: Any, **options: Any) -> list[float]:
        asked.append(1)
        return speedups(*arguments, **options)

    monkeypatch.setattr(adaptive, "speedups", count)
    spend(HUMP, always(0.0), 300, CostMeter())
    assert len(asked) < 40


def test_a_probe_pays_for_catching_up() -> None:
    """Behind a full round it costs more, were nothing accepted."""
    costs = StepCosts({1: 1.0, 2: 1.2}, catch_up=0.4)
    controller = GammaController(1, costs)
    left = []
    for accepted in (0, 1, 0):
        before = controller._purse
        controller.observe(1, 1, [Judged(True, accepted, not accepted)])
        left.append(controller._purse - before - accepted)
    assert left == pytest.approx([-0.2, -0.2, -0.6])


def test_nothing_accepted_ends_in_plain_decoding() -> None:
    meter, gammas = CostMeter(), Counter[int]()
    controller = GammaController(8, meter)
    for _ in range(480):
        gamma = controller.choose()
        gammas[gamma] += 1
        verify = HUMP.verify(gamma + 1) * PLAIN
        meter.add(gamma, gamma, Timed(Seconds(verify=verify)))
        controller.observe(gamma, gamma, [Judged(gamma > 0, 0, gamma > 0)])
    assert gammas[0] > 460
    assert gammas.total() - gammas[0] >= 5  # it goes on looking


@pytest.mark.parametrize(
    ("costs", "alpha"),
    [
        (HUMP, 0.8),
        (HUMP, 0.95),
        (FLAT, 0.3),
        (FLAT, 0.7),
        (FLAT, 0.9),
        (STEEP, 0.9),
        (DRAFT_MODEL, 0.5),
        (DRAFT_MODEL, 0.8),
    ],
)
def test_stationary_texts_reach_the_best_fixed_gamma(costs: StepCosts, alpha: float) -> None:
    best = max(speed(costs, always(alpha), 2000, gamma) for gamma in range(9))
    assert speed(costs, always(alpha), 2000, None) >= 0.95 * best


@pytest.mark.parametrize("costs", [HUMP, FLAT, STEEP, DRAFT_MODEL])
@pytest.mark.parametrize("first", [0.0, 0.9])
def test_switching_texts_reach_the_best_fixed_gamma(costs: StepCosts, first: float) -> None:
    alpha = switching(100, first, 0.9 - first)
    best = max(speed(costs, alpha, 600, gamma) for gamma in range(9))
    assert speed(costs, alpha, 600, None) >= 0.95 * best


def test_a_small_gain_does_not_change_gamma() -> None:
    """Hysteresis: gamma 2 becomes better than 1 by less than 2 %, then by more."""
    rates = [Judged(True, 1, True)] * 6 + [Judged(True, 0, True)] * 4
    for v, expected in ((1.15, 1), (1.11, 2)):
        controller = GammaController(2, StepCosts({1: 1.0, 2: 1.1, 3: v}))
        controller._gamma, controller._purse = 1, 5.0
        controller._seen.add(rates)
        assert controller.choose() == expected


def test_measured_costs_are_medians_in_plain_steps() -> None:
    meter = CostMeter()
    for verify in (1.0, 1.0, 9.0):  # one of them was disturbed
        meter.take(0, 0, Seconds(verify=verify, accept=0.2, state=0.05))
    meter.take(3, 3, Seconds(draft=0.9, verify=2.25, accept=0.3, state=0.075))
    meter.take(3, 3, Seconds(draft=0.3, verify=2.25, accept=0.3, state=0.075))
    costs = meter.costs()
    assert costs is not None
    assert costs.v == pytest.approx({1: 1.0, 4: 2.0})
    assert costs.o == pytest.approx(0.1)
    assert meter.plain_seconds == pytest.approx(1.25)


def test_drafting_behind_a_plain_round_is_counted_apart() -> None:
    """A draft model that has to catch up is no slower at drafting."""
    meter = CostMeter()
    for gamma, draft in ((0, 0.0), (2, 0.2), (2, 0.2), (0, 0.0), (2, 0.7), (2, 0.2)):
        meter.take(gamma, gamma, Seconds(draft=draft, verify=1.0))
    costs = meter.costs()
    assert costs is not None
    assert costs.c == pytest.approx(0.1)
    assert meter.resume == pytest.approx(0.5)


def test_drafting_behind_a_full_round_is_catching_up() -> None:
    meter = CostMeter()
    for gamma, draft, is_full in ((0, 0.0, False), (2, 0.2, True), (2, 0.5, False), (2, 0.2, True)):
        meter.add(gamma, gamma, Timed(Seconds(draft=draft, verify=1.0)), is_full=is_full)
    costs = meter.costs()
    assert costs is not None
    assert (costs.c, costs.catch_up) == pytest.approx((0.1, 0.3))


def test_the_decoder_tells_full_rounds() -> None:
    """One request of the batch is enough: the forward of all is as wide as its own."""
    target = gpt()
    request = Request([1, 2, 3], max_new_tokens=12)
    (output,) = plain(target, [request])
    right = oracle_proposer([[1, 2, 3, *output.tokens]] * 2)
    wrong = FixedProposer(lambda row, seen, count: [0] * count)
    half = FixedProposer(lambda row, *where: (wrong if row else right).continue_(row, *where))
    for proposer, requests, expected in ((right, 1, True), (wrong, 1, False), (half, 2, True)):
        one = Decoder(target, proposer, gamma=2).start([request] * requests)
        one.step()
        assert one.pace.meter._was_full is expected


def test_rounds_count_when_the_device_has_timed_them() -> None:
    meter, late = CostMeter(warm_up=1), Timed(Seconds(verify=3.0), is_done=False)
    meter.add(0, 0, Timed(Seconds(verify=99.0)))  # compiling
    meter.add(0, 0, late)
    meter.add(2, 2, Timed(Seconds(verify=99.0)))
    meter.add(2, 2, Timed(Seconds(verify=6.0)))
    assert meter.costs() is None
    late.is_done = True
    meter.add(0, 0, Timed(Seconds(verify=3.0)))
    assert meter.costs() == StepCosts({1: 1.0, 3: 2.0})


def test_acceptance_is_that_of_tested_positions() -> None:
    seen = Acceptance(3)
    seen.add([Judged(True, 2, True), Judged(True, 0, True), Judged(False, 0, False)])
    assert seen._tried == [2.0, 1.0, 1.0]
    assert seen._accepted == [1.0, 1.0, 0.0]
    assert seen.drafted == pytest.approx((0.95 + 2) / (0.95 + 3))
    assert Judged.of([-1, 0, 0, 1], [0, 2]) == Judged(True, 1, False)  # a tree: node 2 is a leaf
    assert Judged.of([-1, 0, 0, 1], [0, 1]) == Judged(True, 1, True)


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_output_that_depends_on_no_gamma_stays(rule: str) -> None:
    """Greedy text, and the coupled rule's seeded text, with measured costs."""
    target, heat = gpt(), 0.9 if rule == "coupled" else 0.0
    requests = [
        Request(prompt, max_new_tokens=16, temperature=heat, seed=seed)
        for seed, prompt in enumerate([[1, 2, 3, 1, 2], [5]])
    ]
    expected = [output.tokens for output in plain(target, requests, rule=rule)]
    draft = DraftModelProposer(gpt(seed=1))
    for proposer in (NgramProposer(), NgramProposer(nodes=6), draft, random_proposer(31)):
        decoder = Decoder(target, proposer, gamma="auto", max_gamma=4, rule=rule)
        for _ in range(2):
            assert [output.tokens for output in decoder.generate(requests)] == expected


def test_given_costs_make_sampled_text_repeatable() -> None:
    costs = StepCosts({1: 1.0, 5: 1.3}, c=0.02, o=0.01)
    decoder = Decoder(
        gpt(), DraftModelProposer(gpt(seed=1)), gamma="auto", max_gamma=4, costs=costs
    )
    request = Request([1, 2, 3], max_new_tokens=30, temperature=1.0, seed=3)
    runs = [decoder.start([request]) for _ in range(2)]
    for one in runs:
        while not one.is_done:
            one.step()
    assert runs[0]._rows[0].tokens == runs[1]._rows[0].tokens
    assert runs[0].pace.rounds == runs[1].pace.rounds
    assert len(runs[0].pace.rounds) > 1  # gamma did change


@pytest.mark.parametrize("rule", ["block", "token"])
def test_joint_law_of_four_tokens_under_auto(rule: str) -> None:
    """A batch of one gamma would not do: the past of *this* request decides. So each is alone."""
    costs = StepCosts({1: 1.0, 2: 1.2, 3: 1.9, 5: 2.2})

    class Alone(Decoder):
        def generate(self, requests: Any) -> Any:
            return [super(Alone, self).generate([request])[0] for request in requests]

    proposer = DraftModelProposer(TableTarget(DRAFT_2))
    decoder = Alone(
        TableTarget(TARGET_2), proposer, gamma="auto", max_gamma=4, costs=costs, rule=rule
    )
    assert run(decoder, 400) > SIGNIFICANT


def test_a_failed_round_is_repeated_with_its_gamma(monkeypatch: pytest.MonkeyPatch) -> None:
    target, costs = gpt(), StepCosts({1: 1.0, 5: 1.2})
    request = Request([1, 2, 3, 1, 2], max_new_tokens=12, temperature=1.0, seed=1)
    decoder = Decoder(target, NgramProposer(), gamma="auto", max_gamma=4, costs=costs)
    (expected,) = decoder.generate([request])
    one, fails = decoder.start([request]), True
    forward = type(target).forward

    def flaky(*arguments: Any, **options: Any) -> Any:
        nonlocal fails
        fails = not fails
        if not fails:
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)

    monkeypatch.setattr(type(target), "forward", flaky)
    while not one.is_done:
        try:
            one.step()
        except RuntimeError:
            continue
    assert tuple(one._rows[0].tokens) == expected.tokens


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gamma": "often"}, ValueError, 'an integer or "auto"'),
        ({"gamma": "auto", "max_gamma": 0}, ValueError, "max_gamma must be at least 1"),
        ({"gamma": 4, "costs": HUMP}, ValueError, 'costs need gamma="auto"'),
        ({"gamma": 2.5}, TypeError, "float"),
        ({"gamma": -1}, ValueError, "gamma must be at least 0"),
    ],
)
def test_decoder_refuses(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Decoder(TableTarget(torch.eye(3)), NgramProposer(), **arguments)


def test_auto_without_a_proposer_is_plain_decoding() -> None:
    one = Decoder(TableTarget(torch.eye(3)), gamma="auto").start([Request([0], max_new_tokens=3)])
    while not one.is_done:
        one.step()
    assert one.pace.rounds == {0: 3}
