"""How a Triton kernel is proven without a GPU; docs/evidence.md tells the ladder of evidence."""

from .dry_run import CompiledLaunch, dry_run
from .errors import IntegerOverflowError, KernelError, OutOfBoundsError, RaceError
from .interpreter import interpreted
from .ptx import Emulation, MisalignedError, UnsupportedError, emulate, emulated
from .resources import Mix, Resources, measure
from .targets import CHIPS, TARGETS, Chip
from .watcher import Launch, LineUse, Watch, watch

__all__ = [
    "CHIPS",
    "TARGETS",
    "Chip",
    "CompiledLaunch",
    "Emulation",
    "IntegerOverflowError",
    "KernelError",
    "Launch",
    "LineUse",
    "MisalignedError",
    "Mix",
    "OutOfBoundsError",
    "RaceError",
    "Resources",
    "UnsupportedError",
    "Watch",
    "dry_run",
    "emulate",
    "emulated",
    "interpreted",
    "measure",
    "watch",
]
