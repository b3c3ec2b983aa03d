"""The implementations under contract, called so that common faults show.

`layer(name)` has the public functions of a layer. Around every call `torch.empty` and its kin are
filled with garbage, so that memory read before it is written shows, and the storages of all
arguments are compared before and after: padding between rows counts too, and only the first
argument of a function whose name ends in `_` may change.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

LAYERS = ["eager", "triton-interpreter", pytest.param("triton", marks=pytest.mark.gpu)]
"""Every implementation that runs every case; the last one runs compiled on a device."""

SMALL_LAYERS = [*LAYERS, "triton-ptx", "triton-reverse", "triton-shuffle"]
"""Also the emulated PTX, and the watched interpreter with its programs in other orders: for a few
small cases (vocabulary up to 300, a few launches), since the emulator takes seconds a launch."""

FAST_LAYERS = [LAYERS[0], LAYERS[2]]
"""Those that can draw ten thousand tokens in a second."""


def _testing(
    name: str, *args: Any, **kwargs: Any
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a maker of a context of `spec_kernels.testing`, imported when it is needed."""
    return lambda: getattr(importlib.import_module("spec_kernels.testing"), name)(*args, **kwargs)


ROWS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "eager": ("eager", contextlib.nullcontext),
    "triton": ("kernels", contextlib.nullcontext),
    "triton-interpreter": ("kernels", _testing("interpreted")),
    "triton-reverse": ("kernels", _testing("watch", "reverse")),
    "triton-shuffle": ("kernels", _testing("watch", "shuffle", seed=3)),
    "triton-ptx": ("kernels", _testing("emulated", schedule="warps", order="shuffle", seed=2)),
}
"""By name: the module with the functions, and the context in which they are called."""


class Layer:
    """One layer's public functions, under watch.

    Args:
        name: a key of `ROWS`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        module, self.context = ROWS[name]
        self.module = importlib.import_module(f"spec_kernels.{module}")

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(function, args, kwargs)

        return call

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = getattr(self.module, name)
        written = args[0] if name.endswith("_") else None
        inputs = [t for t in tensors_in((args, kwargs)) if t is not written]
        before = [fingerprint(t) for t in inputs]
        if self.name == "triton":
            result = _on_device(function, args, kwargs, written)
        else:
            with poisoned(), self.context():
                result = function(*args, **kwargs)
        assert [fingerprint(t) for t in inputs] == before, f"{name} wrote to an input"
        return result


def fewer(name: str, count: int, most: int = 4) -> int:
    """Return how many rows or requests a test may have on a layer: the interpreter takes a second
    for what the others do in a millisecond."""
    return min(count, most) if name == "triton-interpreter" else count


def layer(name: str) -> Layer:
    """Return a layer by its name in `ROWS`."""
    return Layer(name)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested tuples and dictionaries with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _whole_storage(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def fingerprint(tensor: Tensor) -> int:
    """Return a checksum of the whole storage behind a tensor."""
    return zlib.crc32(_whole_storage(tensor).view(torch.uint8).numpy().tobytes())


def _to_device(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides and its padding."""
    storage = _whole_storage(tensor).cuda()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _on_device(function: Callable[..., Any], args: Any, kwargs: Any, written: Tensor | None) -> Any:
    moved = _map(args, _to_device)
    with poisoned():
        result = function(*moved, **_map(kwargs, _to_device))
    if written is not None:
        written.copy_(moved[0])
    return _map(result, Tensor.cpu)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty`, `torch.empty_like` and `Tensor.new_empty` return with garbage."""

    def fill(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            garbage = float("nan") if tensor.is_floating_point() else 0x55
            return tensor.fill_(garbage) if tensor.numel() else tensor

        return allocate_and_fill

    with (
        mock.patch("torch.empty", fill(torch.empty)),
        mock.patch("torch.empty_like", fill(torch.empty_like)),
        mock.patch("torch.Tensor.new_empty", fill(Tensor.new_empty)),
    ):
        yield
