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
from benchmarks.workloads import WORKLOADS, Workload
from spec_kernels import eager, ops, reference
from spec_kernels.types import Draft, SamplingParams

METRIC = "seconds of one call"


def argmax_match(logits: Tensor, tokens: Tensor) -> Tensor:
    """Verify `[batch, gamma]` tokens as assisted generation does under greedy decoding."""
    own = logits.argmax(-1)
    accepted = (own[:, :-1] == tokens).long().cumprod(1).sum(1)
    place = torch.arange(own.shape[1], device=own.device)
    return torch.where(place <= accepted[:, None], own, -1)


def make_case(w: Workload, options: harness.Options) -> harness.Case:
    """Return the checked row of one workload; seven of ten drafts are the target's own."""
    device, rows = options.device, w.gamma + 1
    generator = torch.Generator().manual_seed(0)
    logits = (2.5 * torch.randn(w.batch, rows, w.vocab, generator=generator)).to(device)
    own = logits[:, :-1].argmax(-1)
    tokens = own + (torch.rand(own.shape, generator=generator) > 0.7).long().to(device)
    root = torch.zeros(w.batch, 1, dtype=torch.int64, device=device)
    count = torch.full((w.batch,), rows, dtype=torch.int32, device=device)
    draft = Draft(torch.cat([root, tokens], 1), count)
    greedy = SamplingParams.make(0.0, batch=w.batch, device=device)
    flat, request = logits.flatten(0, 1), w.request_of_rows(device, rows)
    at = torch.arange(w.batch * rows, dtype=torch.int32, device=device).view(w.batch, rows)
    coins = torch.full((w.batch, rows), 0.5, dtype=torch.float64, device=device)

    def match(layer: Any) -> Tensor:
        law = layer.row_law(flat, greedy, request)
        drawn = layer.sample(flat, law, coins=coins.flatten()).view(w.batch, rows)
        result: Tensor = layer.match(draft, drawn, max_depth=w.gamma).output_tokens
        return result

    def accept(layer: Any) -> Tensor:
        args = (draft, flat, greedy, at, coins, coins[:, 0])
        result: Tensor = layer.accept(*args, max_depth=w.gamma).output_tokens
        return result

    variants: dict[str, Any] = {
        "ours": lambda: match(ops),
        "ours, accept": lambda: accept(ops),
        "argmax + cumprod": lambda: argmax_match(logits, tokens),
        "the same, compiled": harness.compiled(argmax_match, (logits, tokens), options),
    }
    if device != "cpu":
        variants["eager"] = lambda: match(eager)
    expected = match(reference)
    for name, call in variants.items():
        assert isinstance(call, str) or torch.equal(call(), expected), f"{name}: other tokens"
    variants["native"] = "no floor of its own: see read"
    variants["read"] = native.reader(device, logits)
    settings = {**w.settings(filters=False), "context": None, "sampling": "greedy"}
    return harness.Case(settings, variants, logits.nbytes)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield a chat service, then the other workloads."""
    names = ["chat-8b", "code-70b", "big-vocab", "moe-latent"] if options.full else ["chat-8b"]
    for name in names:
        yield make_case(WORKLOADS[name].on(options.device), options)


if __name__ == "__main__":
    harness.main("match", METRIC, cases, __doc__)
