"""Acceptance of chains on a CPU: ours, softmax + multinomial as peers write it, and native floors.

    python -m benchmarks.bench_accept

Drafts are drawn from laws at the given total variation from the target's. Every variant is checked
against the float64 reference (same coins, or for the peer the same accepted lengths in law)
before it is timed. "read" is a plain read of all the logits, the roof of every row.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness, native
from spec_kernels import ops, reference
from spec_kernels.types import Draft, SamplingParams

TEMPERATURE = 0.7


class Problem(NamedTuple):
    """One verification step; rows lie as engines pack them, request by request."""

    target: Tensor  # [batch, gamma + 1, vocab] float32 logits
    draft: Tensor  # [batch, gamma, vocab] float32 logits
    tokens: Tensor  # [batch, gamma] int64, drawn from the draft's law
    accept_coins: Tensor  # [batch, gamma + 1] float64
    final_coins: Tensor  # [batch] float64


def make_problem(batch: int, gamma: int, vocab: int, variation: float, seed: int = 0) -> Problem:
    """Draw logits, and drafts from laws at about `variation` total variation from the target's."""
    generator = torch.Generator().manual_seed(seed)
    target = 2.5 * torch.randn(batch, gamma + 1, vocab, generator=generator)
    p = (target[:, :gamma] / TEMPERATURE).softmax(-1)
    # mixing with a rolled copy: the variation is nearly the share of the copy
    q = (1.0 - variation) * p + variation * p.roll(vocab // 2, -1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, gamma)
    coins = torch.rand(batch, gamma + 2, dtype=torch.float64, generator=generator)
    draft = q.log() * TEMPERATURE
    return Problem(target, draft, tokens, coins[:, :-1].contiguous(), coins[:, -1].contiguous())


def ours(problem: Problem, rule: str, accept: Callable[..., Any] = ops.accept) -> Callable[[], Any]:
    """Return a call of our op: raw logits in, tokens out."""
    batch, gamma = problem.tokens.shape
    params = SamplingParams.make(TEMPERATURE, batch=batch)
    rows = torch.arange(batch * (gamma + 1), dtype=torch.int32).view(batch, gamma + 1)
    draft_rows = torch.full((batch, gamma + 1), -1, dtype=torch.int32)
    draft_rows[:, 1:] = torch.arange(batch * gamma, dtype=torch.int32).view(batch, gamma)
    logits = problem.draft.flatten(0, 1)
    draft_request = torch.arange(batch, dtype=torch.int32).repeat_interleave(gamma)
    law = ops.row_law(logits, params, draft_request)  # known since the drafts were drawn
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), problem.tokens], 1)
    draft = Draft(tokens, torch.full((batch,), gamma + 1, dtype=torch.int32), None, logits, law)
    draft = draft._replace(row=draft_rows)

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


def softmax_multinomial(problem: Problem) -> Callable[[], Tensor]:
    """Return a call of the token rule as it is commonly written: whole probability tensors."""
    gamma = problem.draft.shape[1]

    def call() -> Tensor:
        p = (problem.target / TEMPERATURE).softmax(-1)
        q = (problem.draft / TEMPERATURE).softmax(-1)
        chosen = problem.tokens[..., None]
        ratio = p[:, :gamma].gather(-1, chosen)[..., 0] / q.gather(-1, chosen)[..., 0]
        accepted = (problem.accept_coins[:, 1:] < ratio).long().cumprod(1).sum(1)
        own = torch.arange(len(accepted))
        residual = p[own, accepted]
        rejected = accepted < gamma
        residual[rejected] -= q[own[rejected], accepted[rejected]]
        last = torch.multinomial(residual.clamp(min=0.0), 1)
        place = torch.arange(gamma + 1)
        out = torch.cat([problem.tokens, last], 1)
        out = torch.where(place == accepted[:, None], last, out)
        return torch.where(place <= accepted[:, None], out, -1)

    return call


def check(problem: Problem, variants: dict[str, Callable[[], Tensor]]) -> None:
    """Raise AssertionError unless every variant accepts as the reference does, and ours and the
    floors draw its tokens. (float32 sums move the boundary between two ids of a wide vocabulary:
    one draw in a hundred may fall on its other side.)"""
    for rule in ("token", "block"):
        expected = ours(problem, rule, reference.accept)()
        for name, call in variants.items():
            if rule not in name:
                continue
            found = call()
            same = (found >= 0) == (expected >= 0)
            assert same.all(), f"{name}: other lengths than the reference"
            if "multinomial" not in name:
                other = int((found != expected).any(1).sum())
                assert other <= 1 + len(found) // 100, f"{name}: {other} other tokens"


def measure(batch: int, gamma: int, vocab: int, repeats: int, floors: native.Floors) -> Any:
    """Return the row of one batch size."""
    problem = make_problem(batch, gamma, vocab, variation=0.3)
    flat = problem.accept_coins[:, 1:].contiguous()

    def floor(rule: str) -> Callable[[], Tensor]:
        arguments = (problem.target, problem.draft, problem.tokens, flat, problem.final_coins)
        return lambda: floors.accept(rule, *arguments, TEMPERATURE)

    variants: dict[str, Callable[[], Any]] = {
        "token": ours(problem, "token"),
        "block": ours(problem, "block"),
        "softmax + multinomial (token)": softmax_multinomial(problem),
        "native early stop (token)": floor("token"),
        "native full read (block)": floor("block"),
    }
    check(problem, variants)
    variants["read"] = lambda: (floors.read(problem.target), floors.read(problem.draft))
    times = harness.measure(variants, repeats=repeats)
    moved = 4 * (problem.target.numel() + problem.draft.numel())
    return {"batch": batch, "bytes": moved, **times}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--gamma", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    floors = native.Floors(native.build())
    head = harness.header(
        vocab=options.vocab,
        gamma=options.gamma,
        temperature=TEMPERATURE,
        total_variation=0.3,
        metric="seconds of one call",
    )
    print("  ".join(f"{key} {value}" for key, value in head.items()))
    rows = []
    for batch in options.batches:
        row = measure(batch, options.gamma, options.vocab, options.repeats, floors)
        rows.append(row)
        peer, read = row["softmax + multinomial (token)"], row["read"]
        print(f"\nbatch {batch}{'':24}ms p50 [p20 p80]      GB/s   % of read   x softmax")
        for name, times in ((n, t) for n, t in row.items() if isinstance(t, harness.Times)):
            print(
                f"{name:34}{times.p50 * 1e3:7.2f} [{times.p20 * 1e3:.2f} {times.p80 * 1e3:.2f}]"
                f"{times.gigabytes_per_second(row['bytes']):10.2f}"
                f"{100 * times.ratio_to(read):12.1f}{times.ratio_to(peer):12.2f}"
            )
    harness.print_record("accept", head, rows)


if __name__ == "__main__":
    main()
