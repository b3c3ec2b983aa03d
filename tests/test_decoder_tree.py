"""The loop over trees of drafts: equal to plain decoding, its caches right after every round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import BestFirst, DecodingState, DraftModelProposer, NgramProposer
from spec_kernels.proposers.levels import CHILDREN
from spec_kernels.stats import AcceptanceMatrix, DecoderStats
from spec_kernels.targets import TableTarget
from spec_kernels.tree import optimal_tree, pack_parents
from spec_kernels.types import PAD_TOKEN, Draft
from tests.test_decoder import ADJUSTED, Flaky, snapshot, tokens_of
from tests.tiny_models import FixedProposer, assert_holds, gpt, plain

RULES = ("block", "token", "coupled")
PROMPTS = ([1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8, 9, 7])
UNEVEN = [-1, 0, 0, 0, 1, 1, 3, 4, 4, 6, 7]
SUCCESSOR = torch.eye(10).roll(1, dims=1)  # id x is followed by x + 1


class RandomTrees(FixedProposer):
    """Fixed drafts on random trees; every other one holds the known text on some path."""

    def __init__(self, known: list[list[int]], nodes: int = 12) -> None:
        super().__init__(lambda row, committed, count: [])
        self.known, self.nodes = known, nodes

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        trees, tokens = [], torch.full((len(limits), self.nodes), PAD_TOKEN)
        for row, limit in enumerate(limits.tolist()):
            if limit < 0:
                trees.append([])
                continue
            length, parents, depth = int(state.lens[row]), [-1], [0]
            for node in range(1, self.nodes):
                above = int(torch.randint(max(0, node - 3), node, (1,)))
                above = above if depth[above] < gamma else 0
                parents.append(above)
                depth.append(depth[above] + 1)
            trees.append(parents)
            tokens[row] = torch.randint(31, (self.nodes,))
            tokens[row, 0] = state.tokens[row, length - 1]
            for node in range(1, self.nodes, 2):
                text = self.known[row][length + depth[node] - 1 :]
                tokens[row, node] = text[0] if text else 0
        parents, num_nodes = pack_parents(trees, nodes=self.nodes)
        return Draft(tokens, num_nodes, parents)


def proposers(known: list[list[int]]) -> dict[str, object]:
    """One of every kind; those of the draft model are close enough to be accepted often."""
    made: dict[str, object] = {
        "ngram": NgramProposer(nodes=9),
        "random": RandomTrees(known),
        "best-first": DraftModelProposer(gpt(), tree=BestFirst(8, depth=4, expanded=2, children=3)),
        "uneven": DraftModelProposer(gpt(), temperature=0.9, tree=UNEVEN, children="mixed"),
    }
    for children in CHILDREN:
        made[children] = DraftModelProposer(gpt(seed=1), tree=[3, 2, 1], children=children)
    return made


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_greedy_equals_plain_greedy(gamma: int, batch: int) -> None:
    target = gpt()
    requests = [Request(prompt, max_new_tokens=10 + i) for i, prompt in enumerate(PROMPTS[:batch])]
    expected = tokens_of(plain(target, requests))
    known = [[*r.prompt, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    for index, (name, proposer) in enumerate(proposers(known).items()):
        decoder = Decoder(target, proposer, gamma=gamma, rule=RULES[(gamma + index) % 3])
        outputs = decoder.generate(requests)
        assert tokens_of(outputs) == expected
        if name in ("best-first", "uneven"):
            assert outputs[0].stats.steps <= -(-10 // (min(gamma, 4) + 1))


def test_coupled_output_is_that_of_plain_decoding() -> None:
    target = gpt()
    requests = [
        Request(PROMPTS[0], max_new_tokens=11, temperature=1.0, seed=3),
        Request(PROMPTS[1], max_new_tokens=8, temperature=0.6, top_p=0.8, seed=4),
        Request(PROMPTS[2], max_new_tokens=11, temperature=1.4, top_k=5, min_p=0.01, seed=5),
    ]
    expected = tokens_of(plain(target, requests, rule="coupled"))
    known = [[*r.prompt, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    for proposer in proposers(known).values():
        outputs = Decoder(target, proposer, gamma=3, rule="coupled").generate(requests)
        assert tokens_of(outputs) == expected


class TooDeep(FixedProposer):
    """The right drafts, deeper than anybody asked for."""

    def __init__(self) -> None:
        super().__init__(lambda row, committed, count: [])

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        tokens = torch.cat([(state.roots + n) % 10 for n in (0, 1, 2, 3, 0)], 1)
        parents = torch.tensor([[-1, 0, 1, 2, 0]], dtype=torch.int32).expand(len(limits), -1)
        return Draft(tokens, torch.where(limits >= 0, 5, 0).int(), parents)


@pytest.mark.parametrize("budgets", [(2, 2), (2, 3), (7, 1)])
def test_drafts_that_are_too_deep_exceed_no_budget(budgets: tuple[int, ...]) -> None:
    requests = [Request([0, 1], max_new_tokens=budget) for budget in budgets]
    outputs = Decoder(TableTarget(SUCCESSOR), TooDeep(), gamma=3).generate(requests)
    for output, budget in zip(outputs, budgets, strict=True):
        assert output.tokens == tuple(n % 10 for n in range(2, 2 + budget))


@pytest.mark.parametrize("part", ["spec_kernels.targets.attention", "spec_kernels.nn.verifier"])
def test_flattened_indices_as_positions_are_caught(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flattened(parents: Tensor, num_nodes: Tensor) -> Tensor:
        return torch.arange(parents.shape[1], dtype=torch.int32).expand(parents.shape)

    monkeypatch.setattr(f"{part}.depths", flattened)
    target = gpt()
    requests = [Request(PROMPTS[0], max_new_tokens=16, temperature=1.0, seed=3)]
    expected = tokens_of(plain(target, requests, rule="coupled"))
    proposer = RandomTrees([[*PROMPTS[0], *expected[0]]])
    outputs = Decoder(target, proposer, gamma=4, rule="coupled").generate(requests)
    assert tokens_of(outputs) != expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("children", "temperature"),
    [("sampled", 1.0), ("replacement", 1.0), ("mixed", 0.0), ("fixed", 0.0)],
)
def test_a_copy_of_the_target_is_accepted_to_its_full_depth(
    children: str, temperature: float, rule: str
) -> None:
    """And both caches equal a fresh prefill after every round."""
    target = gpt()
    proposer = DraftModelProposer(target, tree=UNEVEN, children=children)
    decoder = Decoder(target, proposer, gamma=4, rule=rule)
    requests = [
        Request([1, 2, 3], max_new_tokens=13, temperature=temperature, top_k=9, seed=1),
        Request([4], max_new_tokens=9, temperature=temperature, top_p=0.9, seed=2),
    ]
    run = decoder.start(requests)
    while not run.is_done:
        run.step()
        check_caches(run, target, target)
    # the first child of every node in UNEVEN has children of its own down to depth 4
    assert [row.stats.steps for row in run._rows] == [3, 2]
    assert [row.stats.accepted for row in run._rows] == [10, 7]


def check_caches(run, target, model) -> None:
    """Both caches hold what a fresh prefill of the committed tokens would leave; the target's is
    empty where a request has ended."""
    for row, length in enumerate(run.state.lens.tolist()):
        if run._rows[row].is_done:
            assert run.cache.context_lens[row] == 0
            continue
        committed = run.state.tokens[row, :length].tolist()
        assert_holds(target, run.cache, row, committed[:-1])
        drafted = int(run.session.cache.context_lens[row])
        assert length - 2 <= drafted <= length - 1
        assert_holds(model, run.session.cache, row, committed[:drafted])


@pytest.mark.parametrize(
    "tree", [[2, 2, 1], UNEVEN, BestFirst(9, depth=3, expanded=2, children=3)], ids=str
)
def test_caches_equal_a_fresh_prefill_when_drafts_are_rejected(tree: object) -> None:
    """Ragged: requests with other prompts and budgets, so that trees are cut at other depths."""
    target, model = gpt(), gpt()
    requests = [
        Request([row, 2, 3][: row + 1], max_new_tokens=9 + row, temperature=1.2, seed=row)
        for row in range(3)
    ]
    proposer = DraftModelProposer(model, tree=tree, temperature=0.6)
    run = Decoder(target, proposer, gamma=3).start(requests)
    moved = set()
    while not run.is_done:
        before = [row.length for row in run._rows]
        run.step()
        check_caches(run, target, model)
        moved |= {row.length - b - 1 for row, b in zip(run._rows, before, strict=True)}
    assert 0 in moved
    assert max(moved) >= 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["ngram", "best-first", "sampled", "mixed"])
def test_a_request_does_not_depend_on_its_neighbours(name: str, rule: str) -> None:
    target, proposer = gpt(), proposers([])[name]
    mine = Request(PROMPTS[0], max_new_tokens=9, temperature=0.9, top_p=0.95, seed=7)
    others = [
        Request([4, 4, 4, 4], max_new_tokens=3, seed=9, temperature=1.5),
        Request(list(range(20)), max_new_tokens=12, repetition_penalty=1.3),
    ]
    decoder = Decoder(target, proposer, gamma=4, rule=rule)
    (alone,) = decoder.generate([mine])
    for slot in (0, 2):
        again = decoder.generate([*others[:slot], mine, *others[slot:]])[slot]
        assert again.tokens == alone.tokens
        assert again.stats.node_accepted == alone.stats.node_accepted
        assert again.stats.matrix == alone.stats.matrix


@pytest.mark.parametrize("place", ["draft-forward", "forward", "commit"])
def test_a_failed_round_leaves_everything_as_before(place: str) -> None:
    target, model = Flaky(gpt()), Flaky(gpt())
    proposer = Flaky(DraftModelProposer(model, temperature=0.8, tree=[2, 2]))
    decoder = Decoder(target, proposer, gamma=4)
    requests = [
        Request([1, 2, 3], max_new_tokens=14, temperature=1.0, seed=3, presence_penalty=0.5),
        Request([4], max_new_tokens=10, temperature=1.0, seed=4),
    ]
    expected = tokens_of(decoder.generate(requests))
    run = decoder.start(requests)
    run.step()
    before = snapshot(run)
    parts = {"draft-forward": model, "forward": target, "commit": proposer.session}
    parts[place].fuse = 1 if place == "forward" else 2
    with pytest.raises(RuntimeError, match="planted"):
        run.step()
    assert snapshot(run) == before
    outputs = {}
    while not run.is_done:
        outputs.update((c.request, c.generation) for c in run.step() if c.generation)
    assert [outputs[row].tokens for row in range(2)] == expected


@pytest.mark.parametrize("name", ADJUSTED)
def test_penalties_count_the_path_to_a_node(name: str) -> None:
    """Not the tokens of cousins; and the draft model adjusts its own laws likewise."""
    target = gpt()
    requests = [
        Request(PROMPTS[0], max_new_tokens=12, **ADJUSTED[name]),
        Request(PROMPTS[2], max_new_tokens=9),
    ]
    expected = tokens_of(plain(target, requests))
    known = [[*r.prompt, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    makers = {
        "random": RandomTrees(known),
        "copy": DraftModelProposer(target, tree=[2, 2, 2]),
        "best": DraftModelProposer(target, tree=BestFirst(6, depth=3, expanded=2)),
    }
    for kind, proposer in makers.items():
        outputs = Decoder(target, proposer, gamma=3).generate(requests)
        assert tokens_of(outputs) == expected
        if kind == "copy":
            assert outputs[0].stats.steps == 3


@pytest.mark.parametrize("batch", [1, 2])
def test_faulty_branches_spoil_nothing_else(batch: int) -> None:
    """A token whose K/V are NaN stands in every tree, beside the right one."""
    clean = gpt()
    requests = [Request(p, max_new_tokens=12) for p in PROMPTS[:batch]]
    expected = tokens_of(plain(clean, requests))
    bad = next(
        x
        for x in range(31)
        if all(x not in [*p, *t] for p, t in zip(PROMPTS, expected, strict=False))
    )
    target = gpt()
    with torch.no_grad():
        target.module.token[bad] = float("nan")

    class Beside(RandomTrees):
        def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
            draft = super().propose(state, limits, gamma)
            real = (draft.tokens >= 0) & (torch.arange(self.nodes) % 2 == 0)
            real[:, 0] = False
            return draft._replace(tokens=torch.where(real, bad, draft.tokens))

    known = [[*r.prompt, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    outputs = Decoder(target, Beside(known), gamma=3).generate(requests)
    assert tokens_of(outputs) == expected
    assert outputs[0].stats.accepted > 0


class OneTree(FixedProposer):
    """The same tree every round; each node holds its parent's token plus its entry in `steps`."""

    def __init__(self, parents: list[int], steps: list[int]) -> None:
        super().__init__(lambda row, committed, count: [])
        self.parents, self.steps = parents, steps

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        rows = []
        for root in state.roots[:, 0].tolist():
            tokens = [root]
            for parent, step in zip(self.parents[1:], self.steps[1:], strict=True):
                tokens.append((tokens[parent] + step) % 10)
            rows.append(tokens)
        trees = [self.parents if limit >= 0 else [] for limit in limits.tolist()]
        parents, num_nodes = pack_parents(trees, nodes=len(self.parents))
        return Draft(torch.tensor(rows), num_nodes, parents)


def test_counters_of_a_tree() -> None:
    """The right token is the second child of the root, then its first child."""
    proposer = OneTree([-1, 0, 0, 1, 2, 2], [0, 5, 1, 1, 1, 4])
    run = Decoder(TableTarget(SUCCESSOR), proposer, gamma=4).start([Request([0])])
    run.step()
    run.step()
    stats = run._rows[0].stats
    assert (stats.steps, stats.drafted, stats.accepted, stats.emitted) == (2, 10, 4, 6)
    assert (stats.drafted_at, stats.accepted_at) == ([4, 6], [2, 2])
    assert stats.node_drafted == [2] * 5
    assert stats.node_accepted == [0, 2, 0, 2, 0]
    assert stats.matrix == AcceptanceMatrix([[2, 2], [2, 2], []], [[0, 2], [2, 0], []])
    assert stats.matrix.expected(proposer.parents) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert sum(stats.matrix.expected(proposer.parents)) == stats.mean_accepted_length


def test_nothing_counts_behind_a_stop_or_below_a_limit() -> None:
    proposer = OneTree([-1, 0, 0, 1, 2, 2], [0, 5, 1, 1, 1, 4])
    decoder = Decoder(TableTarget(SUCCESSOR), proposer, gamma=4, eos_ids=[1])
    (output,) = decoder.generate([Request([0])])
    assert output.tokens == (1,)
    assert (output.stats.drafted_at, output.stats.accepted_at) == ([2], [1])
    decoder = Decoder(TableTarget(SUCCESSOR), proposer, gamma=4)
    outputs = decoder.generate([Request([0], max_new_tokens=n) for n in (1, 2, 5)])
    assert tokens_of(outputs) == [(1,), (1, 2), (1, 2, 3, 4, 5)]
    assert [output.stats.drafted_at for output in outputs] == [[], [2], [4, 3]]


def test_malformed_nodes_were_not_tested() -> None:
    class Malformed(OneTree):
        def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
            draft = super().propose(state, limits, gamma)
            draft.tokens[:, 1] = 99
            draft.tokens[:, 5] = PAD_TOKEN
            return draft

    proposer = Malformed([-1, 0, 0, 1, 2, 2], [0, 5, 1, 1, 1, 4])
    run = Decoder(TableTarget(SUCCESSOR), proposer, gamma=4).start([Request([0])])
    (chunk,) = run.step()
    assert chunk.tokens == (1, 2, 3)
    assert run._rows[0].stats.node_drafted == [0, 1, 0, 1]


def test_the_matrix_is_saved_and_feeds_the_optimal_tree(tmp_path: Path) -> None:
    """Measured with a wide tree, it predicts what the best smaller one then gives."""
    table = 1.5 * torch.randn(12, 12)
    target, model = TableTarget(table), TableTarget(table + 0.8 * torch.randn(12, 12))
    requests = [
        Request([seed % 12], max_new_tokens=40, temperature=1.0, seed=seed) for seed in range(40)
    ]

    def measure(tree: object, gamma: int) -> DecoderStats:
        proposer = DraftModelProposer(model, tree=tree)
        decoder = Decoder(target, proposer, gamma=gamma, rule="token")
        return DecoderStats.total(output.stats for output in decoder.generate(requests))

    measured = measure([3, 3], 2)
    assert sum(measured.node_accepted) == measured.accepted
    measured.matrix.save(tmp_path / "matrix.json")
    matrix = AcceptanceMatrix.load(tmp_path / "matrix.json")
    assert matrix == measured.matrix
    best = optimal_tree(matrix.rates(), nodes=6)
    assert sum(matrix.expected(best.parents)) == pytest.approx(best.expected_tokens)
    assert measure(best.parents, 2).mean_accepted_length == pytest.approx(
        best.expected_tokens, rel=0.05
    )
    with pytest.raises(ValueError, match="node 1 has parent 4"):
        matrix.expected([-1, 4])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"tried": [[1]]}',
        '{"tried": [[1]], "accepted": [[2]]}',
        '{"tried": 3, "accepted": 3}',
        '{"tried": [3], "accepted": [3]}',
        '{"tried": [["1"]], "accepted": [["1"]]}',
        '{"tried": [[1.5]], "accepted": [[0.5]]}',
        '{"tried": {"a": 1}, "accepted": {"a": 1}}',
    ],
)
def test_files_without_counts_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json must hold"):
        AcceptanceMatrix.load(path)


def test_totals_add_up_trees() -> None:
    stats = DecoderStats()
    stats.count_tree([-1, 0, 0, 1], [0, 2], 2)
    stats.count(drafted=1, accepted=1, emitted=2)
    total = DecoderStats.total([stats, stats])
    assert total.matrix == AcceptanceMatrix([[4, 2], []], [[2, 2], []])
    assert total.node_drafted == [4, 2, 2]
    assert total.node_accepted == [2, 2, 0]
