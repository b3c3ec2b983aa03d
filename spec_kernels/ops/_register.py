"""One way to register an operation: schema, fake result, and the layer that the device decides.

`Library.define / impl / register_fake` costs less a call than `torch.library.custom_op`. What
remains grows with the number of arguments, and is the price of being seen by compilers, modes and
transforms. Calls that nothing of that kind watches go to the layer directly: the same function with
the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import profiler

from spec_kernels import eager

LIBRARY: Final[Any] = torch.library.Library(  # type: ignore[no-untyped-call]
    "spec_kernels", "DEF"
)
_PLAIN: Final = frozenset((type(None), bool, int, float, str))


def register(schema: str, call: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register `torch.ops.spec_kernels.<name>` and return what calls it.

    CPU tensors run `eager`; CUDA and ROCm tensors, which share one dispatch key, run `kernels`,
    imported at the first call so that `import spec_kernels` needs no Triton.

    Args:
        schema: name, flat arguments (tensors, optional tensors, lists of tensors, numbers) and
            results; an argument that is written carries its alias mark, as in `Tensor(a!) x`.
        call: takes a layer's module and the flat arguments, and calls the layer's function.
        fake: takes the flat arguments and returns empty tensors of the right shape and dtype.
    """
    name = schema.partition("(")[0]

    def on_cpu(*args: Any) -> Any:
        return call(eager, *args)

    def on_device(*args: Any) -> Any:
        from spec_kernels import kernels

        return call(kernels, *args)

    LIBRARY.define(schema)
    LIBRARY.impl(name, on_cpu, "CPU")
    LIBRARY.impl(name, on_device, "CUDA")
    torch.library.register_fake(f"spec_kernels::{name}", fake, lib=LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.spec_kernels, name).default

    def dispatch(*args: Any) -> Any:
        return (on_cpu if _is_unwatched(args) else overload)(*args)

    return dispatch


def _is_unwatched(args: tuple[Any, ...]) -> bool:
    """Tell that a call is plain work on CPU tensors: no compiler, mode, transform, profiler or
    autograd waits for it in the dispatcher."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or profiler._is_profiler_enabled
    ) and _are_plain(args)


def _are_plain(values: tuple[Any, ...] | list[Any]) -> bool:
    """Tell that all values are numbers, strings, or plain tensors on the CPU without grad."""
    for value in values:
        kind = value.__class__
        if kind is Tensor:
            if not value.is_cpu or value.requires_grad:
                return False
        elif kind is list:
            if not _are_plain(value):
                return False
        elif kind not in _PLAIN:  # a subclass of Tensor, a symbolic number
            return False
    return True
