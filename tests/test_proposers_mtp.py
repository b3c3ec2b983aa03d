"""Drafts from the target's own states: parallel heads, sequential modules, early exits.

Most targets here are tables (the hidden state is the token, one-hot), so modules can be made that
are right, or nearly right, while their caches hold numbers that depend on everything before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from spec_kernels.decoder import Decoder, Request, Run
from spec_kernels.nn.mtp import MTPConfig, ParallelHeads, SequentialMTP, attend_causally
from spec_kernels.proposers import (
    BestFirst,
    DraftModelProposer,
    EarlyExitProposer,
    HeadsProposer,
    MTPProposer,
    Session,
)
from spec_kernels.proposers.base import DecodingState
from spec_kernels.proposers.levels import CHILDREN
from spec_kernels.targets import ModuleTarget, TableTarget
from spec_kernels.types import PAD_TOKEN, Draft
from tests.test_decoder import ADJUSTED, Flaky, tokens_of
from tests.test_decoder_law import SIGNIFICANT, random_table, run
from tests.tiny_models import TinyGPT, assert_holds, plain

PROMPTS = ([1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8, 9, 7])
RULES = ("block", "token", "coupled")
UNEVEN = [-1, 0, 0, 0, 1, 1, 3, 4, 4, 6]
BEST = BestFirst(7, depth=3, expanded=2, children=3)


class ExitGPT(TinyGPT):
    """A tiny GPT of three layers that can stop early."""

    num_layers = 3

    def forward(self, tokens, positions, attend, layers: int | None = None) -> Tensor:
        whole, self.num_layers = self.num_layers, layers or self.num_layers
        try:
            return super().forward(tokens, positions, attend)
        finally:
            self.num_layers = whole


def exit_gpt() -> ModuleTarget:
    return ModuleTarget(ExitGPT().eval())


def scatter(module: torch.nn.Module, scale: float, seed: int = 0) -> None:
    """Give every parameter but the gains of norms random values."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = (scale * noise).to(parameter.dtype)
        parameter.requires_grad_(False)


def sequential(embedding: Tensor, unembedding: Tensor, **changes: object) -> SequentialMTP:
    """Random modules of depth 3."""
    ids = changes.pop("ids", None)
    size = embedding.shape[1]
    fields = {"heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate_size": 6, "norm_eps": 1e-12}
    config = MTPConfig("sequential", size, 3, **(fields | changes))  # type: ignore[arg-type]
    mtp = SequentialMTP(config, embedding, unembedding, draft_to_target=ids).double()
    scatter(mtp, 0.7)
    return mtp


def parallel(unembedding: Tensor, depth: int = 3, ids: Tensor | None = None) -> ParallelHeads:
    config = MTPConfig("parallel", unembedding.shape[1], depth, norm_eps=1e-12)
    heads = ParallelHeads(config, unembedding, draft_to_target=ids).double()
    scatter(heads, 0.7)
    return heads


def near_oracle(table: Tensor, noise: float, **changes: object) -> SequentialMTP:
    """Modules that predict by the table from the token they read, but for some noise that depends
    on all that they see; without noise they are right."""
    vocab = len(table)
    eye = torch.eye(vocab, dtype=torch.float64)
    mtp = sequential(eye, table.double().T / vocab**0.5, **changes)
    for module in mtp.layers:
        merge = module.projection.weight
        merge.data = torch.cat([noise * merge.data[:, :vocab], eye], 1)
        for part in (module.block.self_attn["o_proj"], module.block.mlp["down_proj"]):
            part.weight.data *= noise
    return mtp


def proposers(target: ModuleTarget) -> dict[str, object]:
    """One of every kind over a tiny GPT with exits."""
    token, unembed = target.module.token, target.module.unembed
    ids = torch.randperm(31, generator=torch.Generator().manual_seed(1))[:12]
    mtp, heads = sequential(token, unembed), parallel(unembed)
    made: dict[str, object] = {
        "heads": HeadsProposer(heads),
        "heads-best": HeadsProposer(heads, tree=BEST),
        "heads-reduced": HeadsProposer(parallel(unembed, ids=ids), tree=[2, 2]),
        "mtp": MTPProposer(mtp, temperature=0.8),
        "mtp-best": MTPProposer(mtp, tree=BEST),
        "mtp-uneven": MTPProposer(mtp, tree=UNEVEN, children="mixed"),
        "mtp-shared": MTPProposer(sequential(token, unembed, is_shared=True), depth=5),
        "mtp-reduced": MTPProposer(sequential(token, unembed, ids=ids), tree=[2, 1, 1]),
        "mtp-reduced-best": MTPProposer(sequential(token, unembed, ids=ids), tree=BEST),
        "exit-1": EarlyExitProposer(target, 1),
        "exit-2": EarlyExitProposer(target, 2, tree=[2, 1, 1], temperature=0.9),
        "exit-best": EarlyExitProposer(target, 2, tree=BEST),
    }
    for children in CHILDREN:
        made[f"heads-{children}"] = HeadsProposer(heads, tree=[3, 2, 1], children=children)
        made[f"mtp-{children}"] = MTPProposer(mtp, tree=[3, 2, 1], children=children)
    return made


# ------------------------------------------------------------------ exactness


NAMES = (*proposers(exit_gpt()),)
EVERY = [pytest.param(n, marks=[] if i % 3 == 0 else pytest.mark.slow) for i, n in enumerate(NAMES)]


@pytest.mark.parametrize("name", EVERY)
def test_greedy_equals_plain_greedy(name: str) -> None:
    target, index = exit_gpt(), NAMES.index(name)
    requests = [Request(prompt, max_new_tokens=7 + i) for i, prompt in enumerate(PROMPTS)]
    expected = tokens_of(plain(target, requests))
    decoder = Decoder(target, proposers(target)[name], gamma=1 + index % 5, rule=RULES[index % 3])
    assert tokens_of(decoder.generate(requests)) == expected


@pytest.mark.parametrize("name", EVERY)
def test_coupled_output_is_that_of_plain_decoding(name: str) -> None:
    target = exit_gpt()
    requests = [
        Request(PROMPTS[0], max_new_tokens=9, temperature=1.0, seed=3),
        Request(PROMPTS[1], max_new_tokens=7, temperature=0.6, top_p=0.8, seed=4),
        Request(PROMPTS[2], max_new_tokens=9, temperature=1.4, top_k=5, min_p=0.01, seed=5),
    ]
    expected = tokens_of(plain(target, requests, rule="coupled"))
    outputs = Decoder(target, proposers(target)[name], gamma=3, rule="coupled").generate(requests)
    assert tokens_of(outputs) == expected


def test_penalties_reach_the_draft_laws_and_the_output_stays() -> None:
    """Reduced vocabularies too: the adjustment is made over the target's ids."""
    target = exit_gpt()
    requests = [
        Request(PROMPTS[0], max_new_tokens=8, **ADJUSTED["all"]),
        Request(PROMPTS[2], max_new_tokens=6),
    ]
    expected = tokens_of(plain(target, requests))
    made = {"all-layers": EarlyExitProposer(target, 3)}
    made |= {name: proposers(target)[name] for name in ("heads-sampled", "mtp-reduced")}
    for kind, proposer in made.items():
        outputs = Decoder(target, proposer, gamma=3).generate(requests)
        assert tokens_of(outputs) == expected
        if kind == "all-layers":
            assert outputs[0].stats.acceptance_rate == 1.0


def law_cases() -> dict[str, tuple[str, Callable[[Tensor], object]]]:
    def mtp(**options: object) -> Callable[[Tensor], object]:
        return lambda table: MTPProposer(near_oracle(table, 0.3), **options)

    def heads(**options: object) -> Callable[[Tensor], object]:
        return lambda table: HeadsProposer(parallel(table.double()), **options)

    def reduced(table: Tensor) -> object:
        ids = torch.tensor([2, 0])
        return MTPProposer(near_oracle(table, 0.3, ids=ids), tree=[2, 1])

    return {
        "mtp-block": ("block", mtp()),
        "mtp-token-tree": ("token", mtp(tree=[2, 2], children="sampled")),
        "mtp-block-tree": ("block", mtp(tree=UNEVEN, children="mixed")),
        "mtp-reduced": ("block", reduced),
        "mtp-best": ("block", mtp(tree=BestFirst(5, depth=3, expanded=2, children=2))),
        "heads-block": ("block", heads(temperature=0.8)),
        "heads-token-tree": ("token", heads(tree=[2, 2], children="replacement")),
        "heads-block-tree": ("block", heads(tree=[3, 1, 1], children="sampled")),
        "heads-coupled": ("coupled", heads(tree=[2, 1])),
    }


@pytest.mark.parametrize("case", law_cases())
def test_joint_law_of_four_tokens(case: str) -> None:
    rule, make = law_cases()[case]
    table = random_table(3, 21)
    decoder = Decoder(TableTarget(table), make(table), gamma=3, rule=rule)
    assert run(decoder, 250, 0.8) > SIGNIFICANT


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("case", law_cases())
def test_joint_law_of_four_tokens_in_long_runs(case: str, vocab: int) -> None:
    rule, make = law_cases()[case]
    table = random_table(vocab, 22, 1.5)
    decoder = Decoder(TableTarget(table), make(table), gamma=3, rule=rule)
    assert run(decoder, 1000, 1.0) > SIGNIFICANT


def test_a_law_that_is_not_the_one_drawn_from_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node of a tree hands over the row of depth 1."""
    propose = HeadsProposer.open

    class Wrong:
        def __init__(self, session: Session) -> None:
            self.session = session

        def __getattr__(self, name: str) -> object:
            return getattr(self.session, name)

        def propose(self, *arguments: object) -> Draft:
            draft = self.session.propose(*arguments)
            if draft.logits is None:
                return draft
            batch = torch.arange(len(draft.tokens), dtype=torch.int32)[:, None]
            return draft._replace(row=torch.where(draft.row >= 0, batch, -1))

    monkeypatch.setattr(HeadsProposer, "open", lambda *a: Wrong(propose(*a)))
    table = random_table(3, 21)
    heads = parallel(torch.eye(3))
    for k, head in enumerate(heads.heads):
        head.weight.data.zero_()
        head.bias.data = 3.0 * torch.eye(3).double()[k]
    decoder = Decoder(TableTarget(table), HeadsProposer(heads), gamma=3, rule="token")
    assert run(decoder, 500, 0.8) < SIGNIFICANT


# ------------------------------------------------------------------ oracles

CHAOS = 2.5 * torch.randn(12, 12, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [None, [2, 2, 1], BEST], ids=str)
def test_right_modules_are_always_accepted(tree: object, temperature: float, rule: str) -> None:
    if isinstance(tree, BestFirst) and temperature:
        pytest.skip("the likeliest tokens are not the ones drawn")
    proposer = MTPProposer(near_oracle(CHAOS, 0.0), tree=tree, children="mixed")
    decoder = Decoder(TableTarget(CHAOS), proposer, gamma=3, rule=rule)
    requests = [
        Request([1, 2, 3, 4], max_new_tokens=12, temperature=temperature, top_k=9, seed=1),
        Request([4, 5, 6, 7], max_new_tokens=9, temperature=temperature, top_p=0.9, seed=2),
    ]
    outputs = decoder.generate(requests)
    assert [output.stats.steps for output in outputs] == [3, 3]
    assert [output.stats.accepted for output in outputs] == [9, 6]


@pytest.mark.parametrize("tree", [None, [2, 1, 1]], ids=str)
def test_right_heads_are_always_accepted(tree: list[int] | None) -> None:
    """Id x is followed by x + 1: only then one state tells what comes at every depth."""
    eye = torch.eye(10)
    heads = parallel(eye)
    for depth, head in enumerate(heads.heads, 1):
        head.weight.data = 100.0 * (2.0 * eye.double().roll(depth + 1, dims=0) - 1.0)
        head.bias.data.zero_()
    decoder = Decoder(TableTarget(eye.roll(1, dims=1)), HeadsProposer(heads, tree=tree), gamma=3)
    (output,) = decoder.generate([Request([3, 4], max_new_tokens=12)])
    assert output.tokens == tuple((5 + i) % 10 for i in range(12))
    assert (output.stats.steps, output.stats.accepted) == (3, 9)


@pytest.mark.parametrize("tree", [None, UNEVEN], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_exit_behind_the_last_layer_is_always_accepted(
    tree: list[int] | None, temperature: float
) -> None:
    """And the target's cache equals a fresh prefill after every round, at an early exit too."""
    target = exit_gpt()
    requests = [
        Request([1, 2, 3], max_new_tokens=12, temperature=temperature, top_k=9, seed=1),
        Request([4], max_new_tokens=9, temperature=temperature, top_p=0.9, seed=2),
    ]
    for layers in (3, 1):
        proposer = EarlyExitProposer(target, layers, tree=tree)
        decode = Decoder(target, proposer, gamma=3).start(requests)
        while not decode.is_done:
            decode.step()
            for row, length in enumerate(decode.state.lens.tolist()):
                committed = decode.state.tokens[row, :length].tolist()
                if not decode._rows[row].is_done:
                    assert_holds(target, decode.cache, row, committed[:-1])
        if layers == 3:
            assert [row.stats.steps for row in decode._rows] == [3, 3]


# ------------------------------------------------------------------ literal readings


def entries(mtp: SequentialMTP, depth: int, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return K and V of every depth over a text of a table's target, computed in one go."""
    found = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found.append((key[0], value[0]))
        return attend_causally(query, key, value)

    text = torch.tensor([list(tokens)])
    states = torch.nn.functional.one_hot(text, mtp.config.hidden_size).double()
    for k in range(1, min(depth, len(tokens) - 1) + 1):
        length = len(tokens) - k
        positions = torch.arange(length)[None]
        states = mtp.state(states[:, :length], text[:, k:], positions, attend, k)
    return found


def check_caches(decode: Run, mtp: SequentialMTP) -> None:
    """The cache of depth k holds what a fresh prefill of the tokens that it took in leaves; no
    module has taken in more than the one before."""
    session = decode.session
    for row, length in enumerate(decode.state.lens.tolist()):
        fresh = entries(mtp, len(session.caches), decode.state.tokens[row, :length].tolist())
        starts = [int(start[row]) for start in session._memory.starts]
        assert sorted([length, *starts], reverse=True) == [length, *starts]
        for k, (cache, fed) in enumerate(zip(session.caches, starts, strict=True), 1):
            count = int(cache.context_lens[row])
            assert count == max(fed - k, 0)
            if count:
                for store, right in zip(
                    (cache.keys[0], cache.values[0]), fresh[k - 1], strict=True
                ):
                    assert (store[row, :count] - right[:count]).abs().max() < 1e-12


@pytest.mark.parametrize("reads_lengths", [True, False])
@pytest.mark.parametrize("tree", [None, [2, 2, 1], UNEVEN, BEST], ids=str)
def test_caches_of_every_depth_equal_a_fresh_prefill(
    tree: object, reads_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged: prompts of 1, 2 and 5 tokens, fewer than the depths, and budgets that differ. Nothing
    of a rejected draft survives: what the caches hold follows from the committed text alone."""
    if not reads_lengths:
        for module in ("proposers.base", "proposers.mtp"):
            monkeypatch.setattr(f"spec_kernels.{module}.needed_width", lambda lens, most: most)
    mtp = near_oracle(CHAOS, 0.1)
    proposer = MTPProposer(mtp, tree=tree, temperature=0.7)
    requests = [
        Request(list(range(1, 2 + n)), max_new_tokens=12 + n, temperature=1.0, seed=n)
        for n in (0, 1, 4)
    ]
    decode = Decoder(TableTarget(CHAOS), proposer, gamma=3).start(requests)
    moved = set()
    while not decode.is_done:
        before = [row.length for row in decode._rows]
        fed = decode.state.lens.tolist()
        alive = [not row.is_done for row in decode._rows]
        has_room = any(row.limit > row.length + 1 for row in decode._rows)
        decode.step()
        check_caches(decode, mtp)
        start = decode.session._memory.starts[0].tolist()
        assert not has_room or [s for s, ok in zip(start, alive, strict=True) if ok] == [
            n for n, ok in zip(fed, alive, strict=True) if ok
        ]
        moved |= {row.length - b - 1 for row, b in zip(decode._rows, before, strict=True)}
    assert {0, 2} <= moved


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tree", [None, [3, 1, 2], UNEVEN], ids=str)
def test_draft_laws_equal_modules_run_over_text_and_drafts(
    tree: list[int] | None, shared: bool
) -> None:
    """In the third round, so from caches; no state of the target behind the root's is used."""
    mtp = near_oracle(CHAOS, 0.5, is_shared=shared)
    requests = [Request([1, 2, 3, 4, 5], temperature=1.0, seed=n) for n in range(3)]
    decode = Decoder(TableTarget(CHAOS), MTPProposer(mtp, tree=tree), gamma=3).start(requests)
    decode.step()
    decode.step()
    draft = decode.session.propose(decode.state, torch.full((3,), 3, dtype=torch.int32), 3)
    parents = draft.parents.tolist() if draft.parents is not None else [[-1, 0, 1, 2]] * 3
    for b, length in enumerate(decode.state.lens.tolist()):
        text = decode.state.tokens[b, :length].tolist()
        for node in range(1, int(draft.num_nodes[b])):
            path = [parents[b][node]]
            while path[-1] > 0:
                path.append(parents[b][path[-1]])
            drafts = [int(draft.tokens[b, n]) for n in path[-2::-1]]
            depth, tokens = len(path), torch.tensor([[*text, *drafts]])
            hot = torch.nn.functional.one_hot(tokens[:, : length - 1], 12).double()
            for k in range(1, depth + 1):
                new = tokens[:, k : k + length - 1]
                positions = torch.arange(length - 1)[None]
                hot = mtp.state(hot, new, positions, attend_causally, k)
            right = mtp.logits(hot[0, -1], depth)
            assert (draft.logits[draft.row[b, node]] - right).abs().max() < 1e-5


def ask(decode: Run, most: int, allowed: Sequence[int] | None = None) -> None:
    """Run a round that asks for `most` drafts, of each request for at most `allowed`."""
    session, propose = decode.session, type(decode.session).propose

    def fewer(state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        own = limits if allowed is None else limits.minimum(torch.tensor(allowed))
        return propose(session, state, own.clamp(max=most).to(torch.int32), min(gamma, most))

    session.propose = fewer
    decode.step()


def test_rounds_without_drafts_leave_no_hole() -> None:
    mtp = near_oracle(CHAOS, 0.0)
    decoder = Decoder(TableTarget(CHAOS), MTPProposer(mtp), gamma=3)
    decode = decoder.start([Request([1, 2, 3, 4], max_new_tokens=40, temperature=1.0, seed=5)])
    for most in (3, 0, 1, 0, 3, 3):
        ask(decode, most)
        check_caches(decode, mtp)
    assert decode._rows[0].stats.acceptance_rate == 1.0
    assert decode._rows[0].stats.emitted == 16


@pytest.mark.parametrize("reads_lengths", [True, False])
@pytest.mark.parametrize("tree", [None, [2, 2, 1]], ids=str)
def test_modules_that_were_not_asked_catch_up(
    tree: object, reads_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged, and each module late by another number of rounds. Where module k has caught up, its
    drafts come from the same law as in a run whose modules were never late."""
    if not reads_lengths:
        for module in ("proposers.base", "proposers.mtp"):
            monkeypatch.setattr(f"spec_kernels.{module}.needed_width", lambda lens, most: most)
    mtp = near_oracle(CHAOS, 0.1)
    requests = [
        Request(list(range(1, 2 + n)), max_new_tokens=60, temperature=1.0, seed=n)
        for n in (0, 1, 4)
    ]
    decoder = Decoder(TableTarget(CHAOS), MTPProposer(mtp, tree=tree, temperature=0.7), gamma=3)
    decode, late = decoder.start(requests), set()
    for most in (1, 0, 1, 2, 0, 2, 1, 3, 0, 0, 3, 1, 1, 3):
        ask(decode, most, [3, 1, 2])
        starts = [start.tolist() for start in decode.session._memory.starts]
        late |= {first - last for first, last in zip(starts[0], starts[2], strict=True)}
        check_caches(decode, mtp)
    assert max(late) > 4
    fresh = Decoder(TableTarget(CHAOS), decoder.proposer, gamma=3).start(
        [
            Request(
                decode.state.tokens[b, :length].tolist(), max_new_tokens=9, temperature=1.0, seed=b
            )
            for b, length in enumerate(decode.state.lens.tolist())
        ]
    )
    del decode.session.propose
    fresh.state.seeds = decode.state.seeds
    limits = torch.full((3,), 3, dtype=torch.int32)
    one, other = (r.session.propose(r.state, limits, 3) for r in (decode, fresh))
    assert torch.equal(one.tokens, other.tokens)
    assert (one.logits - other.logits).abs().max() < 1e-5


def test_a_round_runs_the_modules_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mtp, ran = near_oracle(CHAOS, 0.1), []
    state = mtp.state
    monkeypatch.setattr(mtp, "state", lambda *a: ran.append(a[4]) or state(*a))
    monkeypatch.setattr("spec_kernels.proposers.mtp.MOST_WAITING", 6)
    decoder = Decoder(TableTarget(CHAOS), MTPProposer(mtp), gamma=3)
    decode, seen = decoder.start([Request([1, 2, 3, 4], max_new_tokens=60, seed=5)]), []
    for most in (3, 1, 2, 0, 1, *(0,) * 9):
        ran.clear()
        ask(decode, most)
        seen.append(list(ran))
        check_caches(decode, mtp)
    assert seen[:5] == [[1, 2, 3], [1], [1, 2], [], [1]]
    assert seen[5:].count([1, 2, 3]) == 1  # too much was waiting
    assert seen[5:].count([]) == 8


@pytest.mark.parametrize("children", CHILDREN)
def test_a_tree_of_heads_holds_one_row_per_depth(children: str) -> None:
    """Row `batch * (k - 1) + b` is the law of head k at the state in front of the root."""
    heads = parallel(torch.randn(9, 12).double())
    requests = [Request([4, 7], temperature=1.0, seed=1), Request([5, 2], temperature=0.7, seed=2)]
    proposer = HeadsProposer(heads, tree=[3, 2], children=children)
    decode = Decoder(TableTarget(torch.zeros(12, 12)), proposer, gamma=3).start(requests)
    draft = decode.session.propose(decode.state, torch.tensor([2, 1], dtype=torch.int32), 2)
    assert draft.num_nodes.tolist() == [10, 4]
    laws = []
    for depth in (1, 2):
        states = heads.state(torch.eye(12).double()[[4, 5]], depth)
        laws.append(heads.logits(states, depth).float())
    if children == "fixed":
        assert draft.row is None
        ranked = [law.argsort(dim=1, descending=True) for law in laws]
        assert draft.tokens[0].tolist() == [7, *ranked[0][0, :3], *[*ranked[1][0, :2]] * 3]
        return
    torch.testing.assert_close(draft.logits, torch.cat(laws))
    drawn = [0, -1, -1] if children == "mixed" else [0] * 3
    below = [2, -1] * 3 if children == "mixed" else [2] * 6
    assert draft.row[0].tolist() == [-1, *drawn, *below]
    assert draft.tokens[1, 4:].tolist() == [PAD_TOKEN] * 6
    if children == "sampled":
        groups = (draft.tokens[0, 1:4], *draft.tokens[0, 4:].view(3, 2))
        assert all(len(set(group.tolist())) == len(group) for group in groups)


def test_heads_with_the_greedy_rule_are_blockwise_parallel_decoding() -> None:
    """Stern et al. 2018, written out: predict a block, verify it, accept the agreeing prefix."""
    target = exit_gpt()
    heads = parallel(target.module.unembed)
    # a head that is right now and then: depth 1 as the target's own head at the same state
    heads.heads[0].weight.data.zero_()
    heads.heads[0].bias.data.zero_()
    prompt, budget = [1, 2, 3], 24

    def states(tokens: list[int]) -> Tensor:
        cache = target.open(1, len(tokens))
        return target.prefill(cache, 0, tokens, hidden=True)

    text, blocks = list(prompt), []
    while len(text) < len(prompt) + budget:
        room = min(3, len(prompt) + budget - len(text) - 1)
        front = states(text)[-2]
        block = [int(heads.logits(heads.state(front, k), k).argmax()) for k in range(1, room + 1)]
        judged = target.module.head(states([*text, *block])[len(text) - 1 :]).argmax(1).tolist()
        count = next((i for i, token in enumerate(block) if token != judged[i]), len(block))
        text += judged[: count + 1]
        blocks.append(count)
    (output,) = Decoder(target, HeadsProposer(heads), gamma=3, rule="block").generate(
        [Request(prompt, max_new_tokens=budget)]
    )
    assert list(output.tokens) == text[len(prompt) :]
    assert (output.stats.steps, output.stats.accepted) == (len(blocks), sum(blocks))


@pytest.mark.parametrize("layers", [1, 2])
def test_an_exit_drafts_what_the_same_layers_alone_draft(layers: int) -> None:
    """Public case B226: positions included, behind a prefix of 7, round after round."""
    target, alone = exit_gpt(), exit_gpt()
    alone.module.num_layers = layers
    requests = [Request([9, 8, 7, 6, 5, 4, 3], max_new_tokens=16, temperature=1.0, seed=1)]
    made = (EarlyExitProposer(target, layers), DraftModelProposer(alone))
    runs = [Decoder(target, one, gamma=3, rule="token").start(requests) for one in made]
    limits = torch.tensor([3], dtype=torch.int32)
    while runs[0].state.longest < 19:  # room for the drafts
        one, other = (r.session.propose(r.state, limits, 3) for r in runs)
        assert torch.equal(one.tokens, other.tokens)
        assert (one.logits - other.logits).abs().max() < 1e-5
        runs[1].session.rollback(runs[1].state)
        chunks = [r.step() for r in runs]
        assert chunks[0][0].tokens == chunks[1][0].tokens


# ------------------------------------------------------------------ the batch


@pytest.mark.parametrize("rule", ["block", "coupled"])
@pytest.mark.parametrize("name", ["heads-sampled", "mtp", "mtp-mixed", "mtp-best", "exit-2"])
def test_a_request_does_not_depend_on_its_neighbours(name: str, rule: str) -> None:
    target = exit_gpt()
    mine = Request(PROMPTS[0], max_new_tokens=9, temperature=0.9, top_p=0.95, seed=7)
    others = [
        Request([4, 4, 4, 4], max_new_tokens=3, seed=9, temperature=1.5),
        Request([6], max_new_tokens=12, repetition_penalty=1.3),
    ]
    decoder = Decoder(target, proposers(target)[name], gamma=3, rule=rule)
    (alone,) = decoder.generate([mine])
    for slot in (0, 2):
        again = decoder.generate([*others[:slot], mine, *others[slot:]])[slot]
        assert again.tokens == alone.tokens
        assert again.stats.node_accepted == alone.stats.node_accepted


@pytest.mark.parametrize("place", ["forward", "propose", "commit"])
@pytest.mark.parametrize("kind", ["heads", "mtp"])
def test_a_failed_round_leaves_everything_as_before(kind: str, place: str) -> None:
    target = Flaky(TableTarget(CHAOS))
    mtp, heads = near_oracle(CHAOS, 0.1), parallel(CHAOS.double())
    tree = MTPProposer(mtp, tree=[2, 1, 1]) if kind == "mtp" else HeadsProposer(heads, tree=[2, 1])
    proposer = Flaky(tree)
    decoder = Decoder(target, proposer, gamma=3)
    requests = [
        Request([1, 2, 3], max_new_tokens=14, temperature=1.0, seed=3),
        Request([4], max_new_tokens=10, temperature=1.0, seed=4),
    ]
    expected = tokens_of(decoder.generate(requests))
    decode = decoder.start(requests)
    decode.step()
    part = target if place == "forward" else proposer.session
    part.fuse = 2 if place == "commit" else 1
    with pytest.raises(RuntimeError, match="planted"):
        decode.step()
    if kind == "mtp":
        check_caches(decode, mtp)
    outputs = {}
    while not decode.is_done:
        outputs.update((c.request, c.generation) for c in decode.step() if c.generation)
        if kind == "mtp":
            check_caches(decode, mtp)
    assert [outputs[row].tokens for row in range(2)] == expected


def test_reduced_vocabularies_draft_their_own_ids_only() -> None:
    ids = CHAOS[4].topk(4).indices  # likely behind the prompts' last token
    mtp = near_oracle(CHAOS, 0.1, ids=ids)
    heads = parallel(CHAOS.double(), ids=ids)
    requests = [Request([1, 2, 3, 4], temperature=1.5, seed=seed) for seed in range(8)]
    for proposer in (
        MTPProposer(mtp),
        MTPProposer(mtp, tree=[3, 2], children="mixed"),
        MTPProposer(mtp, tree=BEST),
        HeadsProposer(heads, tree=[2, 2]),
    ):
        decoder = Decoder(TableTarget(CHAOS), proposer, gamma=3)
        decode = decoder.start(requests)
        draft = decode.session.propose(decode.state, torch.full((8,), 3, dtype=torch.int32), 3)
        assert {*draft.tokens[:, 1:].flatten().tolist()} <= {*ids.tolist(), PAD_TOKEN}
        assert draft.logits is None or draft.logits.shape[1] == 4
        decode.step()
        right = isinstance(proposer, MTPProposer)
        assert sum(row.stats.accepted for row in decode._rows) > 0 or not right


def test_modules_that_fail_numerically_draft_nothing() -> None:
    target = exit_gpt()
    requests = [Request([1, 2, 3], max_new_tokens=6)]
    expected = tokens_of(plain(target, requests))
    mtp, heads = sequential(target.module.token, target.module.unembed), None
    mtp.layers[0].projection.weight.data.fill_(float("nan"))
    heads = parallel(target.module.unembed)
    heads.heads[0].weight.data.fill_(float("nan"))
    for proposer in (MTPProposer(mtp), HeadsProposer(heads, tree=[2, 2])):
        (output,) = Decoder(target, proposer, gamma=3).generate(requests)
        assert output.tokens == expected[0]
        assert output.stats.drafted == 0


def test_what_does_not_fit_is_refused() -> None:
    target = exit_gpt()
    token, unembed = target.module.token, target.module.unembed
    heads, mtp = parallel(unembed), sequential(token, unembed)
    for tree, message in (
        ([2, 1, 1, 1], "tree must be at most 3 deep, got 4"),
        ([0], "at least 1"),
    ):
        for make in (lambda t: HeadsProposer(heads, tree=t), lambda t: MTPProposer(mtp, tree=t)):
            with pytest.raises(ValueError, match=message):
                make(tree)
    with pytest.raises(ValueError, match="depth must be at most the number of modules, 3, got 4"):
        MTPProposer(mtp, depth=4)
    with pytest.raises(ValueError, match="depth must be at least 1"):
        MTPProposer(mtp, depth=0)
    with pytest.raises(ValueError, match="children must be one of sampled"):
        HeadsProposer(heads, children="drawn")
    with pytest.raises(ValueError, match=r"layers must be in 1\.\.3, got 4"):
        EarlyExitProposer(target, 4)
    with pytest.raises(NotImplementedError, match="TinyGPT cannot stop early"):
        EarlyExitProposer(ModuleTarget(TinyGPT().eval()), 1)
    with pytest.raises(NotImplementedError, match="TableTarget cannot stop early"):
        EarlyExitProposer(TableTarget(CHAOS), 1)
    for other in (HeadsProposer(heads), MTPProposer(mtp)):
        decoder = Decoder(TableTarget(CHAOS), other, gamma=2)
        with pytest.raises(ValueError, match="hidden states of size 16, the target has 12"):
            decoder.generate([Request([1, 2])])
    outside = parallel(torch.randn(31, 16).double(), ids=torch.tensor([3, 30]))
    with pytest.raises(ValueError, match=r"ids in \[0, 12\), got 30"):
        Decoder(TableTarget(CHAOS), HeadsProposer(outside), gamma=2)


def test_every_prompt_length_and_gamma() -> None:
    """Around the number of depths, where modules have no entry yet."""
    mtp = near_oracle(CHAOS, 0.0)
    for length, gamma in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4)):
        decoder = Decoder(TableTarget(CHAOS), MTPProposer(mtp), gamma=gamma)
        request = Request(list(range(length)), max_new_tokens=9, temperature=1.0, seed=length)
        (output,) = decoder.generate([request])
        stats = output.stats
        assert stats.acceptance_rate == 1.0
        deepest = min(gamma, 3)
        assert stats.steps <= -(-9 // (deepest + 1)) + max(0, deepest + 1 - length)
