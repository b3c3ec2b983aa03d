"""Compile, without a GPU, exactly what launch code would launch.

A stand-in for the driver answers Triton's questions about the current device, so specialisation
(alignment, the value 1, types), launch options and compilation are the real ones. Tensors may be on
the meta device: real sizes cost no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .interpreter import Program, bind, resolve_grid
from .targets import gpu_target


class _Device:
    """What Triton asks the active driver while it specialises and compiles a launch."""

    def __init__(self, name: str, target: GPUTarget) -> None:
        self.name, self.target, self.utils = name, target, self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self.name  # the key of the kernel cache: every target has its own

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {
            "max_shared_mem": 65536 if self.target.backend == "hip" else 232448,
            "multiprocessor_count": 128,
            "max_num_regs": 65536,
            "warpSize": self.target.warp_size,
        }

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@dataclass(frozen=True)
class CompiledLaunch:
    """One launch that was compiled instead of run.

    Attributes:
        kernel: name of the kernel.
        target: "sm_80", ...
        grid: as it would be launched.
        compiled: Triton's `CompiledKernel`: `asm`, `metadata`, `src`.
        arguments: the arguments by name.
    """

    kernel: str
    target: str
    grid: Program
    compiled: Any
    arguments: dict[str, Any]


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """Answer Triton's questions about the device as if this target were present."""
    before, device = driver._active, _Device(target, gpu_target(target))
    fusion: Any = getattr(triton.knobs, "language", None)
    named = hasattr(fusion, "default_fp_fusion")  # silences a warning about the default of 3.9
    with fusion.scope() if named else contextlib.nullcontext():
        if named:
            fusion.default_fp_fusion = True
        driver.set_active(device)
        try:
            yield
        finally:
            driver._active = before


def compile_launch(
    function: JITFunction, target: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Compile a launch of a `@triton.jit` function for a target; return the `CompiledKernel`."""
    with compiling_for(target):
        return _run(function, *args, grid=(1,), warmup=True, **kwargs)


_run = JITFunction.run


@contextlib.contextmanager
def compiled_launches(target: str, act: Callable[[CompiledLaunch], object]) -> Iterator[None]:
    """Compile the launches inside this context for a target, and call `act` instead of the device.

    Launch code that asks for the present target is told this one.
    """
    before = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = compile_launch(self, target, args, kwargs)
        arguments = bind(self, args, kwargs)
        sizes = resolve_grid(grid, arguments)
        act(CompiledLaunch(self.fn.__name__, target, sizes, compiled, arguments))
        return compiled

    JITFunction.run = run
    try:
        with compiling_for(target):
            yield
    finally:
        JITFunction.run = before


@contextlib.contextmanager
def dry_run(target: str) -> Iterator[list[CompiledLaunch]]:
    """Compile the launches inside this context for a target instead of running them.

    Args:
        target: one of `TARGETS`: "sm_80", "sm_90", "sm_100", "gfx942", "gfx950".

    Yields:
        The launches, in order; filled while the context runs.

    Raises:
        ValueError: the target is unknown.

    Example:
        >>> with dry_run("sm_90") as launches:
        ...     pass  # kernel[grid](torch.empty(8, 128256, device="meta"), ...)
        >>> launches
        []
    """
    launches: list[CompiledLaunch] = []
    with compiled_launches(target, launches.append):
        yield launches
