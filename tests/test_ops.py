"""The public operations: registration, fake results, and dispatch by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spec_kernels import (
    Draft,
    SamplingParams,
    accept,
    adjust_logits_,
    coins,
    draft_coins,
    eager,
    match,
    ops,
    overlap,
    row_law,
    sample,
)
from spec_kernels.ops import _register
from tests import attention_cases, test_cache_ops
from tests.steps import NODES, Step


@pytest.fixture
def step() -> Step:
    return Step()


def calls(step: Step) -> dict[str, Callable[[], Any]]:
    """Call every operation in every form of its arguments."""
    return {
        "coins": lambda: coins(step.seeds, step.positions, NODES),
        "draft_coins": lambda: draft_coins(step.seeds, step.positions, NODES, 2),
        "row_law": lambda: row_law(step.logits, step.params, step.request),
        "row_law-temperature": lambda: row_law(
            step.logits.bfloat16(), SamplingParams(step.params.temperature), step.request
        ),
        "adjust_logits_": lambda: adjust_logits_(
            step.logits.detach().clone(), step.request, **step.adjustments
        ),
        "adjust_logits_-nothing": lambda: adjust_logits_(
            step.logits.detach().clone(), step.request
        ),
        "overlap": lambda: overlap(step.logits, step.law, step.draft_logits, step.draft_law),
        "overlap-map": lambda: overlap(
            step.logits.softmax(-1), None, step.draft_logits, None, target_to_draft=step.id_map
        ),
        "sample-coins": lambda: sample(step.logits, step.law, coins=step.row_coins),
        "sample-noise": lambda: sample(step.logits, step.law, noise=step.noise),
        "sample-probabilities": lambda: sample(step.logits.softmax(-1), None, coins=step.row_coins),
        "sample-children": lambda: sample(
            step.logits, step.law, coins=step.child_coins, k=3, excluded=step.excluded
        ),
        "sample-repeated": lambda: sample(
            step.logits, step.law, coins=step.child_coins, k=3, replacement=True
        ),
        "sample-noise-children": lambda: sample(step.logits, step.law, noise=step.noise, k=2),
        "accept-law": lambda: step.accept(),
        "accept-params": lambda: step.accept(target_law=step.params, rule="token"),
        "accept-fixed": lambda: step.accept(
            draft=Draft(step.draft.tokens.int(), step.draft.num_nodes), max_depth=1
        ),
        "accept-probabilities": lambda: step.accept(
            target_logits=step.logits.softmax(-1), target_law=None, target_to_draft=step.id_map
        ),
        "accept-tree": lambda: step.accept(draft=step.tree, max_depth=2),
        "accept-tree-token": lambda: step.accept(
            draft=step.tree, target_law=step.params, rule="token", replacement=True
        ),
        "match-tree": lambda: match(step.tree, step.tokens, max_depth=2),
        "match": lambda: match(step.draft, step.tokens, max_depth=NODES + 1),
        "match-int32": lambda: match(step.draft, step.tokens.int(), max_depth=0),
        **attention_cases.operations(),
    }


FORMS = list(calls(Step()))


def tensors_of(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


class Recorder(TorchDispatchMode):
    """Remember the operations of this package with the flat arguments that reach them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "spec_kernels":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded(call: Callable[[], Any]) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
    with Recorder() as recorder:
        call()
    return recorder.seen[-1]


def test_only_what_nobody_watches_passes_by_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call, or one just like it that nobody watched, was good before."""
    monkeypatch.setattr(eager, "coins", lambda *_: True)

    def coins(*_: Any) -> bool:
        return False

    is_direct = _register.checked_once()(coins)

    def is_direct_again(*args: Any) -> bool:
        assert not is_direct(*args)
        return is_direct(*args)

    plain, seen = torch.ones(2), []
    leaf = torch.ones(2, requires_grad=True)
    assert is_direct_again(plain, None, 1, 0.5, True, "block", (plain, plain.clone()))
    assert is_direct_again((plain, None), plain)
    assert not is_direct_again(plain, leaf)
    assert not is_direct_again((plain, leaf))
    assert is_direct_again((plain, leaf.detach()))
    assert not is_direct((plain, leaf))
    assert not is_direct_again(torch.nn.Parameter(plain, requires_grad=False))
    assert not is_direct_again(plain.to("meta"))
    assert not is_direct_again(np.int64(1))
    assert is_direct_again(1)
    assert is_direct_again(plain)
    with Recorder():
        assert not is_direct_again(plain)
        assert not is_direct_again(plain, plain)
    with FakeTensorMode():
        assert not is_direct_again(plain)
    with torch.profiler.profile():
        assert not is_direct_again(plain)
    torch.vmap(lambda x: seen.extend([is_direct_again(x), is_direct(plain)]) or x)(plain)
    assert seen == [False, False]
    compiled = torch.compile(lambda x: x * is_direct(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(plain), plain * 0)
    assert is_direct(plain)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str, step: Step) -> None:
    overload, args = recorded(calls(step)[form])
    assert overload._schema.name == f"spec_kernels::{form.partition('-')[0]}"
    torch.library.opcheck(overload, args)


def test_every_operation_is_called_here_or_among_the_caches() -> None:
    called = {form.partition("-")[0] for form in FORMS}
    assert called | {name for name, _, _ in test_cache_ops.calls()} == set(ops.__all__)


@pytest.mark.parametrize("form", FORMS)
def test_fake_results_have_the_real_shapes_and_dtypes(form: str, step: Step) -> None:
    real = tensors_of(calls(step)[form]())
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = tensors_of(calls(step)[form]())
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [
        (t.shape, t.dtype, t.stride()) for t in real
    ]


@pytest.mark.parametrize("form", FORMS)
def test_results_are_those_of_the_layer_that_the_device_decides(
    form: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same function name is called in `eager`, with the tuples put together again."""
    name = form.partition("-")[0]
    direct, inner = [], getattr(eager, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        direct.append((args, kwargs))
        return inner(*args, **kwargs)

    monkeypatch.setattr(eager, name, spy)
    got = tensors_of(calls(step)[form]())
    (args, kwargs) = direct[-1]
    want = tensors_of(inner(*args, **kwargs))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_the_tuples_reach_the_layer_unchanged(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    inner = eager.accept

    def spy(*args: Any, **kwargs: Any) -> Any:
        names = ("draft", "target_logits", "target_law", "target_row", "accept_coins")
        seen.update(zip((*names, "final_coins"), args, strict=True))
        seen.update(kwargs)
        return inner(*args, **kwargs)

    monkeypatch.setattr(eager, "accept", spy)
    for law in (step.law, step.params, None):
        logits = step.logits if law is not None else step.logits.softmax(-1)
        step.accept(target_logits=logits, target_law=law, target_to_draft=step.id_map, rule="token")
        assert type(seen["target_law"]) is type(law)
        for got, want in zip(seen["target_law"] or (), law or (), strict=True):
            assert (got is None and want is None) or torch.equal(got, want)
        draft = seen["draft"]
        assert torch.equal(draft.tokens, step.draft.tokens)
        assert draft.parents is None
        assert not seen["replacement"]
        assert torch.equal(draft.num_nodes, step.draft.num_nodes)
        assert torch.equal(draft.logits, step.draft_logits)
        assert torch.equal(draft.row, step.row)
        assert all(torch.equal(a, b) for a, b in zip(draft.law, step.draft_law, strict=True))
        assert torch.equal(seen["target_logits"], logits)
        assert torch.equal(seen["target_row"], step.row)
        assert torch.equal(seen["accept_coins"], step.accept_coins)
        assert torch.equal(seen["final_coins"], step.final_coins)
        assert torch.equal(seen["target_to_draft"], step.id_map)
        assert (seen["rule"], seen["max_depth"]) == ("token", NODES - 1)
    step.accept(draft=step.tree, replacement=True)
    assert torch.equal(seen["draft"].parents, step.tree.parents)
    assert seen["replacement"]


@pytest.mark.parametrize("form", FORMS)
def test_the_device_key_runs_the_kernels_with_the_same_arguments(
    form: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA and ROCm share a dispatch key; its implementation is called here on CPU tensors."""
    kernels = pytest.importorskip("spec_kernels.kernels")
    name = form.partition("-")[0]
    seen: dict[str, list[Any]] = {"eager": [], "kernels": []}
    inner = getattr(eager, name)
    for layer, module in (("eager", eager), ("kernels", kernels)):

        def spy(*args: Any, layer: str = layer, **kwargs: Any) -> Any:
            seen[layer].append((args, kwargs))
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, name, spy, raising=False)
    overload, args = recorded(calls(step)[form])
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    overload.redispatch(key, *args)
    assert [len(seen["eager"]), len(seen["kernels"])] == [1, 1]
    assert str(seen["eager"]) == str(seen["kernels"])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_compiles_without_graph_breaks(backend: str, step: Step) -> None:
    def run(
        draft: Draft, logits: Tensor, params: SamplingParams, request: Tensor, row: Tensor
    ) -> tuple[Tensor, ...]:
        law = row_law(logits * 1.0, params, request)
        accept_coins, final_coins = coins(step.seeds, step.positions + 1, NODES)
        result = accept(draft, logits, law, row, accept_coins, final_coins, max_depth=NODES - 1)
        tokens = sample(logits, law, noise=step.noise)
        children = sample(logits, law, coins=step.child_coins, k=3, excluded=step.excluded)
        tree = draft._replace(parents=step.tree.parents, row=step.tree.row)
        kept = accept(tree, logits, law, row, accept_coins, final_coins, max_depth=2)
        path = match(tree, tokens.view(row.shape), max_depth=2).path
        chain = match(draft, tokens.view(row.shape), max_depth=2).path
        return (*result, tokens + 0, children + 0, *kept, path, chain)

    arguments = (step.draft, step.logits, step.params, step.request, step.row)
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for got, want in zip(compiled(*arguments), run(*arguments), strict=True):
        assert torch.equal(got, want)


def test_adjust_logits_compiles_as_a_mutation(step: Step) -> None:
    def run(logits: Tensor) -> Tensor:
        copy = logits + 0
        adjust_logits_(copy, step.request, **step.adjustments)
        return copy * 2

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(step.logits), run(step.logits))
    assert not torch.equal(run(step.logits), step.logits * 2)


def test_results_are_detached_and_inputs_unchanged(step: Step) -> None:
    step.logits.requires_grad_()
    step.draft_logits.requires_grad_()
    before = {name: str(value) for name, value in vars(step).items()}
    for form, call in calls(step).items():
        assert not any(t.requires_grad for t in tensors_of(call())), form
    assert {name: str(value) for name, value in vars(step).items()} == before


def test_empty_batch_and_no_rows(step: Step) -> None:
    empty = SamplingParams.make([], batch=0)
    none = torch.zeros(0, dtype=torch.int32)
    law = row_law(step.logits[:0], empty, none)
    assert [t.shape for t in law] == [(0,)] * 6
    assert sample(step.logits[:0], law, coins=step.row_coins[:0]).shape == (0, 1)
    accept_coins, final_coins = coins(step.seeds[:0], step.positions[:0], 3)
    draft = Draft(step.tokens[:0, :3], none)
    for target_law in (law, empty, None):
        result = accept(
            draft,
            step.logits[:0],
            target_law,
            step.row[:0, :3],
            accept_coins,
            final_coins,
            max_depth=2,
        )
        assert [list(t.shape) for t in result] == [[0, 3], [0], [0, 3], [0]]
    assert match(draft, step.tokens[:0, :3], max_depth=2).path.shape == (0, 3)
    adjust_logits_(step.logits[:0], none)


def test_adjusts_logits_whose_columns_are_not_adjacent(step: Step) -> None:
    transposed = step.logits.t().contiguous().t()
    adjust_logits_(transposed, step.request, **step.adjustments)
    adjust_logits_(step.logits, step.request, **step.adjustments)
    assert torch.equal(transposed, step.logits)
