"""The attention kernels through the harness: bits of compiled code, tiles, addresses, bytes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import kernels, reference
from spec_kernels.kernels import attention
from spec_kernels.kernels.attention import Config, select_config, select_unit
from spec_kernels.testing import dry_run, emulated, interpreted, measure, watch
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
    "int8-nodes16": call(cache_dtype=torch.int8, nodes=16),
    "e4m3-nodes16": call(cache_dtype=torch.float8_e4m3fn, nodes=16),
    "f32": call(dtype=torch.float32, dim=64),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
@pytest.mark.parametrize("name", MORE)
def test_machine_code_of_further_calls(name: str, target: str) -> None:
    """No spills, matrix instructions, 16-byte loads, and shared memory that the chip has."""
    with dry_run(target) as launches:
        MORE[name]()
    used = measure(launches[0].compiled, target)
    assert used.spill_bytes == 0
    assert used.shared_bytes <= SHARED[target]
    assert used.mma
    assert used.program.load_bits == 128


# --------------------------------------------------------------------------- addresses


def test_offsets_pass_two_to_the_thirty_one() -> None:
    """Blocks that lie 2^30 elements apart, in memory that exists only where it is touched."""
    case = Case((20,), (2,), 2, 1, dim=16, block_size=4)
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
