"""Contract of the cache column: append, compact, select, gather, against the reference.

Whole storages are compared, so that a write beside the rows that should change shows too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from spec_kernels import ops, reference
from spec_kernels.types import CacheTensors
from tests.layers import LAYERS, ROWS, SMALL_LAYERS, layer, poisoned

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=dtype)


def storage(tensor: Tensor) -> Tensor:
    """The bytes behind a tensor, gaps between its rows included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def copy_of(tensor: Tensor, device: str = "cpu") -> Tensor:
    """Copy the whole storage; same shape, strides and offset."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    whole = whole.to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bytes: NaN and every other pattern must survive."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def lay_out(form: str, blocks: int, size: int, seed: int = 0) -> Tensor:
    """Return a cache tensor of one of the forms that engines use."""
    if form == "nhd":
        return noise(blocks, size, 2, 64, dtype=torch.bfloat16, seed=seed)
    if form == "hnd":
        return noise(blocks, 3, size, 80, dtype=torch.bfloat16, seed=seed).transpose(1, 2)
    if form == "latent":
        return noise(blocks, size, 576, dtype=torch.float16, seed=seed)
    if form == "float8":
        return noise(blocks, size, 1, 40, dtype=torch.uint8, seed=seed).view(torch.float8_e4m3fn)
    if form == "scales":
        return noise(blocks, size, 3, dtype=torch.float32, seed=seed)
    if form == "scales-by-head":
        return noise(blocks, 3, size, dtype=torch.float32, seed=seed).transpose(1, 2)
    if form == "odd":  # not aligned to 16 bytes, with a gap behind each row
        return noise(blocks, size, 2, 51, dtype=torch.int8, seed=seed)[:, :, :, 1:50]
    assert form == "keys-by-column", form  # elements of a row at the distance of a block's rows
    return noise(blocks, 2, 16, size, dtype=torch.float16, seed=seed).permute(0, 3, 1, 2)


FORMS = ("nhd", "hnd", "latent", "float8", "scales", "scales-by-head", "odd", "keys-by-column")


class Case(NamedTuple):
    """A compaction: tensors, tables, lengths and paths."""

    tensors: list[Tensor]
    block_table: Tensor | None
    context_lens: Tensor
    path: Tensor
    accepted_lens: Tensor
    num_nodes: Tensor | None = None
    groups: list[int] | None = None


def make_case(
    paths: list[list[int]],
    block_size: int,
    *,
    forms: tuple[str, ...] = FORMS,
    contexts: tuple[int, ...] = (0, 5, 11, 30),
    nodes: int = 33,
    clears: bool = False,
    seed: int = 0,
) -> Case:
    """Shuffle the blocks of all requests; block_size 0 is contiguous."""
    generator = torch.Generator().manual_seed(seed)
    batch, table = len(paths), None
    context = [contexts[b % len(contexts)] for b in range(batch)]
    blocks, size = batch, max(context) + nodes
    if block_size:
        most = -(-size // block_size)
        blocks, size = batch * most + 3, block_size
        table = torch.randperm(blocks, generator=generator)[: batch * most].view(batch, most).int()
    width = max(map(len, paths))
    path = torch.full((batch, width), -1, dtype=torch.int32)
    for row, own in zip(path, paths, strict=True):
        row[: len(own)] = ints(own)
    tensors = [lay_out(form, blocks, size, seed=n) for n, form in enumerate(forms)]
    accepted = ints([max(len(own), 1) - 1 for own in paths])
    num_nodes = ints([nodes - 3 * b for b in range(batch)]) if clears else None
    return Case(tensors, table, ints(context), path, accepted, num_nodes)


def run(name: str, function: str, call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Call on copies of the tensors that are written, and return the copies."""
    device = "cuda" if name == "triton" else "cpu"
    copies = [copy_of(tensor, device) for tensor in tensors]
    module = reference if name == "reference" else layer(name).module
    with poisoned(), context(name, copies):
        call(getattr(module, function), copies, lambda x: None if x is None else x.to(device))
    return [copy_of(tensor) for tensor in copies]


def context(name: str, reachable: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """The context of a layer; what is reached through addresses is named to those that watch."""
    if name in ("reference", "eager", "triton", "triton-interpreter"):
        return ROWS[name][1]() if name in ROWS else contextlib.nullcontext()
    from spec_kernels.testing import emulated, watch

    if name == "triton-ptx":
        return emulated(schedule="warps", order="shuffle", seed=2, reachable=reachable)
    return watch(name.removeprefix("triton-"), seed=3, reachable=reachable)  # type: ignore[arg-type]


def compact(name: str, case: Case) -> list[Tensor]:
    def call(function: Any, tensors: list[Tensor], move: Callable[[Any], Any]) -> None:
        function(
            CacheTensors.make(tensors, case.groups),
            move(case.block_table),
            move(case.context_lens),
            move(case.path),
            move(case.accepted_lens),
            num_nodes=move(case.num_nodes),
        )

    return run(name, "compact_cache", call, case.tensors)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(storage(one), storage(other)), list(one.shape)


def check(name: str, case: Case) -> list[Tensor]:
    expected = compact("reference", case)
    assert_same(compact(name, case), expected)
    return expected


PATHS = {
    "tree": [[0, 2, 5, 9, 30], [0, 31], [0], [0, 1, 3, 4, 6, 7, 8]],
    "chain": [[0, 1, 2], [0], [0, 1], [0, 1, 2, 3]],
    "unordered": [[5, 3, 1, 0], [2, 1, 0], [7, 0, 3], [1, 0]],
    "absent": [[], [0, 2], [], [0, 3]],
}


@pytest.mark.parametrize("block_size", [1, 4, 16, 0])
@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS)
def test_eager_compacts_every_layout(paths: list[list[int]], block_size: int) -> None:
    check("eager", make_case(paths, block_size))
    check("eager", make_case(paths, block_size, clears=True))


@pytest.mark.parametrize("name", LAYERS[1:])
@pytest.mark.parametrize(
    ("kind", "block_size", "clears", "forms"),
    [
        ("tree", 4, False, FORMS[:7]),
        ("unordered", 1, False, ("latent", "odd", "keys-by-column")),
        ("absent", 0, True, ("hnd", "scales-by-head")),
        pytest.param("tree", 16, True, FORMS, marks=pytest.mark.slow),
        pytest.param("unordered", 0, False, FORMS, marks=pytest.mark.slow),
        pytest.param("absent", 4, True, FORMS, marks=pytest.mark.slow),
    ],
)
def test_kernels_compact_every_layout(
    kind: str, block_size: int, clears: bool, forms: tuple[str, ...], name: str
) -> None:
    check(name, make_case(PATHS[kind], block_size, clears=clears, forms=forms))


@pytest.mark.parametrize("name", SMALL_LAYERS[3:])
@pytest.mark.parametrize("kind", ["unordered", pytest.param("tree", marks=pytest.mark.slow)])
def test_order_of_programs_and_warps_does_not_matter(kind: str, name: str) -> None:
    case = make_case(PATHS[kind][:2], 4, forms=("nhd", "scales"), nodes=8, clears=True)
    expected = check(name, case)
    assert not torch.equal(storage(expected[0]), storage(case.tensors[0]))


@pytest.mark.parametrize("block_size", [4, 0])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (0, 2, 4, 1, 3, 5), (5, 3, 4, 0, 1)])
def test_tensors_of_one_storage_move_as_others_do(order: tuple[int, ...], block_size: int) -> None:
    case = make_case(PATHS["tree"], block_size, forms=("nhd",), clears=True)
    whole = noise(6, *case.tensors[0].shape, dtype=torch.bfloat16, seed=5)
    heads_first = noise(6, *case.tensors[0].transpose(1, 2).shape, dtype=torch.bfloat16, seed=6)
    found = []
    for module in (reference, layer("eager").module):
        one, two = copy_of(whole), copy_of(heads_first).transpose(2, 3)
        odd = copy_of(case.tensors[0])  # between them, in a storage of its own
        tensors = [*(one[n] for n in order), odd, *(two[n] for n in order)]
        rest = (case.block_table, case.context_lens, case.path, case.accepted_lens)
        module.compact_cache(CacheTensors.make(tensors), *rest, num_nodes=case.num_nodes)
        found.append([one, two, odd])
    assert_same(found[1], found[0])
    assert not torch.equal(storage(found[0][0]), storage(whole))


def test_moving_rows_is_what_the_formula_says() -> None:
    case = make_case([[0, 3, 4]], 4, forms=("nhd",), contexts=(6,))
    (before,), (after,) = case.tensors, compact("eager", case)
    assert case.block_table is not None
    rows = [(int(case.block_table[0, p // 4]), p % 4) for p in range(6, 12)]
    for i, source in enumerate([0, 3, 4, 3, 4, 5]):
        assert torch.equal(storage(after[rows[i]].clone()), storage(before[rows[source]].clone()))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ["ascending", "unordered"])
def test_paths_longer_than_what_is_staged(kind: str, name: str) -> None:
    if kind == "ascending":
        paths = [[2 * i for i in range(150)]]
    else:
        order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
        paths = [order.tolist()]
    check(name, make_case(paths, 16, forms=("scales", "nhd"), nodes=300))


@pytest.mark.parametrize("name", LAYERS)
def test_tensors_have_block_tables_of_their_own(name: str) -> None:
    case = make_case(PATHS["tree"], 4, forms=("nhd", "latent"))
    other = make_case(PATHS["tree"], 16, forms=("hnd",), seed=5)
    assert case.block_table is not None
    assert other.block_table is not None
    wide = torch.full_like(case.block_table, -1)
    wide[:, : other.block_table.shape[1]] = other.block_table
    case = case._replace(
        tensors=[*case.tensors, *other.tensors],
        block_table=torch.stack([case.block_table, wide]),
        groups=[0, 0, 1],
    )
    expected = check(name, case)
    alone = compact("reference", other)
    assert torch.equal(storage(expected[2]), storage(alone[0]))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("clears", [False, True])
def test_malformed_values_are_skipped(clears: bool, name: str) -> None:
    case = make_case([[0, 3, 5]] * 10, 4, forms=("nhd", "odd"), contexts=(6,), clears=clears)
    assert case.block_table is not None
    case.path[0, 1:] = ints(HIGHEST, LOWEST)
    case.path[1] = ints(-1, 2, 3)  # absent
    case.path[2, 1] = 200  # behind the table
    case.accepted_lens[:5] = ints(HIGHEST, 2, 2, LOWEST, -1)
    case.context_lens[5:8] = ints(-1, HIGHEST, LOWEST)
    case.block_table[8, 1] = -1
    case.block_table[8, 2] = HIGHEST
    if case.num_nodes is not None:
        case.num_nodes[0] = HIGHEST
        case.num_nodes[8] = LOWEST
        case.num_nodes[9] = 4  # its path names node 5
    expected = check(name, case)
    untouched = case._replace(accepted_lens=torch.full((10,), -1, dtype=torch.int32))
    assert not torch.equal(storage(expected[0]), storage(compact("reference", untouched)[0]))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("block_size", [4, 0])
def test_dead_rows_are_cleared_and_no_others(block_size: int, name: str) -> None:
    case = make_case([[0, 2, 3]], block_size, forms=("nhd",), contexts=(3,), nodes=6)
    case = case._replace(num_nodes=ints([5]))
    (cache,) = check(name, case)
    table = [0] if case.block_table is None else case.block_table[0].tolist()
    size = block_size or 9
    rows = [storage(cache[table[p // size], p % size].clone()).any().item() for p in range(9)]
    assert rows == [True] * 6 + [False] * 2 + [True]


@pytest.mark.parametrize("name", LAYERS)
def test_empty_batches(name: str) -> None:
    case = make_case([[0, 1]], 4, forms=("nhd",))
    assert case.block_table is not None
    none = ints([])
    empty = case._replace(
        block_table=case.block_table[:0],
        context_lens=none,
        path=case.path[:0],
        accepted_lens=none,
        num_nodes=none,
    )
    check(name, empty)
    check(name, case._replace(block_table=case.block_table[:, :0], num_nodes=ints([4])))
    hidden = layer(name).compact_hidden(torch.ones(2, 3), case.path[:0], case.path[:0], none)
    assert hidden.shape == (0, 2, 3)


# --------------------------------------------------------------------------- append


QUANTISED = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def append(
    name: str,
    dtype: torch.dtype,
    scale: str,
    *,
    rows_dtype: torch.dtype = torch.float32,
    heads: int = 3,
    sizes: tuple[int, int | None] = (16, 8),
    by_head: bool = False,
    spread: float = 1.0,
) -> list[Tensor]:
    """Append nine rows, two of them skipped, to a cache of garbage; return caches and scales."""
    generator = torch.Generator().manual_seed(4)
    slots = ints([7, -1, 0, 19, 8, 3, 20, 11, LOWEST], dtype=torch.int64)
    written, rows = [], []
    for size in sizes:
        if size is None:
            continue
        cache = noise(5, 4, heads, size, dtype=torch.int16).to(torch.float32).to(dtype)
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2) if by_head else cache
        scales = torch.full((5, 4, heads), 7.0) if scale == "row" else torch.tensor([0.37])
        written += [cache, scales]
        x = torch.randn(9, heads, size, generator=generator)
        x = (x * spread ** torch.arange(size)).to(rows_dtype)
        x[0, 0] = 0.0
        x[2, 1, :3] = torch.tensor([math.inf, -math.inf, 1.0])
        x[3, 2, 1] = math.nan
        rows.append(x)

    def call(function: Any, tensors: list[Tensor], move: Callable[[Any], Any]) -> None:
        key_scale, value_scale = tensors[1], tensors[3] if len(rows) > 1 else None
        function(
            tensors[0],
            tensors[2] if len(rows) > 1 else None,
            move(rows[0]),
            move(rows[1]) if len(rows) > 1 else None,
            move(slots),
            key_scale=None if scale == "none" else key_scale,
            value_scale=None if scale == "none" else value_scale,
        )

    return run(name, "append_cache", call, written)


def assert_close_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    """Equal bit for bit, any NaN being equal to any other."""
    for one, other in zip(got, expected, strict=True):
        a, b = one.float(), other.float()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("scale", ["none", "cache", "row"])
@pytest.mark.parametrize("dtype", QUANTISED.values(), ids=QUANTISED)
def test_append_quantises(dtype: torch.dtype, scale: str, name: str) -> None:
    expected = append("reference", dtype, scale)
    assert_close_bits(append(name, dtype, scale), expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_append_stores_floats(rows_dtype: torch.dtype, dtype: torch.dtype, name: str) -> None:
    options: dict[str, Any] = {"rows_dtype": rows_dtype, "by_head": True, "sizes": (5, None)}
    expected = append("reference", dtype, "none", **options)
    assert_close_bits(append(name, dtype, "none", **options), expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", QUANTISED.values(), ids=QUANTISED)
def test_append_rounds_every_magnitude(dtype: torch.dtype, name: str) -> None:
    """Subnormal, normal and saturating numbers, in the scale of the dtype itself."""
    for scale in ("none", "row"):
        options: dict[str, Any] = {"spread": 0.8, "sizes": (97, None), "heads": 5}
        expected = append("reference", dtype, scale, **options)
        assert_close_bits(append(name, dtype, scale, **options), expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", list(QUANTISED.values())[:2], ids=list(QUANTISED)[:2])
def test_eight_bit_floats_round_to_nearest_even(dtype: torch.dtype, name: str) -> None:
    """Every number of the dtype, every midpoint between two, and their float32 neighbours."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    middle = (numbers[1:] + numbers[:-1]) / 2
    up, down = (middle.nextafter(torch.tensor(x)) for x in (math.inf, -math.inf))
    x = torch.cat([numbers, middle, up, down, ints([-1e9, 1e9], dtype=torch.float32)])
    row = x[None, None, :].contiguous()
    caches = []
    for layer_name in ("reference", name):

        def call(function: Any, tensors: list[Tensor], move: Callable[[Any], Any]) -> None:
            function(tensors[0], None, move(row), None, move(ints([0], dtype=torch.int64)))

        caches += run(
            layer_name, "append_cache", call, [torch.zeros(1, 1, *row.shape[1:]).to(dtype)]
        )
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    assert torch.equal(caches[0].flatten()[: len(numbers)].float(), numbers)


@pytest.mark.parametrize("name", LAYERS)
def test_many_heads_take_several_programs(name: str) -> None:
    options: dict[str, Any] = {"heads": 40, "sizes": (130, 16)}
    expected = append("reference", torch.float32, "none", **options)
    assert_close_bits(append(name, torch.float32, "none", **options), expected)


@pytest.mark.parametrize("name", SMALL_LAYERS[3:])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
def test_append_in_other_orders_and_as_compiled(dtype: torch.dtype, name: str) -> None:
    expected = append("reference", dtype, "row")
    assert_close_bits(append(name, dtype, "row"), expected)


def test_dequantised_rows_are_near() -> None:
    """The scale is what brings a row back: half a step of the dtype at most, per row."""
    x = torch.randn(6, 2, 32) * torch.logspace(-3, 3, 6)[:, None, None]
    for dtype, step in ((torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 28)):
        cache, scale = torch.zeros(6, 1, 2, 32).to(dtype), torch.zeros(6, 1, 2)
        ops.append_cache(cache, None, x, None, torch.arange(6), key_scale=scale)
        back = cache[:, 0].float() * scale[:, 0, :, None]
        assert bool(((back - x).abs() <= step * x.abs().amax(-1, keepdim=True) * 1.001).all())


# --------------------------------------------------------------------------- states, hidden states


def select(name: str, paths: Tensor, accepted: Tensor, slots: Tensor | None) -> list[Tensor]:
    states = [
        noise(6, 1, 3, 40, dtype=torch.float32),
        noise(6, 1, 7, dtype=torch.uint8),
        noise(6, 3, 2, 16, dtype=torch.bfloat16)[:, :, :1].transpose(1, 2),
    ]
    after = [
        noise(len(paths), 5, 3, 40, dtype=torch.float32, seed=1),
        noise(len(paths), 5, 7, dtype=torch.uint8, seed=2),
        noise(len(paths), 3, 5, 16, dtype=torch.bfloat16, seed=3).transpose(1, 2),
    ]

    def call(function: Any, tensors: list[Tensor], move: Callable[[Any], Any]) -> None:
        function(
            CacheTensors.make(tensors[:3]),
            CacheTensors.make(tensors[3:]),
            move(paths),
            move(accepted),
            state_slots=move(slots),
        )

    copies = run(name, "select_state", call, [*states, *after])
    assert_same(copies[3:], after)
    return copies[:3]


STATE_PATHS = ints([[0, 1, 2], [0, 3, 4], [-1, -1, -1], [0, 9, -1], [0, -1, 2], [0, 1, 4]])
STATE_LENS = ints([2, 1, 0, 1, 1, HIGHEST])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("slots", [None, [5, 0, 1, 2, 4, 3], [-1, 9, 1, 2, 4, LOWEST]])
def test_states_follow_the_accepted_path(slots: list[int] | None, name: str) -> None:
    given = None if slots is None else ints(slots)
    expected = select("reference", STATE_PATHS, STATE_LENS, given)
    assert_same(select(name, STATE_PATHS, STATE_LENS, given), expected)


@pytest.mark.parametrize("name", SMALL_LAYERS[3:])
def test_states_in_other_orders_and_as_compiled(name: str) -> None:
    expected = select("reference", STATE_PATHS[:2], STATE_LENS[:2], ints([3, 1]))
    assert_same(select(name, STATE_PATHS[:2], STATE_LENS[:2], ints([3, 1])), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_hidden_rows_are_gathered_along_the_path(name: str) -> None:
    hidden = torch.randn(14, 6).t().contiguous().t()
    row = torch.arange(12, dtype=torch.int32).view(3, 4).flip(0).contiguous()
    row[1, 2] = 99
    row[2, 1] = -1
    path = ints([[0, 2, 3], [0, 2, -1], [HIGHEST, 1, LOWEST]])
    for lens in ([2, 1, 2], [HIGHEST, LOWEST, 1]):
        expected = reference.compact_hidden(hidden, row, path, ints(lens))
        got = layer(name).compact_hidden(hidden, row, path, ints(lens))
        assert torch.equal(got, expected)
    assert torch.equal(
        reference.compact_hidden(hidden, row, path, ints([2, 1, 0]))[0, 1], hidden[10]
    )
