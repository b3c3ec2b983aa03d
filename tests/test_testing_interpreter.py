"""The corrected interpreter: every correction is needed, and nothing is left behind."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from spec_kernels.testing import IntegerOverflowError, KernelError, interpreted
from spec_kernels.testing import interpreter as ours
from spec_kernels.testing._builder import Builder, Semantic
from spec_kernels.testing._formats import fma
from tests import kernels_for_tests as k

IS_OLD = triton.__version__.startswith("3.6")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def run_binary(op: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = bf16(256), bf16(256)
    out = torch.empty(256, dtype=torch.bfloat16)
    k.binary[(1,)](out, x, y, OP=op, BLOCK=256)
    expected = {
        "add": lambda: x + y,
        "mul": lambda: x * y,
        "max": lambda: torch.maximum(x, y),
        "fma": lambda: (x.double() * y.double() + x.double()).float().bfloat16(),
        "neg": lambda: -x,
        "clamp": lambda: torch.minimum(torch.maximum(x, y), y + y),
        "where": lambda: torch.minimum(x, y),
    }[op]()
    return out, expected


def run_round() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(256)
    out = torch.empty(256, dtype=torch.bfloat16)
    k.cast[(1,)](out, x, BLOCK=256)
    return out, x.bfloat16()


def run_fp8() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(256) * 30
    out = torch.empty(256, dtype=torch.float8_e4m3fn)
    k.cast[(1,)](out, x, BLOCK=256)
    return out.float(), x.to(torch.float8_e4m3fn).float()


def run_dot() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randint(-4, 5, (2, 16, 16)).bfloat16()
    out = torch.empty(16, 16)
    k.dot[(1,)](out, x, y, N=16)
    return out, x.float() @ y.float()


def run_sum() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(-4, 5, (16, 16)).bfloat16()
    out = torch.empty(16, dtype=torch.bfloat16)
    k.column_sum[(1,)](out, x, N=16)
    return out, x.float().sum(0).bfloat16()


def run_scalar_mask() -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(8, dtype=torch.int32)
    k.scalar_mask[(1,)](out, 1, 2, BLOCK=8)
    return out, torch.arange(8, dtype=torch.int32)


# correction, what is put back to Triton's own, and a check that needs it
CORRECTIONS = {
    "bf16-add": (Builder, "binary_op", lambda: run_binary("add")),
    "bf16-mul": (Builder, "binary_op", lambda: run_binary("mul")),
    "bf16-max": (Builder, "binary_op", lambda: run_binary("max")),
    "bf16-less": (Builder, "binary_op", lambda: run_binary("where")),
    "bf16-fma": (Builder, "create_fma", lambda: run_binary("fma")),
    "bf16-negate": (Builder, "unary_op", lambda: run_binary("neg")),
    "bf16-round": (Builder, "cast_impl", run_round),
    "fp8-round": (Builder, "create_fp_to_fp", run_fp8),
    "bf16-dot": (Builder, "create_dot", run_dot),
    "scalar-mask": (Builder, "create_splat", run_scalar_mask),
}


RIGHT_IN_OLD = {"bf16-max", "bf16-negate", "scalar-mask"}
"""Corrections that Triton 3.6 did not need yet."""


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_gives_the_numbers_of_the_hardware(name: str) -> None:
    with interpreted():
        got, expected = CORRECTIONS[name][2]()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_without_the_correction_the_numbers_are_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_OLD and name in RIGHT_IN_OLD:
        pytest.skip("right in Triton 3.6")
    owner, method, run = CORRECTIONS[name]
    monkeypatch.setattr(owner, method, getattr(stock.InterpreterBuilder, method))
    if name == "scalar-mask":  # two corrections make it right, each alone suffices
        monkeypatch.setattr(owner, "binary_op", stock.InterpreterBuilder.binary_op)
    with interpreted():
        try:
            got, expected = run()
        except Exception:
            return
    assert not torch.equal(got, expected)


def test_bf16_sum_and_clamp() -> None:
    with interpreted():
        for got, expected in (run_sum(), run_binary("clamp")):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_fused_multiply_add_rounds_once() -> None:
    fmaf = ctypes.CDLL("libm.so.6").fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    x, y = np.random.default_rng(1).standard_normal((2, 4096)).astype(np.float32)
    ties = np.float32(2.0) ** np.arange(-60, 4).repeat(64).astype(np.float32)
    for z in (-x * y, np.float32(1e30) * y, y * ties, ties, np.full_like(x, np.inf)):
        expected = np.frompyfunc(fmaf, 3, 1)(x, y, z).astype(np.float32)
        np.testing.assert_array_equal(fma(x, y, z), expected)
    halfway = np.float32(1 + 2**-23), np.float32(1 + 2**-23), np.float32(2.0**-80)
    assert fma(*halfway) == fmaf(*map(float, halfway))
    wide = np.float64(1 + 2**-30)
    assert fma(wide, wide, np.float64(-1 - 2**-29)) == 2.0**-60


def test_fp8_saturates_and_keeps_nan() -> None:
    x = torch.tensor([1e9, -1e9, float("inf"), float("nan")])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.empty(4, dtype=dtype)
        with interpreted():
            k.cast[(1,)](out, x, BLOCK=4)
        limit = torch.finfo(dtype).max
        assert out.float()[:3].tolist() == [limit, -limit, limit]
        assert out.float()[3].isnan()


def test_reductions_keep_order_drop_nan_and_take_the_first_of_ties() -> None:
    out = torch.empty(3, dtype=torch.int32)
    x = torch.tensor([1.0, 7.0, float("nan"), 7.0, 0.0, 7.0, 2.0, 3.0])
    with interpreted():
        with pytest.raises(KernelError, match="is not commutative"):  # where a NaN is compared
            k.first_argmax[(1,)](out, x, N=8)
        assert out[1:].tolist() == [1, 7]
        x[2] = -1.0
        k.first_argmax[(1,)](out, x, N=8)
        assert out.tolist() == [1, 1, 7]
        with pytest.raises(KernelError, match=r"kernels_for_tests.py:\d+: .* is not commutative"):
            k.left_argmax[(1,)](out, x, N=8)


def test_argmax_of_nothing_but_nan_is_no_error() -> None:
    out = torch.empty(1, dtype=torch.int32)
    with interpreted():
        k.nan_argmax[(1,)](out, torch.full((8,), float("nan")), N=8)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_of_a_function_that_does_not_commute(reverse: bool) -> None:
    scale = torch.randint(1, 3, (16,)).double()
    shift = torch.randint(-3, 4, (16,)).double()
    out = torch.empty(16, dtype=torch.float64)
    with interpreted():
        k.affine_scan[(1,)](out, scale, shift, N=16, REVERSE=reverse)
    value = 0.0
    for i in reversed(range(16)) if reverse else range(16):
        value = float(value * scale[i] + shift[i])
        assert out[i] == value


def test_constants_shifts_defaults_and_callable_grids() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    with interpreted():
        k.shifts[lambda meta: (meta["BLOCK"] // 8,)](out, BLOCK=8, num_warps=1, num_stages=3)
        assert out.tolist() == [8 - 1 + 4 + 3 + 4 * i for i in range(8)]
        with pytest.raises(AssertionError, match="BLOCK must be 8"):
            k.shifts[(1,)](out, BLOCK=16)


def test_none_pointers_and_float_arguments_are_those_of_the_device() -> None:
    x, out = torch.arange(8.0), torch.empty(8)
    with interpreted():
        k.scaled[(1,)](out, x, 0.5, None, BLOCK=8)
        assert torch.equal(out, x * 0.5)
        k.scaled[(1,)](out, x, 0.5, x, BLOCK=8)
        assert torch.equal(out, x * 0.5 + x)
        wide = torch.empty(1, dtype=torch.float64)
        k.float_argument[(1,)](wide, 0.1)
    assert wide.item() == (torch.tensor(0.1) * 3).item()  # rounded to float32, not 0.1 * 3


def test_empty_grid_runs_nothing() -> None:
    with interpreted():
        k.copy_flat[(0,)](torch.empty(0), torch.empty(0), BLOCK=8)


def test_a_broken_promise_of_alignment_is_caught() -> None:
    x, out = torch.zeros(256), torch.empty(128)
    with interpreted():
        k.misaligned[(1,)](out, x, 128, BLOCK=128)
        with pytest.raises(KernelError, match=r":\d+: promised a multiple of 128, got 3"):
            k.misaligned[(1,)](out, x, 3, BLOCK=128)


def test_device_assert_fires() -> None:
    with interpreted():
        k.asserting[(1,)](torch.ones(8), BLOCK=8)
        with pytest.raises(AssertionError, match="x must be positive"):
            k.asserting[(1,)](torch.zeros(8), BLOCK=8)


def test_int32_row_offset_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.zeros(1, 8).expand(3, 8), torch.empty(3)
    with interpreted():
        k.row_sum[(3,)](out, torch.ones(3, 8), 8, 8, BLOCK=8)
        assert out.tolist() == [8.0] * 3
        with pytest.raises(IntegerOverflowError, match=r"kernels_for_tests.py:\d+: int32 .* mul"):
            k.row_sum_int32[(3,)](out, x, 2**30 + 16, 0, BLOCK=8)
        monkeypatch.setattr(Semantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        k.row_sum_int32[(3,)](out, x, 2**30 + 16, 0, BLOCK=8)  # silent without the correction


def test_bf16_accumulation_and_wrong_ties_show_in_the_numbers() -> None:
    x, out = torch.rand(2, 4096).bfloat16(), torch.empty(2)
    exact = x.double().sum(1)
    with interpreted():
        k.row_sum[(2,)](out, x, 4096, 4096, BLOCK=64)
        assert (out - exact).abs().max() < 1e-3
        k.row_sum_bf16[(2,)](out, x, 4096, 4096, BLOCK=64)
        assert (out - exact).abs().max() > 1
        index = torch.empty(1, dtype=torch.int32)
        k.last_argmax[(1,)](index, torch.tensor([0.0, 2.0, 2.0, 1.0]), 4, BLOCK=4)
    assert index.item() == 2


def test_context_leaves_no_trace() -> None:
    def state() -> list[object]:
        owners = (tl, tl.core, tl.math, tl.tensor, tl.constexpr, tl.dtype, JITFunction, stock)
        return [dict(vars(owner)) for owner in owners]

    before, names = state(), set(vars(k))
    out = torch.zeros(8, dtype=torch.int32)
    with interpreted():
        k.shifts[(1,)](out, BLOCK=8)
        assert vars(JITFunction)["__call__"] is before[6]["__call__"]  # patched in launches only
        with pytest.raises(AssertionError), interpreted():
            k.shifts[(1,)](out, BLOCK=16)
        k.shifts[(1,)](out, BLOCK=8)  # the inner context ended by an error; this one goes on
    assert state() == before
    assert set(vars(k)) == names
    with pytest.raises(RuntimeError):
        k.shifts[(1,)](out, BLOCK=8)  # no driver here: the launch is Triton's again


def test_compiling_works_between_launches() -> None:
    source = triton.compiler.ASTSource(
        k.row_sum,
        {"out_ptr": "*fp32", "x_ptr": "*bf16", "x_stride_row": "i32", "size": "i32"}
        | {"BLOCK": "constexpr"},
        {"BLOCK": 64},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    x, out = torch.ones(2, 100).bfloat16(), torch.empty(2)
    with interpreted():
        k.row_sum[(2,)](out, x, 100, 100, BLOCK=64)
        assert "ptx" in triton.compile(source, target=target).asm
        k.row_sum[(2,)](out, x, 100, 100, BLOCK=64)
    assert out.tolist() == [100.0, 100.0]


def test_tensors_elsewhere_are_refused() -> None:
    with interpreted(), pytest.raises(TypeError, match="x_ptr must be a CPU tensor"):
        k.copy_flat[(1,)](torch.empty(8), torch.empty(8, device="meta"), BLOCK=8)


def test_triton_interpret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), interpreted():
        pass


def test_rewriting_keeps_line_numbers() -> None:
    function = ours._python_function(k.shifts)
    assert function.__code__.co_filename == k.__file__
    assert function.__code__.co_firstlineno == k.shifts.fn.__code__.co_firstlineno + 1
