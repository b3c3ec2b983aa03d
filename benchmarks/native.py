"""Build and load the native floors of `csrc_bench/`. For benchmarks only; the package never does.

The C++ library is built with CMake into `build/csrc_bench`; the CUDA library is built beside it
where `nvcc` is found.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).parent.parent / "csrc_bench"
BUILD = SOURCE.parent / "build" / "csrc_bench"


def build(folder: Path = BUILD) -> Path:
    """Compile the floors and return the folder with the libraries.

    Raises:
        RuntimeError: CMake or the compiler is missing, or compiling fails; with their own words.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise RuntimeError("the native floors need CMake: python -m pip install cmake")
    for arguments in (["-S", str(SOURCE), "-B", str(folder)], ["--build", str(folder)]):
        done = subprocess.run([cmake, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"cannot build the native floors:\n{done.stdout}{done.stderr}")
    return folder


class Floors:
    """The C++ floors, called with tensors on the CPU.

    Args:
        folder: with `libfloors.so`, as `build` returns it.
    """

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libfloors.so"))
        self._library.read_all.restype = ctypes.c_float

    def read(self, source: Tensor) -> float:
        """Add up a contiguous float32 tensor: the time of reading it."""
        count = ctypes.c_int64(source.numel())
        return float(self._library.read_all(ctypes.c_void_p(source.data_ptr()), count))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a contiguous float32 tensor."""
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (target, source))
        self._library.copy_all(*pointers, ctypes.c_int64(source.numel()))

    def gather(self, target: Tensor, source: Tensor, index: Tensor) -> None:
        """Copy rows `source[index]`; index is int64, the rows are contiguous."""
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (target, source, index))
        row_bytes = source.stride(0) * source.element_size()
        self._library.gather_rows(
            *pointers, ctypes.c_int64(index.numel()), ctypes.c_int64(row_bytes)
        )

    def accept(
        self,
        rule: str,
        target: Tensor,
        draft: Tensor,
        tokens: Tensor,
        accept_coins: Tensor,
        final_coins: Tensor,
        temperature: float,
    ) -> Tensor:
        """Verify chains of gamma drafts each; every tensor contiguous.

        Args:
            rule: "token" (stops at the first rejection) or "block" (reads every row).
            target: `[batch, gamma + 1, vocab] float32`.
            draft: `[batch, gamma, vocab] float32`.
            tokens: `[batch, gamma] int64`.
            accept_coins: `[batch, gamma] float64`.
            final_coins: `[batch] float64`.
            temperature: of all rows.

        Returns:
            `[batch, gamma + 1] int64`: accepted drafts, one more token, then -1.
        """
        batch, rows, vocab = target.shape
        out = torch.empty(batch, rows, dtype=torch.int64)
        tensors = (out, target, draft, tokens, accept_coins, final_coins)
        assert all(t.is_contiguous() for t in tensors)
        call = self._library.accept_token if rule == "token" else self._library.accept_block
        call(
            *(ctypes.c_void_p(t.data_ptr()) for t in tensors),
            batch,
            rows - 1,
            vocab,
            ctypes.c_float(1.0 / temperature),
        )
        return out
