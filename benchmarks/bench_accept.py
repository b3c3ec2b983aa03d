"""Acceptance of chains: ours, softmax + multinomial as peers write it, and native floors.

    python -m benchmarks.bench_accept

Drafts are drawn from laws at 0.3 total variation from the target's. How many are accepted, and so
how much early stops save, is chance: a row is the mean over draws that make 16 requests in all.
Every variant is checked against the float64 reference (same coins, or for the peers the same
accepted lengths) before it is timed. "read" is a plain read of all the logits, the roof of every
row.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import harness, native
from benchmarks.workloads import WORKLOADS, Workload
from spec_kernels import eager, ops, reference
from spec_kernels.types import Draft, SamplingParams

TEMPERATURE = 0.7
VARIATION = 0.3
REQUESTS = 16
"""Requests that a row is a mean over, at least."""
METRIC = "seconds of one call, a mean over draws of drafts and coins"


DRAWN = ("tokens", "accept_coins", "final_coins")


class Problem(NamedTuple):
    """One verification step; rows lie as engines pack them, request by request."""

    target: Tensor  # [batch, gamma + 1, vocab] float32 logits
    draft: Tensor  # [batch, gamma, vocab] float32 logits
    tokens: Tensor  # [batch, gamma] int64, drawn from the draft's law
    accept_coins: Tensor  # [batch, gamma + 1] float64
    final_coins: Tensor  # [batch] float64

    def to(self, device: str) -> Problem:
        """Return a copy on a device."""
        return Problem(*(t.to(device) for t in self))


def make_problem(batch: int, gamma: int, vocab: int, variation: float, seed: int = 0) -> Problem:
    """Draw logits, and drafts from laws at about `variation` total variation from the target's."""
    return make_problems(1, batch, gamma, vocab, variation, seed)[0]


def make_problems(
    draws: int, batch: int, gamma: int, vocab: int, variation: float, seed: int = 0
) -> list[Problem]:
    """Do as `make_problem`, with several draws of drafts and coins from the same logits."""
    generator = torch.Generator().manual_seed(seed)
    target = 2.5 * torch.randn(batch, gamma + 1, vocab, generator=generator)
    p = (target[:, :gamma] / TEMPERATURE).softmax(-1)
    # mixing with a rolled copy: the variation is nearly the share of the copy
    q = (1.0 - variation) * p + variation * p.roll(vocab // 2, -1)
    draft, problems = q.log() * TEMPERATURE, []
    for _ in range(draws):
        tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, gamma)
        coins = torch.rand(batch, gamma + 2, dtype=torch.float64, generator=generator)
        own = coins[:, :-1].contiguous(), coins[:, -1].contiguous()
        problems.append(Problem(target, draft, tokens, *own))
    return problems


def ours(
    problem: Problem, rule: str, accept: Callable[..., Any] = ops.accept
) -> Callable[[], Tensor]:
    """Return a call of our op: raw logits in, tokens out."""
    batch, gamma = problem.tokens.shape
    device = problem.target.device
    params = SamplingParams.make(TEMPERATURE, batch=batch, device=device)
    rows = torch.arange(batch * (gamma + 1), dtype=torch.int32, device=device)
    rows = rows.view(batch, gamma + 1)
    own = torch.arange(batch * gamma, dtype=torch.int32, device=device).view(batch, gamma)
    logits = problem.draft.flatten(0, 1)
    # known since the drafts were drawn
    law = ops.row_law(logits, params, (own // gamma).flatten() if gamma else own.flatten())
    root = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    count = torch.full((batch,), gamma + 1, dtype=torch.int32, device=device)
    draft = Draft(torch.cat([root, problem.tokens], 1), count, None, logits, law)
    draft = draft._replace(row=torch.cat([root.int() - 1, own], 1))

    def call() -> Tensor:
        result = accept(
            draft,
            problem.target.flatten(0, 1),
            params,
            rows,
            problem.accept_coins,
            problem.final_coins,
            rule=rule,
            max_depth=gamma,
        )
        tokens: Tensor = result.output_tokens
        return tokens

    return call


def accept_softmax(target: Tensor, draft: Tensor, tokens: Tensor, coins: Tensor) -> Tensor:
    """Verify by the token rule as it is commonly written: whole probability tensors."""
    gamma = draft.shape[1]
    p = (target / TEMPERATURE).softmax(-1)
    q = (draft / TEMPERATURE).softmax(-1)
    chosen = tokens[..., None]
    ratio = p[:, :gamma].gather(-1, chosen)[..., 0] / q.gather(-1, chosen)[..., 0]
    accepted = (coins[:, 1:] < ratio).long().cumprod(1).sum(1)
    own = torch.arange(len(accepted), device=target.device)
    rejected = (accepted < gamma).float()[:, None]
    residual = p[own, accepted] - rejected * q[own, accepted.clamp(max=gamma - 1)]
    last = torch.multinomial(residual.clamp(min=0.0), 1)
    return _finish(tokens, accepted, last)


def assisted(problem: Problem) -> Any:
    """Return a call of what transformers' assisted generation verifies with, for each request by
    itself, since it has batch 1; our coins stand in the place of its own."""
    try:
        from transformers.generation.utils import _speculative_sampling as verify
    except ImportError as error:
        return str(error)
    target, draft, tokens, coins = problem[:4]
    gamma = tokens.shape[1]

    def call() -> Tensor:
        numbers, out = iter(coins[:, 1:]), torch.full((len(tokens), gamma + 1), -1)
        with mock.patch.object(torch, "rand_like", lambda like: next(numbers).to(like)):
            for b, own in enumerate(tokens.split(1)):
                p, q = target[b : b + 1] / TEMPERATURE, draft[b : b + 1] / TEMPERATURE
                kept, _ = verify(own, q, gamma, p)
                out[b, : kept.shape[1]] = kept[0]
        return out.to(tokens.device)

    return call


def _finish(tokens: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
    """Return accepted drafts, the last token, then -1."""
    place = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    out = torch.where(place == accepted[:, None], last, torch.cat([tokens, last], 1))
    return torch.where(place <= accepted[:, None], out, -1)


def softmax_multinomial(problem: Problem) -> Callable[[], Tensor]:
    """Return a call of the peer."""
    return lambda: accept_softmax(*problem[:4])


def check(problem: Problem, variants: dict[str, Any]) -> None:
    """Raise AssertionError unless every variant accepts as the reference does, and ours and the
    floors draw its tokens. (float32 sums move the boundary between two ids of a wide vocabulary:
    one draw in a hundred may fall on its other side.)"""
    for rule in ("token", "block"):
        expected = ours(problem.to("cpu"), rule, reference.accept)()
        for name, call in variants.items():
            if rule not in name or isinstance(call, str):
                continue
            found = call().cpu()
            same = (found >= 0) == (expected >= 0)
            assert same.all(), f"{name}: other lengths than the reference"
            if name.startswith(("ours", "eager", "native", rule)):
                other = int((found != expected).any(1).sum())
                assert other <= 1 + len(found) // 100, f"{name}: {other} other tokens"


def make_variants(problem: Problem, options: harness.Options) -> dict[str, Any]:
    """Return every way to verify the problem."""
    device, peers = options.device, problem[:4]
    floors, flat = native.load(device), problem.accept_coins[:, 1:].contiguous()
    arguments = (problem.target, problem.draft, problem.tokens, flat, problem.final_coins)

    def floor(rule: str) -> Any:
        if isinstance(floors, str):
            return floors
        return lambda: floors.accept(rule, *arguments, TEMPERATURE)

    variants: dict[str, Any] = {
        f"ours ({rule})": ours(problem, rule) for rule in ("token", "block")
    }
    if device != "cpu":
        variants["eager (token)"] = ours(problem, "token", eager.accept)
    variants |= {
        "softmax + multinomial (token)": softmax_multinomial(problem),
        "the same, compiled (token)": harness.compiled(accept_softmax, peers, options),
        "transformers assisted (token)": assisted(problem),
        "native, early stop (token)": floor("token"),
        "native, full read (block)": floor("block") if device == "cpu" else "has no block rule",
    }
    return variants


def make_case(workload: Workload, options: harness.Options) -> harness.Case:
    """Return the checked row of one workload, at one temperature and without filters."""
    w = workload._replace(temperature=TEMPERATURE)
    draws = -(-REQUESTS // w.batch)
    problems = make_problems(draws, w.batch, w.gamma, w.vocab, VARIATION)
    first = problems[0].to(options.device)
    variants: dict[str, list[Any]] = {}
    for problem in problems:
        own = first._replace(**{n: getattr(problem, n).to(options.device) for n in DRAWN})
        calls = make_variants(own, options)
        check(own, calls)
        calls["read"] = native.reader(options.device, own.target, own.draft)
        for name, call in calls.items():
            variants.setdefault(name, []).append(call)
    settings = {**w.settings(filters=False), "context": None, "total_variation": VARIATION}
    settings["draws"] = draws
    moved = first.target.nbytes + first.draft.nbytes
    return harness.Case(settings, {n: in_a_row(c) for n, c in variants.items()}, moved, draws)


def in_a_row(calls: list[Any]) -> Any:
    """Return all calls as one, or why they can't run."""
    reasons = [call for call in calls if isinstance(call, str)]
    return reasons[0] if reasons else lambda: [call() for call in calls]


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield the batches of a chat service, then the other workloads."""
    chat = WORKLOADS["chat-8b"]
    for batch in (1, 8, 32) if options.full else (1, 8):
        yield make_case(chat._replace(batch=batch), options)
    if options.full or options.device != "cpu":
        for name in ("code-70b", "big-vocab", "batch-256", "moe-latent"):
            if name != "batch-256" or options.device != "cpu":
                yield make_case(WORKLOADS[name].on(options.device), options)


if __name__ == "__main__":
    harness.main("accept", METRIC, cases, __doc__)
