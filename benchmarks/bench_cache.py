"""Rollback of KV caches: ours beside index_select + copy per layer, and transformers.

    python -m benchmarks.bench_cache

One step of every layer: keep what each request accepted of its draft of eight, then append the
next eight rows behind it. Trees move rows; on chains only lengths change. All variants are checked
before they are timed.

    ours            one compaction for all layers, and an append per layer
    index_select    per layer and request: gather the accepted rows, copy them to the front
    DynamicCache    transformers: crop (a tree: gather what is kept), then its own update
    StaticCache     as transformers lays it out: gather every row anew, copy it back, write the new
    native          a CUDA kernel that only moves the accepted rows of the keys of one layer, times
                    all layers, keys and values: no append

Last line of stdout: one JSON object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness, native
from spec_kernels.ops import append_cache, compact_cache
from spec_kernels.types import CacheTensors

PATHS = {"tree": (0, 2, 4, 5), "chain": (0, 1, 2, 3)}
NODES, HEADS, SIZE = 8, 8, 64
METRIC = "seconds of one step of all layers"


class Problem(NamedTuple):
    """Contiguous K/V before a step, and the rows of the next one."""

    keys: list[Tensor]  # per layer [batch, context + 2 * NODES, HEADS, SIZE]
    values: list[Tensor]
    new: Tensor  # [batch, NODES, HEADS, SIZE]
    context: int
    path: tuple[int, ...]

    @property
    def source(self) -> Tensor:
        """Rows of the kept nodes."""
        return torch.tensor(self.path, device=self.new.device) + self.context

    @property
    def length(self) -> int:
        """Rows behind the step."""
        return self.context + len(self.path)

    def to(self, device: str) -> Problem:
        """Return it on a device."""
        keys, values = ([x.to(device) for x in all_] for all_ in (self.keys, self.values))
        return self._replace(keys=keys, values=values, new=self.new.to(device))

    def clone(self) -> Problem:
        """Copy the cache."""
        keys, values = ([x.clone() for x in all_] for all_ in (self.keys, self.values))
        return self._replace(keys=keys, values=values)


def make_problem(batch: int, context: int, layers: int, path: tuple[int, ...]) -> Problem:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, context + 2 * NODES, HEADS, SIZE)
    tensors = [torch.randn(shape, generator=generator) for _ in range(2 * layers)]
    new = torch.randn(batch, NODES, HEADS, SIZE, generator=generator)
    return Problem(tensors[::2], tensors[1::2], new, context, path)


Step = Callable[[], list[Tensor]]
"""One step; returns the keys of every layer, `[batch, length + NODES or more, HEADS, SIZE]`."""


def ours(problem: Problem) -> Step:
    batch, rows = problem.keys[0].shape[:2]
    device = problem.new.device
    caches = CacheTensors.make([*problem.keys, *problem.values])
    context = torch.full((batch,), problem.context, dtype=torch.int32, device=device)
    path = torch.tensor([problem.path] * batch, dtype=torch.int32, device=device)
    lens = torch.full((batch,), len(problem.path) - 1, dtype=torch.int32, device=device)
    place = torch.arange(NODES, device=device) + problem.length
    slots = (torch.arange(batch, device=device)[:, None] * rows + place).flatten()
    new = problem.new.flatten(0, 1)

    def step() -> list[Tensor]:
        compact_cache(caches, None, context, path, lens)
        for key, value in zip(problem.keys, problem.values, strict=True):
            append_cache(key, value, new, new, slots)
        return problem.keys

    return step


def index_select(problem: Problem) -> Step:
    end = problem.length

    def step() -> list[Tensor]:
        for tensor in (*problem.keys, *problem.values):
            for own in tensor:
                own[problem.context : end].copy_(own.index_select(0, problem.source))
            tensor[:, end : end + NODES] = problem.new
        return problem.keys

    return step


def dynamic(problem: Problem) -> Step:
    from transformers import DynamicCache

    cache, end = DynamicCache(), problem.context + NODES
    stores = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in zip(*problem[:2], strict=True)]
    stores = [(k[:, :, :end].contiguous(), v[:, :, :end].contiguous()) for k, v in stores]
    for layer, (key, value) in enumerate(stores):
        cache.update(key[:, :, :0], value[:, :, :0], layer)
    is_chain = problem.path == tuple(range(len(problem.path)))
    kept = torch.cat([torch.arange(problem.context, device=problem.new.device), problem.source])
    new = problem.new.transpose(1, 2)

    def step() -> list[Tensor]:
        for layer, (key, value) in zip(cache.layers, stores, strict=True):
            layer.keys, layer.values = key, value  # as the forward left them
            if not is_chain:
                layer.keys, layer.values = key.index_select(2, kept), value.index_select(2, kept)
        if is_chain:
            cache.crop(problem.length - end)  # a negative number of rows
        keys = [cache.update(new, new, layer)[0] for layer in range(len(stores))]
        return [key.transpose(1, 2) for key in keys]

    return step


def static(problem: Problem) -> Step:
    device = problem.new.device
    order = torch.arange(problem.keys[0].shape[1], device=device)
    order[problem.context : problem.length] = problem.source
    place = torch.arange(NODES, device=device) + problem.length
    stores = [[x.transpose(1, 2).contiguous() for x in all_] for all_ in problem[:2]]
    new = problem.new.transpose(1, 2)

    def step() -> list[Tensor]:
        for tensor in (*stores[0], *stores[1]):
            tensor.copy_(tensor.index_select(2, order))
            tensor.index_copy_(2, place, new)
        return [key.transpose(1, 2) for key in stores[0]]

    return step


VARIANTS = {
    "ours": ours,
    "index_select": index_select,
    "DynamicCache": dynamic,
    "StaticCache": static,
}


def check(name: str, problem: Problem) -> None:
    """Raise unless context, kept rows and new rows stand one behind the other."""
    before = problem.clone()
    for key, old in zip(VARIANTS[name](problem.clone())(), before.keys, strict=True):
        wanted = [old[:, : problem.context], old[:, problem.source], problem.new]
        if not torch.equal(key[:, : problem.length + NODES], torch.cat(wanted, 1)):
            raise AssertionError(f"{name} left wrong rows")


def native_floor(problem: Problem, device: str) -> Any:
    """Return a call of the CUDA floor for all layers, or why there is none."""
    floors = native.load(device)
    if device == "cpu" or isinstance(floors, str):
        return floors if isinstance(floors, str) else "no floor of its own on a CPU"
    batch = len(problem.keys[0])
    lens = torch.full((batch,), problem.context, dtype=torch.int32, device=device)
    path = torch.tensor([problem.path] * batch, dtype=torch.int32, device=device)
    kept = torch.full((batch,), len(problem.path) - 1, dtype=torch.int32, device=device)
    stores = [t.flatten(2) for t in (*problem.keys, *problem.values)]

    def call() -> None:
        for store in stores:
            floors.compact(store, lens, path, kept)

    before, moved = problem.keys[0].clone(), problem.context + torch.tensor(problem.path)
    call()
    rows = problem.keys[0][:, problem.context : problem.length]
    assert torch.equal(rows, before[:, moved.to(device)]), "native left wrong rows"
    return call


def make_case(case: str, batch: int, context: int, options: harness.Options) -> harness.Case:
    """Return the checked row of one case."""
    layers = 32 if options.device != "cpu" else 8
    problem = make_problem(batch, context, layers, PATHS[case]).to(options.device)
    steps: dict[str, Any] = {}
    for name, make in VARIANTS.items():
        try:
            check(name, problem)
            steps[name] = make(problem.clone())
        except ImportError as error:
            steps[name] = str(error)
    steps["native"] = native_floor(problem.clone(), options.device)
    moved = sum(node != i for i, node in enumerate(problem.path)) + NODES
    payload = 2 * layers * batch * 2 * moved * HEADS * SIZE * 4
    settings = {"draft": case, "batch": batch, "context": context, "gamma": NODES - 1}
    settings |= {"sampling": None, "layers": layers, "row": f"{HEADS} x {SIZE} float32"}
    return harness.Case(settings, steps, payload)


def cases(options: harness.Options) -> Iterator[harness.Case]:
    """Yield trees, which move rows, and a chain, which only cuts."""
    for case, batch, context in (("tree", 1, 512), ("tree", 8, 512), ("chain", 8, 512)):
        yield make_case(case, batch, context, options)


if __name__ == "__main__":
    harness.main("cache", METRIC, cases, __doc__)
