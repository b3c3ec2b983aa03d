"""Linear layers that see few rows on a CPU: every weight is read once, and used for all rows.

Verifying gamma drafts multiplies every weight matrix by gamma + 1 rows. That should cost what
reading the matrix costs, but torch's products on a CPU are made for one row, or for many: between
them every row is paid for, in bfloat16 without the instructions in full. `speed_up_linear_` puts
the loop of `few_rows.cpp` in their place; torch's own compiler front end builds it on first use.
It rounds otherwise than the products that it replaces, and the same way for any number of rows up
to `MAX_ROWS`; a verifier is exact for the logits that it is given. `nn.RMSNorm`, of which torch
makes eight operations, becomes one loop of the same page.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS: Final = 128
"""Above it torch's products in float32 are as fast."""

_BLOCK: Final = 1 << 21  # weights of a product of many rows, widened to float32 at a time
_SUFFIXES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class FewRowsLinear(nn.Linear):
    """A linear layer that is fast for few rows; what `speed_up_linear_` turns layers into.

    Up to `MAX_ROWS` rows (requests x nodes) run the native loop. More run torch's product in
    float32, block by block. Calls that record gradients, that are traced or cast, and tensors of
    other dtypes, devices or classes run `nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that nn.Linear gave it
        """Return input @ weight.T + bias, `[..., outputs]`."""
        weight, outputs, inputs = self.weight, self.out_features, self.in_features
        if not _suits(input, weight):
            return F.linear(input, weight, self.bias)
        rows, shape = input.numel() // inputs, (*input.shape[:-1], outputs)
        if rows > MAX_ROWS:
            out = _many_rows(input.reshape(rows, inputs), weight).view(shape)
        else:
            x, out = input.contiguous(), input.new_empty(shape)
            pointers = (weight.data_ptr(), x.data_ptr(), out.data_ptr())
            multiply = _loops()[weight.dtype].multiply
            multiply(*pointers, outputs, inputs, rows, torch.get_num_threads())
        return out if self.bias is None else out.add_(self.bias)


class FewRowsNorm(nn.RMSNorm):
    """A norm that is one loop; what `speed_up_linear_` turns `nn.RMSNorm` over columns into."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, of the shape of x."""
        weight = self.weight
        if not _suits(x, weight):
            return super().forward(x)
        x, out = x.contiguous(), x.new_empty(x.shape)
        pointers = (weight.data_ptr(), x.data_ptr(), out.data_ptr())
        size = weight.shape[0]
        _loops()[weight.dtype].normalise(*pointers, size, x.numel() // size, self.eps)
        return out


def speed_up_linear_(model: nn.Module) -> int:
    """Give the linear layers of a model on a CPU a fast product for few rows, in place.

    Layers are `nn.Linear`, and `nn.RMSNorm` over columns, themselves (no subclasses), with
    contiguous float32 or bfloat16 weights on the CPU: they become `FewRowsLinear` and
    `FewRowsNorm`, with the same parameters. Not meant for bfloat16 on CPUs that multiply it
    themselves (where `smollm2.fast_dtype` is bfloat16).

    Args:
        model: any module; a second call changes nothing.

    Returns:
        How many layers were changed.

    Raises:
        RuntimeError: the loop cannot be compiled (there is no C++ compiler); nothing was changed.

    Example:
        >>> import torch
        >>> from spec_kernels.targets import speed_up_linear_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> speed_up_linear_(model)
        1
        >>> with torch.inference_mode():
        ...     model(torch.ones(2, 64)).shape
        torch.Size([2, 8])
    """
    layers = [layer for layer in model.modules() if _is_eligible(layer)]
    _loops()
    for layer in layers:
        layer.__class__ = FewRowsLinear if type(layer) is nn.Linear else FewRowsNorm
    return len(layers)


def _is_eligible(layer: nn.Module) -> bool:
    """Tell that a layer is one that there is a loop for."""
    if type(layer) is nn.RMSNorm:
        has_all = layer.weight is not None and layer.eps is not None
        return has_all and layer.weight.dim() == 1 and _has_loop(layer.weight)
    return type(layer) is nn.Linear and _has_loop(layer.weight)


def _has_loop(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype in _SUFFIXES and weight.is_contiguous()


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Tell that a loop computes what is asked for."""
    return (
        type(x) is Tensor  # no tensor that only stands for one
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_tracing_state() is None
        and _has_loop(weight)
        and x.dtype is weight.dtype
        and x.device == weight.device
        and x.shape[-1] == weight.shape[-1]
        and x.numel() > 0
    )


class _Loops(NamedTuple):
    """The loops of a dtype."""

    multiply: Any
    normalise: Any


@functools.cache
def _loops() -> dict[torch.dtype, _Loops]:
    """Compile the loops, or load what was compiled before."""
    from torch._inductor.codecache import CppCodeCache

    try:
        library = CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text())
    except Exception as error:  # a missing compiler and a failing one have no common base
        raise RuntimeError(f"speed_up_linear_ cannot compile its loop: {error}") from error
    found = {}
    for dtype, suffix in _SUFFIXES.items():
        loops = _Loops(*(getattr(library, f"{name}_{suffix}") for name in _Loops._fields))
        pointers = [ctypes.c_void_p] * 3
        loops.multiply.argtypes = [*pointers, *[ctypes.c_int64] * 3, ctypes.c_int]
        loops.normalise.argtypes = [*pointers, *[ctypes.c_int64] * 2, ctypes.c_float]
        found[dtype] = loops
    return found


def _many_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, in float32: weight @ x.T is the product that BLAS does better."""
    wide, out = x.float().t(), x.new_empty(x.shape[0], weight.shape[0])
    step = max(1, _BLOCK // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        part = slice(begin, begin + step)
        out[:, part] = (weight[part].float() @ wide).t()
    return out
