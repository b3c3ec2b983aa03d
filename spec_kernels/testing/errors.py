"""The faults that a watched or interpreted kernel can show, and the source line that shows them."""

from __future__ import annotations

import os
import sys
from typing import Final

import triton

_TRITON: Final = os.path.dirname(os.path.abspath(triton.__file__)) + os.sep
_HARNESS: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


class KernelError(AssertionError):
    """A kernel did what no kernel may do. The message names kernel, line and argument."""


class IntegerOverflowError(KernelError):
    """An integer operation left the range of its type (compiled code would wrap around)."""


class OutOfBoundsError(KernelError):
    """A load or store left its tensor, or touched a gap of a strided view."""


class RaceError(KernelError):
    """Two programs of one launch touched the same byte, and at least one of them wrote it."""


def source_line() -> str:
    """Return `file.py:line` of the innermost line of kernel code on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TRITON, _HARNESS)):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"
