"""One way to register an operation and to call it: checks, schema, fake result, and the layer that
the device decides.

`Library.define / impl / register_fake` costs less a call than `torch.library.custom_op`. What
remains grows with the number of arguments, and is the price of being seen by compilers, modes and
transforms; checks grow with it too. Both are paid once for each signature: a later call on a CPU
with the same types, shapes, dtypes and options, that nothing of that kind watches, goes to the
layer at once: the same function with the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from spec_kernels import eager
from spec_kernels.types import CacheTensors, Draft, Law, SamplingParams

LIBRARY: Final[Any] = torch.library.Library(  # type: ignore[no-untyped-call]
    "spec_kernels", "DEF"
)
_OPTIONS: Final = frozenset((bool, int, float, str))
_TUPLES: Final = frozenset((tuple, Draft, Law, SamplingParams))
MAX_SIGNATURES: Final = 256
"""Signatures that an operation remembers; then it begins anew."""

P = ParamSpec("P")
R = TypeVar("R")


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
    return overload


def checked_once(*, strides: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a call of an operation that is like an earlier one pass by its checks and the dispatcher.

    Both ask for types, shapes, dtypes, devices and options, never for values of tensors: what they
    find depends on the signature of a call alone. A call that differs in any of it, and each one
    that is refused, runs the whole function: checks, then what `register` returned. The layer's
    function has the operation's name and takes the same arguments.

    Args:
        strides: whether the checks ask for strides too.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name, known = function.__name__, set[tuple[Any, ...]]()

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _is_watched():
                return function(*args, **kwargs)
            signature: list[Any] = [len(args), *kwargs]
            is_grad = torch.is_grad_enabled()
            if not _describe((*args, *kwargs.values()), signature, strides, is_grad):
                return function(*args, **kwargs)
            key = tuple(signature)
            if key in known:
                result: R = getattr(eager, name)(*args, **kwargs)
                return result
            result = function(*args, **kwargs)
            if len(known) == MAX_SIGNATURES:
                known.clear()
            known.add(key)
            return result

        return call

    return decorate


def _is_watched() -> bool:
    """Tell that a compiler, mode, transform or profiler waits for calls in the dispatcher."""
    return bool(
        is_dynamo_compiling()  # other tracers are modes
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or profiler._is_profiler_enabled
    )


def _describe(values: Iterable[Any], signature: list[Any], strides: bool, is_grad: bool) -> bool:
    """Add all that checks may ask of the values to a signature. Return whether they are plain:
    options, and tensors on the CPU that autograd does not watch, by themselves or in tuples.
    Autograd watches nothing while `is_grad` is False."""
    add = signature.append
    for value in values:
        kind = value.__class__
        if kind is Tensor:
            if not value.is_cpu or (is_grad and value.requires_grad):
                return False
            add(value.shape)
            add(value.dtype)
            if strides:
                add(value.stride())
        elif value is None:
            add(None)
        elif kind in _OPTIONS:
            add(kind)  # 1, 1.0 and True are equal
            add(value)
        elif kind in _TUPLES:
            add(kind)
            add(len(value))
            if not _describe(value, signature, strides, is_grad):
                return False
        elif kind is CacheTensors:  # no check asks for addresses
            add(kind)
            add(value.rows)
            held = (value.tensors, value.table, value.groups)
            if not _describe(held, signature, strides, is_grad):
                return False
        else:  # a subclass of Tensor, a symbolic number, what the checks refuse
            return False
    return True
