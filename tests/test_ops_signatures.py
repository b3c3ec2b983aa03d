"""A call is checked once for its signature: whatever differs from a good call is checked again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import eager, ops
from spec_kernels.ops import _register
from spec_kernels.types import CacheTensors
from tests.steps import Step
from tests.test_cache_ops import appended, compacted
from tests.test_ops import calls

CACHES = {
    "append_cache": appended(),
    "compact_cache": compacted(),
    "compact_hidden": lambda: ops.compact_hidden(
        torch.ones(4, 3), torch.tensor([[0, 2]]).int(), *path()
    ),
    "select_state": lambda: ops.select_state(
        CacheTensors.make([torch.zeros(1, 1, 2)]), CacheTensors.make([torch.ones(1, 2, 2)]), *path()
    ),
}
NAMES = [*calls(Step()), *CACHES]
FIRST = {name.partition("-")[0]: name for name in reversed(NAMES)}.values()
FORMS = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def path() -> tuple[Tensor, Tensor]:
    return torch.tensor([[0, 1]]).int(), torch.tensor([1]).int()


def arguments_of(
    name: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], dict[str, Any]]:
    """Make a good call, and return the arguments with which a second one reaches the layer."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    inner = getattr(eager, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return inner(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(eager, name, spy)
        call()
        call()
    return list(seen[-1][0]), seen[-1][1]


def others(value: Any) -> Iterator[Any]:
    """Yield values that differ from a good one in a single respect."""
    if isinstance(value, Tensor):
        yield value[None]  # shape
        yield value[:0] if value.dim() else value.reshape(1)
        yield value.bool()  # dtype
        yield value.to("meta")  # device
        yield torch.nn.Parameter(value, requires_grad=False)
        if value.is_floating_point():
            yield value.clone().requires_grad_()
        if value.dim() > 1 and value.numel():
            yield value[:1].expand(value.shape)  # strides
            yield value.mT.contiguous().mT
    elif type(value) is bool:
        yield not value
        yield int(value)
    elif type(value) is int:
        yield from (0, -1, float(value), value + 1)
    elif isinstance(value, float):
        yield from (0.0, -1.0)
    elif isinstance(value, str):
        yield "other"
    elif isinstance(value, CacheTensors):
        yield CacheTensors.make([*value.tensors, *value.tensors])
        yield CacheTensors.make([tensor.double() for tensor in value.tensors])
        yield CacheTensors.make([tensor.repeat_interleave(2, -1) for tensor in value.tensors])
        yield from (value._replace(table=table) for table in others(value.table))
        yield value._replace(groups=2)
    elif isinstance(value, tuple):
        yield list(value)
        yield tuple(value) if type(value) is not tuple else value[:-1]
        for place, inner in enumerate(value):
            for other in others(inner):
                changed = [*value[:place], other, *value[place + 1 :]]
                yield value._make(changed) if hasattr(value, "_make") else tuple(changed)
    yield None if value is not None else torch.zeros(1)


def outcome(call: Callable[..., Any], arguments: tuple[list[Any], dict[str, Any]]) -> str:
    """Return the result of a call on copies of its arguments, or what it raises."""
    args, kwargs = copy.deepcopy(arguments)
    try:
        return str(call(*args, **kwargs))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
@pytest.mark.parametrize("form", FORMS)
def test_a_good_call_vouches_for_no_other(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument changed in turn: as without the memory of the good one."""
    name = form.partition("-")[0]
    call = CACHES[form] if form in CACHES else calls(Step())[form]
    args, kwargs = arguments_of(name, call, monkeypatch)
    known = getattr(ops, name)
    changes = [
        ([*args[:i], other, *args[i + 1 :]], kwargs)
        for i, value in enumerate(args)
        for other in others(value)
    ]
    changes += [(args, {**kwargs, key: other}) for key in kwargs for other in others(kwargs[key])]
    for changed in changes:
        expected = outcome(known.__wrapped__, changed)
        assert outcome(known, changed) == expected


@pytest.fixture
def checked() -> list[Any]:
    """What `good_coins` was called with."""
    return []


@pytest.fixture
def good_coins(checked: list[Any]) -> Callable[..., Any]:
    """`coins`, with a memory of its own, that tells each call that is checked."""

    def coins(seeds: Tensor, root_positions: Tensor, nodes: int) -> Any:
        checked.append((len(seeds), nodes))
        return ops.coins(seeds, root_positions, nodes)

    return _register.checked_once()(coins)


def test_an_equal_signature_is_not_checked_again(
    good_coins: Callable[..., Any], checked: list[Any]
) -> None:
    for seed in (1, 2, 3):
        seeds, positions = torch.tensor([[seed], [7]])
        assert str(good_coins(seeds, positions, 2)) == str(ops.coins(seeds, positions, 2))
    assert checked == [(1, 2)]
    good_coins(seeds, positions, nodes=2)
    assert len(checked) == 2


def test_a_tensor_given_twice_is_like_no_two_tensors(
    good_coins: Callable[..., Any], checked: list[Any]
) -> None:
    for seed in (1, 2, 3):
        seeds = torch.tensor([seed])
        assert str(good_coins(seeds, seeds, 2)) == str(ops.coins(seeds, seeds, 2))
    assert checked == [(1, 2)]
    for _ in range(2):
        good_coins(seeds, seeds.clone(), 2)
    good_coins(seeds, seeds, 2)
    assert checked == [(1, 2), (1, 2)]
    with pytest.raises(ValueError, match="root_positions must be"):
        good_coins(seeds, torch.tensor([1, 2]), 2)


def test_memory_is_bounded(good_coins: Callable[..., Any], checked: list[Any]) -> None:
    (forms,) = (
        cell.cell_contents
        for cell in good_coins.__closure__  # type: ignore[attr-defined]
        if type(cell.cell_contents) is list
    )
    one, other = torch.tensor([[1], [1]])
    for nodes in (*range(1, _register.MAX_OPTIONS + 2), 1):
        good_coins(one, other, nodes)
    assert [nodes for _, nodes in checked[-2:]] == [_register.MAX_OPTIONS + 1, 1]
    assert [len(form.known) for form in forms] == [2]
    for batch in (*range(1, _register.MAX_LIKE + 2), 1, 1):
        good_coins(*torch.ones(2, batch, dtype=torch.int64), 1)
    assert [batch for batch, _ in checked[-2:]] == [_register.MAX_LIKE + 1, 1]
    assert len(forms[0].known[(1,)]) == _register.MAX_LIKE
    names = ("seeds", "root_positions", "nodes")
    for order in itertools.permutations(names):
        for given in range(4):
            values = dict(zip(names, (one, other, 3), strict=True))
            args = [values.pop(name) for name in names[:given]]
            good_coins(*args, **{name: values[name] for name in order if name in values})
    assert len(forms) == 10
    forms[:] = forms * 2
    good_coins(torch.nn.Parameter(one, requires_grad=False), other, 2)
    assert len(forms) == _register.MAX_FORMS
