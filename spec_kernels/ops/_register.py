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
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from spec_kernels import eager
from spec_kernels.types import CacheTensors, Draft, Law, SamplingParams

LIBRARY: Final[Any] = torch.library.Library(  # type: ignore[no-untyped-call]
    "spec_kernels", "DEF"
)
_OPTIONS: Final = frozenset((bool, int, float, str))
_TUPLES: Final = frozenset((tuple, Draft, Law, SamplingParams))
_NOTHING: Final[tuple[Any, Any, Any]] = ({}, (), ())
MAX_FORMS: Final = 16
"""Combinations of types that an operation remembers, the newest ones."""
MAX_OPTIONS: Final = 256
"""Combinations of options that it remembers of each; then it begins anew."""
MAX_LIKE: Final = 16
"""Sets of shapes and dtypes that it remembers of each of these, the newest ones."""

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
        name, forms = function.__name__, list[_Form]()

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if (  # a compiler, mode, transform or profiler waits for calls in the dispatcher
                is_dynamo_compiling()  # other tracers are modes
                or _len_torch_dispatch_stack()
                or _are_functorch_transforms_active()
                or profiler._is_profiler_enabled
            ):
                return function(*args, **kwargs)
            found = _find(forms, args, kwargs)
            known, options, tensors = found or _NOTHING
            for is_like in known.get(options, ()):
                if is_like(*tensors):
                    passed: R = getattr(eager, name)(*args, **kwargs)
                    return passed
            result = function(*args, **kwargs)
            if found is None:
                found = _add_form(forms, args, kwargs)
            _remember(*found, strides)
            return result

        return call

    return decorate


_Known = dict[tuple[Any, ...], tuple[Callable[..., bool], ...]]


class _Form(NamedTuple):
    """Calls that differ in the values of options and in tensors alone.

    Attributes:
        take_apart: takes positional and keyword arguments of a call; returns the options and the
            tensors among them and in their tuples, or None for a call of another form.
        known: by options, what tells that tensors are like those of a good call.
    """

    take_apart: Callable[..., tuple[Any, Any] | None]
    known: _Known


def _find(forms: list[_Form], args: Any, kwargs: Any) -> tuple[_Known, Any, Any] | None:
    """Return what is known of the form of a call, its options and its tensors."""
    for take_apart, known in forms:
        parts = take_apart(args, kwargs)
        if parts is not None:
            return known, *parts
    return None


def _add_form(forms: list[_Form], args: Any, kwargs: Any) -> tuple[_Known, Any, Any]:
    """Add the form of a call, the newest; return what `_find` does then."""
    take_apart = _write_take_apart(args, kwargs)
    form = _Form(take_apart, {})
    forms[:] = [form, *forms][:MAX_FORMS]
    options, tensors = take_apart(args, kwargs)
    return form.known, options, tensors


def _remember(known: _Known, options: Any, tensors: Any, strides: bool) -> None:
    """Add a good call to what is known, if its tensors are on the CPU and none requires a
    gradient."""
    if all(x.__class__ is Tensor and x.is_cpu and not x.requires_grad for x in tensors):
        if options not in known and len(known) == MAX_OPTIONS:
            known.clear()
        known[options] = (_likeness(tensors, strides), *known.get(options, ()))[:MAX_LIKE]


def _write_take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Write `_Form.take_apart` for the form of a call: straight code, as a walk through the
    arguments takes longer than all else. What it returns as tensors holds values of classes that
    the fast way doesn't know, too."""
    kinds, options, tensors = dict[str, Any](), list[str](), list[str]()
    lines = [f"if (*kwargs,) != {(*kwargs,)}: return", "values = (*kwargs.values(),)"]

    def add(name: str, value: Any) -> None:
        if value is None:
            lines.append(f"if {name} is not None: return")
            return
        kind = kinds[f"{name}_kind"] = value.__class__
        lines.append(f"if {name}.__class__ is not {name}_kind: return")
        if kind in _OPTIONS:  # 1, 1.0 and True are equal, their classes are not
            options.append(name)
        elif kind in _TUPLES:
            parts = [f"{name}_{place}" for place in range(len(value))]
            lines.append(f"if len({name}) != {len(value)}: return")
            lines.append(f"[{', '.join(parts)}] = {name}")
            for part in zip(parts, value, strict=True):
                add(*part)
        elif kind is CacheTensors:  # no check asks for addresses
            for field in ("rows", "tensors", "table", "groups"):
                lines.append(f"{name}_{field} = {name}.{field}")
                add(f"{name}_{field}", getattr(value, field))
        else:
            tensors.append(name)

    add("args", args)
    add("values", (*kwargs.values(),))
    found = (f"({''.join(f'{name}, ' for name in names)})" for names in (options, tensors))
    lines.append(f"return {', '.join(found)}")
    exec("\n    ".join(["def take_apart(args, kwargs):", *lines]), kinds)
    take_apart: Callable[..., Any] = kinds["take_apart"]
    return take_apart


def _likeness(tensors: Sequence[Tensor], strides: bool) -> Callable[..., bool]:
    """Return what tells that as many other tensors have the same shapes, dtypes and
    device, and require no gradient: the guard of `torch.compile`."""
    first = {id(tensor): place for place, tensor in reversed([*enumerate(tensors)])}
    kept = [*reversed(first.values())]
    any_stride: Any = None if strides else [[None] * tensors[place].dim() for place in kept]
    guards = TensorGuards(
        *[tensors[place] for place in kept],
        dynamic_dims_sizes=None,
        dynamic_dims_strides=any_stride,
    )
    is_like: Callable[..., bool] = guards.check
    if len(kept) == len(tensors):
        return is_like
    places = [first[id(tensor)] for tensor in tensors]

    def is_like_with_repeats(*others: Tensor) -> bool:  # the guard refuses a tensor given twice
        repeated = [others[place] for place in places]
        return is_like(*[others[place] for place in kept]) and all(map(is_, others, repeated))

    return is_like_with_repeats
