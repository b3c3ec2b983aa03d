"""Makers of random trees for the contract tests, and the judge of what a layer makes of them."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import INVALID_TARGET, PAD_TOKEN, Acceptance, Draft, Law, invert_id_map
from tests.cases import Step, float32_law, lay_out, random_params, scatter_rows

judge: Any = importlib.import_module("spec_kernels.reference.accept")

KINDS = ("sampled", "fixed", "sampled first", "fixed first", "any")

TREE_EPSILON = 2e-6
"""How far float32 sums may move the mass that decides about a node; h moves by that over W."""


class TreeCase(NamedTuple):
    """The shape and the kind of a step with trees."""

    batch: int
    nodes: int
    vocab: int
    kind: str = "sampled"  # of siblings; "any" also has duplicates
    dtype: torch.dtype = torch.float32
    layout: str = "packed"
    filters: str = "none"  # none or all
    ids: torch.dtype = torch.int64
    draft_vocab: int = 0  # 0 = the target's
    is_mapped: bool = False
    is_probabilities: bool = False
    is_shared: bool = False  # one draft row per depth instead of per parent
    replacement: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """Return an id like `b3-n30-v259-sampled-replacement`."""
        parts = [f"b{self.batch}", f"n{self.nodes}", f"v{self.vocab}"]
        parts += [f"d{self.draft_vocab}"] if self.draft_vocab else []
        parts += [self.kind.replace(" ", "_"), str(self.dtype).removeprefix("torch."), self.layout]
        flags = {"filtered": self.filters == "all", "int32": self.ids == torch.int32}
        flags |= {"map": self.is_mapped, "probabilities": self.is_probabilities}
        flags |= {"shared": self.is_shared, "replacement": self.replacement}
        return "-".join(parts + [name for name, is_set in flags.items() if is_set])


def random_parents(nodes: int, form: int, generator: torch.Generator) -> list[int]:
    """Return the parents of a chain, a star, a comb, a full binary or 4-ary tree, or a random
    tree with many or few levels."""
    draws = torch.rand(nodes, generator=generator).tolist()
    makers = [
        lambda i: int(draws[i] * i),
        lambda i: (i - 1) // 2,
        lambda i: max(0, i - 1 - int(draws[i] * 3)),
        lambda i: (i - 1) // 4,
        lambda i: 0,
        lambda i: i - 1,
        lambda i: (i - 1) // 2 * 2,
    ]
    return [-1, *(makers[form % len(makers)](i) for i in range(1, nodes))]


def _children(parents: list[int]) -> list[list[int]]:
    return [[i for i, p in enumerate(parents) if p == v] for v in range(len(parents))]


def _depths(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _are_sampled(kind: str, count: int, generator: torch.Generator) -> list[bool]:
    """Say which of a node's children are sampled."""
    if kind == "any":
        return (torch.rand(count, generator=generator) < 0.6).tolist()
    only = {"sampled first": 0, "fixed first": count - 1}.get(kind)
    return [kind == "sampled" if only is None else i == only for i in range(count)]


class _Forest:
    """The trees of a step: parents and, once drawn, tokens and draft rows."""

    def __init__(self, case: TreeCase, generator: torch.Generator) -> None:
        self.case, self._generator = case, generator
        batch, nodes = case.batch, case.nodes
        drawn = torch.randint(2, nodes + 1, (batch,), generator=generator) if nodes > 1 else None
        self.num_nodes = [nodes] * batch if drawn is None else drawn.tolist()
        self.num_nodes[:3] = [nodes, 0, 1][:batch]
        self.parents = [random_parents(nodes, b + case.seed, generator) for b in range(batch)]
        self.tokens = torch.full((batch, nodes), PAD_TOKEN)
        self.row = torch.full((batch, nodes), -1, dtype=torch.int32)

    def draft_row(self, request: int, node: int) -> int:
        """Return the row, before it is moved, that the children of a node are drawn from."""
        depths = _depths(self.parents[request])
        owner = depths.index(depths[node]) if self.case.is_shared else node
        return request * self.case.nodes + owner

    def draw(self, logits: Tensor, law: Law | None, place: Tensor, to_target: Tensor) -> None:
        """Draw every child by the oracle; the draft rows lie at `place`."""
        for b, parents in enumerate(self.parents):
            self.tokens[b, 0] = 3
            for v, children in enumerate(_children(parents)):
                row = int(place[self.draft_row(b, v)])
                own = None if law is None else Law(*(f[row : row + 1] for f in law))
                is_sampled = _are_sampled(self.case.kind, len(children), self._generator)
                tokens = self._draw_siblings(logits[row : row + 1], own, is_sampled)
                for child, token, is_drawn in zip(children, tokens, is_sampled, strict=True):
                    self.tokens[b, child] = to_target[token] if token >= 0 else PAD_TOKEN
                    self.row[b, child] = row if is_drawn else -1

    def _draw_siblings(self, logits: Tensor, law: Law | None, is_sampled: list[bool]) -> list[int]:
        generator, case = self._generator, self.case
        fixed = logits[0, : case.vocab].topk(
            min(is_sampled.count(False), logits.shape[1], case.vocab)
        )
        coins = torch.rand(1, is_sampled.count(True), dtype=torch.float64, generator=generator)
        drawn = reference.sample(
            logits,
            law,
            coins=coins,
            k=coins.shape[1],
            replacement=case.replacement,
            excluded=fixed.indices[None],
        )
        pools = {True: iter(drawn[0].tolist()), False: iter(fixed.indices.tolist())}
        tokens = [next(pools[kind], PAD_TOKEN) for kind in is_sampled]
        if case.kind == "any":
            for i in range(1, len(tokens)):
                if float(torch.rand((), generator=generator)) < 0.2:
                    tokens[i] = tokens[i - 1]
        return tokens


def _laws(case: TreeCase, values: Tensor, params: Any, request: Tensor, generator: Any) -> Any:
    """Return rows packed between NaN, where they went, who owns them, and their laws."""
    logits, place = scatter_rows(values.to(case.dtype), generator)
    owner = torch.full((len(logits),), -1, dtype=torch.int32)
    owner[place] = request.int()
    law = None
    if not case.is_probabilities:
        law = float32_law(reference.row_law(logits, params, owner))
    return logits, place, owner, law


def make_tree_step(case: TreeCase) -> Step:
    """Return a random step of a kind; sampled children are drawn from their laws by the oracle."""
    generator = torch.Generator().manual_seed(1000 * case.seed + case.vocab + case.nodes)
    batch, nodes, vocab = case.batch, case.nodes, case.vocab
    width = case.draft_vocab or vocab
    params = random_params(batch, case.filters, generator)
    request = torch.arange(batch).repeat_interleave(nodes)
    target = torch.randn(batch * nodes, vocab, generator=generator) * 2.5
    own = torch.randn(batch * nodes, width, generator=generator)
    id_map, to_target = None, torch.arange(width)
    if case.is_mapped:
        to_target = torch.randperm(vocab, generator=generator)[:width]
        id_map = invert_id_map(to_target, vocab)
    shared = to_target < vocab
    own[:, shared] += target[:, to_target[shared]]
    if case.is_probabilities:
        target, own = target.softmax(1), own.softmax(1)
    logits, place, owner, law = _laws(case, target, params, request, generator)
    draft_logits, draft_place, _, draft_law = _laws(case, own, params, request, generator)

    forest = _Forest(case, generator)
    forest.draw(draft_logits, draft_law, draft_place, to_target)
    num_nodes = torch.tensor(forest.num_nodes, dtype=torch.int32)
    behind = torch.arange(nodes) >= num_nodes[:, None]
    parents = torch.tensor(forest.parents, dtype=torch.int32).reshape(batch, nodes)
    has_law = case.kind != "fixed"
    draft = Draft(
        forest.tokens.masked_fill(behind, PAD_TOKEN).to(case.ids),
        num_nodes,
        parents.masked_fill(behind, 10**6),
        lay_out(draft_logits, case.layout) if has_law else None,
        draft_law if has_law else None,
        forest.row if has_law else None,
    )
    return Step(
        draft,
        lay_out(logits, case.layout),
        params,
        law,
        place.view(batch, nodes).int(),
        torch.rand(batch, nodes, dtype=torch.float64, generator=generator),
        torch.rand(batch, dtype=torch.float64, generator=generator),
        max((max(_depths(p)) for p in forest.parents), default=0),
        id_map,
        owner,
        case.replacement,
    )


class Verdict:
    """What the oracle says about one request, decision by decision."""

    def __init__(self, step: Step, request: int) -> None:
        self.step, self.request = step, request
        nodes = judge.read_topology(step.draft, request, step.max_depth)
        self.coins = step.accept_coins[request].tolist()
        self.tree = judge.Tree(
            nodes,
            step.draft,
            step.target_logits,
            step.target_law,
            step.target_row,
            step.target_to_draft,
            request,
        )

    def follow(self, path: list[int], rule: str) -> Any:
        """Return the oracle's state at the end of a path, every decision of which it could have
        made with coins and sums within `TREE_EPSILON`."""
        return self._follow_token(path) if rule == "token" else self._follow_block(path)

    def _follow_token(self, path: list[int]) -> Any:
        for node, following in zip(path, [*path[1:], -1], strict=True):
            state = self._state(node, 1.0)
            for child in state.family.children:
                gain, cost = judge.entry(state, child)
                margin = gain - self.coins[child.node] * cost
                if child.node == following:
                    assert margin > -TREE_EPSILON, (child, margin)
                    break
                assert margin < TREE_EPSILON, (child, margin)
                judge.reject(state, child)
            else:
                assert following == -1, following
        return state

    def _follow_block(self, path: list[int]) -> Any:
        stack = [(self._state(0, 1.0), 0)]
        while True:
            state, place = stack.pop()
            if place < len(state.family.children):
                child = state.family.children[place]
                entry = judge.entry_probability(state, child)
                judge.reject(state, child)
                stack += [(state, place + 1), (self._state(child.node, entry), 0)]
                continue
            slack = (self._kept(state) - self.coins[state.node]) * state.whole
            if state.node == path[-1]:
                assert state.node == 0 or slack > -TREE_EPSILON, (state.node, slack)
                assert [s.node for s, _ in stack] == path[:-1]
                return state
            assert slack < TREE_EPSILON, (state.node, slack)

    def _state(self, node: int, a: float) -> Any:
        return judge.State(node, a, self.tree.family(node), self.step.replacement)

    def _kept(self, state: Any) -> float:
        return float(judge.kept_probability(state))


def assert_tree_result(result: Acceptance, step: Step, rule: str, request: int) -> None:
    """Check one request that differs from the oracle's answer: path, token and status must be
    those of an oracle whose coins and sums differ by `TREE_EPSILON`."""
    tokens, length, path, status = (field[request].tolist() for field in result)
    path = path[: length + 1]
    state = Verdict(step, request).follow(path, rule)
    assert tokens[:length] == step.draft.tokens[request, path[1:]].tolist()
    assert tokens[length + 1 :] == [PAD_TOKEN] * (len(tokens) - length - 1)
    expected_status = judge._finish(state, 0.0)[1]
    assert status == expected_status, (status, expected_status)
    if not status & INVALID_TARGET:
        token, weights = tokens[length], judge.final_weights(state)
        edges = weights.cumsum(0)
        point = float(step.final_coins[request] * edges[-1])
        if float(weights[token]) == 0.0:
            assert float(edges[-1]) < TREE_EPSILON, (request, token)
            assert float(state.family.p[token]) > 0.0, (request, token)
            return
        low = float(edges[token] - weights[token])
        assert low - TREE_EPSILON < point < float(edges[token]) + TREE_EPSILON, (request, token)


def assert_tree_accepts(result: Acceptance, step: Step, rule: str) -> int:
    """Compare with the oracle; return how many requests differ, each within `TREE_EPSILON`."""
    expected = step.accept(reference, rule)
    for field, x, y in zip(Acceptance._fields, result, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), field
    different = [
        b
        for b in range(len(result.status))
        if not all(torch.equal(x[b], y[b]) for x, y in zip(result, expected, strict=True))
    ]
    for b in different:
        assert_tree_result(result, step, rule, b)
    return len(different)
