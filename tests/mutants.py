"""Known wrong verifiers, small changes of the reference that the exactness suite must catch.

Every mutant has the signature of `accept` and decides through `random.decide` and
`random.choose`, so the same enumeration that proves the reference exact measures its bias.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.reference import random
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft
from tests.joint import Accept, problems
from tests.mutants_rows import (
    Call,
    bf16_draft_logits,
    bonus_from_last_draft_row,
    drops_unlikely_drafts,
    filtered_bonus_only,
    ignores_the_map,
    last_argmax,
    raw_q,
    shifted_rows,
    softmax_of_fixed,
    softmax_of_greedy_draft,
    unfiltered_target,
    unnormalised_q,
)

module: Any = importlib.import_module("spec_kernels.reference.accept")


class Mutant(NamedTuple):
    """A wrong verifier; `source` names where it was seen, `shown_by` the kind of problem (or the
    ends of the coins) that shows it."""

    name: str
    rule: str
    accept: Accept
    source: str
    shown_by: str = "sampled"


def patched(**parts: Callable[..., object]) -> Accept:
    """Return the reference with some of its functions replaced."""

    def accept(*args: object, **options: object) -> Acceptance:
        with ExitStack() as stack:
            for name, part in parts.items():
                stack.enter_context(patch.object(module, name, part))
            result: Acceptance = module.accept(*args, **options)
        return result

    return accept


def rewired(change: Callable[[Call], Call]) -> Accept:
    """Return the reference called with changed arguments."""

    def accept(*args: Any, **options: Any) -> Acceptance:
        return reference.accept(*change(Call(*args)), **options)

    return accept


class Step(NamedTuple):
    """A draft of a chain: the node in front of it, entered with a = 1, and itself."""

    state: Any
    child: Any

    @property
    def token(self) -> int:
        return int(self.child.token)

    @property
    def p(self) -> Tensor:
        p: Tensor = self.state.family.p
        return p

    @property
    def ratio(self) -> tuple[float, float]:
        """p and q of the token."""
        p, q = module.entry(self.state, self.child)
        return float(p), float(q)

    def weights(self, a: float) -> Tensor:
        """Return the law that follows when the draft is rejected at acceptance `a`."""
        state = module.State(0, a, self.state.family, False)
        module.reject(state, self.child)
        weights: Tensor = original_weights(state)
        return weights

    def mass(self, a: float) -> float:
        """Return Z at acceptance `a`."""
        state = module.State(0, a, self.state.family, False)
        module.reject(state, self.child)
        return float(state.mass)


class Chain(NamedTuple):
    """The drafts of a request that can be judged, and the law behind the last one."""

    steps: list[Step]
    last: Tensor

    def state(self, n: int, a: float) -> Any:
        """Return what is left after n accepted drafts."""
        if n == len(self.steps):
            return module.State(n, a, module.Family(self.last, None, None, [], False, False), False)
        state = module.State(n, a, self.steps[n].state.family, False)
        module.reject(state, self.steps[n].child)
        return state


def read_chain(tree: Any) -> Chain:
    steps, node = [], 0
    while True:
        family = tree.family(node)
        if not family.children:
            return Chain(steps, family.p)
        steps.append(Step(module.State(node, 1.0, family, False), family.children[0]))
        node = family.children[0].node


def walking(walk: Callable[[Chain, list[float]], list[int]]) -> Accept:
    """Return a verifier of single chains from a function that names the emitted tokens."""

    def accept(*args: Any, **options: Any) -> Acceptance:
        call = Call(*args)
        depth = options["max_depth"]
        nodes = module.read_topology(call.draft, 0, depth)
        tree = module.Tree(nodes, *call[:4], options["target_to_draft"], 0)
        emitted = walk(read_chain(tree), call.accept_coins[0, 1:].tolist())
        out: Acceptance = module._empty(1, depth, call.draft.tokens.device)
        out.output_tokens[0, : len(emitted)] = torch.tensor(emitted)
        out.accepted_lens[0] = len(emitted) - 1
        return out

    return accept


# The scan

Scan = Callable[[Chain, list[float]], tuple[int, float]]


def scanning(scan: Scan) -> Accept:
    """Return a verifier of chains from a function that returns the accepted drafts and a."""

    def accept_scan(tree: Any, coins: list[float], rule: str, replacement: bool) -> Any:
        chain = read_chain(tree)
        return chain.state(*scan(chain, coins[1:]))

    return patched(accept_scan=accept_scan)


def testing(accepts: Callable[[Step], tuple[float, float]]) -> Accept:
    """Return the token rule with another acceptance ratio."""

    def scan(chain: Chain, coins: list[float]) -> tuple[int, float]:
        for n, step in enumerate(chain.steps):
            if not random.decide(coins[n], *accepts(step)):
                return n, 1.0
        return len(chain.steps), 1.0

    return scanning(scan)


def accepts_at_equality(chain: Chain, coins: list[float]) -> tuple[int, float]:
    for n, step in enumerate(chain.steps):
        p, q = step.ratio
        if coins[n] * q != p and not random.decide(coins[n], p, q):
            return n, 1.0
    return len(chain.steps), 1.0


def counts_all_hits(chain: Chain, coins: list[float]) -> tuple[int, float]:
    hits = [random.decide(c, *s.ratio) for s, c in zip(chain.steps, coins, strict=False)]
    return sum(hits), 1.0


def entries(chain: Chain, *, cap: bool = True, each: bool = False) -> list[float]:
    """Return the running acceptance a_0..a_gamma of the block rule, or a wrong form of it."""
    a = [1.0]
    for step in chain.steps:
        p, q = step.ratio
        ratio = p / q if q > 0.0 else 0.0
        ratio = min(1.0, ratio) if each else ratio
        a.append(min(1.0, a[-1] * ratio) if cap else a[-1] * ratio)
    return a


def keep(a: list[float], chain: Chain, n: int) -> float:
    """Return h_n."""
    if n == len(chain.steps):
        return a[n]
    mass = chain.steps[n].mass(a[n])
    return mass / (mass + (1.0 - a[n])) if mass + (1.0 - a[n]) != 0.0 else 1.0


def block(h: Callable[[list[float], Chain, int], float] = keep, **form: bool) -> Accept:
    """Return the block rule with another h, or another a."""

    def scan(chain: Chain, coins: list[float]) -> tuple[int, float]:
        a = entries(chain, **form)
        for n in range(len(chain.steps), 0, -1):
            if random.decide(coins[n - 1], h(a, chain, n)):
                return n, a[n]
        return 0, 1.0

    return scanning(scan)


def one_uniform(chain: Chain, coins: list[float]) -> tuple[int, float]:
    """One coin for all nodes: given that it is not below `seen`, it is uniform above."""
    a, seen = entries(chain), 0.0
    for n in range(len(chain.steps), 0, -1):
        h = keep(a, chain, n)
        if h > seen and random.decide(coins[0], h - seen, 1.0 - seen):
            return n, a[n]
        seen = max(seen, h)
    return 0, 1.0


def stops_at_first_failure(chain: Chain, coins: list[float]) -> tuple[int, float]:
    a, n = entries(chain), 0
    while n < len(chain.steps) and random.decide(coins[n], keep(a, chain, n + 1)):
        n += 1
    return n, a[n]


def token_test_with_rescue(chain: Chain, coins: list[float]) -> tuple[int, float]:
    for n in range(len(chain.steps), 0, -1):
        if random.decide(coins[n - 1], *chain.steps[n - 1].ratio):
            return n, 1.0
    return 0, 1.0


def mass_of_own_row(a: list[float], chain: Chain, n: int) -> float:
    mass = chain.steps[n - 1].mass(a[n])
    whole = mass + (1.0 - a[n])
    return a[n] if n == len(chain.steps) or whole == 0.0 else mass / whole


def last_by_token_ratio(a: list[float], chain: Chain, n: int) -> float:
    if n < len(chain.steps):
        return keep(a, chain, n)
    p, q = chain.steps[-1].ratio
    return min(1.0, p / q)


# The token behind the accepted ones

original_weights = module.final_weights


def at_rejection(weights: Callable[[Any], Tensor]) -> Accept:
    """Return the reference with another law for the recovered token; the bonus is left alone."""

    def final_weights(state: Any) -> Tensor:
        return weights(state) if state.was_tried else original_weights(state)

    return patched(final_weights=final_weights)


def only_the_id(state: Any) -> Tensor:
    weights: Tensor = state.family.p.clone()
    weights[[c.token for c in state.family.children if c.token < weights.numel()]] = 0.0
    return weights if float(weights.sum()) > 0.0 else state.family.p


def unscaled_residual(state: Any) -> Tensor:
    return Step(state, state.family.children[0]).weights(1.0)


def filters_independently(chain: Chain, coins: list[float]) -> list[int]:
    kept, first = [], None
    for step, coin in zip(chain.steps, coins, strict=False):
        if random.decide(coin, *step.ratio):
            kept.append(step.token)
        else:
            first = first or step
    weights = chain.last if first is None else first.weights(1.0)
    return [*kept, random.choose(0.5, weights)]


def draws_twice(chain: Chain, coins: list[float]) -> list[int]:
    """Accept on equality with a fresh target draw, but emit another draw after a mismatch."""
    kept: list[int] = []
    for step in chain.steps:
        if random.choose(0.5, step.p) != step.token:
            return [*kept, random.choose(0.5, step.p)]
        kept.append(step.token)
    return [*kept, random.choose(0.5, chain.last)]


def forgets_the_token(chain: Chain, coins: list[float]) -> list[int]:
    """Leave the recovered token to the next step."""
    kept: list[int] = []
    for step, coin in zip(chain.steps, coins, strict=False):
        if not random.decide(coin, *step.ratio):
            return [*kept, PAD_TOKEN]
        kept.append(step.token)
    return [*kept, random.choose(0.5, chain.last)]


MUTANTS = (
    Mutant("token-residual", "block", at_rejection(unscaled_residual), "section 3"),
    Mutant("h-is-a", "block", block(lambda a, chain, n: a[n]), "section 3"),
    Mutant("one-uniform", "block", scanning(one_uniform), "section 3, B052"),
    Mutant("stop-at-failure", "block", scanning(stops_at_first_failure), "B009"),
    Mutant("token-test-rescue", "block", scanning(token_test_with_rescue), "B008"),
    Mutant("uncapped-a", "block", block(cap=False), "section 3"),
    Mutant("product-of-capped", "block", block(each=True), "section 3"),
    Mutant("mass-of-own-row", "block", block(mass_of_own_row), "section 3"),
    Mutant("last-token-ratio", "block", block(last_by_token_ratio), "B008"),
    Mutant("accept-at-equality", "token", scanning(accepts_at_equality), "section 2", "coins"),
    Mutant("hard-test", "token", testing(lambda s: (float(s.ratio[0] >= s.ratio[1]), 1.0)), "B004"),
    Mutant("ratio-to-max-p", "token", testing(lambda s: (s.ratio[0], float(s.p.max()))), "B005"),
    Mutant("accept-by-p-alone", "token", testing(lambda s: (s.ratio[0], 1.0)), "B031"),
    Mutant("threshold", "token", testing(lambda s: (float(s.ratio[0] > 0.2), 1.0)), "F04"),
    Mutant("accepts-everything", "token", testing(lambda s: (1.0, 1.0)), "B054"),
    Mutant("counts-all-hits", "token", scanning(counts_all_hits), "B001"),
    Mutant("independent-filter", "token", walking(filters_independently), "section 10"),
    Mutant("draws-twice", "token", walking(draws_twice), "B006, B007"),
    Mutant("forgets-recovered", "token", walking(forgets_the_token), "B003, B012"),
    Mutant("full-p", "token", at_rejection(lambda state: state.family.p), "section 10"),
    Mutant("mask-only-the-id", "token", at_rejection(only_the_id), "B014"),
    Mutant(
        "softmax-of-residual",
        "token",
        at_rejection(lambda state: module.residual(state).softmax(0)),
        "B013",
    ),
    Mutant("bonus-row", "token", rewired(bonus_from_last_draft_row), "section 10"),
    Mutant("shifted-rows", "token", rewired(shifted_rows), "section 10, B002"),
    Mutant("raw-q", "token", rewired(raw_q), "B027", "draft-filter-only"),
    Mutant(
        "greedy-draft-softmax-q",
        "token",
        rewired(softmax_of_greedy_draft),
        "B010, B026",
        "greedy-draft",
    ),
    Mutant("unnormalised-q", "token", rewired(unnormalised_q), "B027", "top-k"),
    Mutant("bf16-q", "token", rewired(bf16_draft_logits), "B030"),
    Mutant("softmax-q-of-fixed", "token", rewired(softmax_of_fixed), "B017", "fixed"),
    Mutant("unfiltered-target", "token", rewired(unfiltered_target), "B029", "target-filter-only"),
    Mutant(
        "filtered-bonus-only", "token", rewired(filtered_bonus_only), "B024", "target-filter-only"
    ),
    Mutant("last-argmax", "token", rewired(last_argmax), "section 1", "greedy-ties"),
    Mutant("drops-drawn", "token", rewired(drops_unlikely_drafts), "section 4"),
    Mutant("ignores-the-map", "token", ignores_the_map, "section 1", "mapped-draft"),
)


def edge_faults(accept: Accept, rule: str) -> Iterator[str]:
    """Name the ends of the coin's range at which a verifier errs; enumeration cannot see them."""

    def emits(p: list[list[float]], q: list[float], token: int, u: float, z: float) -> list[int]:
        draft = Draft(
            torch.tensor([[0, token]]),
            torch.tensor([2], dtype=torch.int32),
            logits=torch.tensor([q], dtype=torch.float64),
            row=torch.tensor([[-1, 0]], dtype=torch.int32),
        )
        coins = torch.tensor([[u, u]], dtype=torch.float64)
        target = torch.tensor(p, dtype=torch.float64)
        rows = torch.tensor([[0, 1]], dtype=torch.int32)
        final = torch.tensor([z], dtype=torch.float64)
        options: dict[str, Any] = {"rule": rule, "max_depth": 1, "target_to_draft": None}
        out = accept(draft, target, None, rows, coins, final, **options)
        return [token for token in out.output_tokens[0].tolist() if token != PAD_TOKEN]

    one = 1.0 - 2.0**-53
    bonus = [0.0, 0.0, 1.0]
    if emits([[0.0, 0.5, 0.5], bonus], [1.0, 0.0, 0.0], 0, 0.0, 0.0) != [1]:
        yield "coin 0 accepts an id that the target excludes, or the final coin 0 draws it"
    if emits([[0.5, 0.5, 0.0], bonus], [0.5, 0.5, 0.0], 1, one, one) != [1, 2]:
        yield "the largest coin rejects at p = q"
    if emits([[0.1, 0.9, 0.0], bonus], [1.0, 0.0, 0.0], 0, one, one) != [1]:
        yield "the largest final coin draws an id of weight 0"
    if emits([[0.5, 0.5, 0.0], bonus], [0.5, 0.5, 0.0], 2, 0.0, one) != [1]:
        yield "a vanished residual does not fall back to p"
    if emits([[0.5, 0.0, 0.5], bonus], [0.0, 1.0, 0.0], 0, 0.0, 0.0) != [0]:
        yield "an id that its own law excludes is accepted, or hinders the residual"


def bias(mutant: Mutant) -> float:
    """Return how far the mutant's output law is from the target's on the problem that shows it;
    for a fault at the ends of the coins, how many of these go wrong."""
    if mutant.shown_by == "coins":
        return float(len(list(edge_faults(mutant.accept, mutant.rule))))
    name = f"{mutant.shown_by}-v4-g2"
    problem = next(problem for problem in problems() if problem.name == name)
    return problem.measure(mutant.accept, mutant.rule).distance
