"""How a Triton kernel is proven without a GPU; docs/evidence.md tells the ladder of evidence."""

from .errors import IntegerOverflowError, KernelError, OutOfBoundsError, RaceError
from .interpreter import interpreted
from .watcher import Launch, LineUse, Watch, watch

__all__ = [
    "IntegerOverflowError",
    "KernelError",
    "Launch",
    "LineUse",
    "OutOfBoundsError",
    "RaceError",
    "Watch",
    "interpreted",
    "watch",
]
