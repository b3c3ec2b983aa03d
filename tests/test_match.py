"""Contract of `match`, for every layer."""

from __future__ import annotations

import pytest
import torch

from spec_kernels import reference
from spec_kernels.types import BAD_TREE, INVALID_DRAFT, INVALID_TARGET, OK, Draft
from tests.cases import assert_equal, spread_columns
from tests.layers import LAYERS, layer
from tests.tree_cases import random_parents

every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
@pytest.mark.parametrize(("batch", "nodes"), [(0, 4), (1, 1), (3, 4), (17, 9)])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32], ids=["i64", "i32"])
def test_matches_equal_the_oracles(name: str, batch: int, nodes: int, ids: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch)
    for _ in range(3):
        own = torch.randint(-1, 3, (batch, nodes), generator=generator)
        tokens = own.roll(1, 1)
        noise = torch.rand(batch, nodes, generator=generator)
        tokens = torch.where(noise < 0.15, torch.randint(-3, 4, tokens.shape), tokens)
        num_nodes = torch.randint(-1, nodes + 3, (batch,), generator=generator).int()
        draft = Draft(spread_columns(tokens.to(ids)), num_nodes)
        for depth in (0, nodes - 1, nodes + 2):
            result = layer(name).match(draft, spread_columns(own.to(ids)), max_depth=depth)
            assert_equal(result, reference.match(draft, own, max_depth=depth))


@every_layer
def test_match_reports_what_it_reaches(name: str) -> None:
    tokens = torch.tensor([[9, 4, 5], [9, 4, -2], [9, 4, -1], [9, 7, -5], [9, 4, 5]])
    own = torch.tensor([[4, -1, 6], [4, 6, 7], [4, 6, 7], [4, -1, 7], [-7, 1, 1]])
    draft = Draft(tokens, torch.full((5,), 3, dtype=torch.int32))
    result = layer(name).match(draft, own, max_depth=2)
    assert result.output_tokens.tolist() == [
        [4, -1, -1],
        [4, 6, -1],
        [4, 6, -1],
        [4, -1, -1],
        [-1, -1, -1],
    ]
    assert result.accepted_lens.tolist() == [1, 1, 1, 0, 0]
    assert result.status.tolist() == [INVALID_TARGET, INVALID_DRAFT, OK, OK, INVALID_TARGET]


@every_layer
@pytest.mark.parametrize(("batch", "nodes"), [(0, 4), (1, 1), (8, 5), (8, 30), (2, 260)])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32], ids=["i64", "i32"])
def test_matches_on_trees_equal_the_oracles(
    name: str, batch: int, nodes: int, ids: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(batch + nodes)
    for seed in range(2):
        forms = [random_parents(nodes, b + seed, generator) for b in range(batch)]
        parents = torch.tensor(forms, dtype=torch.int32).reshape(batch, nodes)
        is_hit = torch.rand(batch, nodes, generator=generator) < 0.1 / nodes
        parents = torch.where(is_hit, torch.randint(-3, nodes, (batch, nodes)).int(), parents)
        own = torch.randint(-1, 3, (batch, nodes), generator=generator)
        tokens = torch.randint(-2, 3, (batch, nodes), generator=generator)
        num_nodes = torch.randint(-1, nodes + 3, (batch,), generator=generator).int()
        draft = Draft(spread_columns(tokens.to(ids)), num_nodes, spread_columns(parents))
        for depth in (0, 3, nodes):
            result = layer(name).match(draft, spread_columns(own.to(ids)), max_depth=depth)
            assert_equal(result, reference.match(draft, own, max_depth=depth))


@every_layer
def test_match_takes_the_first_child_that_equals(name: str) -> None:
    """The first of two equal siblings, whatever follows; a fault counts where the walk ends."""
    parents = torch.tensor([[-1, 0, 0, 0, 1, 2], [-1, 0, 0, 1, 1, 3], [-1, 0, 0, 3, 0, 0]]).int()
    tokens = torch.tensor([[9, 4, 4, 5, 6, 7], [9, -7, 4, -2, 5, 5], [9, 4, 4, 4, 4, 4]])
    own = torch.tensor([[4, 7, 7, 7, 1, 2], [5, 5, 5, 5, 1, 1], [4, 4, 4, 4, 4, 4]])
    draft = Draft(tokens, torch.full((3,), 6, dtype=torch.int32), parents)
    result = layer(name).match(draft, own, max_depth=3)
    assert result.output_tokens.tolist() == [[4, 7, -1, -1], [5, -1, -1, -1], [4, -1, -1, -1]]
    assert result.path.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1], [0, -1, -1, -1]]
    assert result.status.tolist() == [OK, INVALID_DRAFT, BAD_TREE]


@every_layer
def test_a_chain_given_as_parents_matches_alike(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    own = torch.randint(-1, 2, (12, 6), generator=generator)
    tokens = torch.randint(-2, 2, (12, 6), generator=generator)
    num_nodes = torch.randint(0, 8, (12,), generator=generator).int()
    parents = torch.arange(-1, 5, dtype=torch.int32).expand(12, 6)
    chain, tree = Draft(tokens, num_nodes), Draft(tokens, num_nodes, parents)
    ops = layer(name)
    assert_equal(ops.match(tree, own, max_depth=5), ops.match(chain, own, max_depth=5))
