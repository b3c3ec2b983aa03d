"""An emulator of the PTX that Triton emits for sm_80: compiled kernels run on CPU tensors.

All threads of a program are numpy vectors. Warps run in lockstep, or one at a time in random order,
each as far as its next barrier, which shows a missing barrier in shared or global memory.
Out-of-bounds and misaligned accesses raise. It is a subset, and what it does not know it refuses.
"""

from .emulator import Emulation, emulate, emulated
from .machine import MisalignedError
from .program import UnsupportedError

__all__ = ["Emulation", "MisalignedError", "UnsupportedError", "emulate", "emulated"]
