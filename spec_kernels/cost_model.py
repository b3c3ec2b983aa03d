"""What to expect of speculation before it runs: tokens per round, speed-up, best gamma and tree.

    E[tokens]           = 1 + sum_(i <= gamma) prod_(j <= i) alpha_j
                        = (1 - alpha^(gamma + 1)) / (1 - alpha)             one alpha
                        = 1 + sum over drafted nodes of the product of acceptances on their path
    ideal speed-up      = E / (1 + gamma * c)
    practical speed-up  = E / (v(gamma) + gamma * c + A * catch_up + o)
    A                   = prod_(j <= gamma) alpha_j                         all drafts accepted

A proposer that has nothing to say in some rounds, as n-gram lookup where nothing matches, leaves a
plain step there: with drafts in a share `d` of the rounds

    practical speed-up  = (1 + d * (E - 1))
                          / (1 + d * (v(gamma) - 1 + o + A * catch_up) + gamma * c)

All costs are in units of one plain decode step of the same batch and context: `c` is one draft
step, `v(gamma)` one verification of gamma + 1 tokens per request, `o` what remains of a round
(sampling, tensor moves, cache state) beyond what a plain step has of it. `catch_up` is what
drafting costs more behind a round whose drafts were all accepted: a draft model never saw the last
of them, so its first step takes in two tokens, and where two cost more than one that is paid in a
share A of the rounds. A single alpha describes an i.i.d. drafter only; multi-token prediction falls
off with depth: one alpha per position.

The roofline half (`Machine`, `Model`, `forward_seconds`) predicts v where nothing was measured:
a forward takes the longer of its memory time and its arithmetic time.

Source: Leviathan et al. 2023, theorem 3.8 (E, ideal speed-up); Williams et al. 2009 (roofline).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

Alpha = float | Sequence[float]
"""One acceptance for every position, or the conditional acceptance of each position in turn."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def survival(alpha: Alpha, gamma: int) -> list[float]:
    """Return the probability that the first i drafts are all accepted, i = 1..gamma.

    Args:
        alpha: one acceptance in [0, 1], or the acceptance of each position given that the ones
            before were accepted; at least gamma of them.
        gamma: drafts per round.

    Raises:
        ValueError: gamma is negative, an acceptance is outside [0, 1], or too few are given.

    Example:
        >>> survival([0.5, 0.25], 2)
        [0.5, 0.125]
    """
    _require(gamma >= 0, f"gamma must be >= 0, got {gamma}")
    each = [alpha] * gamma if isinstance(alpha, int | float) else list(alpha)
    _require(len(each) >= gamma, f"alpha must have {gamma} values, one per draft, got {len(each)}")
    wrong = next((a for a in each if not 0.0 <= a <= 1.0), None)
    _require(wrong is None, f"alpha must be in [0, 1], got {wrong}")
    return list(accumulate(each[:gamma], mul))


def conditional_acceptance(survived: Sequence[float]) -> list[float]:
    """Turn shares of rounds that accepted the first i drafts into one alpha per position.

    The inverse of `survival`; `DecoderStats.acceptance_by_position` holds such shares. Positions
    behind one that never survived are 0.

    Raises:
        ValueError: a share is outside [0, 1] or grows with the position.

    Example:
        >>> conditional_acceptance([0.5, 0.125])
        [0.5, 0.25]
    """
    before, alphas = 1.0, []
    for share in survived:
        _require(
            0.0 <= share <= before,
            f"shares of accepted prefixes must fall from 1 to 0, got {share} after {before}",
        )
        alphas.append(share / before if before else 0.0)
        before = share
    return alphas


def expected_tokens(alpha: Alpha, gamma: int) -> float:
    """Return the expected tokens per round of a chain: accepted drafts plus one.

    Args:
        alpha: one acceptance, or one per position (`survival`).
        gamma: drafts per round; 0 is plain decoding.

    Raises:
        ValueError: as `survival`.

    Example:
        >>> round(expected_tokens(0.8, 4), 4), expected_tokens([0.5, 0.2], 2)
        (3.3616, 1.6)
    """
    return 1.0 + sum(survival(alpha, gamma))


def expected_tokens_of_tree(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Return the expected tokens per round of a draft tree.

    Args:
        parents: parent of each node, -1 for the root; a parent comes before its children.
        acceptance: probability that node i is entered, given that its parent was; those of
            siblings sum to at most 1. The root's is not read.

    Raises:
        ValueError: the lengths differ, node 0 is no root, a parent does not come first, or
            the acceptances of siblings exceed 1.

    Example:
        >>> expected_tokens_of_tree([-1, 0, 0, 1], [1.0, 0.5, 0.25, 0.5])
        2.0
    """
    _require(
        len(parents) == len(acceptance),
        f"acceptance must have {len(parents)} values, one per node, got {len(acceptance)}",
    )
    _require(bool(parents) and parents[0] == -1, "parents must begin with the root, -1")
    entered = [1.0]
    children = [0.0] * len(parents)
    for node in range(1, len(parents)):
        parent, share = parents[node], acceptance[node]
        _require(0 <= parent < node, f"the parent of node {node} must come before it, got {parent}")
        _require(0.0 <= share <= 1.0, f"acceptance must be in [0, 1], got {share} at node {node}")
        children[parent] += share
        _require(
            children[parent] <= 1.0 + 1e-9,
            f"acceptances of the children of node {parent} must sum to at most 1",
        )
        entered.append(entered[parent] * share)
    return sum(entered)


def ideal_speedup(alpha: Alpha, gamma: int, c: float) -> float:
    """Return the speed-up over plain decoding if verifying gamma + 1 tokens cost one step.

    Args:
        alpha: one acceptance, or one per position.
        gamma: drafts per round.
        c: cost of one draft step, in plain steps.

    Example:
        >>> round(ideal_speedup(0.8, 4, c=0.1), 3)
        2.401
    """
    return expected_tokens(alpha, gamma) / (1.0 + gamma * c)


@dataclass(frozen=True)
class StepCosts:
    """What a round costs, in units of one plain decode step.

    Attributes:
        v: verification cost by tokens per request (gamma + 1), measured or from a roofline. Between
            measured widths it is interpolated linearly; beyond the last two it goes on
            along their line.
        c: one draft step.
        o: what remains of a round.
        catch_up: what drafting costs more behind a round that accepted every draft.

    Example:
        >>> costs = StepCosts({1: 1.0, 5: 1.2}, c=0.05, o=0.02)
        >>> round(costs.verify(3), 3), round(costs.round(4), 3)
        (1.1, 1.42)
    """

    v: Mapping[int, float]
    c: float = 0.0
    o: float = 0.0
    catch_up: float = 0.0

    def __post_init__(self) -> None:
        _require(len(self.v) > 0, "v must hold at least one measured width")
        wrong = next((pair for pair in self.v.items() if pair[0] < 1 or not pair[1] > 0), None)
        _require(wrong is None, f"v must map widths >= 1 to costs > 0, got {wrong}")
        _require(self.c >= 0 and self.o >= 0, f"c and o must be >= 0, got {self.c} and {self.o}")
        _require(self.catch_up >= 0, f"catch_up must be >= 0, got {self.catch_up}")

    def verify(self, tokens: int) -> float:
        """Return the cost of a forward over `tokens` tokens per request."""
        if tokens in self.v:
            return self.v[tokens]
        widths = sorted(self.v)
        if len(widths) == 1:
            return self.v[widths[0]]
        high = next((i for i, width in enumerate(widths) if width > tokens), len(widths) - 1)
        low, high = widths[max(high - 1, 0)], widths[max(high, 1)]
        slope = (self.v[high] - self.v[low]) / (high - low)
        return self.v[low] + slope * (tokens - low)

    def round(
        self, gamma: int, tokens: int | None = None, *, drafted: float = 1.0, full: float = 0.0
    ) -> float:
        """Return the mean cost of a round with gamma draft steps, verifying `tokens` (gamma + 1)
        where there are drafts: in a share `drafted` of the rounds. Of these a share `full` accepts
        them all, which the next round pays for."""
        width = gamma + 1 if tokens is None else tokens
        plain = self.verify(1)
        extra = self.verify(width) - plain + self.o + full * self.catch_up if width > 1 else 0.0
        return plain + drafted * extra + gamma * self.c


def practical_speedup(alpha: Alpha, gamma: int, costs: StepCosts, *, drafted: float = 1.0) -> float:
    """Return the speed-up over plain decoding at the costs of a real machine.

    Args:
        alpha: one acceptance, or one per position, where there are drafts.
        gamma: drafts per round; 0 is plain decoding.
        costs: `StepCosts` of this batch and context.
        drafted: share of the rounds in which there are drafts.

    Raises:
        ValueError: as `survival`, or drafted is outside [0, 1].

    Example:
        >>> costs = StepCosts({1: 1.0, 9: 1.5}, c=0.0, o=0.05)
        >>> round(practical_speedup(0.8, 8, costs), 3)
        2.793
    """
    return speedups(alpha, costs, max_gamma=gamma, drafted=drafted)[gamma]


def speedups(
    alpha: Alpha, costs: StepCosts, *, max_gamma: int, drafted: float = 1.0
) -> list[float]:
    """Return the practical speed-up of gamma = 0, 1, ..., max_gamma; see `practical_speedup`.

    Example:
        >>> [round(gain, 3) for gain in speedups(0.5, StepCosts({1: 1.0, 3: 1.2}), max_gamma=2)]
        [1.0, 1.364, 1.458]
    """
    _require(0.0 <= drafted <= 1.0, f"drafted must be in [0, 1], got {drafted}")
    survived = survival(alpha, max_gamma)
    tokens = accumulate(survived, initial=0.0)  # beyond the target's own
    return [
        (1.0 + drafted * extra) / costs.round(gamma, drafted=drafted, full=full)
        for gamma, (extra, full) in enumerate(zip(tokens, [0.0, *survived], strict=True))
    ]


def best_gamma(
    alpha: Alpha, costs: StepCosts, *, max_gamma: int, drafted: float = 1.0
) -> tuple[int, float]:
    """Return the gamma of the highest practical speed-up, and that speed-up.

    Every gamma is tried: v need not be convex (a CPU may take longer for 3 tokens than for 4). Ties
    go to the smallest.

    Args:
        alpha: one acceptance, or one per position; max_gamma of them.
        costs: `StepCosts` of this batch and context.
        max_gamma: largest gamma tried.
        drafted: share of the rounds in which there are drafts.

    Example:
        >>> best_gamma(0.6, StepCosts({1: 1.0, 9: 1.4}, c=0.1), max_gamma=8)[0]
        2
    """
    gains = speedups(alpha, costs, max_gamma=max_gamma, drafted=drafted)
    best = max(range(len(gains)), key=gains.__getitem__)
    return best, gains[best]


def best_tree_size(
    expected: Sequence[float], costs: StepCosts, *, draft_steps: Callable[[int], int]
) -> tuple[int, float]:
    """Return the number of nodes of the best tree, and its speed-up over plain decoding.

    Args:
        expected: expected tokens of the best tree of 1, 2, ... nodes, the root included, as
            `spec_kernels.tree.optimal` finds them.
        costs: `StepCosts` of this batch and context.
        draft_steps: draft steps that a tree of n nodes takes, commonly its depth.

    Raises:
        ValueError: expected is empty.

    Example:
        >>> best_tree_size([1.0, 1.6, 1.9, 2.0], StepCosts({1: 1.0, 4: 1.3}),
        ...                draft_steps=lambda nodes: nodes - 1)[0]
        3
    """
    _require(len(expected) > 0, "expected must hold the value of at least one tree")
    gains = [
        tokens / costs.round(draft_steps(nodes), nodes) for nodes, tokens in enumerate(expected, 1)
    ]
    best = max(range(len(gains)), key=gains.__getitem__)
    return best + 1, gains[best]


@dataclass(frozen=True)
class Machine:
    """A device as the roofline sees it.

    Attributes:
        bandwidth: bytes per second from memory.
        flops: multiply-adds count twice; per second, in the dtype of the weights.
    """

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Model:
    """A decoder as the roofline sees it.

    Attributes:
        dense_parameters: parameters that every token uses: attention, shared experts, head.
        bytes_per_parameter: 2 for bfloat16.
        kv_bytes: cache bytes of one token, all layers.
        attention_flops: per query and context token: 4 * heads * head_dim * layers.
        experts: routed experts of a layer; 0 for a dense model.
        experts_per_token: of them, how many a token uses.
        expert_parameters: parameters of one routed expert, summed over the layers.
    """

    dense_parameters: float
    bytes_per_parameter: float = 2.0
    kv_bytes: float = 0.0
    attention_flops: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0

    def touched_experts(self, tokens: int) -> float:
        """Return the expected experts of a layer that at least one of `tokens` tokens uses, if
        every expert is equally likely.

        Example:
            >>> moe = Model(1e9, experts=8, experts_per_token=2, expert_parameters=1e9)
            >>> [round(moe.touched_experts(tokens), 2) for tokens in (0, 1, 4)]
            [0.0, 2.0, 5.47]
        """
        if not self.experts:
            return 0.0
        unused: float = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1.0 - unused)


def forward_seconds(
    machine: Machine, model: Model, *, batch: int, tokens: int, context: int
) -> float:
    """Return the roofline time of one forward: the longer of memory and arithmetic.

    Args:
        machine: the device.
        model: the decoder.
        batch: requests.
        tokens: new tokens per request (gamma + 1, or the nodes of a tree).
        context: cached tokens per request, read once per request however many tokens ask.

    Raises:
        ValueError: batch or tokens is below 1, or context is negative.

    Example:
        >>> h100 = Machine(bandwidth=3.35e12, flops=990e12)
        >>> llama = Model(8e9, kv_bytes=131072, attention_flops=4 * 4096 * 32)
        >>> times = [
        ...     forward_seconds(h100, llama, batch=1, tokens=tokens, context=2048)
        ...     for tokens in (1, 9)
        ... ]
        >>> round(times[1] / times[0], 3)        # memory-bound: eight drafts are free
        1.0
    """
    _require(batch >= 1 and tokens >= 1, f"batch and tokens must be >= 1, got {batch}, {tokens}")
    _require(context >= 0, f"context must be >= 0, got {context}")
    every = batch * tokens
    expert_bytes = model.touched_experts(every) * model.expert_parameters
    weights = (model.dense_parameters + expert_bytes) * model.bytes_per_parameter
    memory = (weights + batch * context * model.kv_bytes) / machine.bandwidth
    used = model.dense_parameters + model.experts_per_token * model.expert_parameters
    arithmetic = every * (2.0 * used + context * model.attention_flops) / machine.flops
    return max(memory, arithmetic)


def roofline_costs(
    machine: Machine,
    model: Model,
    *,
    batch: int,
    context: int,
    max_gamma: int,
    c: float = 0.0,
    o: float = 0.0,
) -> StepCosts:
    """Return `StepCosts` whose v comes from the roofline, for gamma up to max_gamma.

    Args:
        machine: the device.
        model: the decoder.
        batch: requests.
        context: cached tokens per request.
        max_gamma: largest gamma.
        c: one draft step, in plain steps.
        o: what remains of a round, in plain steps.

    Example:
        >>> where = dict(machine=Machine(3e12, 9e14), model=Model(7e9), context=0, max_gamma=7)
        >>> costs = [roofline_costs(batch=batch, **where) for batch in (1, 256)]
        >>> costs[0].verify(8), round(costs[1].verify(8), 2)
        (1.0, 6.83)
    """
    times = [
        forward_seconds(machine, model, batch=batch, tokens=tokens, context=context)
        for tokens in range(1, max_gamma + 2)
    ]
    return StepCosts({n: time / times[0] for n, time in enumerate(times, 1)}, c=c, o=o)


def crossover_batch(
    alpha: Alpha,
    costs_at: Callable[[int], StepCosts],
    *,
    max_gamma: int,
    max_batch: int,
) -> int | None:
    """Return the smallest batch at which no gamma >= 1 pays any more; None up to max_batch.

    Args:
        alpha: one acceptance, or one per position; max_gamma of them.
        costs_at: `StepCosts` at a batch.
        max_gamma: largest gamma tried.
        max_batch: largest batch tried.

    Example:
        >>> costs_at = lambda batch: roofline_costs(
        ...     Machine(3e12, 9e14), Model(7e9), batch=batch, context=0, max_gamma=4, c=0.05)
        >>> crossover_batch(0.7, costs_at, max_gamma=4, max_batch=1024)
        248
    """
    for batch in range(1, max_batch + 1):
        if best_gamma(alpha, costs_at(batch), max_gamma=max_gamma)[0] == 0:
            return batch
    return None
