"""One way to register an operation: schema, fake result, and the layer that the device decides.

`Library.define / impl / register_fake` costs 1.4 us a call; `torch.library.custom_op` 5 to 12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from spec_kernels import eager

LIBRARY: Final[Any] = torch.library.Library(  # type: ignore[no-untyped-call]
    "spec_kernels", "DEF"
)


def register(schema: str, call: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register `torch.ops.spec_kernels.<name>` and return its overload.

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
    return overload
