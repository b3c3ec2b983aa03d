"""Linear layers for few rows: against float64, at every number of rows; what they leave alone."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from spec_kernels.targets import few_rows, speed_up_linear_
from spec_kernels.targets.few_rows import FewRowsLinear

SHAPES = ((1, 1), (7, 3), (8, 8), (33, 61), (5, 129))
ROWS = (1, 2, 5, 6, 7, 8, 11, 12, 13, 24, 25, 49, 64, 127, 128, 129)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    if shutil.which("c++") is None:
        pytest.skip("the loop needs a C++ compiler")
    with torch.inference_mode():
        yield


def make_layer(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def exact(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the sum of all magnitudes that went into it."""
    weight, wide = layer.weight.double(), x.double()
    size = wide.abs() @ weight.abs().t()
    bias = 0.0 if layer.bias is None else layer.bias.double()
    return wide @ weight.t() + bias, size + abs(bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_within_rounding_of_float64(dtype: torch.dtype, bias: bool) -> None:
    for outputs, inputs in SHAPES:
        layer = make_layer(outputs, inputs, dtype, bias=bias)
        assert speed_up_linear_(layer) == 1
        for rows in ROWS:
            x = torch.randn(rows, inputs).to(dtype)
            expected, size = exact(layer, x)
            found = layer(x)
            assert found.dtype == dtype
            # one rounding of the product, one of the bias, and the float32 sums
            slack = (1 + bias) * torch.finfo(dtype).eps + inputs * torch.finfo(torch.float32).eps
            assert ((found.double() - expected).abs() <= slack * size).all(), (outputs, rows)


@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_is_rounded_as_torch_rounds(rows: int) -> None:
    layer = make_layer(33, 61, torch.bfloat16, bias=False)
    layer.weight.copy_(torch.randint(-8, 9, (33, 61)))  # sums of such products are exact
    x = torch.randint(-8, 9, (rows, 61)).to(torch.bfloat16)
    expected = (x.float() @ layer.weight.float().t()).to(torch.bfloat16)
    speed_up_linear_(layer)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    layer = make_layer(33, 61, dtype, bias=True)
    speed_up_linear_(layer)
    x = torch.randn(48, 61).to(dtype)
    together = layer(x)
    for rows in range(1, 48):
        assert torch.equal(layer(x[:rows]), together[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_leading_dimensions_and_strides_do_not_matter(dtype: torch.dtype) -> None:
    layer = make_layer(33, 61, dtype, bias=True)
    speed_up_linear_(layer)
    x = torch.randn(2, 61, 3).to(dtype).transpose(1, 2)
    assert layer(x).shape == (2, 3, 33)
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert torch.equal(layer(x)[1, 2], layer(x.reshape(6, 61))[5])
    assert layer(x[:0]).shape == (0, 3, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_in_their_row(dtype: torch.dtype, value: float) -> None:
    layer = make_layer(33, 61, dtype, bias=False)
    x = torch.randn(3, 61).to(dtype)
    healthy = x.clone()
    x[1, 60] = value
    expected = layer(x)
    speed_up_linear_(layer)
    found = layer(x)
    assert torch.equal(found[0::2], layer(healthy)[0::2])
    assert torch.equal(found[1].isnan(), expected[1].isnan())
    assert torch.equal(found[1].isinf(), expected[1].isinf())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_within_rounding_of_float64(dtype: torch.dtype) -> None:
    for size in (1, 7, 16, 61, 576):
        torch.manual_seed(size)
        norm = nn.RMSNorm(size, eps=1e-5).to(dtype)
        norm.weight.copy_(torch.randn(size))
        x = torch.randn(2, size, 3).to(dtype).transpose(1, 2)
        expected = F.rms_norm(x.double(), (size,), norm.weight.double(), 1e-5)
        assert speed_up_linear_(norm) == 1
        found = norm(x)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        slack = torch.finfo(dtype).eps + size * torch.finfo(torch.float32).eps
        assert ((found.double() - expected).abs() <= slack * expected.abs()).all()
        assert torch.equal(found[1, 2], norm(x[1, 2]))
        x[0, 1, size - 1] = float("nan")
        assert torch.equal(norm(x)[1], found[1])
        assert norm(x)[0, 1].isnan().all()
        assert norm(x[:0]).shape == (0, 3, size)


def test_norms_of_another_kind_stay_as_they_were() -> None:
    others = [nn.RMSNorm((2, 3), eps=1e-5), nn.RMSNorm(3), nn.RMSNorm(3, 1e-5, False)]
    assert speed_up_linear_(nn.ModuleList([*others, nn.RMSNorm(3, 1e-5).half()])) == 0
    norm = nn.RMSNorm(3, eps=1e-5)
    speed_up_linear_(norm)
    x = torch.randn(2, 3)
    norm.weight = nn.Parameter(torch.randn(6)[::2])
    assert torch.equal(norm(x), F.rms_norm(x, (3,), norm.weight, 1e-5))
    with pytest.raises(RuntimeError, match="shape"):
        norm(torch.randn(2, 4))
    with torch.inference_mode(mode=False), torch.enable_grad():
        trained = nn.RMSNorm(3, eps=1e-5)
        speed_up_linear_(trained)
        trained(torch.randn(2, 3)).sum().backward()
        assert trained.weight.grad is not None


def test_calls_with_gradients_and_other_layers_stay_as_they_were() -> None:
    class Special(nn.Linear):
        pass

    layers = {
        "fast": nn.Linear(4, 4),
        "subclass": Special(4, 4),
        "float16": nn.Linear(4, 4).half(),
        "float64": nn.Linear(4, 4).double(),
    }
    model = nn.ModuleDict(layers)
    assert speed_up_linear_(model) == 1
    assert [name for name, x in layers.items() if isinstance(x, FewRowsLinear)] == ["fast"]
    assert speed_up_linear_(model) == 0
    with torch.inference_mode(mode=False), torch.enable_grad():
        weight = nn.Linear(4, 4)
        speed_up_linear_(weight)
        weight(torch.ones(2, 4)).sum().backward()
        assert weight.weight.grad is not None
    with pytest.raises(RuntimeError, match=r"shapes|size|mat"):
        layers["fast"](torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="dtype"):
        layers["fast"](torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_calls_that_are_traced_or_cast_are_those_of_torch() -> None:
    layer, x = nn.Linear(16, 4), torch.randn(2, 16)
    speed_up_linear_(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    traced = torch.jit.trace(layer, x)
    other = torch.randn(2, 16)
    assert torch.allclose(traced(other), layer(other), atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (2, 4)


def test_a_layer_may_be_converted_copied_and_saved(tmp_path: Path) -> None:
    layer = make_layer(33, 61, torch.float32, bias=True)
    speed_up_linear_(layer)
    x = torch.randn(3, 61)
    expected = layer(x)
    copied = copy.deepcopy(layer)
    torch.save(layer, tmp_path / "layer.pt")
    layer.weight.zero_()
    assert torch.equal(copied(x), expected)
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(x), expected)
    short = copied.to(torch.bfloat16)
    assert torch.allclose(short(x.bfloat16()).float(), expected, atol=0.1)
    assert copied.double()(x.double()).dtype == torch.float64
    transposed = nn.Linear(33, 61)
    speed_up_linear_(transposed)
    transposed.weight = nn.Parameter(torch.randn(33, 61).t())
    y = torch.randn(2, 33)
    assert torch.equal(transposed(y), F.linear(y, transposed.weight, transposed.bias))


def test_without_a_compiler_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise OSError(f"no {path.name}")

    few_rows._loops.cache_clear()
    monkeypatch.setattr(Path, "read_text", missing)
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match=r"cannot compile its loop: no few_rows\.cpp"):
        speed_up_linear_(layer)
    assert type(layer) is nn.Linear
