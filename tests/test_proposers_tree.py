"""Trees that proposers make: their shape, their laws, and the noise that drew them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from spec_kernels.decoder import Decoder, Request, Run
from spec_kernels.proposers import BestFirst, DraftModelProposer, NgramProposer, TreeTemplate
from spec_kernels.targets import TableTarget
from spec_kernels.tree import check_parents
from spec_kernels.types import PAD_TOKEN, Draft
from tests.test_proposers import lookup_by_hand


def propose(proposer: object, requests: list[Request], limits: list[int], **target: int) -> Draft:
    """Open a batch over a target that does not matter and propose once."""
    vocab = target.get("vocab", 9)
    run = Decoder(TableTarget(torch.zeros(vocab, vocab)), proposer, gamma=8).start(requests)
    return draft_of(run, limits)


def draft_of(run: Run, limits: list[int]) -> Draft:
    return run.session.propose(run.state, torch.tensor(limits, dtype=torch.int32), max(limits))


def merge_by_hand(row: list[int], nodes: int, limit: int) -> tuple[list[int], list[int]]:
    """Insert continuations, the best match first, into a trie, one token at a time."""
    tokens, parents = [row[-1]], [-1]
    for continuation in lookup_by_hand(row, 4, 2, limit):
        at = 0
        for token in continuation:
            known = [i for i in range(len(tokens)) if (parents[i], tokens[i]) == (at, token)]
            if not known:
                tokens.append(token)
                parents.append(at)
            at = known[0] if known else len(tokens) - 1
    return tokens[:nodes], parents[:nodes]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=3),
    st.integers(2, 12),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_ngram_trees_equal_their_definition(
    rows: list[list[int]], nodes: int, limits: list[int]
) -> None:
    limits = limits[: len(rows)]
    draft = propose(NgramProposer(nodes=nodes), [Request(row) for row in rows], limits)
    for b, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        tokens, parents = merge_by_hand(row, nodes, limit)
        count = int(draft.num_nodes[b])
        drawn = [-1] if draft.parents is None else draft.parents[b, :count].tolist()  # roots alone
        assert (draft.tokens[b, :count].tolist(), drawn) == (tokens, parents)
        assert (draft.tokens[b, count:] == PAD_TOKEN).all()


def test_absent_requests_get_no_tree() -> None:
    requests = [Request([1, 2, 1]), Request([1, 2, 1]), Request([1, 2, 3])]
    draft = propose(NgramProposer(min_ngram=1, nodes=5), requests, [-1, 2, 2])
    assert draft.num_nodes.tolist() == [0, 3, 1]
    assert draft.tokens.tolist() == [[-1] * 5, [1, 2, 1, -1, -1], [3, -1, -1, -1, -1]]


MODEL = TableTarget(torch.linspace(0.0, 2.0, 81).view(9, 9).sin() * 3.0)
TREE = [-1, 0, 0, 0, 1, 1, 3]


@pytest.mark.parametrize("children", ["sampled", "replacement", "fixed", "mixed"])
def test_a_template_says_who_was_drawn_from_which_law(children: str) -> None:
    """Row `offset + b * parents + j` is the law at the j-th node of a level with children; greedy
    requests have fixed children, and deeper nodes than the limit are padding."""
    requests = [Request([4], temperature=1.0, seed=1), Request([5]), Request([6], temperature=0.7)]
    draft = propose(DraftModelProposer(MODEL, tree=TREE, children=children), requests, [2, 2, 1])
    assert draft.parents.tolist() == [TREE] * 3
    assert draft.num_nodes.tolist() == [7, 7, 4]
    drawn = {"sampled": 3, "replacement": 3, "fixed": 0, "mixed": 1}[children]
    if drawn == 0:
        assert draft.row is None
    else:
        first = [0, *[-1] * 2] if drawn == 1 else [0] * 3
        second = [3, -1, 4] if drawn == 1 else [3, 3, 4]
        assert draft.row[0].tolist() == [-1, *first, *second]
        assert draft.row[1].tolist() == [-1] * 7
    for b in range(3):
        for node, parent in enumerate(TREE[: int(draft.num_nodes[b])]):
            if parent < 0:
                continue
            logits = MODEL.table[draft.tokens[b, parent]]
            ranked = logits.argsort(descending=True, stable=True).tolist()
            rank = [i for i, p in enumerate(TREE) if p == parent].index(node)
            row = -1 if draft.row is None else int(draft.row[b, node])
            if row >= 0:
                assert torch.equal(draft.logits[row], logits)
            elif children == "mixed" and b != 1:
                assert draft.tokens[b, node] == ranked[rank - 1]
            else:
                assert draft.tokens[b, node] == ranked[rank]
        siblings = draft.tokens[b, 1:4].tolist()
        assert len(set(siblings)) == 3 or (children == "replacement" and b != 1)


@pytest.mark.parametrize("children", ["sampled", "replacement", "mixed"])
def test_cousins_are_drawn_independently(children: str) -> None:
    """The first children of two nodes, under laws that do not depend on the node."""
    model = TableTarget(torch.tensor([0.5, 0.3, 0.2]).log().repeat(3, 1))
    requests = [Request([0], temperature=1.0, seed=seed) for seed in range(900)]
    proposer = DraftModelProposer(model, tree=[2, 1], children=children)
    draft = propose(proposer, requests, [2] * 900, vocab=3)
    counts = torch.zeros(3, 3)
    for a, b in draft.tokens[:, 3:5].tolist():
        counts[a, b] += 1
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, 4) > 1e-6


def test_best_first_keeps_the_likeliest_paths() -> None:
    """Against a full enumeration; siblings stay in the order of their probabilities."""
    shape = BestFirst(6, depth=3, expanded=9, children=9)
    requests = [Request([4], temperature=1.0), Request([2], temperature=0.5), Request([7])]
    draft = propose(DraftModelProposer(MODEL, tree=shape), requests, [3, 2, 3])
    assert draft.row is None
    for b, (request, limit) in enumerate(zip(requests, [3, 2, 3], strict=True)):
        law = (MODEL.table / (request.temperature or 1.0)).log_softmax(1)
        paths = {(request.prompt[-1],): 0.0}
        for depth in range(limit):
            level = {path: score for path, score in paths.items() if len(path) == depth + 1}
            for path, score in level.items():
                for token in range(9):
                    paths[(*path, token)] = score + float(law[path[-1], token])
        best = sorted(paths, key=lambda path: -paths[path])[:6]
        check_parents(draft.parents[b].tolist(), max_depth=limit)
        ours = []
        for node in range(6):
            path = [node]
            while path[-1]:
                path.append(int(draft.parents[b, path[-1]]))
            ours.append(tuple(draft.tokens[b, path[::-1]].tolist()))
        assert sorted(ours) == sorted(best)


def test_templates() -> None:
    template = TreeTemplate.make(TREE)
    assert template.levels == ((0, 1), (1, 4), (4, 7))
    assert template.ranks == (0, 0, 1, 2, 0, 1, 0)
    assert template.num_children == (3, 2, 0, 1, 0, 0, 0)
    assert (template.inner(0), template.inner(1), template.depth) == ([0], [1, 3], 2)
    for tree, message in (
        ([-1], "more than its root"),
        ([-1, 0, 1, 0], "number the nodes level by level"),
        ([-1, 0, 3, 2], "its own ancestor"),
        ([2, 0], "at least 1 child"),
        ([40, 40], "at most 1024 nodes"),
    ):
        with pytest.raises(ValueError, match=message):
            DraftModelProposer(MODEL, tree=tree)
    for text in ("4x2", "", "-1,0,-1", "0,-1"):
        with pytest.raises(
            ValueError, match=f"tree must look like 4,2,2 or -1,0,0,1, got '{text}'"
        ):
            TreeTemplate.parse(text)


def test_bad_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="children must be one of sampled"):
        DraftModelProposer(MODEL, children="drawn")
    for nodes in (1, 1025):
        with pytest.raises(ValueError, match="nodes must be in"):
            NgramProposer(nodes=nodes)
        with pytest.raises(ValueError, match="nodes must be in"):
            BestFirst(nodes)
    with pytest.raises(ValueError, match="depth must be at least 1"):
        BestFirst(5, depth=0)
