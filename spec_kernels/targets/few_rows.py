"""Linear layers that see few rows on a CPU: every weight is read once, and used for all rows.

Verifying gamma drafts multiplies every weight matrix by gamma + 1 rows. That should cost what
reading the matrix costs, but torch's products on a CPU are made for one row, or for many: between
them every row is paid for, in bfloat16 without the instructions in full. `speed_up_linear_` puts
the loop of `few_rows.cpp` in their place; torch's own compiler front end builds it on first use.
It rounds otherwise than the products that it replaces, and the same way for any number of rows up
to `MAX_ROWS`; a verifier is exact for the logits that it is given.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS: Final = 128
"""Above it torch's products in float32 are as fast."""

_BLOCK: Final = 1 << 21  # weights of a product of many rows, widened to float32 at a time
_NAMES: Final = {torch.float32: "multiply_float32", torch.bfloat16: "multiply_bfloat16"}


class FewRowsLinear(nn.Linear):
    """A linear layer that is fast for few rows; what `speed_up_linear_` turns layers into.

    Up to `MAX_ROWS` rows (requests x nodes) run the native loop. More run torch's product in
    float32, block by block. Calls that record gradients, and tensors of other dtypes or devices,
    run `nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that nn.Linear gave it
        """Return input @ weight.T + bias, `[..., outputs]`."""
        weight, outputs, inputs = self.weight, self.out_features, self.in_features
        rows = input.numel() // max(inputs, 1)
        if (
            torch.is_grad_enabled()
            or not _is_eligible(weight)
            or input.dtype is not weight.dtype
            or input.device != weight.device
            or input.shape[-1] != inputs
            or rows == 0
        ):
            return F.linear(input, weight, self.bias)
        if rows > MAX_ROWS:
            out = _many_rows(input.reshape(rows, inputs), weight)
        else:
            x = input.contiguous()
            out = x.new_empty(rows, outputs)
            product = _products()[weight.dtype]
            pointers = (weight.data_ptr(), x.data_ptr(), out.data_ptr())
            product(*pointers, outputs, inputs, rows, torch.get_num_threads())
        out = out if self.bias is None else out.add_(self.bias)
        return out.view(*input.shape[:-1], outputs)


def speed_up_linear_(model: nn.Module) -> int:
    """Give the linear layers of a model on a CPU a fast product for few rows, in place.

    Layers are `nn.Linear` themselves (no subclasses) with contiguous float32 or bfloat16 weights on
    the CPU: they become `FewRowsLinear`, with the same parameters. Not meant for bfloat16 on CPUs
    that multiply it themselves (where `smollm2.fast_dtype` is bfloat16).

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
    layers = [m for m in model.modules() if type(m) is nn.Linear and _is_eligible(m.weight)]
    _products()
    for layer in layers:
        layer.__class__ = FewRowsLinear
    return len(layers)


def _is_eligible(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype in _NAMES and weight.is_contiguous()


@functools.cache
def _products() -> dict[torch.dtype, Callable[..., None]]:
    """Compile the loop, or load what was compiled before."""
    from torch._inductor.codecache import CppCodeCache

    try:
        library = CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text())
    except Exception as error:  # a missing compiler and a failing one have no common base
        raise RuntimeError(f"speed_up_linear_ cannot compile its loop: {error}") from error
    found = {dtype: getattr(library, name) for dtype, name in _NAMES.items()}
    for product in found.values():
        product.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    return found


def _many_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, in float32: weight @ x.T is the product that BLAS does better."""
    wide, out = x.float().t(), x.new_empty(x.shape[0], weight.shape[0])
    step = max(1, _BLOCK // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        part = slice(begin, begin + step)
        out[:, part] = (weight[part].float() @ wide).t()
    return out
