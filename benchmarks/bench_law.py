"""Laws of rows of logits: ours beside torch's softmax, with and without filters.

    python -m benchmarks.bench_law

A law is a few numbers a row; the peers write a row of probabilities. Checked against the float64
reference: cutoffs, and the log of the sum.

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

METRIC = "seconds of one call"


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities."""
    return (logits / temperature).softmax(-1)


def filtered_softmax(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return probabilities behind top-p, by a sort, as logits warpers do."""
    ascending, order = (logits / temperature).sort(-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
    removed[..., -1:] = False
    removed = removed.scatter(-1, order, removed)
    return (logits / temperature).masked_fill(removed, -torch.inf).softmax(-1)


def check(logits: Tensor, w: Workload, request: Tensor, variants: dict[str, Any]) -> None:
    """Raise AssertionError unless every variant has the reference's laws, on the first rows."""
    few = slice(0, 3)
    expected = reference.row_law(logits[few].cpu(), w.params("cpu"), request[few].cpu())
    log_sum = variants["ours"]().log_sum[few].cpu().double()
    close = torch.isclose(log_sum, expected.log_sum.double(), atol=1e-4)
    assert close.all(), f"ours: log_sum {log_sum} for {expected.log_sum}"
    for name, call in variants.items():
        if name.startswith("softmax") and not isinstance(call, str):
            kept = (call()[few] > 0).sum(-1).cpu()
            wanted = (logits[few].cpu() >= expected.cutoff[:, None]).sum(-1)
            # a sum in another order may keep a few ids more or less of thousands
            assert (kept - wanted).abs().max() <= 2 + wanted.max() // 100, f"{name}: {kept}"


def make_case(w: Workload, filters: bool, options: harness.Options) -> harness.Case:
    """Return the checked row of one workload."""
    device = options.device
    w = w if filters else w._replace(top_p=1.0)
    generator = torch.Generator().manual_seed(0)
    rows = w.batch * (w.gamma + 1)
    logits = (2.5 * torch.randn(rows, w.vocab, generator=generator)).to(device)
    request, params = w.request_of_rows(device, w.gamma + 1), w.params(device)
    floors = native.load(device)
    peer = filtered_softmax if filters else softmax
    arguments = (logits, w.temperature, *((w.top_p,) if filters else ()))
    variants: dict[str, Any] = {"ours": lambda: ops.row_law(logits, params, request)}
    if device != "cpu":
        variants["eager"] = lambda: eager.row_law(logits, params, request)
    variants["softmax"] = lambda: peer(*arguments)
    variants["softmax, compiled"] = harness.compiled(peer, arguments, options)
    check(logits, w, request, variants)
    if not filters:
        has_floor = device == "cpu" and not isinstance(floors, str)
        none = floors if isinstance(floors, str) else "no floor of its own: see read"
        variants["native"] = (lambda: floors.row_laws(logits, w.temperature)) if has_floor else none
    variants["read"] = native.reader(device, logits)
    settings = {**w.settings(), "context": None, "rows": rows}
    return harness.Case(settings, variants, logits.nbytes)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield every workload without and with filters."""
    for w in chosen(options, "big-vocab", "moe-latent"):
        yield make_case(w, False, options)
        yield make_case(w, True, options)


if __name__ == "__main__":
    harness.main("law", METRIC, cases, __doc__)
