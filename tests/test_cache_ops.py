"""The cache operations as registered: checks of torch, dispatch, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spec_kernels import ops
from spec_kernels.types import CacheTensors
from tests.test_cache import Case, assert_same, compact, copy_of, ints, make_case


def small() -> Case:
    return make_case([[0, 2], [0, 1, 3]], 4, forms=("nhd", "scales"), contexts=(2,), nodes=5)


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The flat arguments of every operation, as it was registered."""
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    case, scales = small(), torch.zeros(2, 4, 1)
    caches = CacheTensors.make([copy_of(x) for x in case.tensors])
    state = CacheTensors.make([torch.zeros(2, 1, 4)])
    after = CacheTensors.make([torch.ones(2, 5, 4)])
    rest = (case.path, case.accepted_lens)
    packed = (list(caches.tensors), caches.table, list(caches.addresses), list(caches.rows), 1)
    flat = [(list(c.tensors), c.table, list(c.addresses), list(c.rows), 1) for c in (state, after)]
    row, slots = torch.ones(2, 1, 4), ints([1, -1], dtype=torch.int64)
    int8 = torch.zeros(2, 4, 1, 4, dtype=torch.int8)
    seen.append(("append_cache", (int8, int8.clone(), row, row, slots, scales, scales.clone()), {}))
    seen.append(("append_cache", (torch.zeros(2, 4, 1, 4), None, row, None, slots, None, None), {}))
    args = (*packed, case.block_table, case.context_lens, *rest)
    seen += [("compact_cache", (*args, None), {}), ("compact_cache", (*args, ints([5, 5])), {})]
    seen.append(("compact_hidden", (torch.ones(4, 3), case.path, *rest), {}))
    seen.append(("select_state", (*flat[0], *flat[1], *rest, None), {}))
    yield from seen


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n in (0, 2) else []) for n in range(6)]
)
def test_operations_pass_the_checks_of_torch(number: int) -> None:
    name, args, kwargs = list(calls())[number]
    torch.library.opcheck(getattr(torch.ops.spec_kernels, name).default, args, kwargs)


def test_operations_run_the_eager_layer() -> None:
    case = small()
    caches = CacheTensors.make([copy_of(x) for x in case.tensors])
    ops.compact_cache(caches, case.block_table, case.context_lens, case.path, case.accepted_lens)
    assert_same(list(caches.tensors), compact("eager", case))


CACHES = CacheTensors.make([torch.zeros(2, 4, 1, 4)])
TABLE, ONES = ints([[0], [1]]), ints([1, 1])
PATH = ints([[0, 1], [0, 1]])
SLOTS = ints([0, 1], dtype=torch.int64)
NEW = torch.zeros(2, 1, 4)
CACHE = torch.zeros(2, 4, 1, 4)


def compacted(**changes: Any) -> Callable[[], None]:
    """A call of `compact_cache` with some arguments changed."""
    args = {"caches": CACHES, "block_table": TABLE, "context_lens": ONES} | changes
    return lambda: ops.compact_cache(**({"path": PATH, "accepted_lens": ONES} | args))


def appended(**changes: Any) -> Callable[[], None]:
    args = {"key_cache": CACHE, "value_cache": None, "key": NEW, "value": None, "slots": SLOTS}
    return lambda: ops.append_cache(**(args | changes))


def made(*tensors: torch.Tensor, groups: list[int] | None = None) -> Callable[[], Any]:
    return lambda: CacheTensors.make(tensors, groups)


TWO = CacheTensors.make([CACHE, CACHE], [0, 1])
WIDER = CacheTensors.make([torch.zeros(2, 4, 1, 5)])
INT8 = CACHE.to(torch.int8)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "caches must be CacheTensors", compacted(caches=[CACHE])),
        (ValueError, r"path must be \[batch, max_depth \+ 1\]", compacted(path=ONES)),
        (TypeError, "path must be .* int32, got .* int64", compacted(path=PATH.long())),
        (ValueError, "path must have a column for the root", compacted(path=PATH[:, :0])),
        (ValueError, r"context_lens must be \[2\]", compacted(context_lens=ONES[:1])),
        (ValueError, r"block_table must be \[2, max_blocks\]", compacted(block_table=TABLE[:1])),
        (
            ValueError,
            r"must be \[2, 2, max_blocks\]",
            compacted(caches=TWO, block_table=TABLE[None]),
        ),
        (ValueError, r"num_nodes must be \[2\]", compacted(num_nodes=ONES[:1])),
        (ValueError, "given together", appended(value_cache=CACHE)),
        (ValueError, r"key must be \[2, 1, 4\]", appended(key=NEW[:, :, :3])),
        (TypeError, "slots must be .* int64", appended(slots=ONES)),
        (TypeError, "key_cache must be", appended(key_cache=CACHE.long())),
        (ValueError, "key_scale must be None beside", appended(key_scale=torch.ones(1))),
        (
            ValueError,
            r"key_scale must be \[2, 4, 1\]",
            appended(key_cache=INT8, key_scale=torch.ones(2, 4)),
        ),
        (
            ValueError,
            "checkpoints must have the rows of states",
            lambda: ops.select_state(CACHES, WIDER, PATH, ONES),
        ),
        (
            ValueError,
            r"states must be \[2, 1, 1, 4\]",
            lambda: ops.select_state(CACHES, CACHES, PATH, ONES),
        ),
        (ValueError, "at least one tensor", made()),
        (ValueError, "with elements", made(CACHE[:0])),
        (ValueError, "must not overlap", made(CACHE[:1].expand(2, 4, 1, 4))),
        (ValueError, "at one distance", made(torch.zeros(2, 4, 4, 4, 4)[..., ::2, ::2])),
        (ValueError, "at most 8 bytes", made(CACHE.to(torch.complex128))),
        (ValueError, "groups must be 1 numbers", made(CACHE, groups=[-1])),
        (ValueError, "on one device", made(CACHE, CACHE.to("meta"))),
    ],
)
def test_refusals(error: type[Exception], message: str, call: Callable[[], None]) -> None:
    with pytest.raises(error, match=message):
        call()
