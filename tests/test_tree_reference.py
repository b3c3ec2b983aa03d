"""Trees by the reference: numbers by hand, faults, malformed trees, several children, `match`."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from spec_kernels import reference
from spec_kernels.reference import random
from spec_kernels.types import (
    BAD_TREE,
    INVALID_DRAFT,
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    ZERO_Q,
    Acceptance,
    Draft,
    SamplingParams,
)
from tests.cases import LAST_COIN, Case, assert_equal, make_step
from tests.forking import outcomes

RULES = ("token", "block")
P, Q = [0.3, 0.4, 0.3], [0.6, 0.3, 0.1]
INF = math.inf


def judge(
    parents: list[int],
    tokens: list[int],
    target: list[list[float]],
    *,
    draft: list[list[float]] | None = None,
    row: list[int] | None = None,
    target_row: list[int] | None = None,
    u: float | list[float] = 0.5,
    z: float = 0.5,
    rule: str = "token",
    num_nodes: int | None = None,
    max_depth: int = 3,
    replacement: bool = False,
    map_to_draft: list[int] | None = None,
) -> Acceptance:
    """Judge one tree; the laws are probabilities, and row 0 of the target follows every node."""
    nodes = len(parents)
    coins = torch.full((1, nodes), 0.5, dtype=torch.float64)
    coins[0] = torch.tensor(u, dtype=torch.float64)
    return reference.accept(
        Draft(
            torch.tensor([tokens]),
            torch.tensor([nodes if num_nodes is None else num_nodes], dtype=torch.int32),
            torch.tensor([parents], dtype=torch.int32),
            None if draft is None else torch.tensor(draft, dtype=torch.float64),
            None,
            None if row is None else torch.tensor([row], dtype=torch.int32),
        ),
        torch.tensor(target, dtype=torch.float64),
        None,
        torch.tensor([target_row or [0] * nodes], dtype=torch.int32),
        coins,
        torch.tensor([z], dtype=torch.float64),
        rule=rule,
        replacement=replacement,
        max_depth=max_depth,
        target_to_draft=None if map_to_draft is None else torch.tensor(map_to_draft),
    )


def emitted(out: Acceptance) -> tuple[list[int], list[int], int]:
    """Return tokens, path and status of the only request."""
    n = int(out.accepted_lens[0]) + 1
    assert out.output_tokens[0, n:].tolist() == [PAD_TOKEN] * (out.output_tokens.shape[1] - n)
    assert out.path[0, n:].tolist() == [-1] * (out.path.shape[1] - n)
    return out.output_tokens[0, :n].tolist(), out.path[0, :n].tolist(), int(out.status[0])


@pytest.mark.parametrize(
    ("u", "tokens", "path"),
    [
        # b_1 = 0.3 / 0.6 = 0.5; then s = 1, r = (0, 0.1, 0.2), Z = 0.3, and q without id 0 gives
        # id 1 with 0.3 / 0.4: b_2 = 0.1 / (0.3 * 0.75) = 4/9; then only id 2 has a residual.
        ([0, 0.49, 0.9], [0, 2], [0, 1]),
        ([0, 0.51, 0.444], [1, 2], [0, 2]),
        ([0, 0.51, 0.445], [2], [0]),
    ],
)
def test_siblings_without_replacement_with_numbers(
    u: list[float], tokens: list[int], path: list[int]
) -> None:
    found = judge([-1, 0, 0], [9, 0, 1], [P, [0, 0, 1]], draft=[Q], row=[-1, 0, 0],
                  target_row=[0, 1, 1], u=u)  # fmt: skip
    assert emitted(found) == (tokens, path, OK)


def test_siblings_with_replacement_with_numbers() -> None:
    # D_2 = 0.3 stays: b_2 = 0.1 / (0.3 * 0.3) > 1. A duplicate of a rejected id is never taken.
    arguments: dict[str, Any] = {"draft": [Q], "row": [-1, 0, 0], "replacement": True}
    out = judge([-1, 0, 0], [9, 0, 1], [P], u=[0, 0.51, LAST_COIN], **arguments)
    assert emitted(out) == ([1, 1], [0, 2], OK)
    out = judge([-1, 0, 0], [9, 0, 0], [P], u=[0, 0.51, 0.0], z=0.0, **arguments)
    assert emitted(out) == ([1], [0], OK)


def test_a_fixed_sibling_is_out_of_q_from_the_start() -> None:
    # Without id 0, q gives id 1 with 0.75: b = 0.4 / 0.75 = 8/15; the other one gets 0.3 / W.
    for parents, row in (([9, 1, 0], [-1, 0, -1]), ([9, 0, 1], [-1, -1, 0])):
        sampled = row.index(0)
        u = [0.0, LAST_COIN, LAST_COIN]
        u[sampled] = 0.533 if sampled == 1 else 0.4 / (0.7 * 0.75) - 1e-6
        out = judge([-1, 0, 0], parents, [P], draft=[Q], row=row, u=u)
        assert emitted(out)[1] == [0, sampled]
        u[sampled] += 1e-3
        out = judge([-1, 0, 0], parents, [P], draft=[Q], row=row, u=u, z=0.5)
        assert emitted(out)[1] == [0]


FAULTS = [
    # what is wrong with node 1, tokens, rows, status
    ("padding", [9, PAD_TOKEN, 1, 0], [-1, 0, -1, -1], OK),
    ("negative", [9, -7, 1, 0], [-1, -1, -1, -1], INVALID_DRAFT),
    ("too-large", [9, 3, 1, 0], [-1, -1, -1, -1], INVALID_DRAFT),
    ("sampled-too-large", [9, 3, 1, 0], [-1, 0, -1, -1], INVALID_DRAFT),
    ("row-too-large", [9, 1, 1, 0], [-1, 2, -1, -1], INVALID_DRAFT),
    ("row-negative", [9, 1, 1, 0], [-1, -2, -1, -1], INVALID_DRAFT),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_unusable_nodes_and_their_subtrees_were_never_proposed(
    fault: tuple[str, list[int], list[int], int], rule: str
) -> None:
    """Node 1 is unusable and has a child; node 2 is its sibling, of token 1."""
    _, tokens, row, status = fault
    arguments: dict[str, Any] = {"draft": [Q, Q], "row": row, "rule": rule}
    out = judge([-1, 0, 0, 1], tokens, [P], u=0.5, z=0.99, **arguments)
    assert emitted(out) == ([2], [0], status)  # node 2 is rejected: 0.5 > p(1)
    out = judge([-1, 0, 0, 1], tokens, [P], u=0.39, z=0.2, **arguments)
    assert emitted(out) == ([1, 0], [0, 2], OK)  # the walk does not end at the fault


@pytest.mark.parametrize("rule", RULES)
def test_sampled_siblings_share_the_first_ones_row(rule: str) -> None:
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    arguments: dict[str, Any] = {"draft": rows, "row": [-1, 0, 1], "rule": rule}
    out = judge([-1, 0, 0], [9, 0, 1], [[0.0, 0.5, 0.5]], u=0.0, z=0.0, **arguments)
    assert emitted(out) == ([1], [0], INVALID_DRAFT)
    # A row that only an unusable sibling names does not count as the first.
    out = judge([-1, 0, 0], [9, -5, 1], [[0.0, 0.5, 0.5]], u=0.4, z=0.9, **arguments)
    assert emitted(out) == ([1, 2], [0, 2], OK)


@pytest.mark.parametrize("rule", RULES)
def test_an_unusable_fixed_sibling_is_not_taken_out_of_q(rule: str) -> None:
    """Its id would be: a fixed child beyond the vocabulary of the target, inside the draft's."""
    wide = [0.6, 0.2, 0.0, 0.2]
    arguments: dict[str, Any] = {"draft": [wide], "row": [-1, 0, -1], "rule": rule}
    # q(0) = 0.6, not 0.6 / 0.8: b = 0.3 / 0.6.
    out = judge([-1, 0, 0], [9, 0, 3], [P], u=0.49, z=0.0, **arguments)
    assert emitted(out)[1] == [0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_a_node_without_a_law_is_a_leaf(rule: str) -> None:
    nan = [math.nan] * 3
    out = judge([-1, 0, 1], [9, 1, 1], [P, nan], target_row=[0, 5, 0], u=0.0, rule=rule)
    assert emitted(out) == ([1, PAD_TOKEN], [0, 1], INVALID_TARGET)
    out = judge([-1, 0, 1], [9, 1, -9], [P, nan], target_row=[0, 5, 0], u=0.0, rule=rule)
    assert emitted(out) == ([1, PAD_TOKEN], [0, 1], INVALID_TARGET | INVALID_DRAFT)
    out = judge([-1, 0, 1], [9, 1, 1], [P, nan], target_row=[0, 5, 0], u=0.9, z=0.0, rule=rule)
    assert emitted(out) == ([0], [0], OK)


@pytest.mark.parametrize("rule", RULES)
def test_children_that_cannot_have_been_drawn_are_rejected(rule: str) -> None:
    arguments: dict[str, Any] = {"draft": [Q], "rule": rule, "z": 0.0}
    twice = judge([-1, 0, 0], [9, 0, 0], [P], row=[-1, 0, 0], u=[0, 0.6, 0], **arguments)
    assert emitted(twice) == ([2], [0], ZERO_Q)  # its law is taken out all the same
    fixed_too = judge([-1, 0, 0], [9, 0, 0], [P], row=[-1, 0, -1], u=[0, 0, 0.9], **arguments)
    assert emitted(fixed_too)[1:] == ([0], ZERO_Q)
    q = [0.0, 0.5, 0.5]
    alone = judge([-1, 0], [9, 0], [P], draft=[q], row=[-1, 0], u=0.0, z=0.0, rule=rule)
    assert emitted(alone) == ([0], [0], ZERO_Q)  # its id may still be recovered
    kept = judge([-1, 0, 0], [9, 0, 0], [P], row=[-1, 0, 0], u=[0, 0.4, 0], **arguments)
    assert emitted(kept) == ([0, 0], [0, 1], OK)


def test_more_children_than_the_law_has_ids_never_divide_by_nothing() -> None:
    for rule in RULES:
        out = judge([-1, 0, 0, 0], [9, 0, 1, 2], [P], draft=[[1.0, 0.0, 0.0]], row=[-1, 0, 0, 0],
                    u=0.9, z=0.5, rule=rule)  # fmt: skip
        tokens, path, status = emitted(out)
        assert (path, status) == ([0], ZERO_Q)
        assert tokens in ([1], [2])
    # Node 1 enters with 0.3; its first child leaves Z = 0.3 * 0.7, the impossible one all of it:
    # h = 0.21 / 0.91.
    for u, path in ((0.23, [0, 1]), (0.2309, [0])):
        out = judge([-1, 0, 1, 1], [9, 0, 0, 1], [P], draft=[[1.0, 0.0, 0.0]], row=[-1, -1, 0, 0],
                    u=[0, u, 0.9, 0.9], rule="block")  # fmt: skip
        assert emitted(out)[1] == path


@pytest.mark.parametrize("rule", RULES)
def test_draft_ids_beyond_the_target_and_without_a_column(rule: str) -> None:
    wide = [0.3, 0.1, 0.1, 0.5]
    # Node 1 is beyond: rejected, but its mass leaves q: then q(1) = 0.1 / 0.5 and b = 1.
    out = judge([-1, 0, 0], [9, 3, 1], [P], draft=[wide], row=[-1, 0, 0], u=0.9, rule=rule)
    assert emitted(out)[1:] == ([0, 2], OK)
    # Id 2 has no column: it cannot have been drawn, but may be a fixed child.
    arguments: dict[str, Any] = {"draft": [[0.5, 0.5]], "map_to_draft": [1, 0, -1], "rule": rule}
    out = judge([-1, 0, 0], [9, 2, 0], [P], row=[-1, 0, 0], u=[0, 0, 0.9], z=0.9, **arguments)
    assert emitted(out)[2] == ZERO_Q
    out = judge([-1, 0, 0], [9, 2, 0], [P], row=[-1, -1, 0], u=[0, 0.29, 0.9], **arguments)
    assert emitted(out)[1:] == ([0, 1], OK)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("parents", "max_depth"),
    [
        ([-1, 0, 3, 2], 3),  # a cycle
        ([-1, 1, 0, 0], 3),
        ([-1, 2, 0, 0], 3),  # behind its child
        ([-1, 0, -1, 0], 3),  # two roots
        ([-1, 0, 9, 0], 3),
        ([-1, 0, -2, 0], 3),
        ([0, 0, 0, 0], 3),
        ([-1, 0, 1, 2], 2),  # too deep
    ],
    ids=str,
)
def test_malformed_trees_are_judged_as_a_root_alone(
    parents: list[int], max_depth: int, rule: str
) -> None:
    arguments: dict[str, Any] = {"u": 0.0, "z": 0.69, "rule": rule, "max_depth": max_depth}
    out = judge(parents, [9, 0, 0, -8], [P], **arguments)
    assert emitted(out) == ([1], [0], BAD_TREE)
    out = judge(parents, [9, 0, 0, 0], [P], target_row=[4, 0, 0, 0], **arguments)
    assert emitted(out) == ([PAD_TOKEN], [0], BAD_TREE | INVALID_TARGET)
    out = judge(parents, [9, 0, 0, 0], [P], num_nodes=0, **arguments)
    assert (out.path[0, 0], out.status[0]) == (-1, OK)
    draft = Draft(torch.tensor([[9, 5, 5, -8]]), torch.tensor([7]), torch.tensor([parents]))
    out = reference.match(draft, torch.tensor([[5, 5, 5, 5]]), max_depth=max_depth)
    assert emitted(out) == ([5], [0], BAD_TREE)


def test_what_lies_behind_num_nodes_is_not_read() -> None:
    out = judge([-1, 0, 7], [9, 1, 0], [P], num_nodes=2, u=0.0, max_depth=1)
    assert emitted(out)[1:] == ([0, 1], OK)


@pytest.mark.parametrize("rule", RULES)
def test_a_chain_given_as_parents_is_a_chain_bit_for_bit(rule: str) -> None:
    """B110: also with faults and padding inside."""
    for seed in range(12):
        case = Case(6, 4, 7, drafts="mixed", draft_vocab=(0, 9, 4)[seed % 3], seed=seed)
        step = make_step(case._replace(is_mapped=case.draft_vocab == 4))
        tokens = step.draft.tokens.clone()
        tokens[torch.rand(tokens.shape) < 0.05] = PAD_TOKEN
        tokens[torch.rand(tokens.shape) < 0.05] = -4
        chain = step.draft._replace(tokens=tokens)
        parents = torch.arange(-1, 4, dtype=torch.int32).expand(6, 5)
        for max_depth in (4, 7):
            options: dict[str, Any] = {"max_depth": max_depth}
            plain = step._replace(draft=chain).accept(reference, rule, **options)
            as_tree = chain._replace(parents=parents)
            assert_equal(step._replace(draft=as_tree).accept(reference, rule, **options), plain)
            own = torch.randint(7, (6, 5))
            assert_equal(
                reference.match(as_tree, own, **options), reference.match(chain, own, **options)
            )


@pytest.mark.parametrize("rule", RULES)
def test_a_request_does_not_depend_on_its_neighbours(rule: str) -> None:
    """B112: different trees, one malformed, one absent, one a root alone; greedy and sampled."""
    step = make_step(Case(6, 4, 6, filters="none", seed=3))
    parents = torch.tensor(
        [[-1, 0, 0, 1, 2], [-1, 0, 9, 0, 0], [-1, 0, 0, 0, 0], [-1, 0, 1, 1, 3], [-1, 0, 1, 2, 3],
         [-1, 0, 0, 0, 1]], dtype=torch.int32)  # fmt: skip
    num_nodes = torch.tensor([5, 0, 1, 5, 4, 5], dtype=torch.int32)
    row = step.draft.row
    assert row is not None
    shared = torch.where(row[:, 1:] >= 0, row[:, 1:2], -1)  # one law for all sampled siblings
    row = torch.cat([row[:, :1], shared], dim=1)
    draft = step.draft._replace(parents=parents, num_nodes=num_nodes, row=row)
    whole = step._replace(draft=draft).accept(reference, rule)
    for order in (list(range(6))[::-1], *([b] for b in range(6))):
        few = draft._replace(
            tokens=draft.tokens[order],
            num_nodes=num_nodes[order],
            parents=parents[order],
            row=row[order],
        )
        part = step._replace(
            draft=few,
            target_row=step.target_row[order],
            accept_coins=step.accept_coins[order],
            final_coins=step.final_coins[order],
        )
        for field, expected in zip(part.accept(reference, rule), whole, strict=True):
            assert torch.equal(field, expected[order])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", ["chain", "star", "binary"])
def test_trees_of_1024_nodes(shape: str, rule: str) -> None:
    nodes = 1024
    parents = {
        "chain": list(range(-1, nodes - 1)),
        "star": [-1] + [0] * (nodes - 1),
        "binary": [-1, *((node - 1) // 2 for node in range(1, nodes))],
    }[shape]
    tokens = [(node + 1) % 2 for node in range(nodes)]  # siblings of a binary tree: 0, then 1
    target = [[0.0, 1.0]]
    out = judge(parents, tokens, target, u=0.5, rule=rule, max_depth=nodes)
    path = emitted(out)[1]
    expected = {"chain": [0], "star": [0, 2], "binary": [0, 2, 6, 14, 30, 62, 126, 254, 510, 1022]}
    assert path == expected[shape]
    always = judge(parents, [1] * nodes, target, u=LAST_COIN, rule=rule, max_depth=nodes)
    assert int(always.accepted_lens[0]) == {"chain": 1023, "star": 1, "binary": 10}[shape]


@pytest.mark.parametrize("rule", RULES)
def test_a_vanished_residual_falls_back_to_p_without_the_rejected_ids(rule: str) -> None:
    """Rows whose sum rounding made smaller than 1, exaggerated."""
    p, q = [0.5, 0.25, 0.0], [0.8, 0.3, 0.0]
    arguments: dict[str, Any] = {"draft": [q], "rule": rule}
    out = judge([-1, 0], [9, 0], [p], row=[-1, 0], u=0.9, z=0.0, **arguments)
    assert emitted(out)[0] == [1]
    out = judge([-1, 0, 0], [9, 0, 1], [p], row=[-1, 0, 0], u=LAST_COIN, z=0.0, **arguments)
    assert emitted(out)[0] == [0]  # nothing else is left


# match


def test_match_walks_to_the_first_child_that_equals() -> None:
    parents = torch.tensor([[-1, 0, 0, 0, 2, 2]])
    tokens = torch.tensor([[9, 4, 5, 5, PAD_TOKEN, -3]])
    draft = Draft(tokens, torch.tensor([6]), parents)

    def found(own: list[int], **changes: Any) -> tuple[list[int], list[int], int]:
        out = reference.match(draft._replace(**changes), torch.tensor([own]), max_depth=2)
        return emitted(out)

    assert found([5, 0, 7, 8, 0, 0]) == ([5, 7], [0, 2], INVALID_DRAFT)
    assert found([4, 6, 7, 8, 0, 0]) == ([4, 6], [0, 1], OK)
    assert found([8, 6, 7, 8, 0, 0]) == ([8], [0], OK)
    assert found([-1, 6, 7, 8, 0, 0]) == ([PAD_TOKEN], [0], INVALID_TARGET)
    assert found([5, 0, -1, 8, 0, 0]) == ([5, PAD_TOKEN], [0, 2], INVALID_TARGET | INVALID_DRAFT)
    assert found([5, 0, 7, 8, 0, 0], num_nodes=torch.tensor([2])) == ([5], [0], OK)


# Several children


def children_law(p: list[float], k: int, **options: Any) -> dict[tuple[int, ...], float]:
    """Return the joint law of the children that `sample` draws, summed over all coins."""
    law: Counter[tuple[int, ...]] = Counter()

    def draw() -> tuple[int, ...]:
        coins = torch.full((1, k), 0.5, dtype=torch.float64)
        rows = torch.tensor([p], dtype=torch.float64)
        return tuple(reference.sample(rows, None, coins=coins, k=k, **options)[0].tolist())

    for weight, tokens in outcomes(draw):
        law[tokens] += weight
    return law


def test_children_are_drawn_one_after_another() -> None:
    law = children_law(Q, 3)
    assert len(law) == 6
    for (x, y, _), weight in law.items():
        assert weight == pytest.approx(Q[x] * Q[y] / (1.0 - Q[x]), abs=1e-15)
    law = children_law(Q, 2, replacement=True)
    assert law == pytest.approx({(x, y): Q[x] * Q[y] for x in range(3) for y in range(3)})
    law = children_law(Q, 2, excluded=torch.tensor([[1, -1, 7, -9]]))
    assert law == pytest.approx({(0, 2): 6 / 7, (2, 0): 1 / 7})


def test_missing_children_are_padding_at_the_end() -> None:
    assert children_law([0.5, 0.0, 0.5], 3) == {(0, 2, -1): 0.5, (2, 0, -1): 0.5}
    assert children_law([1.0, 0.0], 3, replacement=True) == {(0, 0, 0): 1.0}
    assert children_law([0.5, 0.5], 2, excluded=torch.tensor([[0, 1]])) == {(-1, -1): 1.0}
    noise = torch.tensor([1]), torch.tensor([2])
    assert reference.sample(torch.tensor([[0.0, 1.0]]), None, noise=noise, k=4).tolist() == [
        [1, -1, -1, -1]
    ]


def test_greedy_and_invalid_rows_have_at_most_one_child() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [1.0, INF, 2.0]])
    law = reference.row_law(logits, SamplingParams.make(0.0), torch.zeros(2).int())
    coins = torch.full((2, 2), 0.9, dtype=torch.float64)
    sample = reference.sample
    assert sample(logits, law, coins=coins, k=2).tolist() == [[1, -1], [-1, -1]]
    again = sample(logits, law, coins=coins, k=2, replacement=True)
    assert again.tolist() == [[1, 1], [-1, -1]]
    excluded = torch.tensor([[1], [1]])
    assert sample(logits, law, coins=coins, k=2, excluded=excluded).tolist() == [[-1, -1]] * 2


def test_noise_gives_the_earliest_arrivals_in_order() -> None:
    p = torch.rand(5, 40, dtype=torch.float64)
    p[:, ::3] = 0.0
    seeds, positions = torch.arange(5), torch.arange(5) * 7
    excluded = torch.randint(40, (5, 3))
    drawn = reference.sample(p, None, noise=(seeds, positions), k=6, excluded=excluded)
    for row in range(5):
        arrival = random.exponential(seeds[row], positions[row], torch.arange(40)) / p[row]
        arrival[excluded[row]] = INF
        order = sorted(range(40), key=lambda x: (float(arrival[x]), x))
        assert drawn[row].tolist() == order[:6]
    one = reference.sample(p, None, noise=(seeds, positions))
    assert torch.equal(one, reference.sample(p, None, noise=(seeds, positions), k=3)[:, :1])


def test_one_child_is_drawn_as_ever() -> None:
    rows, coins = torch.rand(9, 20).softmax(1), torch.rand(9, dtype=torch.float64)
    single = reference.sample(rows, None, coins=coins)
    more = torch.stack([coins, coins.flip(0)], dim=1)
    assert torch.equal(single, reference.sample(rows, None, coins=more, k=2)[:, :1])


def test_tensors_handed_in_are_left_alone() -> None:
    """B016: the residual is made in place of the caller's row."""
    target, draft = torch.tensor([P, P]).double(), torch.tensor([Q]).double()
    before = target.clone(), draft.clone()
    tree = Draft(torch.tensor([[9, 0, 1]]), torch.tensor([3]), torch.tensor([[-1, 0, 0]]), draft,
                 None, torch.tensor([[-1, 0, -1]]))  # fmt: skip
    coins, rows = torch.full((1, 3), 0.9, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.int32)
    for rule in RULES:
        reference.accept(tree, target, None, rows, coins, coins[:, 0], rule=rule, max_depth=1)
    reference.sample(draft, None, coins=coins[:, :2], k=2, excluded=torch.tensor([[1]]))
    assert all(torch.equal(x, y) for x, y in zip(before, (target, draft), strict=True))


def test_results_are_max_depth_wide() -> None:
    out = judge([-1, 0], [9, 1], [P], u=0.0, max_depth=6)
    assert out.output_tokens.shape == out.path.shape == (1, 7)
