"""The chips that kernels are compiled for here, and the figures that the timing model needs."""

from __future__ import annotations

from typing import Final, NamedTuple

from triton.backends.compiler import GPUTarget

TARGETS: Final[dict[str, GPUTarget]] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


def gpu_target(name: str) -> GPUTarget:
    """Return Triton's description of a target.

    Raises:
        ValueError: the name is not one of `TARGETS`.

    Example:
        >>> gpu_target("sm_90").arch
        90
    """
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name}")
    return TARGETS[name]


class Chip(NamedTuple):
    """Public figures of a chip.

    Attributes:
        target: what kernels are compiled for.
        units: SMs or CUs.
        clock: Hz under load.
        bandwidth: bytes per second of the memory.
        registers, shared, warps: per unit: 32-bit registers, bytes of shared memory, warps.
    """

    target: str
    units: int
    clock: float
    bandwidth: float
    registers: int
    shared: int
    warps: int


CHIPS: Final[dict[str, Chip]] = {
    "A100": Chip("sm_80", 108, 1.41e9, 1.555e12, 65536, 167936, 64),
    "H100": Chip("sm_90", 132, 1.75e9, 3.35e12, 65536, 233472, 64),
    "H200": Chip("sm_90", 132, 1.75e9, 4.8e12, 65536, 233472, 64),
    "B200": Chip("sm_100", 148, 1.85e9, 8.0e12, 65536, 233472, 64),
    "MI300X": Chip("gfx942", 304, 2.1e9, 5.3e12, 131072, 65536, 32),
    "MI355X": Chip("gfx950", 256, 2.4e9, 8.0e12, 131072, 163840, 32),
}
