"""Dry runs compile the real launches; resources come from the machine code; faults show there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import triton

from spec_kernels.testing import TARGETS, Mix, Resources, dry_run, measure
from spec_kernels.testing._machine_code import Instruction, best_path, parse_amd, parse_sass
from spec_kernels.testing.resources import bits_of, kind_of
from tests import kernels_for_tests as k


def copy_rows(
    target: str, vocab: int, stride: int, *, peeled: bool = True, offset: int = 0
) -> Resources:
    memory = torch.empty(offset + 8 * stride, device="meta", dtype=torch.bfloat16)
    x = memory[offset:].view(8, stride)
    with dry_run(target) as launches:
        k.copy_rows[lambda meta: (8, triton.cdiv(vocab, meta["BLOCK"]))](
            x, x, stride, vocab, BLOCK=1024, PEELED=peeled, num_warps=4
        )
    (launch,) = launches
    assert (launch.kernel, launch.target) == ("copy_rows", target)
    assert launch.grid == (8, -(-vocab // 1024), 1)
    return measure(launch.compiled, target)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles_and_is_read(target: str) -> None:
    resources = copy_rows(target, 128256, 128256)
    assert resources.registers > 0
    assert resources.spill_bytes == 0
    assert resources.warps == 4
    assert resources.threads == (256 if target.startswith("gfx") else 128)
    assert resources.program.load_bits == (64 if target.startswith("gfx") else 128)
    assert resources.program.store_bytes > 0
    assert not resources.mma


def test_load_width_is_that_of_the_path_not_of_the_tail() -> None:
    """A row stride that is a multiple of 16 allows wide loads in full blocks, whatever V is."""
    even, odd = copy_rows("sm_90", 128256, 128256), copy_rows("sm_90", 50257, 50272)
    assert set(even.path().load_widths) == {128}
    assert odd.path().load_bits == 128
    assert odd.program.load_widths[16] > 0  # the masked tail


@pytest.mark.parametrize("fault", ["masked", "odd stride", "odd address"])
def test_unvectorised_loads_are_caught(fault: str) -> None:
    resources = {
        "masked": lambda: copy_rows("sm_90", 50257, 50272, peeled=False),
        "odd stride": lambda: copy_rows("sm_90", 50257, 50257),
        "odd address": lambda: copy_rows("sm_90", 50257, 50272, offset=1),
    }[fault]()
    assert resources.path().load_bits == 16
    assert max(max(bits) for bits in resources.load_bits_by_line().values()) == 16


def test_loads_are_named_by_source_line() -> None:
    resources = copy_rows("sm_90", 50257, 50272)
    lines = resources.load_bits_by_line()
    assert all(line.startswith("kernels_for_tests.py:") for line in lines)
    (full,) = [line for line, bits in lines.items() if set(bits) == {128}]
    (tail,) = [line for line, bits in lines.items() if set(bits) == {16}]
    assert resources.path(through=[tail]).load_widths[16] == 8
    assert resources.path(through=[full], avoid=[tail]).load_widths == Counter({128: 1})


def test_spills_are_caught() -> None:
    x = torch.empty(64, 128, device="meta")
    with dry_run("sm_80") as launches:
        k.spilling[(1,)](x, x, ROWS=64, BLOCK=128, num_warps=1)
    resources = measure(launches[0].compiled, "sm_80")
    assert resources.spill_bytes > 0
    assert resources.program.kinds["spill"] > 0
    assert resources.registers == 255


def test_matrix_instructions_and_loops() -> None:
    x = torch.empty(64, 64, device="meta", dtype=torch.bfloat16)
    out = torch.empty(64, 64, device="meta")
    found = {}
    for target in ("sm_80", "sm_90", "gfx942"):
        with dry_run(target) as launches:
            k.matrix_product[(1,)](out, x, x, 4096, N=64, BLOCK=64, num_warps=4, num_stages=2)
        resources = measure(launches[0].compiled, target)
        found[target] = resources.mma
        assert resources.loops
        assert any(loop.kinds["mma"] for loop in resources.loops)
        assert resources.shared_bytes > 0
    assert found["sm_80"] == ("HMMA",)
    assert found["sm_90"] == ("HGMMA",)
    assert found["gfx942"][0].startswith("v_mfma")


def test_launch_options_and_specialisation_are_the_real_ones() -> None:
    x = torch.empty(64, device="meta")
    with dry_run("sm_90") as launches:
        k.scaled[(1,)](x, x, 0.5, None, BLOCK=64, num_warps=2)
        k.row_sum[(4,)](x, x, 1, 64, BLOCK=64)
    scaled, row_sum = launches
    assert scaled.compiled.metadata.num_warps == 2
    assert scaled.compiled.src.signature["bias_ptr"] == "constexpr"
    assert row_sum.compiled.src.signature["x_stride_row"] == "constexpr"  # the value 1
    assert row_sum.arguments["size"] == 64


def test_dry_run_leaves_no_trace_and_refuses_unknown_targets() -> None:
    before = triton.runtime.jit.JITFunction.run
    driver = triton.runtime.driver._active
    with dry_run("sm_80"):
        pass
    with pytest.raises(ValueError, match="target must be one of sm_80, "), dry_run("sm_7"):
        pass
    assert triton.runtime.jit.JITFunction.run is before
    assert triton.runtime.driver._active is driver


# --------------------------------------------------------------------------- reading code

SASS = """
\t//## File "/x/kernel.py", line 10 inlined at "/x/main.py", line 3
\t//## File "/x/main.py", line 3
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   BRA `(.L_x_2) ;
.L_x_1:
\t//## File "/x/main.py", line 5
        /*0040*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0050*/                   IMAD R1, R1, R1, R1 ;
.L_x_2:
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_sass_is_read_into_lines_blocks_and_paths() -> None:
    code = parse_sass(SASS)
    assert len(code.instructions) == 9
    assert code.instructions[0].lines == ("kernel.py:10", "main.py:3")
    assert code.instructions[4].lines == ("main.py:5",)

    def weigh(block: Any) -> tuple[int, ...]:
        mix = Mix.of(block)
        return mix.load_bytes, -mix.instructions

    names = [code.instructions[i].name for i in best_path(code, weigh)]
    assert names == ["S2R", "BRA", "LDG", "BRA", "MUFU", "BRA", "EXIT"]
    narrow = best_path(code, lambda block: (sum(x.name == "IMAD" for x in block),))
    assert [code.instructions[i].name for i in narrow][2:4] == ["LDG", "IMAD"]


def test_a_path_may_leave_at_a_guarded_exit() -> None:
    code = parse_sass(SASS.replace("@P0 BRA `(.L_x_1)", "@P0 EXIT"))
    short = best_path(code, lambda block: (-len(list(block)),))
    assert [code.instructions[i].opcode for i in short] == ["S2R", "EXIT"]
    longest = best_path(code, lambda block: (len(list(block)),))
    assert len(longest) > 2


def test_a_path_does_not_follow_warps_that_come_apart() -> None:
    code = parse_sass(SASS.replace("@P0 BRA `(.L_x_1)", "BRA.DIV UR4, `(.L_x_1)"))
    longest = best_path(code, lambda block: (sum(x.name == "IMAD" for x in block),))
    assert [code.instructions[i].name for i in longest][:3] == ["S2R", "BRA", "LDG"]


def test_amd_assembly_is_read() -> None:
    text = """
.LBB0_0:
\t.loc\t1 90 19 is_stmt 1               ; law.py:90:19 @[ law.py:125:28 ]
\tglobal_load_dwordx4 v[0:3], v4, s[2:3]
\ts_cbranch_execz .LBB0_2
\tv_exp_f32_e32 v0, v1
.LBB0_2:
\tglobal_store_short v4, v0, s[2:3]
\ts_endpgm
"""
    code = parse_amd(text)
    assert [kind_of(x) for x in code.instructions] == ["load", "other", "special", "store", "other"]
    assert code.instructions[0].lines == ("law.py:90", "law.py:125")
    assert code.labels == {".LBB0_0": 0, ".LBB0_2": 3}
    assert code.instructions[1].jump == ".LBB0_2"


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [
        ("LDG.E.U16.CONSTANT", 16),
        ("LDG.E", 32),
        ("LDG.E.64", 64),
        ("global_load_short_d16_hi", 16),
        ("global_load_ubyte", 8),
        ("buffer_load_dwordx2", 64),
        ("global_load_dword", 32),
    ],
)
def test_width_of_accesses(opcode: str, bits: int) -> None:
    assert bits_of(Instruction(opcode)) == bits
