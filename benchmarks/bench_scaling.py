"""How cost grows: acceptance with V, batch and gamma, laws with rows, attention with nodes and
context.

    python -m benchmarks.bench_scaling

One size changes at a time: every request keeps half of its drafts, since how many rows are read
would otherwise be another coin at every size. The points of a sweep are timed in turns: a slow
minute of the machine would bend the line. Each is checked like the benchmark of its operation.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import bench_accept, harness
from benchmarks.bench_accept import TEMPERATURE, Problem
from spec_kernels import ops
from spec_kernels.types import SamplingParams

METRIC = "seconds of one call"
SIZES = {"batch": 8, "gamma": 4, "vocab": 32_768}
ACCEPT = {
    "vocab": (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144),
    "batch": (1, 2, 4, 8, 16, 32),
    "gamma": (1, 2, 4, 8, 16, 32),
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
ATTEND = {"nodes": (1, 2, 4, 8, 16, 32, 64), "context": (256, 512, 1024, 2048, 4096, 8192)}
HEADS, KV_HEADS, DIM = 8, 2, 64


def keep_half(problem: Problem) -> Problem:
    """Return the problem with drafts and coins of which either rule keeps half: first those that
    the target's law likes best beside the draft's, under coins of 0; then the other way round."""
    kept = problem.tokens.shape[1] // 2
    tokens, coins = problem.tokens.clone(), torch.zeros_like(problem.accept_coins)
    for node in range(kept + 1):
        p, q = ((t[:, node] / TEMPERATURE).softmax(-1) for t in (problem.target, problem.draft))
        tokens[:, node] = (p - q if node < kept else q - p).argmax(-1)
    coins[:, kept + 1 :] = 1.0 - 2.0**-53
    return problem._replace(tokens=tokens, accept_coins=coins)


def accept_case(sweep: str, sizes: dict[str, int], options: harness.Options) -> harness.Case:
    """Return a point of a sweep of acceptance."""
    problem = bench_accept.make_problem(
        sizes["batch"], sizes["gamma"], sizes["vocab"], bench_accept.VARIATION
    )
    problem = keep_half(problem).to(options.device)
    variants: dict[str, Any] = {
        f"accept ({rule})": bench_accept.ours(problem, rule) for rule in ("token", "block")
    }
    variants["softmax + multinomial (token)"] = bench_accept.softmax_multinomial(problem)
    bench_accept.check(problem, variants)
    for rule in ("token", "block"):
        lens = (variants[f"accept ({rule})"]() >= 0).sum(1)
        assert (lens == sizes["gamma"] // 2 + 1).all(), f"the {rule} rule kept {lens - 1}"
    sampling = f"temperature {TEMPERATURE}"
    settings = {"sweep": sweep, **sizes, "context": None, "sampling": sampling}
    return harness.Case(settings, variants, problem.target.nbytes + problem.draft.nbytes)


def law_case(rows: int, options: harness.Options) -> harness.Case:
    """Return a point of the sweep over rows: the laws of rows of one request."""
    generator, device = torch.Generator().manual_seed(0), options.device
    logits = 2.5 * torch.randn(rows, SIZES["vocab"], generator=generator).to(device)
    params = SamplingParams.make(TEMPERATURE, device=device)
    request = torch.zeros(rows, dtype=torch.int32, device=device)

    def call() -> Any:
        return ops.row_law(logits, params, request)

    law, wide = call(), logits.double() / params.temperature.double()
    found = law.row_max.double() / params.temperature.double() + law.log_sum.double()
    error = float((found - wide.logsumexp(-1)).abs().max())
    assert error <= 1e-5, f"row_law: error {error}"
    settings = {"sweep": "rows", "rows": rows, "vocab": SIZES["vocab"], "batch": 1}
    settings |= {"context": None, "gamma": None, "sampling": f"temperature {TEMPERATURE}"}
    variants = {"row_law": call, "softmax": lambda: (logits / TEMPERATURE).softmax(-1)}
    return harness.Case(settings, variants, logits.nbytes)


def attend_case(sweep: str, nodes: int, context: int, options: harness.Options) -> harness.Case:
    """Return a point of a sweep of attention: a chain behind one long context."""
    generator, device = torch.Generator().manual_seed(0), options.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query = torch.randn(nodes, HEADS, DIM, generator=generator).to(device, dtype)
    rows = (2, 1, context + nodes, KV_HEADS, DIM)
    keys, values = torch.randn(rows, generator=generator).to(device, dtype)
    lens = torch.tensor([context], dtype=torch.int32, device=device)
    starts = torch.tensor([0, nodes], dtype=torch.int32, device=device)

    def call() -> Any:
        return ops.verify_attention(query, keys, values, lens, starts, nodes)[0]

    own = [t.transpose(-2, -3) for t in (query[None], keys, values)]
    place, node = torch.arange(context + nodes, device=device), torch.arange(nodes, device=device)
    mask = place <= context + node[:, None]
    wide = [t.double() for t in own]
    expected = F.scaled_dot_product_attention(*wide, mask, enable_gqa=True)[0].transpose(0, 1)
    error = float((call().double() - expected).abs().max())
    bound = 4 * torch.finfo(dtype).eps * float(values.abs().max())
    assert error <= bound, f"verify_attention: error {error}"
    settings = {"sweep": sweep, "nodes": nodes, "context": context, "batch": 1}
    settings |= {"gamma": nodes - 1, "sampling": None}
    variants = {
        "verify_attention": call,
        "sdpa": lambda: F.scaled_dot_product_attention(*own, mask, enable_gqa=True),
    }
    return harness.Case(settings, variants, keys.nbytes + values.nbytes)


def cases(options: harness.Options) -> Iterator[list[harness.Case]]:
    """Yield every sweep, the smallest size first; the longest only on demand."""
    most = None if options.full else 5
    for sweep, values in ACCEPT.items():
        yield [accept_case(sweep, {**SIZES, sweep: value}, options) for value in values[:most]]
    yield [law_case(rows, options) for rows in ROWS[:most]]
    yield [attend_case("nodes", nodes, 1024, options) for nodes in ATTEND["nodes"][:most]]
    contexts = ATTEND["context"][:most]
    yield [attend_case("context", 5, context, options) for context in contexts]


if __name__ == "__main__":
    harness.main("scaling", METRIC, cases, __doc__)
