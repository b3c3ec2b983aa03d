"""Forms of a tree: each one leads back, malformed ones raise, device and host agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spec_kernels import tree
from spec_kernels.tree import topology

SHAPES = {
    "root": [-1],
    "chain": [-1, 0, 1, 2, 3],  # B110
    "star": [-1, 0, 0, 0, 0],  # B109
    "comb": [-1, 0, 0, 1, 1, 3, 3],
    "binary": [-1, *[(i - 1) // 2 for i in range(1, 31)]],
}

parents_lists = st.integers(0, 69).flatmap(
    lambda n: st.tuples(*[st.integers(0, i) for i in range(n)]).map(lambda p: [-1, *p])
)


def depth_by_hand(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_by_hand(parents, parents[node])


def ancestors_by_hand(parents: list[int], node: int) -> set[int]:
    return {node} if node == 0 else {node} | ancestors_by_hand(parents, parents[node])


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES.keys())
def test_known_shapes_lead_back(parents: list[int]) -> None:
    assert tree.parents_from_paths(tree.paths_from_parents(parents)) == parents
    assert tree.parents_from_links(*tree.links_from_parents(parents)) == parents
    assert tree.parents_from_mask(tree.mask_from_parents(parents)) == parents


@given(parents_lists)
def test_every_form_leads_back(parents: list[int]) -> None:
    tree.check_parents(parents)
    assert tree.parents_from_paths(tree.paths_from_parents(parents)) == parents
    assert tree.parents_from_links(*tree.links_from_parents(parents)) == parents
    assert tree.parents_from_mask(tree.mask_from_parents(parents)) == parents
    choices = tree.choices_from_parents(parents)
    by_choice, ranks = tree.parents_from_choices(choices)
    assert sorted(tree.choices_from_parents(by_choice, ranks)) == sorted(choices)


@given(st.lists(parents_lists, min_size=1, max_size=4), st.integers(0, 3))
def test_device_functions_equal_a_walk_for_every_request(
    trees: list[list[int]], extra: int
) -> None:
    nodes = max(map(len, trees)) + extra
    parents, num_nodes = tree.pack_parents([*trees, []], nodes=nodes)
    depth, mask = tree.depths(parents, num_nodes), tree.ancestor_mask(parents, num_nodes)
    for b, one in enumerate(trees):
        padding = [-1] * (nodes - len(one))
        by_hand = [depth_by_hand(one, i) for i in range(len(one))]
        assert depth[b].tolist() == by_hand + padding
        seen = [ancestors_by_hand(one, i) for i in range(len(one))]
        assert [set(row.nonzero()[:, 0].tolist()) for row in mask[b, : len(one)]] == seen
        assert not mask[b, len(one) :].any()
        deepest = max(by_hand)
        for limit, fits in ((deepest, True), (deepest - 1, False)):
            assert tree.is_tree(parents, num_nodes, limit)[b] == fits
    assert depth[-1].tolist() == [-1] * nodes
    assert bool(tree.is_tree(parents, num_nodes, 0)[-1])


@given(st.lists(st.integers(-2, 7), min_size=1, max_size=7), st.integers(-1, 8))
def test_depths_of_few_nodes_are_those_of_many(parents: list[int], count: int) -> None:
    """Also of parents that are no tree."""
    few = torch.tensor([parents], dtype=torch.int32)
    many = few.repeat(topology.FEW + 1, 1)
    depth = tree.depths(few, torch.tensor([count]))
    assert tree.depths(many, torch.tensor([count] * len(many)))[-1:].equal(depth)


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 63, 64, 65, 1024])
@pytest.mark.parametrize("kind", ["chain", "random"])
def test_words_hold_any_number_of_nodes(nodes: int, kind: str) -> None:
    """B113: masks packed into a fixed number of bits."""
    last = torch.arange(nodes)
    parents = last - 1
    if kind == "random":
        parents = torch.maximum((torch.rand(nodes) * last).long(), (last > 0).long() - 1)
    words = tree.ancestor_words(parents[None].int(), torch.tensor([nodes]))
    assert (words.dtype, list(words.shape)) == (torch.int32, [1, nodes, -(-nodes // 32)])
    expected = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        if node:
            expected[node] = expected[parents[node]]
        expected[node, node] = True
    bits = torch.stack([(words[0].long() >> bit) & 1 for bit in range(32)], dim=2)
    assert torch.equal(bits.view(nodes, -1)[:, :nodes].bool(), expected)


MALFORMED = [
    # parents, what the message says, max_depth
    ([], "1 to 1024 nodes, got 0", None),
    ([-1] + [0] * 1024, "1 to 1024 nodes, got 1025", None),
    ([0, 0], "node 0 must be the root", None),
    ([-1, 0, -1], "node 2 is a second root", None),
    ([-1, 0, 3, 2], r"node 2 is its own ancestor \(parent 3\)", None),
    ([-1, 1], r"node 1 is its own ancestor \(parent 1\)", None),
    ([-1, 2, 0], r"node 1 precedes its parent \(parent 2\)", None),
    ([-1, 0, 5], r"node 2 has parent 5, outside \[0, 3\)", None),
    ([-1, -2], r"node 1 has parent -2, outside \[0, 2\)", None),
    ([-1, 0, 1, 2], "node 3 has depth 3, deeper than 2", 2),
]


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case[1])
def test_malformed_trees_raise_on_the_host_and_are_told_on_the_device(
    case: tuple[list[int], str, int | None],
) -> None:
    parents, message, max_depth = case
    with pytest.raises(ValueError, match=message):
        tree.check_parents(parents, max_depth=max_depth)
    if 0 < len(parents) <= tree.MAX_NODES:
        padded = torch.tensor([[*parents, -1]], dtype=torch.int32)
        limit = len(parents) if max_depth is None else max_depth
        assert not tree.is_tree(padded, torch.tensor([len(parents)]), limit)
        # What lies behind num_nodes does not count, and too large a num_nodes is clamped.
        assert tree.is_tree(padded, torch.tensor([0]), limit)
        assert not tree.is_tree(padded[:, :-1], torch.tensor([99]), limit)


def test_device_functions_survive_malformed_parents() -> None:
    parents = torch.tensor([[-1, 7, 1, 0, -9, 5], [3, 0, 1, 1, 0, 2]], dtype=torch.int32)
    num_nodes = torch.tensor([6, 3])
    assert tree.depths(parents, num_nodes).tolist() == [
        [0, -1, -1, 1, -1, -1],
        [0, 1, 2, -1, -1, -1],
    ]
    assert tree.is_tree(parents, num_nodes, 5).tolist() == [False, False]
    words = tree.ancestor_words(parents, num_nodes)[..., 0]
    assert words.tolist() == [[1, 2, 6, 9, 16, 32], [1, 3, 7, 0, 0, 0]]


def test_empty_batches() -> None:
    parents, num_nodes = tree.pack_parents([], nodes=3)
    assert tree.depths(parents, num_nodes).shape == (0, 3)
    assert tree.ancestor_words(parents, num_nodes).shape == (0, 3, 1)
    assert tree.is_tree(parents, num_nodes, 1).shape == (0,)
    assert tree.pack_parents([])[0].shape == (0, 0)
    with pytest.raises(ValueError, match="fit into 2 nodes, got a tree of 3"):
        tree.pack_parents([[-1, 0, 0]], nodes=2)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0, 0, 0)], r"\(0, 0, 0\) lacks its prefix \(0, 0\)"),  # B120
        ([(0,), (0,)], r"\(0,\) is there twice"),
        ([()], "root"),
        ([(-1,)], "negative rank"),
        ([(0,), (0, 0), (0, 0, 1)], "node 3 has depth 3, deeper than 2"),  # B118
    ],
)
def test_choices_that_make_no_tree_raise(choices: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.parents_from_choices(choices, max_depth=2)


def test_choices_take_the_token_of_their_rank() -> None:
    """B119: widths that differ from depth to depth."""
    heads = [[10, 11], [20, 21, 22], [30]]
    choices = [(1,), (0,), (0, 2), (1, 0), (0, 2, 0)]
    parents, ranks = tree.parents_from_choices(choices, max_depth=3)
    assert tree.choices_from_parents(parents, ranks) == [(0,), (1,), (0, 2), (1, 0), (0, 2, 0)]
    depth = tree.depths(torch.tensor([parents]), torch.tensor([6]))[0].tolist()
    tokens = [heads[d - 1][r] for d, r in zip(depth, ranks, strict=True) if d]
    assert tokens == [10, 11, 22, 20, 30]
    with pytest.raises(ValueError, match="ranks must have 2 entries"):
        tree.choices_from_parents([-1, 0], [0])


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (([1, -1], [-1]), "next_sibling must have 2 entries, got 1"),
        (([2, -1], [-1, -1]), "outside"),
        (([1, -1, -1], [-1, 2, 1]), "sibling 1 comes behind 2"),
        (([1, 1], [-1, -1]), "linked twice"),
        (([1, -1, -1], [-1, -1, -1]), "second root"),
        (([-1, 0], [-1, -1]), "node 0 must be the root"),
    ],
)
def test_links_that_make_no_tree_raise(links: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.parents_from_links(*links)


def test_paths_and_masks_that_make_no_tree_raise() -> None:
    for paths, message in (
        ([[1, 2]], "start at node 0"),
        ([[0, 1, 2], [0, 2]], "node 2 has parents 1 and 0"),
        ([[0, 2]], "node 1 is on no path"),
        ([[0, -1]], "node -1 is outside"),
        ([[0, 2, 1]], "precedes its parent"),
    ):
        with pytest.raises(ValueError, match=message):
            tree.parents_from_paths(paths)
    mask = tree.mask_from_parents([-1, 0, 1, 1])
    for node, other in ((2, 0), (3, 0), (1, 3), (1, 1)):
        wrong = mask.clone()
        wrong[node, other] ^= True
        with pytest.raises(ValueError, match=f"row {node}"):
            tree.parents_from_mask(wrong)
    with pytest.raises(ValueError, match="mask must be"):
        tree.parents_from_mask(mask[:2])
    with pytest.raises(ValueError, match="mask must be"):
        tree.parents_from_mask(mask[0, 0])
    for no_mask in (mask.int(), mask.tolist()):
        with pytest.raises(TypeError, match="bool"):
            tree.parents_from_mask(no_mask)


@pytest.mark.parametrize("function", [tree.depths, tree.ancestor_words, tree.ancestor_mask])
def test_device_functions_refuse_by_name(function: Callable[..., Tensor]) -> None:
    parents, num_nodes = tree.pack_parents([[-1, 0], [-1]])
    with pytest.raises(ValueError, match=r"parents must be \[batch, nodes\]"):
        function(parents[0], num_nodes)
    with pytest.raises(ValueError, match=r"num_nodes must be \[2\]"):
        function(parents, num_nodes[:1])
    with pytest.raises(TypeError, match="parents must be"):
        function(parents.double(), num_nodes)
