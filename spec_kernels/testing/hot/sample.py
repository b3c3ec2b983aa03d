"""Hot calls of `sample`: by a coin, and by coupled noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from spec_kernels.kernels import sample

from ..dry_run import CompiledLaunch
from ._call import HotCall, HotPath, tile_path
from ._rows import SHAPES, full, law_of, rows_of


def make_sample(shape: str, noise: bool, device: str) -> Callable[[], object]:
    """Prepare one draw per row."""
    rows = 32 if device == "meta" else 1
    vocab, stride, dtype = SHAPES[shape]
    logits = rows_of(rows, vocab, stride, dtype, device)
    given: dict[str, Any] = {"coins": full(rows, 0.5, torch.float64, device)}
    if noise:
        place = torch.arange(rows, device=device)
        given = {"noise": (place, place)}
    return partial(sample, logits, law_of(logits), **given)


def _race_path(launch: CompiledLaunch) -> tuple[HotPath, ...]:
    return (HotPath(4 * launch.arguments["QUADS"]),)


def _counts(shape: str) -> dict[str, int]:
    vocab, _, dtype = SHAPES[shape]
    return {"rows": 1, "vocab": vocab, "itemsize": dtype.itemsize}


CALLS: Final = tuple(
    HotCall(
        "sample",
        f"{shape}-noise" if noise else shape,
        partial(make_sample, shape, noise),
        launches=2,
        paths={"race_kernel": _race_path} if noise else {"mass_kernel": tile_path},
        counts=_counts(shape),
    )
    for shape, noise in [
        *(("bf16", False), ("bf16", True), ("f32", False), ("f32", True)),
        *(("bf16-padded", False), ("bf16-odd", False), ("bf16-odd", True), ("f32-odd", True)),
    ]
)
