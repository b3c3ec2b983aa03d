"""Verification attention on a CPU: ours beside torch's dense mask and FlexAttention.

    python -m benchmarks.bench_attention

One layer of one request: a tree of 16 nodes over a long contiguous cache, 32 query heads on 8 KV
heads of 128 columns. All variants are checked against float64 before they are timed.

    ours            `verify_attention`: context without a mask, ancestor words over the nodes
    sdpa            `scaled_dot_product_attention` with a 4-D mask, which is made once, untimed
    flex            FlexAttention, compiled, with the tree as mask_mod; the block mask is untimed

Memory is what the process holds more at the peak of one call than before it, masks included.
Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from benchmarks import harness
from spec_kernels import tree
from spec_kernels.ops import verify_attention

NODES, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPILED = torch.compile(flex.flex_attention, dynamic=False)


class Problem(NamedTuple):
    """Queries, a cache that holds context and nodes, and the tree."""

    query: Tensor  # [NODES, HEADS, DIM]
    keys: Tensor  # [1, context + NODES, KV_HEADS, DIM]
    values: Tensor
    context: int
    words: Tensor  # [NODES, 1] int32
    sees: Tensor  # [NODES, NODES] bool


def make_problem(context: int, dtype: torch.dtype) -> Problem:
    """Return random rows and a tree in which every node has two children."""
    shape = (1, context + NODES, KV_HEADS, DIM)
    parents = torch.tensor([[-1, *((i - 1) // 2 for i in range(1, NODES))]], dtype=torch.int32)
    count = torch.tensor([NODES], dtype=torch.int32)
    return Problem(
        torch.randn(NODES, HEADS, DIM).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        context,
        tree.ancestor_words(parents, count)[0],
        tree.ancestor_mask(parents, count)[0],
    )


def arguments(p: Problem) -> tuple[Any, ...]:
    """Return the positional arguments of `verify_attention`."""
    context, cu = (torch.tensor(x, dtype=torch.int32) for x in ([p.context], [0, NODES]))
    return p.query, p.keys, p.values, context, cu, NODES


def ours(p: Problem) -> Callable[[], Tensor]:
    """Prepare our call."""
    args = arguments(p)
    return lambda: verify_attention(*args, ancestors=p.words)[0]


def sdpa(p: Problem) -> Callable[[], Tensor]:
    """Prepare torch's call and its mask."""
    mask = torch.ones(1, 1, NODES, p.context + NODES, dtype=torch.bool)
    mask[..., p.context :] = p.sees
    q, k, v = p.query.transpose(0, 1)[None], p.keys.transpose(1, 2), p.values.transpose(1, 2)
    return lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)


def flexible(p: Problem) -> Callable[[], Tensor]:
    """Prepare FlexAttention and its block mask."""
    sees, context = p.sees, p.context

    def visible(b: Tensor, h: Tensor, node: Tensor, position: Tensor) -> Tensor:
        return (position < context) | sees[node, (position - context).clamp(min=0)]

    blocks = flex.create_block_mask(visible, None, None, NODES, context + NODES, device="cpu")
    q, k, v = p.query.transpose(0, 1)[None], p.keys.transpose(1, 2), p.values.transpose(1, 2)
    return lambda: COMPILED(q, k, v, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)


VARIANTS = {"ours": ours, "sdpa": sdpa, "flex": flexible}


def peak_bytes(prepare: Callable[[Problem], Callable[[], Tensor]], p: Problem) -> int:
    """Return how much more memory the process holds at most while it prepares and runs a call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give freed memory back, or calls would find it
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    prepare(p)()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{name}:"))


def check(p: Problem, results: dict[str, Tensor]) -> None:
    """Raise unless every result is that of the oracle, up to twice the rounding of torch's own."""
    wide = p._replace(**{name: getattr(p, name).double() for name in ("query", "keys", "values")})
    expected = sdpa(wide)()
    errors = {n: float((x.double() - expected).abs().max()) for n, x in results.items()}
    allowed = 2 * errors["sdpa"] + torch.finfo(p.query.dtype).eps * float(expected.abs().max())
    if max(errors.values()) > allowed:
        raise AssertionError(f"errors {errors}, allowed {allowed:.3g}")


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    rows: list[dict[str, Any]] = []
    print(f"{'dtype':9} {'context':>7}  " + "  ".join(f"{name:>22}" for name in VARIANTS))
    for dtype in options.dtypes:
        for context in options.contexts:
            p = make_problem(context, DTYPES[dtype])
            calls = {name: prepare(p) for name, prepare in VARIANTS.items()}
            check(p, {name: call() for name, call in calls.items()})
            times = harness.measure(calls, repeats=options.repeats, clock=clock)
            peaks = {name: peak_bytes(prepare, p) for name, prepare in VARIANTS.items()}
            moved = p.keys.nbytes + p.values.nbytes
            rows.append({"dtype": dtype, "context": context, "bytes": moved, **times})
            rows[-1]["peak_bytes"] = peaks
            cells = [f"{1e3 * t.p50:8.2f} ms {peaks[n] / 2**20:6.1f} MiB" for n, t in times.items()]
            print(f"{dtype:9} {context:7}  " + "  ".join(f"{cell:>22}" for cell in cells))
    head = harness.header(
        batch=1, nodes=NODES, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, clock=options.clock
    )
    harness.print_record("attention", head, rows)


if __name__ == "__main__":
    main()
