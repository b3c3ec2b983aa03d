"""The module: the three rules, any layout of rows, and independence of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import (
    INVALID_DRAFT,
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    Acceptance,
    Draft,
    SamplingParams,
    Verifier,
    accept,
    coins,
    ops,
    row_law,
    sample,
)

RULES = ("block", "token", "coupled")
BATCH, NODES, VOCAB = 4, 4, 40
ROWS = BATCH * NODES


class Problem:
    """Drafts near the target: some are accepted, some not. Request 2 is absent."""

    def __init__(self, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(11)
        self.params = SamplingParams.make([0.9, 0.0, 1.0, 1.4], top_k=[0, 0, 5, 30])
        self.logits = torch.randn(ROWS, vocab, generator=generator)
        draft_logits = self.logits + 0.3 * torch.randn(ROWS, vocab, generator=generator)
        request = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(NODES)
        law = row_law(draft_logits, self.params, request)
        draws = torch.rand(ROWS, dtype=torch.float64, generator=generator)
        drawn = sample(draft_logits, law, coins=draws).view(BATCH, NODES)
        # The draft at node i + 1 is drawn from row i.
        self.row = torch.arange(ROWS, dtype=torch.int32).view(BATCH, NODES)
        self.draft = Draft(
            drawn.roll(1, dims=1),
            torch.tensor([4, 4, 0, 3], dtype=torch.int32),
            None,
            draft_logits,
            law,
            (self.row - 1).contiguous(),
        )
        self.draft.row[:, 0] = -1
        self.seeds = torch.tensor([3, 1 << 40, -5, 9])
        self.positions = torch.tensor([17, 4, 90, 2**33])

    def verify(self, verifier: Verifier, **changes: Any) -> Acceptance:
        arguments = {
            "draft": self.draft,
            "target_logits": self.logits,
            "params": self.params,
            "seeds": self.seeds,
            "root_positions": self.positions,
        }
        result: Acceptance = verifier(**(arguments | changes))
        return result

    def coins_then_accept(
        self, rule: str, offset: int = 0, *, max_depth: int = NODES - 1, **changes: Any
    ) -> Acceptance:
        """Return what the verifier should, with seeds moved by an offset."""
        accept_coins, final_coins = coins(self.seeds + offset, self.positions, NODES)
        arguments: dict[str, Any] = {
            "draft": self.draft,
            "target_logits": self.logits,
            "target_law": self.params,
            "target_row": self.row,
            "accept_coins": accept_coins,
            "final_coins": final_coins,
        }
        return accept(**(arguments | changes), rule=rule, max_depth=max_depth)


@pytest.fixture
def problem() -> Problem:
    return Problem()


def assert_equal(got: Acceptance, want: Acceptance) -> None:
    for name, a, b in zip(Acceptance._fields, got, want, strict=True):
        assert torch.equal(a, b), (name, a, b)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_it_is_coins_then_accept(rule: str, problem: Problem) -> None:
    want = problem.coins_then_accept(rule)
    assert_equal(problem.verify(Verifier(rule)), want)
    assert 0 < int(want.accepted_lens.sum()) < 8  # the problem is neither easy nor hopeless


TREE = torch.tensor([[-1, 0, 0, 2]] * BATCH, dtype=torch.int32)
DEPTH = torch.tensor([0, 1, 1, 2])


def as_tree(problem: Problem) -> Draft:
    """Return drafts of a root with two children, drawn with replacement from laws far from the
    target's, the second of which has a child."""
    logits = problem.draft.logits + torch.randn(ROWS, VOCAB)
    request = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(NODES)
    law = row_law(logits, problem.params, request)
    draws = torch.rand(ROWS, 2, dtype=torch.float64)
    siblings = sample(logits, law, coins=draws, k=2, replacement=True)[::NODES]
    tokens = torch.cat([problem.draft.tokens[:, :1], siblings, problem.draft.tokens[:, 3:]], 1)
    row = problem.draft.row.clone()
    row[:, 2] = row[:, 1]
    return Draft(tokens, problem.draft.num_nodes, TREE, logits, law, row)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("replacement", [False, True])
def test_a_tree_is_coins_then_accept(rule: str, replacement: bool, problem: Problem) -> None:
    verifier = Verifier(rule, replacement=replacement)
    kept, differ = 0, 0
    for offset in range(60):
        draft = as_tree(problem)
        seeds = problem.seeds + offset
        want, other = (
            problem.coins_then_accept(rule, offset, draft=draft, replacement=mode, max_depth=2)
            for mode in (replacement, not replacement)
        )
        assert_equal(problem.verify(verifier, draft=draft, seeds=seeds, max_depth=2), want)
        kept += int((want.path == 2).sum())
        differ += int((want.status != other.status).sum())
    assert kept > 0
    assert differ > 0


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("is_tree", [False, True])
def test_greedy_requests_need_no_coins(
    rule: str, is_tree: bool, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the coins are, and whether drafts are good, impossible, or judged by no law."""
    problem.params = SamplingParams.make([0.0, 1e-6, 0.0, 0.0])
    statuses, kept = set(), 0
    for offset in range(60):
        draft = as_tree(problem) if is_tree else problem.draft
        logits = problem.logits.clone()
        best = logits.argmax(1).view(BATCH, NODES)
        draft.tokens[0, 1] = best[0, 0]
        draft.tokens[1, 1 + is_tree] = VOCAB + 3 if offset % 2 else best[1, 0]
        if offset % 3 == 0:
            logits[3 * NODES, 5] = torch.nan
        want = problem.coins_then_accept(rule, offset, draft=draft, target_logits=logits)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "coins", None)
            got = problem.verify(Verifier(rule), draft=draft, target_logits=logits)
        assert_equal(got, want)
        statuses.update(want.status.tolist())
        kept += int(want.accepted_lens.sum())
    assert {OK, INVALID_TARGET, INVALID_DRAFT} <= statuses
    assert kept > 0


def test_coupled_trees_emit_what_plain_decoding_draws(problem: Problem) -> None:
    """Every node's noise is that of its depth: siblings and cousins share a position. The
    children stand for what follows the same token, so the rows of cousins are equal here."""
    request = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(NODES)
    law = row_law(problem.logits, problem.params, request)
    depths = [0] * 3
    for offset in range(20):
        seeds = problem.seeds + offset
        positions = (problem.positions[:, None] + DEPTH + 1).flatten()
        own = sample(problem.logits, law, noise=(seeds.repeat_interleave(NODES), positions))
        own = own.view(BATCH, NODES)
        # The second child is what the target draws; its child is now and then.
        tokens = problem.draft.tokens.clone()
        tokens[:, 1], tokens[:, 2] = (own[:, 0] + 1) % VOCAB, own[:, 0]
        if offset % 2:
            tokens[:, 3] = own[:, 2]
        draft = problem.draft._replace(tokens=tokens, parents=TREE)
        got = problem.verify(Verifier("coupled"), draft=draft, seeds=seeds)
        for b in (0, 1, 3):
            wide = int(draft.num_nodes[b]) == NODES and bool(tokens[b, 3] == own[b, 2])
            path = [0, 2, 3] if wide else [0, 2]
            depths[len(path) - 1] += 1
            emitted = [*tokens[b, path[1:]].tolist(), int(own[b, path[-1]])]
            assert got.output_tokens[b, : len(path)].tolist() == emitted
            assert got.path[b, : len(path)].tolist() == path
            assert int(got.accepted_lens[b]) == len(path) - 1
    assert min(depths[1:]) > 0


def test_the_rule_matters_and_block_is_the_default(problem: Problem) -> None:
    def outputs(verifier: Verifier) -> list[Any]:
        return [
            problem.verify(verifier, seeds=problem.seeds + i).output_tokens.tolist()
            for i in range(40)
        ]

    assert outputs(Verifier()) == outputs(Verifier("block"))
    assert outputs(Verifier("token")) != outputs(Verifier("block"))


def test_coupled_emits_what_plain_decoding_draws(problem: Problem) -> None:
    """Token by token, each drawn alone at its own position until it leaves the draft."""
    request = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(NODES)
    law = row_law(problem.logits, problem.params, request)
    positions = (problem.positions[:, None] + torch.arange(NODES) + 1).flatten()
    accepted = 0
    for offset in range(20):
        seeds = problem.seeds + offset
        noise = seeds.repeat_interleave(NODES), positions
        drawn = sample(problem.draft.logits, problem.draft.law, noise=noise).view(BATCH, NODES)
        draft = problem.draft._replace(tokens=drawn.roll(1, dims=1))
        got = problem.verify(Verifier("coupled"), draft=draft, seeds=seeds)
        for b in range(BATCH):
            plain = []
            for i in range(int(problem.draft.num_nodes[b])):
                r = slice(b * NODES + i, b * NODES + i + 1)
                noise = seeds[b : b + 1], problem.positions[b : b + 1] + i + 1
                token = sample(problem.logits[r], type(law)(*(t[r] for t in law)), noise=noise)
                plain.append(int(token))
                last = i + 1 == problem.draft.num_nodes[b]
                if last or plain[-1] != draft.tokens[b, i + 1]:
                    break
            accepted += max(len(plain) - 1, 0)
            assert got.output_tokens[b].tolist() == plain + [PAD_TOKEN] * (NODES - len(plain))
    assert accepted > 60


@pytest.mark.parametrize("rule", RULES)
def test_rows_may_lie_anywhere(rule: str, problem: Problem) -> None:
    """Packed in any order, with rows that nobody owns, and rubbish behind num_nodes."""
    want = problem.verify(Verifier(rule))
    order = torch.randperm(ROWS + 5)[:ROWS]
    logits = torch.full((ROWS + 5, VOCAB), float("nan"))
    logits[order] = problem.logits
    row = order.int().view(BATCH, NODES)
    behind = torch.arange(NODES) >= problem.draft.num_nodes[:, None]
    for rubbish in (-1, int(row[0, 0]), ROWS + 5, 2**31 - 1):
        target_row = torch.where(behind, rubbish, row).int()
        got = problem.verify(Verifier(rule), target_logits=logits, target_row=target_row)
        assert_equal(got, want)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("missing", [-1, -9, ROWS, 2**31 - 1])
def test_a_root_without_a_row_has_no_token(rule: str, missing: int, problem: Problem) -> None:
    want = problem.verify(Verifier(rule))
    target_row = problem.row.clone()
    target_row[1, 0] = missing
    got = problem.verify(Verifier(rule), target_row=target_row)
    assert got.output_tokens[1].tolist() == [PAD_TOKEN] * NODES
    assert got.status.tolist() == [0, INVALID_TARGET, 0, 0]
    others = torch.tensor([0, 2, 3])
    assert_equal(Acceptance(*(t[others] for t in got)), Acceptance(*(t[others] for t in want)))


@pytest.mark.parametrize("rule", RULES)
def test_a_request_does_not_see_its_neighbours(rule: str, problem: Problem) -> None:
    want = problem.verify(Verifier(rule))
    for b in range(BATCH):
        alone = slice(b, b + 1)
        got = Verifier(rule)(
            problem.draft._replace(
                tokens=problem.draft.tokens[alone],
                num_nodes=problem.draft.num_nodes[alone],
                row=problem.draft.row[alone],
            ),
            problem.logits,
            SamplingParams(*(t if t is None else t[alone] for t in problem.params)),
            problem.seeds[alone],
            problem.positions[alone],
            target_row=problem.row[alone],
        )
        assert_equal(got, Acceptance(*(t[alone] for t in want)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("max_depth", [0, 1, 6])
def test_max_depth_closes_the_chain(rule: str, max_depth: int, problem: Problem) -> None:
    result = problem.verify(Verifier(rule), max_depth=max_depth)
    assert result.output_tokens.shape == (BATCH, max_depth + 1)
    assert int(result.accepted_lens.max()) <= max_depth
    if max_depth == 6:
        assert_equal(
            problem.verify(Verifier(rule)),
            Acceptance(
                result.output_tokens[:, :NODES],
                result.accepted_lens,
                result.path[:, :NODES],
                result.status,
            ),
        )


@pytest.mark.parametrize("rule", RULES)
def test_a_narrower_draft_vocabulary_is_one_with_zeros(rule: str, problem: Problem) -> None:
    draft_to_target = torch.randperm(VOCAB)[:25]
    logits = problem.draft.logits[:, :25].contiguous()
    request = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(NODES)
    law = row_law(logits, problem.params, request)
    drawn = sample(logits, law, coins=torch.rand(ROWS, dtype=torch.float64)).view(BATCH, NODES)
    tokens = draft_to_target[drawn].roll(1, dims=1)
    wide = torch.full((ROWS, VOCAB), float("-inf"))
    wide[:, draft_to_target] = logits
    narrow = problem.draft._replace(tokens=tokens, logits=logits, law=law)
    spread = narrow._replace(logits=wide, law=row_law(wide, problem.params, request))
    mapped = Verifier(rule, draft_to_target=draft_to_target, vocab=VOCAB)
    for offset in range(10):
        seeds = problem.seeds + offset
        got = problem.verify(mapped, draft=narrow, seeds=seeds)
        assert_equal(got, problem.verify(Verifier(rule), draft=spread, seeds=seeds))


@pytest.mark.parametrize("rule", RULES)
def test_it_compiles_without_graph_breaks(rule: str, problem: Problem) -> None:
    verifier = Verifier(rule)
    compiled = torch.compile(verifier, backend="aot_eager", fullgraph=True)
    assert_equal(problem.verify(compiled), problem.verify(verifier))
    tree = as_tree(problem)
    assert_equal(problem.verify(compiled, draft=tree), problem.verify(verifier, draft=tree))


@pytest.mark.parametrize("rule", RULES)
def test_empty_batch(rule: str, problem: Problem) -> None:
    empty = problem.draft._replace(
        tokens=problem.draft.tokens[:0],
        num_nodes=problem.draft.num_nodes[:0],
        row=problem.draft.row[:0],
    )
    params = SamplingParams.make([], batch=0)
    seeds = problem.seeds[:0]
    for logits, row in ((problem.logits[:0], None), (problem.logits, problem.row[:0])):
        result = Verifier(rule)(empty, logits, params, seeds, seeds, target_row=row)
        assert [list(t.shape) for t in result] == [[0, NODES], [0], [0, NODES], [0]]


def test_nothing_is_saved_with_a_model() -> None:
    verifier = Verifier("token", draft_to_target=torch.tensor([2, 0]), vocab=3)
    assert verifier.state_dict() == {}
    assert repr(verifier) == "Verifier(rule='token')"
    assert repr(Verifier(replacement=True)) == "Verifier(rule='block', replacement=True)"
    moved: Tensor | None = verifier.to("meta").target_to_draft
    assert moved is not None
    assert moved.device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "greedy"}, 'rule must be "block", "token" or "coupled", got \'greedy\''),
        ({"vocab": 5}, "draft_to_target and vocab must be given together, got vocab"),
        ({"draft_to_target": torch.zeros(2).long()}, "given together, got draft_to_target"),
        ({"draft_to_target": torch.zeros(2).long(), "vocab": 5}, "name each target id once"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Verifier(**arguments)


@pytest.mark.parametrize("rule", RULES)
def test_bad_arguments_are_refused(rule: str, problem: Problem) -> None:
    verifier = Verifier(rule)
    with pytest.raises(ValueError, match=r"target_logits must be \[16, vocab\]"):
        problem.verify(verifier, target_logits=problem.logits[:5])
    few = problem.seeds[:3]
    with pytest.raises(ValueError, match=r"seeds must be \[4\] int64, got \[3\]"):
        problem.verify(verifier, seeds=few, root_positions=few)
    with pytest.raises(TypeError, match=r"target_row must be \[4, 4\] int32, got .* int64"):
        problem.verify(verifier, target_row=problem.row.long())
    with pytest.raises(ValueError, match=r"draft\.parents must be \[4, 4\] int32, got \[4, 3\]"):
        problem.verify(verifier, draft=problem.draft._replace(parents=problem.row[:, :3]))
    with pytest.raises(TypeError, match=r"draft\.tokens must be \[batch, nodes\]"):
        problem.verify(verifier, draft=problem.draft._replace(tokens=None))
    with pytest.raises(TypeError, match="draft must be a Draft, got NoneType"):
        problem.verify(verifier, draft=None)
    with pytest.raises(TypeError, match=r"target_logits must be \[rows, vocab\] .*, got list"):
        problem.verify(verifier, target_logits=[0.0])
    with pytest.raises(TypeError, match="params must be SamplingParams, got NoneType"):
        problem.verify(verifier, params=None)
    for batch in (1, 5):
        with pytest.raises(ValueError, match=r"params\.temperature must be \[4\] float32, got"):
            problem.verify(verifier, params=SamplingParams.make(1.0, batch=batch))
