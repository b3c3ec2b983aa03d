"""Latent attention of draft chains: ours beside `scaled_dot_product_attention` and FlexAttention.

    python -m benchmarks.bench_mla

One layer in the absorbed form: every head reads the same latent row, keys and values at once. The
peers get the mask of the chain over the whole context, made once and untimed, and the values as a
view of the keys. Checked against float64.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from benchmarks import harness, native
from benchmarks.workloads import WORKLOADS, Workload
from spec_kernels import eager, ops

METRIC = "seconds of one call for one layer"
LATENT, ROPE = 512, 64
CONTEXTS = (1024, 4096)
SCALE = (128 + ROPE) ** -0.5


class Problem:
    """Queries of every node, and a contiguous cache that holds context and nodes."""

    def __init__(self, w: Workload, device: str) -> None:
        self.batch, self.nodes, self.context = w.batch, w.gamma + 1, w.context
        self.heads, length = w.heads, w.context + w.gamma + 1
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        generator = torch.Generator().manual_seed(0)
        shape = (w.batch * self.nodes, w.heads, LATENT + ROPE)
        self.query = torch.randn(shape, generator=generator).to(device, dtype)
        rows = (w.batch, length, LATENT + ROPE)
        self.cache = torch.randn(rows, generator=generator).to(device, dtype)
        int32 = {"dtype": torch.int32, "device": device}
        self.lens = torch.full((w.batch,), w.context, **int32)
        self.starts = torch.arange(w.batch + 1, **int32) * self.nodes
        place = torch.arange(length, device=device)
        node = torch.arange(self.nodes, device=device)
        self.sees = place <= w.context + node[:, None]  # [nodes, length]

    def ours(self, layer: Any) -> Tensor:
        """Attend by a layer."""
        args = (self.query[..., :LATENT], self.query[..., LATENT:], self.cache)
        args += (self.lens, self.starts, self.nodes)
        out: Tensor = layer.verify_attention_mla(*args, scale=SCALE)[0]
        return out

    def first(self, dtype: torch.dtype) -> Problem:
        """Return the first request alone, in another dtype."""
        one = copy.copy(self)
        one.batch, one.query = 1, self.query[: self.nodes].to(dtype)
        one.cache = self.cache[:1].to(dtype)
        return one

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as torch takes them."""
        query, cache = self.query, self.cache
        query = query.view(self.batch, self.nodes, self.heads, -1).transpose(1, 2)
        return query, cache[:, None], cache[:, None, :, :LATENT]

    def nodes_first(self, out: Tensor) -> Tensor:
        """Return torch's result in the order of ours."""
        return out.transpose(1, 2).flatten(0, 1)

    def sdpa(self) -> Tensor:
        """Attend by torch."""
        out = F.scaled_dot_product_attention(
            *self.heads_first(), self.sees, scale=SCALE, enable_gqa=True
        )
        return self.nodes_first(out)

    def flex(self, options: harness.Options) -> Any:
        """Return FlexAttention's call, or why there is none."""
        if not options.compiled:
            return harness.NOT_COMPILED
        sees = self.sees

        def visible(b: Tensor, h: Tensor, node: Tensor, place: Tensor) -> Tensor:
            return sees[node, place]

        blocks = flex.create_block_mask(
            visible, None, None, *self.sees.shape, device=str(self.query.device)
        )

        def call() -> Tensor:
            out = flex.flex_attention(
                *self.heads_first(), block_mask=blocks, scale=SCALE, enable_gqa=True
            )
            return self.nodes_first(out)

        return harness.compiled(call, (), options)


def check(problem: Problem, variants: dict[str, Any]) -> None:
    """Raise AssertionError unless the first request of every result is that of float64, up to twice
    torch's rounding."""
    dtype, few = problem.query.dtype, problem.nodes
    one = problem.first(torch.float64).sdpa()
    eps = torch.finfo(dtype).eps * float(one.abs().max())
    allowed = 2 * float((problem.first(dtype).sdpa().double() - one).abs().max()) + eps
    for name, call in variants.items():
        if not isinstance(call, str):
            error = float((call()[:few].double() - one).abs().max())
            assert error <= allowed, f"{name}: error {error}, allowed {allowed}"


def make_case(w: Workload, options: harness.Options) -> harness.Case:
    """Return the checked row of one workload."""
    problem = Problem(w, options.device)
    variants: dict[str, Any] = {"ours": lambda: problem.ours(ops)}
    if options.device != "cpu":
        variants["eager"] = lambda: problem.ours(eager)
    variants["sdpa"] = problem.sdpa
    variants["flex, compiled"] = problem.flex(options)
    check(problem, variants)
    variants["native"] = "no floor of its own: see read"
    variants["read"] = native.reader(options.device, problem.cache)
    settings = {**w.settings(), "sampling": None, "heads": w.heads, "latent": LATENT, "rope": ROPE}
    settings["dtype"] = str(problem.query.dtype).removeprefix("torch.")
    return harness.Case(settings, variants, problem.cache.nbytes)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield the latent workload, then longer contexts."""
    w = WORKLOADS["moe-latent"].on(options.device)
    w = w if options.device != "cpu" else w._replace(batch=1, heads=16)
    for context in CONTEXTS if options.full else CONTEXTS[:1]:
        yield make_case(w._replace(context=context), options)


if __name__ == "__main__":
    harness.main("mla", METRIC, cases, __doc__)
