"""The KV caches of `nn`: random rounds against lists of committed rows, blocks, forks, faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import kernels
from spec_kernels.nn.cache import (
    ContiguousKVCache,
    KVShape,
    PagedKVCache,
    SlidingWindowKVCache,
)
from spec_kernels.testing import interpreted
from spec_kernels.types import OutOfBlocks

SHAPES = [KVShape(2, 4, 2), KVShape(1, 6, 0)]
WINDOW, NODES, LENGTH = 9, 7, 60


def paged(block_size: int = 4, num_rows: int = 160, **options: Any) -> PagedKVCache:
    blocks = num_rows // block_size
    return PagedKVCache(
        SHAPES, 5, num_blocks=blocks, block_size=block_size, max_length=LENGTH, **options
    )


def ring(block_size: int = 2, **options: Any) -> SlidingWindowKVCache:
    sizes = {"window": WINDOW, "max_nodes": NODES, "max_length": LENGTH}
    return SlidingWindowKVCache(SHAPES, 5, block_size=block_size, **sizes, **options)


KINDS: dict[str, Callable[[], Any]] = {
    "paged-1": lambda: paged(1),
    "paged-4": paged,
    "paged-16": lambda: paged(16, 176),
    "paged-4-clears": lambda: paged(clears=True),
    "paged-int8": lambda: paged(dtype=torch.int8),
    "paged-e4m3-cache": lambda: paged(dtype=torch.float8_e4m3fn, scale="cache"),
    "contiguous": lambda: ContiguousKVCache(SHAPES, 5, max_length=LENGTH),
    "contiguous-int8": lambda: ContiguousKVCache(SHAPES, 5, max_length=LENGTH, dtype=torch.int8),
    "ring-1": lambda: ring(1),
    "ring-4": lambda: ring(4),
    "ring-bfloat16": lambda: ring(2, dtype=torch.bfloat16),
}


def poison(cache: Any) -> None:
    """Fill every row with what must never be read: NaN, or the largest byte."""
    for tensor in cache.tensors.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 127)


def ids(tokens: list[list[int]], width: int) -> Tensor:
    out = torch.zeros(len(tokens), width)
    for row, own in zip(out, tokens, strict=True):
        row[: len(own)] = torch.tensor(own)
    return out


class Simulation:
    """A cache beside lists of the ids that its rows should hold; ids fit every dtype."""

    def __init__(self, cache: Any, seed: int) -> None:
        self.cache, self.random = cache, random.Random(seed)
        self.lists: list[list[int]] = [[] for _ in range(cache.batch)]
        self.copied = self.refused = 0
        poison(cache)

    def draw(self, count: int) -> list[int]:
        return [self.random.randint(1, 15) for _ in range(count)]  # 8-bit floats hold them

    def append(self, tokens: list[list[int]], layers: int = len(SHAPES)) -> None:
        """One forward: write the ids of all nodes, one layer having another sign."""
        width = max(map(len, tokens))
        counts = torch.tensor([len(own) for own in tokens], dtype=torch.int32)
        slots = self.cache.slots(counts, width)
        value = ids(tokens, width)[..., None, None]
        for layer, shape in enumerate(SHAPES[:layers]):
            x = value * (-1) ** layer
            key = x.expand(-1, -1, shape.kv_heads, shape.key_dim)
            has_value = shape.value_dim > 0
            v = -x.expand(-1, -1, shape.kv_heads, shape.value_dim) if has_value else None
            self.cache.append(layer, key, v, slots)

    def extend(self, request: int, tokens: list[int]) -> None:
        """A prompt, in pieces that fit the ring."""
        for start in range(0, len(tokens), NODES):
            piece = tokens[start : start + NODES]
            counts = [len(piece) if b == request else 0 for b in range(self.cache.batch)]
            self.cache.reserve(counts)
            self.append([piece if b == request else [] for b in range(self.cache.batch)])
            self.cache.advance(counts)
            self.lists[request] += piece

    def join(self, request: int) -> None:
        live = [b for b, own in enumerate(self.lists) if own and b != request]
        if live and self.random.random() < 0.5:
            source = self.random.choice(live)
            length = len(self.lists[source]) - self.random.randint(0, 3)
            if isinstance(self.cache, SlidingWindowKVCache):
                length = len(self.lists[source])
            if length > 0:
                self.cache.fork(source, request, length)
                self.lists[request] = self.lists[source][:length]
                self.copied += 1
            return
        self.extend(request, self.draw(self.random.randint(1, 20)))

    def leave(self, request: int) -> None:
        self.cache.free(request)
        self.lists[request] = []

    def step(self, *, is_tree: bool, fails: bool) -> None:
        """One round over the live requests, ragged."""
        drafts = [
            self.draw(min(self.random.randint(0, NODES), LENGTH - len(own))) if own else []
            for own in self.lists
        ]
        before = self.state()
        lens = [len(own) for own in self.lists]
        self.cache.reserve([len(own) for own in drafts])
        if not any(drafts):
            return
        point = self.random.randint(0, 3) if fails else 3
        self.append(drafts, layers=min(point, 2))  # interrupted before, between, behind the layers
        if fails:
            if point == 3:
                none = torch.full((5, 2), -1, dtype=torch.int32)
                with pytest.raises(ValueError, match="length of request 0"):
                    self.cache.keep(none, none[:, 0], lens=[LENGTH + 9] * 5)
            self.cache.truncate(lens)
            after = self.state()
            assert [len(x) for x in after[1]] == [len(x) for x in before[1]]
            assert after[0] == before[0]
            return
        paths = []
        for own, draft in zip(self.lists, drafts, strict=True):
            kept = self.random.randint(1, len(draft)) if draft else 0
            more = range(1, len(draft))
            nodes = (
                sorted(self.random.sample(more, kept - 1)) if is_tree and kept else more[: kept - 1]
            )
            paths.append([0, *nodes] if kept else [])
            own += [draft[node] for node in paths[-1]]
        path = torch.full((len(paths), max(map(len, paths)) + 2), -1, dtype=torch.int32)
        for row, nodes in zip(path, paths, strict=True):
            row[: len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        accepted = torch.tensor([max(len(own) - 1, 0) for own in paths], dtype=torch.int32)
        self.cache.holds_tree = is_tree
        self.cache.keep(path, accepted, lens=[len(own) for own in self.lists])

    def state(self) -> tuple[list[int], list[tuple[int, ...]]]:
        cache = self.cache
        blocks = [cache.blocks_of(b) if isinstance(cache, PagedKVCache) else () for b in range(5)]
        return cache.context_lens.tolist(), blocks

    def check(self) -> None:
        """Contents, lengths, and the count of blocks."""
        cache = self.cache
        lens = [len(own) for own in self.lists]
        assert cache.context_lens.tolist() == lens
        width = max(lens)
        expected = ids(self.lists, width)
        if isinstance(cache, SlidingWindowKVCache):
            first = torch.tensor(lens)[:, None] - (WINDOW - 1)  # what the next token sees
            seen = torch.arange(width) >= first
        else:
            seen = torch.ones(5, width, dtype=torch.bool)
        for layer, shape in enumerate(SHAPES):
            key, value = cache.rows(layer, cache.context_lens, width)
            wanted = torch.where(seen, expected * (-1) ** layer, 0.0)
            for got, sign in ((key, 1), (value, -1)):
                if got is not None:
                    assert got.isfinite().all()
                    clean = torch.where(seen[..., None, None], got.float(), 0.0)
                    # amax / 127 * 127 rounds twice; everything else is exact
                    torch.testing.assert_close(
                        clean, sign * wanted[..., None, None].expand_as(clean), rtol=3e-7, atol=0
                    )
            assert (value is None) == (shape.value_dim == 0)
        if isinstance(cache, PagedKVCache):
            held = Counter(block for b in range(5) for block in cache.blocks_of(b))
            pool = cache._lists.pool
            assert pool.num_free + len(held) == len(pool._holders)
            assert all(pool.holders(block) == count for block, count in held.items())
            assert set(pool._free).isdisjoint(held)
            assert len(set(pool._free)) == pool.num_free
            for b, length in enumerate(lens):
                own = cache.blocks_of(b)
                assert len(own) == -(-length // cache.block_size)
                assert len(set(own)) == len(own)
                table = cache.block_table[b].tolist()
                assert table == [*own, *[-1] * (len(table) - len(own))]

    def round(self, *, is_tree: bool) -> None:
        """Somebody joins, somebody leaves, everybody takes a step; out of blocks is survived."""
        empty = [b for b, own in enumerate(self.lists) if not own]
        live = [b for b, own in enumerate(self.lists) if own]
        full = [b for b in live if len(self.lists[b]) > LENGTH - NODES]
        for b in full or (live[:1] if self.random.random() < 0.1 else []):
            self.leave(b)
        before = self.state()
        lists = [list(own) for own in self.lists]
        try:
            if empty and self.random.random() < 0.5:
                self.join(empty[0])
            else:
                self.step(is_tree=is_tree, fails=self.random.random() < 0.15)
        except OutOfBlocks:
            self.refused += 1
            changed = [b for b in range(5) if lists[b] != self.lists[b]]
            assert all(self.state()[1][b] == before[1][b] for b in range(5) if b not in changed)
            live = [b for b, own in enumerate(self.lists) if own]
            self.leave(self.random.choice(live))


ROUNDS = [(kind, 0, 200 if kind in ("paged-1", "paged-4", "paged-16") else 60) for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "seed", "rounds"),
    ROUNDS + [pytest.param(k, s, 300, marks=pytest.mark.slow) for k in KINDS for s in (1, 2)],
)
def test_random_rounds_hold_what_was_committed(kind: str, seed: int, rounds: int) -> None:
    cache = KINDS[kind]()
    simulation = Simulation(cache, seed)
    storages = [tensor.data_ptr() for tensor in cache.tensors.tensors]
    for number in range(rounds):
        simulation.round(is_tree=number % 3 > 0)
        simulation.check()
    assert simulation.copied > 0
    assert [tensor.data_ptr() for tensor in cache.tensors.tensors] == storages
    for request in range(5):
        simulation.leave(request)
    simulation.check()
    if isinstance(cache, PagedKVCache):
        assert simulation.refused > 0 or rounds < 200
        assert cache.num_free == len(cache.keys[0])


@pytest.mark.parametrize("kind", ["paged-4-clears", "ring-4", "contiguous-int8"])
def test_rounds_on_the_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the Triton kernels in the place of torch."""
    for name in ("append_cache", "compact_cache"):
        monkeypatch.setattr(f"spec_kernels.nn._cache.{name}", getattr(kernels, name))
    simulation = Simulation(KINDS[kind](), 3)
    with interpreted():
        for number in range(10):
            simulation.round(is_tree=number % 3 > 0)
            simulation.check()


# --------------------------------------------------------------------------- blocks


def test_out_of_blocks_says_how_many_are_missing_and_changes_nothing() -> None:
    cache = paged(4, 20)  # five blocks
    cache.reserve([8, 4, 0, 0, 0])
    cache.advance([8, 4, 0, 0, 0])
    table, free = cache.block_table.clone(), cache.num_free
    with pytest.raises(OutOfBlocks, match="3 blocks needed, 2 free: 1 missing") as caught:
        cache.reserve([1, 0, 5, 0, 0])
    assert caught.value.missing == 1
    assert torch.equal(cache.block_table, table)
    assert cache.num_free == free
    cache.free(1)
    cache.reserve([1, 0, 5, 0, 0])
    assert cache.num_free == 0


@pytest.mark.parametrize(
    ("block_size", "length", "nodes", "blocks"), [(4, 3, 3, 2), (16, 14, 4, 2), (1, 0, 5, 5)]
)
def test_a_draft_across_a_block_border_is_counted(
    block_size: int, length: int, nodes: int, blocks: int
) -> None:
    cache = paged(block_size)
    cache.reserve([length, 0, 0, 0, 0])
    cache.advance([length, 0, 0, 0, 0])
    cache.reserve([nodes, 0, 0, 0, 0])
    assert len(cache.blocks_of(0)) == blocks
    num_nodes = torch.tensor([nodes, 0, 0, 0, 0], dtype=torch.int32)
    slots = cache.slots(num_nodes, nodes)[0]
    assert len(set(slots.tolist())) == nodes
    assert int(slots.min()) >= 0


def test_rows_behind_the_maximum_are_dropped() -> None:
    for cache in (paged(), ContiguousKVCache(SHAPES, 5, max_length=LENGTH)):
        cache.reserve([LENGTH - 1, 0, 0, 0, 0])
        cache.advance([LENGTH - 1, 0, 0, 0, 0])
        cache.reserve([1, 0, 0, 0, 0])
        slots = cache.slots(torch.tensor([4, 0, 0, 0, 0]), 4)
        assert (slots[0] >= 0).tolist() == [True, False, False, False]
        assert (slots[1:] == -1).all()
        with pytest.raises(ValueError, match=f"request 0 must have at most {LENGTH} rows, got"):
            cache.reserve([2, 0, 0, 0, 0])


def test_blocks_wait_until_the_lengths_are_told() -> None:
    cache = paged(4)
    cache.reserve([7, 0, 0, 0, 0])
    path = torch.tensor([[0, -1]] + [[-1, -1]] * 4, dtype=torch.int32)
    cache.keep(path, torch.zeros(5, dtype=torch.int32))
    assert cache.context_lens.tolist() == [1, 0, 0, 0, 0]
    assert len(cache.blocks_of(0)) == 2
    with pytest.raises(ValueError, match="the length of request 0 was not told"):
        cache.fork(0, 1, 1)
    cache.truncate([1, 0, 0, 0, 0])
    assert len(cache.blocks_of(0)) == 1


def test_lengths_given_as_a_tensor_undo_a_round() -> None:
    cache = paged(4)
    cache.reserve([3, 2, 0, 0, 0])
    cache.advance([3, 2, 0, 0, 0])
    before = cache.context_lens
    cache.reserve([3, 0, 0, 0, 0])
    path = torch.tensor([[0, 1]] + [[-1, -1]] * 4, dtype=torch.int32)
    cache.keep(path, torch.ones(5, dtype=torch.int32))
    assert cache.context_lens.tolist() == [5, 2, 0, 0, 0]
    assert before.tolist() == [3, 2, 0, 0, 0]
    cache.truncate(before)
    assert cache.context_lens.tolist() == [3, 2, 0, 0, 0]


def test_forks_share_blocks_until_one_writes() -> None:
    simulation = Simulation(paged(4), 0)
    cache = simulation.cache
    simulation.extend(0, [1, 2, 3, 4, 5, 6])
    free = cache.num_free
    for request in (1, 2):
        cache.fork(0, request, 6)
        simulation.lists[request] = [1, 2, 3, 4, 5, 6]
    assert cache.num_free == free
    assert cache.blocks_of(1) == cache.blocks_of(0)
    simulation.extend(1, [7])
    assert cache.blocks_of(1)[0] == cache.blocks_of(0)[0]
    assert cache.blocks_of(1)[1] != cache.blocks_of(0)[1]
    simulation.extend(0, [8, 9])
    last = cache.blocks_of(2)[1]
    simulation.extend(2, [10])
    assert cache.blocks_of(2)[1] == last  # nobody else held it any more
    simulation.check()
    assert cache.num_free == free - 2


def test_two_forks_that_write_at_once_get_a_block_each() -> None:
    simulation = Simulation(paged(4, 8), 0)  # two blocks: the last holder needs no copy
    cache = simulation.cache
    simulation.extend(0, [1, 2])
    cache.fork(0, 1, 2)
    cache.reserve([1, 1, 0, 0, 0])
    assert cache.blocks_of(0) != cache.blocks_of(1)
    simulation.append([[3], [4], [], [], []])
    cache.advance([1, 1, 0, 0, 0])
    simulation.lists[:2] = [[1, 2, 3], [1, 2, 4]]
    simulation.check()


def test_a_copy_that_finds_no_block_is_refused() -> None:
    cache = paged(4, 4)  # one block
    cache.reserve([2, 0, 0, 0, 0])
    cache.advance([2, 0, 0, 0, 0])
    cache.fork(0, 1, 2)
    with pytest.raises(OutOfBlocks, match="1 blocks needed, 0 free"):
        cache.reserve([1, 0, 0, 0, 0])
    cache.free(1)
    cache.reserve([1, 0, 0, 0, 0])


# --------------------------------------------------------------------------- the ring


def test_a_draft_that_wraps_is_undone() -> None:
    simulation = Simulation(ring(1), 0)
    cache = simulation.cache
    simulation.extend(0, simulation.draw(cache.ring_rows - 1))
    cache.reserve([NODES, 0, 0, 0, 0])
    slots = cache.slots(torch.tensor([NODES, 0, 0, 0, 0]), NODES)[0].tolist()
    assert slots != sorted(slots)  # it wrapped
    simulation.append([simulation.draw(NODES), [], [], [], []])
    cache.truncate([len(own) for own in simulation.lists])
    simulation.check()


def test_what_would_break_the_window_is_refused_before_it_is_written() -> None:
    simulation = Simulation(ring(1), 0)
    cache = simulation.cache
    simulation.extend(0, simulation.draw(40))
    cache.reserve([NODES, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="at most 7, got 8"):
        cache.reserve([NODES + 1, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="needs row 31, but rows below 32 are overwritten"):
        cache.truncate([39, 0, 0, 0, 0])
    assert cache.context_lens.tolist() == [40, 0, 0, 0, 0]
    simulation.check()
    cache.truncate([0, 0, 0, 0, 0])
    simulation.lists[0] = []
    simulation.extend(0, simulation.draw(5))
    simulation.check()


def test_a_short_ring_may_go_back_to_any_length() -> None:
    simulation = Simulation(ring(4), 0)
    simulation.extend(0, simulation.draw(12))
    simulation.cache.truncate([2, 0, 0, 0, 0])
    simulation.lists[0] = simulation.lists[0][:2]
    simulation.extend(0, simulation.draw(3))
    simulation.check()


# --------------------------------------------------------------------------- rows


def test_dead_rows_are_zero_in_what_is_read() -> None:
    cache = paged(4)
    poison(cache)
    cache.reserve([3, 0, 0, 0, 0])
    key = torch.ones(5, 3, 2, 4)
    slots = cache.slots(torch.tensor([3, 0, 0, 0, 0]), 3)
    cache.append(0, key, key[..., :2], slots)
    read, _ = cache.rows(0, torch.tensor([2, 0, 0, 0, 0]), 6)
    assert read[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert (read[1:] == 0).all()


def test_rejected_rows_are_cleared_where_that_was_asked() -> None:
    for clears in (False, True):
        cache = paged(4, clears=clears)
        cache.reserve([4, 0, 0, 0, 0])
        key = torch.ones(5, 4, 2, 4)
        cache.append(0, key, key[..., :2], cache.slots(torch.tensor([4, 0, 0, 0, 0]).int(), 4))
        path = torch.tensor([[0, 2]] + [[-1, -1]] * 4, dtype=torch.int32)
        cache.keep(path, torch.ones(5, dtype=torch.int32), lens=[2, 0, 0, 0, 0])
        rows = cache.keys[0][cache.blocks_of(0)[0], :, 0, 0]
        assert rows.tolist() == [1.0, 1.0, 0.0 if clears else 1.0, 0.0 if clears else 1.0]


def test_levels_of_a_tree_are_appended_one_after_the_other() -> None:
    cache = paged(4)
    cache.reserve([1, 0, 0, 0, 0])
    first = cache.slots(torch.tensor([1, 0, 0, 0, 0]), 1)
    cache.reserve([3, 0, 0, 0, 0])
    more = cache.slots(torch.tensor([3, 0, 0, 0, 0]), 3, start=1)
    whole = cache.slots(torch.tensor([3, 0, 0, 0, 0]), 3)
    assert torch.equal(torch.cat([first, more], 1)[0], whole[0])


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("counts must be 5 ints, got 2", lambda: paged().reserve([1, 2])),
        ("count of request 1 must be at least 0", lambda: paged().reserve([1, -2, 0, 0, 0])),
        (r"length of request 0 must be in \[0, 0\]", lambda: paged().truncate([1, 0, 0, 0, 0])),
        (r"length of request 0 must be in \[0, 0\]", lambda: paged().advance([1, 0, 0, 0, 0])),
        (r"length must be in \[0, 0\]", lambda: paged().fork(0, 1, 2)),
        ("shapes must have at least one", lambda: ContiguousKVCache([], 1, max_length=2)),
        ("max_length must be at least 1", lambda: ContiguousKVCache(SHAPES, 1, max_length=0)),
        ("block_size must be at least 1", lambda: ring(0)),
        ("scale must be row or cache", lambda: paged(dtype=torch.int8, scale="head")),
    ],
)
def test_refusals(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_forking_onto_a_live_request_is_refused() -> None:
    cache = paged()
    cache.reserve([1, 1, 0, 0, 0])
    with pytest.raises(ValueError, match="request 1 must be empty, free it first"):
        cache.fork(0, 1, 0)
