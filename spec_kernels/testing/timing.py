"""A model of what binds a kernel: issue, a pipe, or the memory. Not a time; no device ran it.

Cycles of one quarter of an SM (or one SIMD of a CU) for one program, from the instructions on one
path of its machine code, against the cycles in which its share of the memory delivers its bytes.
Rates are the public ones: a warp instruction takes 1 cycle of issue, 2 on the integer and
comparison pipes, 8 in the special function unit, 4 for a load or a store (AMD: 4 for any vector
instruction of 64 lanes, 16 for a special function, 16 for memory). Latencies and caches are left
out: the model ranks variants and names the pipe that binds, if enough warps are in flight.
"""

from __future__ import annotations

from typing import Final

from .resources import Mix, Resources
from .targets import CHIPS

_NVIDIA_CYCLES: Final = {
    "alu": {"alu": 2, "imad": 2},
    "special": {"special": 8},
    "memory": {"load": 4, "store": 4, "shared": 4, "shuffle": 4, "atomic": 4, "copy": 4},
    "float64": {"float64": 2},
}
_AMD_CYCLES: Final = {
    "alu": {"alu": 4, "shuffle": 4},
    "special": {"special": 16},
    "memory": {"load": 16, "store": 16, "shared": 8, "atomic": 16},
    "float64": {"float64": 4},
}


def model(resources: Resources, chip: str, mix: Mix | None = None) -> dict[str, float]:
    """Return modelled cycles by pipe for one program on one quarter of a unit.

    Args:
        resources: of the compiled kernel.
        chip: one of `CHIPS`; its target must be that of the kernel.
        mix: the instructions of a thread; by default those of `resources.path()`.

    Raises:
        ValueError: the chip is unknown, or another target's.
    """
    if chip not in CHIPS or CHIPS[chip].target != resources.target:
        names = [name for name, c in CHIPS.items() if c.target == resources.target]
        raise ValueError(f"chip must be one of {', '.join(names)} here, got {chip}")
    figures = CHIPS[chip]
    mix = mix or resources.path()
    is_amd = resources.target.startswith("gfx")
    warps = resources.warps / 4
    cycles = {"issue": mix.instructions * warps}
    for pipe, kinds in (_AMD_CYCLES if is_amd else _NVIDIA_CYCLES).items():
        cycles[pipe] = warps * sum(cost * mix.kinds[kind] for kind, cost in kinds.items())
    moved = (mix.load_bytes + mix.store_bytes) * resources.threads
    cycles["dram"] = moved / (figures.bandwidth / figures.units / figures.clock)
    return cycles


def bound(resources: Resources, chip: str, mix: Mix | None = None) -> str:
    """Name what binds the kernel by the model: issue, alu, special, memory, float64 or dram."""
    cycles = model(resources, chip, mix)
    return max(cycles, key=lambda pipe: cycles[pipe])
