"""Peak memory of training n parallel heads over one unembedding: head by head, and all at once.

Each measurement is a process of its own; what counts is its peak above what it held before the
step: logits, their gradients, parameters' gradients.

    python -m benchmarks.bench_mtp_memory [places]

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import torch

from spec_kernels.nn.mtp import MTPConfig, ParallelHeads
from spec_kernels.training import backward, kl_loss

VOCAB, SIZE, HEADS = 49_152, 576, (1, 4)


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def step(heads: int, places: int, *, at_once: bool) -> int:
    """Go backward once; return the peak above what was held before."""
    torch.set_num_threads(1)
    unembedding = torch.randn(VOCAB, SIZE).mul_(0.04)  # in place: no peak before the step
    module = ParallelHeads(MTPConfig("parallel", SIZE, heads), unembedding)
    hidden = torch.randn(1, places + heads, SIZE)
    tokens = torch.randint(VOCAB, (1, places + heads))
    before = peak_bytes()
    if at_once:
        own = hidden @ module.unembedding.T
        total = hidden.new_zeros(())
        for k in range(1, heads + 1):
            logits = module.logits(module.state(hidden[:, :-k], k), k)
            total = total + kl_loss(logits.flatten(0, 1), own[:, k:].flatten(0, 1))
        total.backward()
    else:
        backward(module, hidden, tokens, [1.0] * heads, loss="kl")
    return peak_bytes() - before


def measure(heads: int, places: int, mode: str) -> int:
    """Run `step` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_mtp_memory", str(places), str(heads), mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(places: int) -> None:
    """Print a row per number of heads, then all of them as JSON."""
    rows: list[dict[str, Any]] = []
    for mode in ("by-head", "at-once"):
        for heads in HEADS:
            peak = measure(heads, places, mode)
            one = next((row["bytes"] for row in rows if row["mode"] == mode), peak)
            rows.append({"mode": mode, "heads": heads, "bytes": peak, "ratio": peak / one})
            print(f"{mode:8} {heads} heads {peak / 2**20:8.0f} MiB  {peak / one:.2f}x")
    print(json.dumps({"benchmark": "mtp-memory", "vocab": VOCAB, "places": places, "rows": rows}))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(step(int(sys.argv[2]), int(sys.argv[1]), at_once=sys.argv[3] == "at-once"))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
