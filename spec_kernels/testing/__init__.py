"""How a Triton kernel is proven without a GPU; docs/evidence.md tells the ladder of evidence."""

from .errors import IntegerOverflowError, KernelError, OutOfBoundsError, RaceError
from .interpreter import interpreted

__all__ = ["IntegerOverflowError", "KernelError", "OutOfBoundsError", "RaceError", "interpreted"]
