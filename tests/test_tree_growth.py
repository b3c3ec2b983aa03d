"""Which nodes grow and stay: against plain Python, and the best static tree against all trees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
import torch

from spec_kernels import tree
from spec_kernels.types import PAD_TOKEN, Draft

Choice = tuple[int, ...]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_top_children_are_the_largest_and_ties_go_to_the_lower_id(dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 3, (30, 40)).to(dtype)
    logits[torch.rand(30, 40) < 0.2] = -math.inf
    logits[torch.rand(30, 40) < 0.05] = math.nan
    before = logits.clone()
    ids = tree.top_children(logits, 6)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    for row, found in zip(logits.tolist(), ids.tolist(), strict=True):
        usable = [x for x, value in enumerate(row) if value > -math.inf]
        assert found == sorted(usable, key=lambda x: (-row[x], x))[:6]


def test_top_children_are_padded() -> None:
    logits = torch.tensor([[-math.inf, 1.0, math.nan], [-math.inf] * 3])
    assert tree.top_children(logits, 5).tolist() == [[1, *[PAD_TOKEN] * 4], [PAD_TOKEN] * 5]
    assert tree.top_children(logits[:0], 2).shape == (0, 2)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        tree.top_children(logits, 0)
    with pytest.raises(TypeError, match="logits must be"):
        tree.top_children(logits.int(), 1)


def grown_draft(
    batch: int, nodes: int, max_depth: int, seed: int
) -> tuple[Draft, torch.Tensor, list[list[int]]]:
    """Return ragged random trees of fixed drafts, and scores in eighths with many ties."""
    random, trees = Random(seed), []
    for _ in range(batch):
        parents, depth, size = [-1], [0], random.randint(1, nodes)
        while len(parents) < size:
            above = random.randrange(len(parents))
            if depth[above] < max_depth:
                parents.append(above)
                depth.append(depth[above] + 1)
        trees.append(parents)
    trees[-1] = []
    packed, num_nodes = tree.pack_parents(trees, nodes=nodes)
    scores = -torch.tensor([[random.randint(0, 8) / 8 for _ in range(nodes)] for _ in trees])
    tokens = torch.tensor([[random.randrange(90) for _ in range(nodes)] for _ in trees])
    tokens[:, 1:][torch.rand(batch, nodes - 1) < 0.05] = PAD_TOKEN
    scores[torch.rand(batch, nodes) < 0.05] = -math.inf
    scores[torch.rand(batch, nodes) < 0.05] = math.nan
    return Draft(tokens, num_nodes, packed), scores, trees


def kept_by_hand(
    parents: list[int], tokens: list[int], scores: list[float], budget: int
) -> list[int]:
    """Return the nodes to keep, by definition."""
    total = [0.0]
    for node in range(1, len(parents)):
        usable = tokens[node] != PAD_TOKEN and not math.isnan(scores[node])
        total.append(total[parents[node]] + scores[node] if usable else -math.inf)
    order = sorted(range(len(parents)), key=lambda v: (-total[v], v))
    return sorted(v for v in order[: max(budget, 1)] if total[v] > -math.inf)


@pytest.mark.parametrize("nodes", [1, 9, 70])
@pytest.mark.parametrize("seed", range(5))
def test_kept_nodes_equal_their_definition(nodes: int, seed: int) -> None:
    batch, max_depth, width = 8, 5, 12
    draft, scores, trees = grown_draft(batch, nodes, max_depth, seed)
    budget = torch.tensor([12, 1, 0, 5, 11, 200, 7, 3], dtype=torch.int32)
    cut, kept = tree.keep_best(draft, scores, budget, max_depth=max_depth, nodes=width)
    assert (cut.tokens.shape, kept.dtype) == ((batch, width), torch.int32)
    for b, parents in enumerate(trees):
        tokens = draft.tokens[b].tolist()
        nodes_kept = (
            kept_by_hand(parents, tokens, scores[b].tolist(), min(int(budget[b]), width))
            if parents
            else []
        )
        rest = width - len(nodes_kept)
        assert kept[b].tolist() == nodes_kept + [-1] * rest
        assert cut.num_nodes[b] == len(nodes_kept)
        assert cut.tokens[b].tolist() == [tokens[v] for v in nodes_kept] + [PAD_TOKEN] * rest
        new_parents = cut.parents[b].tolist()  # type: ignore[index]
        for place, node in enumerate(nodes_kept[1:], start=1):
            assert nodes_kept[new_parents[place]] == parents[node]
        if nodes_kept:
            tree.check_parents(new_parents[: len(nodes_kept)], max_depth=max_depth)


def test_one_budget_for_all_and_alone_as_in_a_batch() -> None:
    draft, scores, _ = grown_draft(6, 30, 4, seed=1)
    cut, kept = tree.keep_best(draft, scores, 8, max_depth=4)
    assert kept.shape == (6, 8)
    for b in range(6):
        one = Draft(*(field[b : b + 1] for field in draft[:3]))  # type: ignore[index]
        alone, kept_alone = tree.keep_best(one, scores[b : b + 1], 8, max_depth=4)
        assert torch.equal(kept_alone[0], kept[b])
        assert all(
            torch.equal(x[0], y[b])  # type: ignore[index]
            for x, y in zip(alone[:3], cut[:3], strict=True)
        )


def test_malformed_nodes_are_dropped_with_what_hangs_below() -> None:
    parents = torch.tensor([[-1, 0, 3, 2, 0, 4, 5]], dtype=torch.int32)
    draft = Draft(torch.arange(7)[None], torch.tensor([7], dtype=torch.int32), parents)
    _, kept = tree.keep_best(draft, torch.zeros(1, 7), 7, max_depth=2)
    assert kept.tolist() == [[0, 1, 4, 5, -1, -1, -1]]  # 2 and 3 are a cycle, 6 is too deep


def test_rounding_never_tears_a_child_from_its_parent() -> None:
    """Sums that are regrouped along the path could make a child larger than its parent."""
    chain = torch.arange(-1, 63, dtype=torch.int32)[None]
    scores = -torch.rand(1, 64) * 1e-7
    scores[0, 1] = -1.0
    total = tree.path_scores(chain, scores, max_depth=63)
    assert bool((total[0, 1:] <= total[0, :-1]).all())
    draft = Draft(torch.zeros(1, 64, dtype=torch.int64), torch.tensor([64]).int(), chain)
    _, kept = tree.keep_best(draft, scores, 20, max_depth=63)
    assert kept.tolist() == [list(range(20))]


def test_scores_above_zero_count_as_zero() -> None:
    chain = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    total = tree.path_scores(chain, torch.tensor([[0.0, -1.0, 0.5]]), max_depth=2)
    assert total.tolist() == [[0.0, -1.0, -1.0]]
    with pytest.raises(ValueError, match=r"scores must be \[1, 3\]"):
        tree.path_scores(chain, torch.zeros(1, 2), max_depth=2)


def test_keep_best_refuses_what_it_could_not_keep_exact() -> None:
    draft, scores, _ = grown_draft(2, 5, 3, seed=0)
    drawn = draft._replace(row=torch.zeros(2, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match="drawn node is never dropped"):
        tree.keep_best(drawn, scores, 3, max_depth=3)
    with pytest.raises(ValueError, match="must be a tree"):
        tree.keep_best(draft._replace(parents=None), scores, 3, max_depth=3)
    with pytest.raises(ValueError, match="nodes must be at least 1, got None"):
        tree.keep_best(draft, scores, torch.tensor([1, 2], dtype=torch.int32), max_depth=3)
    with pytest.raises(ValueError, match="nodes must be at least 1, got 0"):
        tree.keep_best(draft, scores, 0, max_depth=3)
    with pytest.raises(ValueError, match="scores must be"):
        tree.keep_best(draft, scores[:, :4], 3, max_depth=3)
    with pytest.raises(TypeError, match="draft must be a Draft, got tuple"):
        tree.keep_best(tuple(draft), scores, 3, max_depth=3)
    with pytest.raises(TypeError, match="budget must be"):
        tree.keep_best(draft, scores, torch.tensor([1, 2]), max_depth=3, nodes=3)


# Static trees


def every_tree(nodes: int, depth: int, ranks: int) -> Iterator[frozenset[Choice]]:
    """Yield every tree of up to `nodes` nodes whose children take the first ranks."""
    found: set[frozenset[Choice]] = {frozenset()}
    for _ in range(nodes):
        yield from found
        found = {
            chosen | {(*above, rank)}
            for chosen in found
            for above in (*chosen, ())
            for rank in range(ranks)
            if len(above) < depth
            and (*above, rank) not in chosen
            and (rank == 0 or (*above, rank - 1) in chosen)
        }


def value(chosen: frozenset[Choice], acceptance: list[list[float]]) -> float:
    return 1.0 + sum(
        math.prod(acceptance[depth][rank] for depth, rank in enumerate(choice)) for choice in chosen
    )


@pytest.mark.parametrize("nodes", range(1, 8))
@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (3, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("kind", ["random", "falling", "zeros"])
def test_no_tree_is_better_than_the_optimal_one(
    nodes: int, shape: tuple[int, int], kind: str
) -> None:
    table = torch.rand(shape, dtype=torch.float64)
    if kind == "falling":
        table = table.sort(1, descending=True).values
    elif kind == "zeros":
        table[torch.rand(shape) < 0.4] = 0.0
    acceptance = table.tolist()
    best = tree.optimal_tree(acceptance, nodes)
    every = list(every_tree(nodes, *shape))
    highest = max(value(chosen, acceptance) for chosen in every)
    assert best.expected_tokens == pytest.approx(highest, abs=1e-12)
    assert len(best.parents) <= nodes
    smallest = min(len(c) for c in every if value(c, acceptance) > highest - 1e-12)
    assert len(best.parents) == smallest + 1
    tree.check_parents(best.parents, max_depth=shape[0])
    again = tree.expected_tokens(best.parents, best.ranks, acceptance)
    assert again == pytest.approx(highest, abs=1e-12)
    chosen = frozenset(tree.choices_from_parents(best.parents, best.ranks))
    assert chosen in set(every)
    by_size = tree.best_expected_tokens(acceptance, nodes)
    assert len(by_size) == nodes
    for size in range(1, nodes + 1):
        within = max(value(c, acceptance) for c in every if len(c) < size)
        assert by_size[size - 1] == pytest.approx(within, abs=1e-12)


def test_optimal_tree_of_many_nodes() -> None:
    acceptance = [
        [0.7 / (rank + 1) ** 1.5 * 0.95**depth for rank in range(6)] for depth in range(9)
    ]
    by_size = tree.best_expected_tokens(acceptance, 300)
    best = tree.optimal_tree(acceptance, 300)
    assert len(best.parents) == 300
    assert best.expected_tokens == pytest.approx(by_size[-1], abs=1e-12)
    gains = [b - a for a, b in pairwise(by_size)]
    assert min(gains) > 0.0
    # A chain, a star and a full binary tree of the same size are no better.
    chain = tree.expected_tokens(range(-1, 9), [-1] + [0] * 9, acceptance)
    assert by_size[9] > chain
    binary = [-1, *[(node - 1) // 2 for node in range(1, 63)]]
    ranks = [-1, *[(node - 1) % 2 for node in range(1, 63)]]
    assert by_size[62] > tree.expected_tokens(binary, ranks, acceptance)


def test_static_trees_refuse_and_degenerate() -> None:
    assert tree.optimal_tree([], 5) == tree.StaticTree([-1], [-1], 1.0)
    assert tree.optimal_tree([[1.0]], 1).parents == [-1]
    assert tree.optimal_tree([[]], 3).parents == [-1]
    assert tree.optimal_tree([[1.0]] * 4, 9).parents == [-1, 0, 1, 2, 3]
    assert tree.expected_tokens([-1, 0, 1, 2], [-1, 0, 5, 0], [[0.5]]) == 1.5
    for acceptance, nodes, message in (
        ([[0.5], [0.5, 0.1]], 3, "rows of one length"),
        ([[0.5, 1.5]], 3, r"acceptance\[0\]\[1\] must be in \[0, 1\], got 1.5"),
        ([[math.nan]], 3, "got nan"),
        ([[0.5]], 0, "nodes must be in"),
        ([[0.5]], 1025, "nodes must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            tree.optimal_tree(acceptance, nodes)
    with pytest.raises(ValueError, match="ranks must have 2 entries"):
        tree.expected_tokens([-1, 0], [-1], [[0.5]])
