"""Greedy verification of chains from logits: ours beside argmax and a cumulative product.

    python -m benchmarks.bench_match

"ours" draws one token per row at temperature 0 and matches; "ours, accept" gives the same result
through `accept`, which a mixed batch of greedy and sampled requests needs. Both are checked against
the reference.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, native
from benchmarks.workloads import Workload, chosen
from spec_kernels import eager, ops, reference
from spec_kernels.types import Draft, SamplingParams

METRIC = "seconds of one call"


def argmax_match(logits: Tensor, tokens: Tensor) -> Tensor:
    """Verify `[batch, gamma]` tokens as assisted generation does under greedy decoding."""
    own = logits.argmax(-1)
    accepted = (own[:, :-1] == tokens).long().cumprod(1).sum(1)
    place = torch.arange(own.shape[1], device=own.device)
    return torch.where(place <= accepted[:, None], own, -1)


class Problem:
    """Logits and drafts of one workload; seven of ten drafts are the target's own."""

    def __init__(self, w: Workload, device: str) -> None:
        self.gamma, shape = w.gamma, (w.batch, w.gamma + 1, w.vocab)
        generator = torch.Generator().manual_seed(0)
        self.logits = 2.5 * torch.randn(shape, generator=generator)
        own = self.logits[:, :-1].argmax(-1)
        tokens = own + (torch.rand(own.shape, generator=generator) > 0.7).long()
        self.logits, self.tokens = self.logits.to(device), tokens.to(device)
        root = torch.zeros(w.batch, 1, dtype=torch.int64, device=device)
        count = torch.full((w.batch,), w.gamma + 1, dtype=torch.int32, device=device)
        self.draft = Draft(torch.cat([root, self.tokens], 1), count)
        self.params = SamplingParams.make(0.0, batch=w.batch, device=device)
        self.request = w.request_of_rows(device, w.gamma + 1)
        self.rows = torch.arange(w.batch * (w.gamma + 1), dtype=torch.int32, device=device)
        self.rows = self.rows.view(shape[:2])
        self.coins = torch.full(shape[:2], 0.5, dtype=torch.float64, device=device)

    def match(self, layer: Any) -> Tensor:
        """Draw a token per row, and match."""
        flat = self.logits.flatten(0, 1)
        law = layer.row_law(flat, self.params, self.request)
        drawn = layer.sample(flat, law, coins=self.coins.flatten()).view(self.rows.shape)
        result: Tensor = layer.match(self.draft, drawn, max_depth=self.gamma).output_tokens
        return result

    def accept(self, layer: Any) -> Tensor:
        """Verify by the rules for sampled requests."""
        args = (self.draft, self.logits.flatten(0, 1), self.params, self.rows)
        args += (self.coins, self.coins[:, 0])
        result: Tensor = layer.accept(*args, max_depth=self.gamma).output_tokens
        return result


def make_case(w: Workload, options: harness.Options) -> harness.Case:
    """Return the checked row of one workload."""
    problem = Problem(w, options.device)
    peer = (problem.logits, problem.tokens)
    variants: dict[str, Any] = {
        "ours": lambda: problem.match(ops),
        "ours, accept": lambda: problem.accept(ops),
        "argmax + cumprod": lambda: argmax_match(*peer),
        "the same, compiled": harness.compiled(argmax_match, peer, options),
    }
    if options.device != "cpu":
        variants["eager"] = lambda: problem.match(eager)
    expected = Problem(w, "cpu").match(reference)
    for name, call in variants.items():
        if not isinstance(call, str):
            assert torch.equal(call().cpu(), expected), f"{name}: other tokens"
    variants["native"] = "no floor of its own: see read"
    variants["read"] = native.reader(options.device, problem.logits)
    settings = {**w.settings(filters=False), "context": None, "sampling": "greedy"}
    return harness.Case(settings, variants, problem.logits.nbytes)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield a chat service, then the other workloads."""
    for w in chosen(options, "code-70b", "big-vocab", "moe-latent"):
        yield make_case(w, options)


if __name__ == "__main__":
    harness.main("match", METRIC, cases, __doc__)
