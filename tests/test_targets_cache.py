"""Targets on paged caches: the same output as on contiguous ones, and room that runs out."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import DraftModelProposer
from spec_kernels.targets import ModuleTarget
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
