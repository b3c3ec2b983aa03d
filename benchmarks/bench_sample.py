"""Tokens drawn from laws: ours beside softmax + multinomial.

    python -m benchmarks.bench_sample

Ours takes the law and a coin a row, or coupled noise; the peer takes logits and torch's generator.
The time of our law, which verification needs anyway, is a variant of its own. Tokens are checked
against the float64 reference under the same law.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, native
from benchmarks.bench_law import filtered_softmax, softmax
from benchmarks.workloads import Workload, chosen
from spec_kernels import eager, ops, reference

METRIC = "seconds of one call"


def multinomial(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw a token a row as logits warpers and torch do."""
    if top_p < 1.0:
        return torch.multinomial(filtered_softmax(logits, temperature, top_p), 1)
    return torch.multinomial(softmax(logits, temperature), 1)


def check(found: Tensor, logits: Tensor, law: Any, **drawn: Any) -> None:
    """Raise AssertionError unless the first rows have the reference's tokens, but for one whose
    coin falls beside a boundary that float32 sums have moved."""
    few = slice(0, 3)
    given = type(law)(*(field[few].cpu() for field in law))
    expected = reference.sample(logits[few].cpu(), given, **drawn)
    other = int((found[few].cpu() != expected).sum())
    assert other <= 1, f"{other} other tokens than the reference"


def make_case(w: Workload, filters: bool, options: harness.Options) -> harness.Case:
    """Return the checked row of one workload."""
    device = options.device
    w = w if filters else w._replace(top_p=1.0)
    generator = torch.Generator().manual_seed(0)
    rows = w.batch * (w.gamma + 1)
    logits = (2.5 * torch.randn(rows, w.vocab, generator=generator)).to(device)
    coins = torch.rand(rows, generator=generator, dtype=torch.float64).to(device)
    request, params = w.request_of_rows(device, w.gamma + 1), w.params(device)
    law = ops.row_law(logits, params, request)
    noise = (request.long(), torch.arange(rows, device=device))
    variants: dict[str, Any] = {
        "ours": lambda: ops.sample(logits, law, coins=coins),
        "ours, law first": lambda: ops.sample(
            logits, ops.row_law(logits, params, request), coins=coins
        ),
        "ours, coupled noise": lambda: ops.sample(logits, law, noise=noise),
    }
    check(variants["ours"](), logits, law, coins=coins[:3].cpu())
    check(variants["ours, coupled noise"](), logits, law, noise=tuple(n[:3].cpu() for n in noise))
    if device != "cpu":
        variants["eager"] = lambda: eager.sample(logits, law, coins=coins)
    arguments = (logits, w.temperature, w.top_p)
    variants["softmax + multinomial"] = lambda: multinomial(*arguments)
    variants["the same, compiled"] = harness.compiled(multinomial, arguments, options)
    floors = native.load(device)
    if not filters and device == "cpu" and not isinstance(floors, str):
        known = (law.row_max, law.log_sum, coins, w.temperature)
        drawn = floors.sample(logits, *known)
        assert int((drawn != variants["ours"]()[:, 0]).sum()) <= 1, "native: other tokens"
        variants["native"] = lambda: floors.sample(logits, *known)
    variants["read"] = native.reader(device, logits)
    settings = {**w.settings(), "context": None, "rows": rows}
    return harness.Case(settings, variants, logits.nbytes)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield every workload without and with filters."""
    for w in chosen(options, "big-vocab", "moe-latent"):
        yield make_case(w, False, options)
        yield make_case(w, True, options)


if __name__ == "__main__":
    harness.main("sample", METRIC, cases, __doc__)
