"""What a public operation costs the host beside its work: checks and dispatch.

    python -m benchmarks.bench_dispatch --repeats 4000

In the place of the layer's function stands one that returns a finished result, so the whole time of
a call is overhead; under no_grad, where decoders call. On a GPU that is what launching costs before
the first kernel. Many turns, a minute of them: a CPU that others use too changes its speed.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks import harness
from spec_kernels import ops
from spec_kernels.types import CacheTensors, Draft, SamplingParams

METRIC = "seconds of one call whose work is left out"
BATCH, GAMMA, VOCAB = 2, 3, 64
CALLS = 100


def make_calls(device: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]]:
    """Return a call of every operation: function, arguments, keyword arguments."""
    nodes, rows = GAMMA + 1, BATCH * (GAMMA + 1)
    logits, target = torch.randn(2, rows, VOCAB, device=device)
    params = SamplingParams.make(0.7, top_p=0.9, batch=BATCH, device=device)
    at = torch.arange(rows, dtype=torch.int32, device=device).view(BATCH, nodes)
    request = (at // nodes).flatten()
    law, target_law = (ops.row_law(x, params, request) for x in (logits, target))
    tokens, judged = torch.randint(VOCAB, (2, BATCH, nodes), device=device)
    count = torch.full((BATCH,), nodes, dtype=torch.int32, device=device)
    draft = Draft(tokens, count, None, logits, law, at - 1)
    coins = torch.rand(BATCH, nodes, dtype=torch.float64, device=device)
    seeds, positions = torch.arange(2 * BATCH, device=device).view(2, BATCH)
    keys, values = torch.randn(2, BATCH, 16, 2, 8, device=device)
    latent = torch.randn(BATCH, 16, 24, device=device)
    context = torch.full((BATCH,), 8, dtype=torch.int32, device=device)
    starts = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * nodes
    query, new = torch.randn(2, rows, 2, 8, device=device)
    latent_query = torch.randn(rows, 2, 16, device=device)
    attended = (context, starts, nodes)
    out, lse = torch.zeros_like(query), torch.zeros(rows, 2, device=device)
    counts = torch.zeros(BATCH, VOCAB, dtype=torch.int32, device=device)
    path = at[:1].repeat(BATCH, 1)
    state, states = torch.zeros(BATCH, 1, 24, device=device), torch.zeros_like(latent[:, :nodes])
    return {
        "coins": (ops.coins, (seeds, positions, nodes), {}),
        "draft_coins": (ops.draft_coins, (seeds, positions, nodes), {}),
        "row_law": (ops.row_law, (logits, params, request), {}),
        "adjust_logits_": (
            ops.adjust_logits_,
            (logits, request),
            {"repetition_penalty": params.temperature, "output_counts": counts},
        ),
        "overlap": (ops.overlap, (target, target_law, logits, law), {}),
        "sample": (ops.sample, (logits, law), {"coins": coins.flatten()}),
        "accept": (
            ops.accept,
            (draft, target, params, at, coins, coins[:, 0]),
            {"max_depth": GAMMA},
        ),
        "match": (ops.match, (draft, judged), {"max_depth": GAMMA}),
        "verify_attention": (ops.verify_attention, (query, keys, values, *attended), {}),
        "verify_attention_mla": (
            ops.verify_attention_mla,
            (latent_query, query, latent, *attended),
            {"scale": 0.2},
        ),
        "merge_attention": (ops.merge_attention, (out, lse, new, lse.clone()), {}),
        "append_cache": (
            ops.append_cache,
            (keys, values, query, new, at.flatten().long()),
            {},
        ),
        "compact_cache": (
            ops.compact_cache,
            (CacheTensors.make([keys, values]), None, context, path, count - 1),
            {},
        ),
        "compact_hidden": (ops.compact_hidden, (new.flatten(1), at, path, count - 1), {}),
        "select_state": (
            ops.select_state,
            (CacheTensors.make([state]), CacheTensors.make([states]), path, count - 1),
            {},
        ),
    }


def without_work(name: str, device: str, call: tuple[Callable[..., Any], Any, Any]) -> Any:
    """Return `CALLS` calls of an operation as one, its layer's function replaced."""
    layer = importlib.import_module(f"spec_kernels.{'eager' if device == 'cpu' else 'kernels'}")
    function, args, kwargs = call
    result = getattr(layer, name)(*args, **kwargs)

    def finished(*_: Any, **__: Any) -> Any:
        return result

    def calls() -> None:
        with torch.no_grad(), mock.patch.object(layer, name, finished):
            for _ in range(CALLS):
                function(*args, **kwargs)

    return calls


def cases(options: harness.Options) -> Iterator[list[harness.Case]]:
    """Yield every operation; they take turns, so that none meets a CPU at another speed."""
    found = []
    for name, call in make_calls(options.device).items():
        settings = {
            "operation": name,
            "batch": BATCH,
            "context": 8 if "cache" in name or "attention" in name else None,
            "gamma": GAMMA,
            "sampling": "temperature 0.7, top-p 0.9",
        }
        variants = {"ours": without_work(name, options.device, call)}
        found.append(harness.Case(settings, variants, 0, CALLS, on_host=True))
    yield found


if __name__ == "__main__":
    harness.main("dispatch", METRIC, cases, __doc__)
