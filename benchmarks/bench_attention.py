"""Verification attention of chains and trees: ours beside a dense mask and FlexAttention.

    python -m benchmarks.bench_attention --full

One layer over a long cache. Variants of a row do the same work, and are checked against float64:

    ours                  `verify_attention` over a contiguous cache
    sdpa                  `scaled_dot_product_attention` with a 4-D mask, made once and untimed
    flex, compiled        FlexAttention with the draft as mask_mod; its block mask is untimed. On a
                          CPU only where it is short: each shape is compiled anew
    ours, paged           over a cache in blocks of 16 in random order
    sdpa, gathered        the blocks of each request are put together first

Memory is what a child process holds more at the peak of one call than before it, the mask and the
result included.

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from benchmarks import harness, native
from spec_kernels import ops, tree

METRIC = "seconds of one call for one layer"
BLOCK_SIZE = 16
CONTEXTS = (512, 2048, 8192, 16384)
BATCHES = {1: 4, 4: 2}
"""Requests, and over how many of the contexts: a row shall take seconds."""
FLEX = (1, CONTEXTS[0], torch.float32)
"""Requests, context and dtype of rows for which FlexAttention is compiled on a CPU."""
NOT_FLEX = f"compiled for {FLEX[0]} x {FLEX[1]} in float32 only: 20 s of CPU time for each shape"


class Shape(NamedTuple):
    """Heads of a model, and the draft of every request."""

    heads: int
    kv_heads: int
    dim: int
    nodes: int
    is_tree: bool  # every node has two children


SHAPES = tuple(
    Shape(*heads, *draft)
    for heads in ((32, 8, 128), (9, 3, 64))  # an 8B model, SmolLM2
    for draft in ((8, False), (64, True))
)


class Problem:
    """Queries, and caches that hold context and nodes: the same rows, contiguous and in blocks."""

    def __init__(
        self, shape: Shape, batch: int, context: int, dtype: torch.dtype, device: str
    ) -> None:
        self.shape, self.batch, self.context = shape, batch, context
        nodes, length = shape.nodes, context + shape.nodes
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(batch * nodes, shape.heads, shape.dim, generator=generator)
        count = -(-length // BLOCK_SIZE)
        rows = (2, batch * count, BLOCK_SIZE, shape.kv_heads, shape.dim)
        blocks = torch.randn(rows, generator=generator).to(dtype)
        table = torch.randperm(batch * count, generator=generator).view(batch, count)
        whole = blocks[:, table].flatten(2, 3)[:, :, :length].contiguous()
        self.query = query.to(device, dtype)
        self.keys, self.values = whole.to(device)
        self.blocks, self.table = blocks.to(device), table.to(device, torch.int32)
        self.lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
        parents = [(i - 1) // 2 if shape.is_tree else i - 1 for i in range(nodes)]
        parent_rows = torch.tensor([parents], dtype=torch.int32, device=device)
        self.sees = tree.ancestor_mask(parent_rows, self.starts[1:2])[0]
        words = tree.ancestor_words(parent_rows, self.starts[1:2])
        self.words = words.expand(batch, -1, -1).flatten(0, 1) if shape.is_tree else None

    def ours(self) -> Tensor:
        """Attend where the rows lie."""
        args = (self.query, self.keys, self.values, self.lens, self.starts, self.shape.nodes)
        return ops.verify_attention(*args, ancestors=self.words)[0]

    def ours_paged(self) -> Tensor:
        """Attend over the blocks."""
        args = (self.query, *self.blocks, self.lens, self.starts, self.shape.nodes)
        return ops.verify_attention(*args, ancestors=self.words, block_table=self.table)[0]

    def mask(self) -> Tensor:
        """Return the dense mask, one for all requests."""
        mask = self.sees.new_ones(1, 1, self.shape.nodes, self.keys.shape[1])
        mask[..., self.context :] = self.sees
        return mask

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as torch takes them."""
        query = self.query.view(self.batch, self.shape.nodes, *self.query.shape[1:])
        return query.transpose(1, 2), self.keys.transpose(1, 2), self.values.transpose(1, 2)

    def sdpa(self) -> Callable[[], Tensor]:
        """Prepare torch's call."""
        mask, rows = self.mask(), self.heads_first()
        return lambda: self._nodes_first(_dense(*rows, mask))

    def sdpa_gathered(self) -> Callable[[], Tensor]:
        """Prepare torch's call over the blocks."""
        mask, query = self.mask(), self.heads_first()[0]

        def call() -> Tensor:
            keys, values = (
                blocks[self.table].flatten(1, 2)[:, : mask.shape[3]].transpose(1, 2)
                for blocks in self.blocks
            )
            return self._nodes_first(_dense(query, keys, values, mask))

        return call

    def flex(self) -> Callable[[], Tensor]:
        """Prepare FlexAttention and its block mask."""
        sees, context = self.sees, self.context

        def visible(b: Tensor, h: Tensor, node: Tensor, place: Tensor) -> Tensor:
            return (place < context) | sees[node, (place - context).clamp(min=0)]

        sizes = (self.shape.nodes, self.keys.shape[1])
        blocks = flex.create_block_mask(visible, None, None, *sizes, device=str(sees.device))
        rows = self.heads_first()

        def call() -> Tensor:
            return self._nodes_first(flex.flex_attention(*rows, block_mask=blocks, enable_gqa=True))

        return call

    def first(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return what torch takes for the first request, in another dtype."""
        query, keys, values = (x[:1].to(dtype) for x in self.heads_first())
        return query, keys, values

    def _nodes_first(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)


def _dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


def peak_bytes(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return how much more memory a process holds at most while it prepares and runs a call.

    The process is a child that has made the call before, so that code is loaded, and has given all
    memory back. It runs on one thread: those of its parent are not there.
    """
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            prepare()()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = _status("VmRSS")
            prepare()()
            os.write(send, str(_status("VmHWM") - before).encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as stream:
        found = stream.read()
    os.waitpid(child, 0)
    return int(found)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{name}:"))


def check(problem: Problem, variants: dict[str, Any]) -> None:
    """Raise AssertionError unless the first request of every result is that of float64, up to twice
    torch's rounding."""
    dtype, nodes, mask = problem.query.dtype, problem.shape.nodes, problem.mask()
    expected, rounded = (
        _dense(*problem.first(x), mask)[0].transpose(0, 1) for x in (torch.float64, dtype)
    )
    eps = torch.finfo(dtype).eps * float(expected.abs().max())
    allowed = 2 * float((rounded.double() - expected).abs().max()) + eps
    for name, call in variants.items():
        if not isinstance(call, str):
            error = float((call()[:nodes].double() - expected).abs().max())
            assert error <= allowed, f"{name}: error {error}, allowed {allowed}"


def make_case(problem: Problem, options: harness.Options, has_peaks: bool) -> harness.Case:
    """Return the checked row of one problem."""
    makers: dict[str, Any] = {
        "ours": lambda: problem.ours,
        "sdpa": problem.sdpa,
        "ours, paged": lambda: problem.ours_paged,
        "sdpa, gathered": problem.sdpa_gathered,
    }
    variants = {name: make() for name, make in makers.items()}
    compiled: Any = NOT_FLEX if options.compiled else harness.NOT_COMPILED
    is_small = (problem.batch, problem.context, problem.query.dtype) == FLEX
    if options.compiled and (is_small or options.device != "cpu"):
        compiled = harness.compiled(problem.flex(), (), options)
    variants["flex, compiled"] = compiled
    check(problem, variants)
    variants["native"] = "no floor of its own: see read"
    floats = (x.view(torch.float32) for x in (problem.keys, problem.values))  # as floors read
    variants["read"] = native.reader(options.device, *floats)
    shape = problem.shape
    settings = {
        **shape._asdict(),
        "batch": problem.batch,
        "context": problem.context,
        "gamma": 6 if shape.is_tree else shape.nodes - 1,
        "sampling": None,
        "dtype": str(problem.query.dtype).removeprefix("torch."),
    }
    if has_peaks:
        settings["peak_bytes"] = {name: peak_bytes(make) for name, make in makers.items()}
    return harness.Case(settings, variants, problem.keys.nbytes + problem.values.nbytes)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield rows, the longest context first: of one dtype and request, unless all are asked for."""
    on_cpu = options.device == "cpu"
    dtypes = (torch.float32, torch.bfloat16) if on_cpu else (torch.bfloat16,)
    for batch, count in BATCHES.items() if options.full else ((1, 2),):
        for context in reversed(CONTEXTS[:count]):
            for dtype in dtypes if options.full else dtypes[:1]:
                for shape in SHAPES:
                    problem = Problem(shape, batch, context, dtype, options.device)
                    yield make_case(problem, options, on_cpu and context == CONTEXTS[-1])


if __name__ == "__main__":
    harness.main("attention", METRIC, cases, __doc__)
