"""The attention kernels through the harness: bits of compiled code, tiles, addresses, bytes."""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from spec_kernels import eager, kernels, reference
from spec_kernels.kernels import _attention as shared
from spec_kernels.kernels import attention
from spec_kernels.kernels.attention import Config, select_config, select_unit
from spec_kernels.testing import KernelError, dry_run, emulated, interpreted, measure, watch
from spec_kernels.testing.hot import attention as hot
from tests import test_attention, test_mla
from tests.attention_cases import CHAIN, Case, make

SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}
"""Bytes of shared memory that a program may have; the compiler doesn't check AMD's."""


# --------------------------------------------------------------------------- bits


def decode(case: Case, args: tuple[Any, ...], keywords: dict[str, Any], node: int) -> list[Tensor]:
    """One node alone: the root as it is, others after the chain before them was committed."""
    query, keys, values, context_lens, _, _ = args
    out = kernels.verify_attention(
        query[node : node + 1], keys, values, context_lens + node,
        torch.tensor([0, 1], dtype=torch.int32), 1, block_table=keywords["block_table"],
        return_lse=True, invariant=True,
    )  # fmt: skip
    return [x[0] for x in out]


@pytest.mark.parametrize(
    ("context", "nodes"), [(30, 3), pytest.param(90, 16, marks=pytest.mark.slow)]
)
def test_invariant_compiled_rows_have_the_bits_of_plain_decoding(context: int, nodes: int) -> None:
    """The masked tile of today is an unmasked one later: the compiled loops must agree."""
    case = Case((context,), (nodes,), 2, 1, dim=32, tree=CHAIN)
    args, keywords = make(case)
    with emulated(schedule="lockstep"):
        out, lse = kernels.verify_attention(*args, **keywords, invariant=True)
        for node in (0, nodes - 1):
            single = decode(case, args, keywords, node)
            assert torch.equal(single[0], out[node])
            assert torch.equal(single[1], lse[node])


def test_the_root_of_a_tree_has_its_bits_whatever_the_tree() -> None:
    case = Case((37,), (9,), 2, 1, dim=32)
    args, keywords = make(case)
    with interpreted():
        out, lse = kernels.verify_attention(*args, **keywords, invariant=True)
        single = decode(case, args, keywords, 0)
    assert torch.equal(single[0], out[0])
    assert torch.equal(single[1], lse[0])


def test_invariant_calls_have_one_tile_and_no_fused_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    for nodes in (1, 16, 40):
        args, keywords = make(Case((5,), (nodes,), 2, 1, dim=32))
        with watch() as launches:
            kernels.verify_attention(*args, **keywords, invariant=True)
        seen.append(launches.launches[0].grid[0])
    assert seen == [1, 1, 3]  # tiles of 32 rows: 16 nodes of two heads
    with dry_run("sm_80") as compiled:
        kernels.verify_attention(
            *(x.to("meta") if isinstance(x, Tensor) else x for x in args),
            block_table=keywords["block_table"].to("meta"), invariant=True,
        )  # fmt: skip
    for launch in compiled:
        assert not launch.compiled.metadata.enable_fp_fusion
        assert "fma.rn.f32" not in launch.compiled.asm["ptx"].replace("// fma", "")


# --------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 128, torch.bfloat16, ("cuda", 90)), Config(16, 64, 4, 5)),
        ((64, 128, torch.bfloat16, ("cuda", 80)), Config(64, 64, 8, 5)),
        ((300, 64, torch.float16, ("cuda", 100)), Config(128, 64, 8, 5)),
        ((300, 128, torch.float16, ("cuda", 80)), Config(128, 32, 8, 5)),
        ((300, 256, torch.bfloat16, ("cuda", 90)), Config(64, 32, 8, 5)),
        ((300, 512, torch.bfloat16, ("cuda", 90)), Config(32, 32, 8, 5)),
        ((300, 512, torch.bfloat16, ("hip", "gfx942")), Config(16, 32, 4, 2)),
        ((64, 128, torch.bfloat16, ("hip", "gfx942")), Config(64, 64, 4, 2)),
        ((64, 128, torch.float32, ("cuda", 90)), Config(32, 32, 8, 5)),
        ((64, 512, torch.float32, ("hip", "gfx942")), Config(16, 16, 4, 2)),
        ((64, 512, torch.float32, ("cuda", 90)), Config(16, 16, 8, 2)),
        ((300, 128, torch.bfloat16, ("hip", "gfx950")), Config(128, 32, 8, 2)),
    ],
)
def test_tiles_follow_the_table(arguments: tuple[Any, ...], expected: Config) -> None:
    assert select_config(*arguments) == expected


def test_a_contiguous_cache_needs_fewer_stages_and_options_more_warps() -> None:
    arguments = (64, 128, torch.bfloat16, ("cuda", 90))
    assert select_config(*arguments, is_paged=False).num_stages == 3
    assert select_config(*arguments, is_plain=False).num_warps == 8


def test_each_lane_of_gfx950_copies_sixteen_bytes() -> None:
    arguments = (300, 128, torch.bfloat16, ("hip", "gfx950"))
    assert select_config(*arguments, is_byte=True) == Config(128, 64, 8, 2)


@pytest.mark.parametrize(
    ("dim", "target", "expected"),
    [
        (64, ("cuda", 80), Config(32, 32, 4, 5)),
        (128, ("cuda", 90), Config(32, 32, 8, 5)),
        (64, ("hip", "gfx942"), Config(32, 64, 4, 2)),
        (128, ("hip", "gfx950"), Config(32, 32, 4, 2)),
    ],
)
def test_each_lane_loads_sixteen_bytes_for_queries_of_float32(
    dim: int, target: tuple[str, Any], expected: Config
) -> None:
    assert select_config(64, dim, torch.float32, target, is_byte=True) == expected
    lanes = expected.num_warps * (64 if target[0] == "hip" else 32)
    assert expected.block_n * dim >= 16 * lanes


SHORT: dict[str, Any] = {"contexts": (5, 20), "nodes": (2, 3), "heads": 4, "kv_heads": 1}


@pytest.mark.parametrize(
    ("compare", "case"),
    [
        (test_attention.run, Case(**SHORT, dim=48, v_dim=80, cache="int8")),
        (test_mla.run, Case(**SHORT, dim=32, rope=16, cache="int8")),
        pytest.param(test_attention.run, Case(window=3, cache="int8"), marks=pytest.mark.slow),
    ],
)
def test_keys_loaded_as_columns_keep_the_error_budget(
    compare: Callable[[str, Case], None], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form for gfx950, interpreted."""
    monkeypatch.setattr(attention, "target_of", lambda _: ("hip", "gfx950"))
    compare("triton-interpreter", case)


@pytest.mark.parametrize("cache", ["int8", "e4m3"])
def test_values_loaded_as_columns_keep_the_error_budget(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form for queries of float32 on NVIDIA, interpreted."""
    monkeypatch.setattr(attention, "target_of", lambda _: ("cuda", 80))
    case = Case(**SHORT, dim=48, v_dim=80, dtype=torch.float32, cache=cache, scales="token")
    test_attention.run("triton-interpreter", case)


def test_strides_count_in_units_of_sixteen_bytes_where_they_can() -> None:
    x = torch.zeros(4, 16, 1, 40).bfloat16()
    assert select_unit(x) == 8
    assert select_unit(x.float()) == 4
    assert select_unit(x.to(torch.int8)) == 1  # 40 bytes from row to row
    assert select_unit(x, x[..., 1:]) == 1  # an odd address
    assert select_unit(torch.zeros(4, 16, 2, 36).bfloat16()) == 1


# --------------------------------------------------------------------------- machine code


def call(keywords: dict[str, Any] | None = None, **changes: Any) -> Callable[[], object]:
    """A call of production size, with fields of the hot calls changed and more keywords."""
    return partial(
        hot.make_verify(hot.CONFIGURATIONS[0]._replace(**changes), "meta"), **(keywords or {})
    )


# why these: an odd head whose strides are no multiple of 16 elements, other block sizes, options
# that cost registers, integers, and float32 products
MORE = {
    "d40": call(dim=40, group=7, kv_heads=1),
    "block1": call(block_size=1, dim=64),
    "window-softcap": call({"window": 4096, "softcap": 30.0}),
    "int8": call(cache_dtype=torch.int8),
    "f32": call(dtype=torch.float32, dim=64),
}


OWN_TILE = {
    "int8-nodes16": call(cache_dtype=torch.int8, nodes=16),
    "e4m3-nodes16": call(cache_dtype=torch.float8_e4m3fn, nodes=16),
}
"""Calls that have a tile of their own on gfx950."""

BYTES_OF_FLOAT32 = {
    f"{name}-d{dim}": call(dtype=torch.float32, cache_dtype=dtype, dim=dim, group=4)
    for name, dtype in (("int8", torch.int8), ("e4m3", torch.float8_e4m3fn))
    for dim in (64, 128)
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [*itertools.product(MORE, SHARED), *((name, "gfx950") for name in OWN_TILE)],
)
def test_machine_code_of_further_calls(name: str, target: str) -> None:
    """No spills, matrix instructions, 16-byte loads, and shared memory that the chip has."""
    with dry_run(target) as launches:
        (MORE | OWN_TILE)[name]()
    used = measure(launches[0].compiled, target)
    assert used.spill_bytes == 0
    assert used.shared_bytes <= SHARED[target]
    assert used.mma
    assert used.program.load_bits == 128


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), [*itertools.product(BYTES_OF_FLOAT32, SHARED)])
def test_all_loads_of_an_8_bit_cache_are_wide(name: str, target: str) -> None:
    """For queries of float32 too; ids, scales and words are single numbers."""
    with dry_run(target) as launches:
        BYTES_OF_FLOAT32[name]()
    widths = measure(launches[0].compiled, target).path().load_widths
    assert {*widths} == {32, 128}


# --------------------------------------------------------------------------- addresses


def test_offsets_pass_two_to_the_thirty_one() -> None:
    """Blocks that lie 2^30 elements apart, in memory that exists only where it is touched; a tile
    of the context and one of the draft."""
    case = Case((70,), (2,), 2, 1, dim=16, block_size=16)
    args, keywords = make(case)
    query, *caches = args[:3]
    far = []
    for cache in caches:
        stride, blocks = 2**30 + 64, cache.shape[0]
        memory = mmap.mmap(-1, stride * blocks * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = torch.frombuffer(memory, dtype=torch.bfloat16)
        view = view.as_strided(cache.shape, (stride, *cache.stride()[1:]))
        far.append(view.copy_(cache))
    with watch(bounds=False):
        near_out, _ = kernels.verify_attention(*args, **keywords)
        far_out, _ = kernels.verify_attention(query, *far, *args[3:], **keywords)
    assert torch.equal(near_out, far_out)


def test_blocks_that_span_too_much_are_refused() -> None:
    args, keywords = make(Case((20,), (2,), 2, 1, dim=16, block_size=0, dtype=torch.float32))
    keys = torch.empty(1, 3, 1, 16, device="meta").as_strided((1, 3, 1, 16), (1, 2**33, 16, 1))
    with pytest.raises(ValueError, match=r"a block of key_cache must span less than 2\*\*31"):
        kernels.verify_attention(args[0], keys, keys, *args[3:], **keywords)


# --------------------------------------------------------------------------- traffic


@pytest.mark.parametrize("group", [1, 8])
def test_bytes_do_not_depend_on_query_heads_or_nodes(group: int) -> None:
    """Keys and values once, for up to 64 rows of a tile; blocks of one position cost no more."""
    case = Case((300,), (8,), group, 1, dim=64, block_size=1)
    args, keywords = make(case)
    with watch(races=False) as seen:
        kernels.verify_attention(*args, **keywords)
    split = seen.launches[0]
    cache_bytes = 308 * 2 * 64 * 2
    assert split.bytes("load", "inputs.key_cache") * 2 == cache_bytes
    assert split.distinct_load_bytes <= split.load_bytes
    rest = split.load_bytes - cache_bytes
    assert rest <= 8 * group * 64 * 2 + 4 * 2 * 308 + 16 * group * 8 * 8 + 64


def test_a_window_reads_only_what_it_sees() -> None:
    args, keywords = make(Case((1300,), (2,), 1, 1, dim=16, window=64, block_size=64))
    with watch(races=False) as seen:
        out, _ = kernels.verify_attention(*args, **keywords)
    expected, _ = reference.verify_attention(*args, **keywords)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert seen.launches[0].bytes("load", "inputs.key_cache") <= (64 + 64 + 2) * 16 * 2


# --------------------------------------------------------------------------- compiled code

SPLIT_CASE = Case((317,), (8,), heads=2, kv_heads=1, dim=64)
"""Four tiles of context and two that meet the draft block: every loop turns more than once."""


@pytest.mark.parametrize(
    "case",
    [
        Case((0, 17), (3, 2), heads=2, kv_heads=1, dim=64, cache="int8"),
        *test_attention.slow(
            [
                Case((5, 17), (3, 2), 2, 1, dtype=torch.float16, cache="int8", scales="token"),
                Case((70,), (3,), 2, 1, dtype=torch.float32, dim=32),
                Case((70,), (3,), 2, 1, dtype=torch.float32, cache="int8"),
            ]
        ),
    ],
    ids=str,
)
def test_emulated_compiled_code_keeps_the_error_budget(case: Case) -> None:
    """Warps in random order, shared memory under watch."""
    args, keywords = make(case)
    expected = reference.verify_attention(*args, **keywords)
    judge = eager.verify_attention(*args, **keywords)
    with emulated(races=True, order="shuffle"):
        out, lse = kernels.verify_attention(*args, **keywords)
    test_attention.check_budget(out, judge[0], expected[0], case.dtype)
    test_attention.check_budget(lse, judge[1], expected[1], torch.float32)


def without_barrier(ptx: str, n: int) -> str:
    """The n-th barrier becomes a comment; code without one stays as it is."""
    places = [found.start() for found in re.finditer(r"bar\.sync", ptx)]
    return f"{ptx[: places[n]]}// {ptx[places[n] :]}" if places else ptx


def split_barriers() -> int:
    """The number of barriers of the split kernel; the merge has one warp, and none."""
    with dry_run("sm_80") as launches:
        args, keywords = make(SPLIT_CASE)
        kernels.verify_attention(*args, **keywords)
    split, merge = (launch.compiled.asm["ptx"].count("bar.sync") for launch in launches)
    assert (launches[1].compiled.metadata.num_warps, merge) == (1, 0)
    return split


def is_needed(barrier: int) -> bool:
    """Whether a race shows without one barrier of the split kernel.

    Else it was reached, and two warps never used one byte from the barrier before it to the one
    behind it: then it orders nothing, and the result has the same bits.
    """
    args, keywords = make(SPLIT_CASE)
    edit = partial(without_barrier, n=barrier)
    for late in (True, False):  # copies land at their wait, or at once
        try:
            with emulated(races=True, late_copies=late, edit=edit) as launches:
                got = kernels.verify_attention(*args, **keywords)
        except KernelError:
            return True
    with emulated() as plain:
        expected = kernels.verify_attention(*args, **keywords)
    assert launches[0].steps < plain[0].steps
    assert all(map(torch.equal, got, expected))
    return False


def test_no_race_with_all_barriers_and_one_without_them() -> None:
    args, keywords = make(SPLIT_CASE)
    for late in (True, False):
        with emulated(races=True, late_copies=late):
            kernels.verify_attention(*args, **keywords)
    with (
        emulated(races=True, edit=lambda ptx: ptx.replace("bar.sync", "// ")),
        pytest.raises(KernelError),  # a race, or a block number read before it was written
    ):
        kernels.verify_attention(*args, **keywords)


@pytest.mark.slow
def test_every_barrier_but_one_is_needed() -> None:
    """The one stands between the context loop, behind the last barrier of which no warp uses shared
    memory, and the first copies for the masked loop."""
    assert sum(not is_needed(barrier) for barrier in range(split_barriers())) <= 1


# --------------------------------------------------------------------------- known wrong kernels


class Fault(NamedTuple):
    """A wrong kernel: lines of `kernels/_attention.py`, what stands there instead, and who sees it.

    Attributes:
        name: what is wrong.
        line, wrong: text that occurs once, and its replacement.
        shown_by: a check that fails.
    """

    name: str
    line: str
    wrong: str
    shown_by: Callable[[], object]


def budget(**fields: Any) -> Callable[[], object]:
    """The error budget of the contract, for a case that shows the fault."""
    case = Case((5, 70), (3, 2), heads=2, kv_heads=1, dim=16, block_size=4)
    return partial(test_attention.run, "triton-interpreter", case._replace(**fields))


def merge_ascending() -> None:
    """In float32 `(1 + 1e8) - 1e8` is 0; from behind it is 1."""
    part = torch.tensor([1.0, 1e8, -1e8]).view(3, 1, 1, 1).repeat(1, 1, 1, 16)
    zero, one = torch.zeros(3, 1, 1), torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    out = torch.empty(1, 1, 16)
    sizes = {"tokens": 1, "heads": 1, "batch": 1, "capacity": 2500, "window": 0}
    with interpreted():
        attention.merge_splits_kernel[(1, 1)](
            out, None, part, zero, one, ints(2400), ints(0, 1), None, None, **sizes,
            SPLIT=1024, V_DIM=16, V_BLOCK=16, HAS_WINDOW=False, BLOCK=16,
        )  # fmt: skip
    assert (out == 0.0).all()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_splits_are_merged_in_ascending_order() -> None:
    merge_ascending()


FAULTS = [
    Fault(
        "merged from behind",
        "    for split in range(first, last):\n        place = ",
        "    for split in range(last - 1, first - 1, -1):\n        place = ",
        merge_ascending,
    ),
    Fault(
        "a split is not merged",
        "last = tl.cdiv(tl.minimum(context + nodes, capacity), SPLIT)",
        "last = tl.cdiv(tl.minimum(context, capacity), SPLIT)",
        budget(contexts=(1024,), nodes=(2,)),
    ),
    Fault(
        "no mask on the draft tile",
        "        scores = tl.where(visible, scores, NEG_INF)\n",
        "",
        budget(),
    ),
    Fault(
        "ancestors of the next tile",
        "first = start - cache.context + 32 * i",
        "first = start - cache.context + 32 * i + 1",
        budget(),
    ),
    Fault(
        "the window one too wide",
        "> (rows.depth - sizes.window)",
        ">= (rows.depth - sizes.window)",
        budget(window=3),
    ),
    Fault(
        "lse without the sum", "(largest + tl.log2(total)) * LN2", "largest * LN2", budget(tree="")
    ),
    Fault("lse in bits", "(largest + tl.log2(total)) * LN2", "largest + tl.log2(total)", budget()),
    Fault("sums not rescaled", "acc * shrink[:, None]", "acc", budget(contexts=(200,), nodes=(2,))),
    Fault(
        "rows of 32 bits",
        "block = tl.load(cache.table_ptr + number).to(tl.int64)",
        "block = tl.load(cache.table_ptr + number)",
        test_offsets_pass_two_to_the_thirty_one,
    ),
    Fault(
        "masked rows of 32 bits",
        "mask=ok, other=0).to(tl.int64)",
        "mask=ok, other=0)",
        test_offsets_pass_two_to_the_thirty_one,
    ),
]
"""Each is a mistake that a reader of the kernels might make."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_known_wrong_kernels_are_caught(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shared.__file__).read_text()
    assert source.count(fault.line) == 1
    file = tmp_path / "wrong_attention.py"
    file.write_text(source.replace(fault.line, fault.wrong))
    spec = importlib.util.spec_from_file_location("wrong_attention", file)
    assert spec is not None
    assert spec.loader is not None
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    for kernel in ("verify_split_kernel", "merge_splits_kernel"):
        monkeypatch.setattr(attention, kernel, getattr(wrong, kernel))
    with pytest.raises(AssertionError):
        fault.shown_by()
