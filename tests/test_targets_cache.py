"""Targets on paged caches: the same output as on contiguous ones, and room that runs out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_kernels.decoder import Decoder, Request
from spec_kernels.nn import KVShape
from spec_kernels.proposers import DraftModelProposer
from spec_kernels.targets import KVCache, ModuleTarget, Nodes, make_room, open_cache
from spec_kernels.types import OutOfBlocks
from tests.tiny_models import TinyGPT, gpt

REQUESTS = [
    Request([1, 2, 3], max_new_tokens=9, temperature=1.2, seed=1),
    Request([4], max_new_tokens=6, temperature=1.2, seed=2),
]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_caches_decode_as_contiguous_ones(block_size: int) -> None:
    """Chains and trees, which need more rows than positions."""
    for tree in (None, [2, 2, 1]):
        outputs = []
        for target in (gpt(), ModuleTarget(TinyGPT().eval(), block_size=block_size)):
            proposer = DraftModelProposer(target, tree=tree, temperature=0.7)
            outputs.append(Decoder(target, proposer, gamma=3).generate(REQUESTS))
        assert [o.tokens for o in outputs[0]] == [o.tokens for o in outputs[1]]


def test_running_out_of_blocks_changes_nothing() -> None:
    target = ModuleTarget(TinyGPT().eval(), block_size=4, num_blocks=3)
    cache = target.open(2, 32)
    target.prefill(cache, 0, [1, 2, 3, 4, 5])
    before = cache.context_lens.tolist(), cache.block_table.clone(), cache.keys[0].clone()
    tokens, num_nodes = torch.ones(2, 5, dtype=torch.int64), torch.tensor([5, 1])
    with pytest.raises(OutOfBlocks) as caught:
        target.forward(tokens, num_nodes, cache)
    assert caught.value.missing == 1
    assert cache.context_lens.tolist() == before[0]
    assert torch.equal(cache.block_table, before[1])
    assert torch.equal(cache.keys[0], before[2])
    target.forward(tokens[:, :3], num_nodes.clamp(max=3), cache)
    assert cache.num_free == 0
    cache.trim([5, 0])
    assert cache.num_free == 1


CONTEXT, COUNT, SHAPE = 9, 5, KVShape(2, 8, 4)
TREE = torch.tensor([[-1] * 6, [-1, 0, 0, 1, 1, -1], [-1] * 6], dtype=torch.int32)


def cache_of_one(block_size: int | None, context: int) -> KVCache:
    """Three requests, of which only the second holds rows; all others are NaN."""
    cpu = torch.device("cpu")
    options = {"dtype": torch.float64, "device": cpu, "block_size": block_size}
    cache = open_cache([SHAPE], 3, 32, **options)
    for tensor in cache.tensors.tensors:
        tensor.fill_(torch.nan)
    cache.reserve([0, context, 0])
    generator = torch.Generator().manual_seed(3)
    rows = (
        torch.randn(1, context, 2, dim, dtype=torch.float64, generator=generator) for dim in (8, 4)
    )
    slots = cache.slots(torch.tensor([0, context, 0], dtype=torch.int32), context)
    cache.append(0, *rows, slots[1])
    cache.advance([0, context, 0])
    return cache


def attend(cache: KVCache, parents: Tensor | None, start: int, window: int | None) -> list[Tensor]:
    """What the nodes see, level by level if start > 0, and the rows that they leave."""
    generator, seen = torch.Generator().manual_seed(4), []
    num_nodes = torch.tensor([0, COUNT, 0], dtype=torch.int32)
    for first, last in ((0, start), (start, COUNT)) if start else ((0, COUNT),):
        counts = make_room(cache, num_nodes.clamp(max=last), 6, is_tree=parents is not None)
        new = Nodes(cache, num_nodes.clamp(max=last), 6, counts, parents=parents, start=first)
        query, key, value = (
            torch.randn(last - first, *shape, dtype=torch.float64, generator=generator)
            for shape in ((6, 8), (2, 8), (2, 4))
        )
        seen.append(new.attend(0, query, key, value, scale=0.7, window=window))
    written = cache.rows(0, torch.tensor([0, int(cache.context_lens[1]) + COUNT, 0]), 14)
    return [*seen, *(part[1] for part in written if part is not None)]


@pytest.mark.parametrize("context", [0, 9])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(("parents", "start"), [(None, 0), (None, 2), (TREE, 0), (TREE, 3)])
def test_a_round_of_one_request_sees_what_it_would_among_others(
    parents: Tensor | None, start: int, window: int | None, context: int
) -> None:
    """Contiguous rows of one request take a shorter way, blocks never do."""
    short, long = cache_of_one(None, context), cache_of_one(4, context)
    for ours, theirs in zip(
        attend(short, parents, start, window), attend(long, parents, start, window), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-12)
        assert ours.isfinite().all()
