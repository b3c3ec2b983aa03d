"""Contract of `match`, for every layer."""

from __future__ import annotations

import pytest
import torch

from spec_kernels import reference
from spec_kernels.types import INVALID_DRAFT, INVALID_TARGET, OK, Draft
from tests.cases import assert_equal, spread_columns
from tests.layers import LAYERS, layer

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
