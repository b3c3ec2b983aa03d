"""Emulated PTX: the compiled kernel gives the interpreter's results, and shows missing barriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton

from spec_kernels.testing import (
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    UnsupportedError,
    emulate,
    emulated,
    interpreted,
)
from spec_kernels.testing.dry_run import compile_launch
from spec_kernels.testing.ptx.machine import SharedRaces
from spec_kernels.testing.ptx.program import parse
from tests import kernels_for_tests as k


def both(kernel: Any, grid: Any, *args: Any, **options: Any) -> list[torch.Tensor]:
    """Run a kernel interpreted and emulated on clones of its first argument; return both."""
    results = []
    for context in (interpreted(), emulated(schedule="warps", order="shuffle", seed=2)):
        out = args[0].clone()
        with context:
            kernel[grid](out, *args[1:], **options)
        results.append(out)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_bit_equal_to_the_interpreter(dtype: torch.dtype) -> None:
    x = torch.randint(-8, 9, (3, 300)).to(dtype)
    got, emulation = both(k.row_sum, (3,), torch.empty(3), x, 300, 290, BLOCK=128)
    assert torch.equal(got, emulation)
    assert torch.equal(got, x[:, :290].float().sum(1))


def test_special_functions_agree() -> None:
    x = torch.rand(256) + 0.1
    got, emulation = both(k.special_functions, (1,), torch.empty(256), x, BLOCK=256)
    torch.testing.assert_close(got, emulation, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [1234, -5, 0x123456789ABCDEF])
def test_random_bits_and_wide_integers(seed: int) -> None:
    got, emulation = both(
        k.wide_integers, (1,), torch.empty(128, dtype=torch.int64), seed, BLOCK=128, num_warps=2
    )
    assert torch.equal(got, emulation)


def test_float64_search() -> None:
    weight = torch.rand(256)
    for target in (0.0, 0.3, 0.999999):
        out = torch.zeros(1, dtype=torch.int32)
        got, emulation = both(k.float64_search, (1,), out, weight, target, BLOCK=256)
        assert torch.equal(got, emulation)


def test_divergence_and_atomics() -> None:
    x = torch.tensor([3, 0, 7, 1], dtype=torch.int32)
    got, emulation = both(k.diverging, (4,), torch.zeros(5), x, BLOCK=4)
    assert torch.equal(got, emulation)


def test_reductions_and_scans() -> None:
    x = torch.randint(0, 9, (64,)).float()  # many ties
    with emulated():
        out = torch.zeros(1, dtype=torch.int32)
        k.left_argmax[(1,)](out, x, N=64)
    if not triton.__version__.startswith("3.6"):  # whose layout happens to keep the order
        assert out.item() != x.argmax()  # why the interpreter refuses functions that don't commute
    got, emulation = both(k.first_argmax, (1,), torch.zeros(3, dtype=torch.int32), x, N=64)
    assert torch.equal(got, emulation)
    scale, shift = torch.randint(1, 3, (2, 32)).double()
    got, emulation = both(
        k.affine_scan, (1,), shift.clone(), scale, shift, N=32, REVERSE=False, num_warps=1
    )
    assert torch.equal(got, emulation)


# --------------------------------------------------------------------------- barriers


def compiled(kernel: Any, *args: Any, **options: Any) -> Any:
    return compile_launch(kernel, "sm_80", args, options)


def test_a_missing_barrier_shows_when_warps_run_in_random_order() -> None:
    expected = torch.arange(32 * 64.0).reshape(32, 64).roll(-1, 0)
    for kernel, sound in ((k.rotate_in_place, True), (k.rotate_without_barrier, False)):
        right = []
        for seed in range(4):
            x = torch.arange(32 * 64.0).reshape(32, 64)
            with emulated(schedule="warps", seed=seed):
                kernel[(1,)](x, ROWS=32, WIDTH=64)
            right.append(torch.equal(x, expected))
        assert all(right) == sound
    x = torch.arange(32 * 64.0).reshape(32, 64)
    with emulated(schedule="lockstep"):
        k.rotate_without_barrier[(1,)](x, ROWS=32, WIDTH=64)
    assert torch.equal(x, expected)  # all warps together hide it, as one interpreter does


@pytest.fixture(scope="module")
def product() -> tuple[Any, list[Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-4, 5, (32, 256), generator=generator).bfloat16()
    y = torch.randint(-4, 5, (256, 32), generator=generator).bfloat16()
    out = torch.empty(32, 32)
    options = {"N": 32, "BLOCK": 32, "num_warps": 4, "num_stages": 3}
    return compiled(k.matrix_product, out, x, y, 256, **options), [x, y, 256], x.float() @ y.float()


def run_product(product: Any, ptx: str, **options: Any) -> bool:
    kernel, arguments, expected = product
    out = torch.empty(32, 32)
    shared = kernel.metadata.shared
    emulate(ptx, (1,), [out, *arguments], shared_bytes=shared, schedule="warps", **options)
    return torch.equal(out, expected)


def test_matrix_product_with_asynchronous_copies(product: Any) -> None:
    ptx = product[0].asm["ptx"]
    assert "mma.sync" in ptx
    assert "cp.async" in ptx
    for late in (True, False):
        assert run_product(product, ptx, seed=1, late_copies=late)


def test_a_removed_barrier_of_the_product_shows(product: Any) -> None:
    parts = product[0].asm["ptx"].split("bar.sync")
    unnoticed = []
    for place in range(len(parts) - 1):
        mutant = "bar.sync".join(parts[: place + 1]) + "// bar.sync"
        mutant += "bar.sync".join(parts[place + 1 :])
        if all(run_product(product, mutant, seed=s, late_copies=s == 0) for s in range(2)):
            unnoticed.append(place)
    # the compiler puts one before the first copies, where nothing was read or written yet
    assert unnoticed in ([], [0], [1])
    assert len(parts) > 2


def test_a_missing_barrier_is_a_race_whatever_the_order(product: Any) -> None:
    """The two accesses show it, not the values, so one run is enough."""
    ptx = product[0].asm["ptx"]
    for late in (True, False):
        assert run_product(product, ptx, late_copies=late, races=True)
        with pytest.raises(RaceError, match="without a barrier"):
            run_product(product, ptx.replace("bar.sync", "// "), late_copies=late, races=True)
    with (
        emulated(schedule="lockstep", races=True),
        pytest.raises(ValueError, match="races need schedule='warps'"),
    ):
        k.copy_flat[(1,)](torch.empty(32), torch.empty(32), BLOCK=32)


def test_which_accesses_of_two_warps_need_a_barrier() -> None:
    races, where, same = SharedRaces(8), np.arange(4), np.zeros(4, bool)
    races.write(0, where, ~same, "st")
    races.write(1, where, same, "st")  # the same value once more
    races.read(1, where, "ld")
    with pytest.raises(RaceError, match="warp 2 reads what another one wrote"):
        races.read(2, where, "ld")
    with pytest.raises(RaceError, match="warp 0 overwrites what another one uses"):
        races.write(0, where, ~same, "st")
    races.forget()
    races.read(2, where, "ld")
    with pytest.raises(RaceError, match="warp 0 overwrites what another one uses"):
        races.write(0, where, ~same, "st")


def test_a_wait_that_is_too_weak_shows(product: Any) -> None:
    ptx = product[0].asm["ptx"]
    weak = ptx.replace("cp.async.wait_group \t", "cp.async.wait_group 5; //")
    assert weak != ptx
    assert not run_product(product, weak, seed=0)


# --------------------------------------------------------------------------- refusals


def test_faults_of_addresses_are_refused() -> None:
    x = torch.zeros(200)[:100]
    with emulated(), pytest.raises(OutOfBoundsError, match="400 bytes behind the start of arg"):
        k.doubled[(2,)](torch.empty(128), x, 100, SLACK_LOAD=1, SLACK=0, BLOCK=64)
    with emulated(), pytest.raises(MisalignedError, match=r"misaligned access: ld\.global"):
        k.misaligned[(1,)](torch.empty(128), torch.zeros(256), 3, BLOCK=128, num_warps=1)


def test_pointer_tables_reach_named_tensors_only() -> None:
    rows = [torch.rand(32), torch.rand(32)]
    table = torch.tensor([r.data_ptr() for r in rows])
    out = torch.empty(64)
    with emulated(reachable=rows):
        k.through_table[(2,)](out, table, BLOCK=32, num_warps=1)
    assert torch.equal(out, torch.cat(rows))
    with emulated(), pytest.raises(OutOfBoundsError):
        k.through_table[(2,)](out, table, BLOCK=32, num_warps=1)


def test_unknown_instructions_are_refused() -> None:
    kernel = compiled(k.copy_flat, torch.empty(32), torch.empty(32), BLOCK=32)
    for new, message in (("ld.local", "local memory"), ("frobnicate.global", "frobnicate")):
        ptx = kernel.asm["ptx"].replace("ld.global", new)
        with pytest.raises(UnsupportedError, match=message):
            emulate(ptx, (1,), [torch.empty(32)] * 2, shared_bytes=0)
    with pytest.raises(UnsupportedError, match="no entry"):
        parse("")


def test_nothing_is_skipped_silently() -> None:
    """Inline assembly stands in a scope of its own on one line, with its own registers."""
    text = """.entry f(.param .u64 f_param_0)
.reqntid 32
{
    .reg .b32 %r<3>;  .reg .b64 %rd<2>;
    mov.b64 %rd1, 0x0000000500000003;
    { .reg .b32 tmp; mov.b64 {%r1, tmp}, %rd1; add.u32 %r1, %r1, tmp; }
    @%p1 bra $L1; $L1: ret; }"""
    program = parse(text)
    assert [x.op[0] for x in program.instructions] == ["mov", "mov", "add", "bra", "ret"]
    assert program.instructions[1].operands == [["%r1", "%tmp"], "%rd1"]
    assert program.labels == {"$L1": 4}
    assert program.width("%tmp") == 32
    with pytest.raises(UnsupportedError, match="shared"):
        parse(text.replace("mov.b64 %rd1", ".reg .b32 %q<2>; .shared .b8 x[4]; mov.b64 %rd1"))
    numbered = text.replace(".reg .b32 tmp", ".reg .s8 r<2>").replace("tmp", "r1")
    program = parse(numbered)  # its r1 is not the compiler's %r1
    assert program.instructions[1].operands == [["%r1", "%ownr1"], "%rd1"]
    assert (program.width("%ownr1"), program.width("%r1")) == (8, 32)
    with pytest.raises(UnsupportedError, match=r"reg \.b16"):
        parse(numbered.replace("@%p1", "{ .reg .b16 r<2>; } @%p1"))


def test_contexts_put_back_what_they_found() -> None:
    before = triton.runtime.jit.JITFunction.run
    with pytest.raises(TypeError, match="x_ptr must be a CPU tensor"), emulated():
        k.copy_flat[(1,)](torch.empty(8), torch.empty(8, device="meta"), BLOCK=8)
    assert triton.runtime.jit.JITFunction.run is before
