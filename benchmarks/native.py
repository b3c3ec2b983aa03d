"""Build and load the native floors of `csrc_bench/`. For benchmarks only; the package never does.

The C++ library is built with CMake into `build/csrc_bench`; the CUDA library is built beside it
where `nvcc` is found. `load` gives the floors of a device, or says why there are none.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Return what C takes for contiguous tensors, which must live on until the call is over."""
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


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
        return float(self._library.read_all(*_pointers(source), count))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a contiguous float32 tensor."""
        pointers = _pointers(target, source)
        self._library.copy_all(*pointers, ctypes.c_int64(source.numel()))

    def gather(self, target: Tensor, source: Tensor, index: Tensor) -> None:
        """Copy rows `source[index]`; index is int64, the rows are contiguous."""
        pointers = _pointers(target, source, index)
        row_bytes = source.stride(0) * source.element_size()
        self._library.gather_rows(
            *pointers, ctypes.c_int64(index.numel()), ctypes.c_int64(row_bytes)
        )

    def row_laws(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return maximum and log sum of every row of contiguous float32 logits."""
        rows, vocab = logits.shape
        out = torch.empty(2, rows)
        pointers = _pointers(out[0], out[1], logits)
        self._library.row_laws(*pointers, rows, vocab, ctypes.c_float(1.0 / temperature))
        return out[0], out[1]

    def sample(
        self, logits: Tensor, row_max: Tensor, log_sum: Tensor, coins: Tensor, temperature: float
    ) -> Tensor:
        """Draw a token of every row, whose maximum and log sum are given."""
        rows, vocab = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        tensors = (out, logits, row_max, log_sum, coins)
        pointers = _pointers(*tensors)
        self._library.sample_rows(*pointers, rows, vocab, ctypes.c_float(1.0 / temperature))
        return out

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
            *_pointers(*tensors),
            batch,
            rows - 1,
            vocab,
            ctypes.c_float(1.0 / temperature),
        )
        return out


class CudaFloors:
    """The CUDA floors, on the default stream.

    Args:
        folder: with `libfloors_cuda.so`, as `build` returns it.
    """

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libfloors_cuda.so"))
        self._blocks = 16 * torch.cuda.get_device_properties(0).multi_processor_count
        self._out = torch.empty(1, device="cuda")

    def read(self, source: Tensor) -> None:
        """Read a contiguous tensor of a multiple of 16 bytes."""
        pointers = _pointers(self._out, source)
        self._library.read_all_cuda(*pointers, ctypes.c_int64(source.nbytes // 4), self._blocks)

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
        """Verify chains as `Floors.accept` does, by the token rule only."""
        assert rule == "token", "the CUDA floor has the token rule"
        batch, rows, vocab = target.shape
        assert vocab % 4 == 0
        assert rows <= 17
        assert vocab <= 64 * 8192
        out = torch.empty(batch, rows, dtype=torch.int64, device="cuda")
        tiles = torch.empty(batch * (2 * rows - 1), (vocab + 8191) // 8192, 2, device="cuda")
        masses = torch.empty(batch, tiles.shape[1], device="cuda")
        tensors = (out, tiles, masses, target, draft, tokens, accept_coins, final_coins)
        assert all(t.is_contiguous() for t in tensors)
        self._library.accept_token_cuda(
            *_pointers(*tensors),
            batch,
            rows - 1,
            vocab,
            ctypes.c_float(1.0 / temperature),
        )
        return out

    def compact(
        self, cache: Tensor, context_lens: Tensor, path: Tensor, accepted_lens: Tensor
    ) -> None:
        """Move the accepted rows of one layer `[batch, capacity, row]`, at most 16 a request."""
        batch, capacity = cache.shape[:2]
        tensors = (cache, context_lens, path, accepted_lens)
        self._library.compact_cache_cuda(
            *_pointers(*tensors),
            batch,
            ctypes.c_int64(capacity),
            ctypes.c_int64(cache[0, 0].nbytes),
            path.shape[1] - 1,
        )


@functools.cache
def load(device: str) -> Any:
    """Return the floors of "cpu" or "cuda", or a str that says why there are none."""
    try:
        folder = build()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if device == "cpu":
        return Floors(folder)
    if not (folder / "libfloors_cuda.so").exists():
        return "nvcc is not installed"
    return CudaFloors(folder)


def reader(device: str, *tensors: Tensor) -> Callable[[], object]:
    """Return a call that reads tensors once: the roof of every row. Without native floors, torch
    adds them up."""
    floors = load(device)
    if isinstance(floors, str):
        return lambda: [t.sum() for t in tensors]
    return lambda: [floors.read(t) for t in tensors]
