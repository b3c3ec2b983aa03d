"""Hot calls of `row_law`, `adjust_logits_` and `overlap`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from spec_kernels.kernels import adjust_logits_, overlap, row_law

from ._call import HotCall, tile_path
from ._rows import SHAPES, full, law_of, params_of, rows_of


def _sizes(shape: str, device: str) -> tuple[int, Tensor]:
    """32 requests and five rows of each; one row on the CPU."""
    batch, rows = (32, 160) if device == "meta" else (1, 1)
    vocab, stride, dtype = SHAPES[shape]
    return batch, rows_of(rows, vocab, stride, dtype, device)


def _counts(shape: str) -> dict[str, int]:
    vocab, _, dtype = SHAPES[shape]
    return {"rows": 1, "slots": 1, "vocab": vocab, "itemsize": dtype.itemsize}


def _adjusted(everything: bool) -> dict[str, int]:
    return {"counts": int(everything), "masks": 1 + everything}


def make_row_law(shape: str, filters: bool, device: str) -> Callable[[], object]:
    """Prepare laws of the target rows of a batch."""
    batch, logits = _sizes(shape, device)
    request = torch.arange(logits.shape[0], dtype=torch.int32, device=device) // 5
    return partial(row_law, logits, params_of(batch, device, filters=filters), request)


def make_adjust(shape: str, everything: bool, device: str) -> Callable[[], object]:
    """Prepare an adjustment: a mask of allowed ids, or all there is."""
    batch, logits = _sizes(shape, device)
    rows, vocab = logits.shape
    words = (vocab + 31) // 32

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    given: dict[str, Any] = {"allowed_words": zeros(rows, words)}
    if everything:
        given |= {
            "bias_ids": zeros(batch, 8, dtype=torch.int64),
            "bias_values": zeros(batch, 8, dtype=torch.float32),
            "output_counts": zeros(batch, vocab),
            "prompt_words": zeros(batch, words),
            "repetition_penalty": full(batch, 1.1, torch.float32, device),
            "presence_penalty": full(batch, 0.1, torch.float32, device),
            "frequency_penalty": full(batch, 0.1, torch.float32, device),
            "draft_tokens": zeros(batch, 5, dtype=torch.int64),
            "row_node": torch.arange(rows, dtype=torch.int32, device=device) % 5,
        }
    request = torch.arange(rows, dtype=torch.int32, device=device) // 5
    return partial(adjust_logits_, logits, request, **given)


def make_overlap(shape: str, device: str) -> Callable[[], object]:
    """Prepare the overlap of pairs of rows."""
    _, target = _sizes(shape, device)
    _, own = _sizes(shape, device)
    return partial(overlap, target, law_of(target), own, law_of(own))


CALLS: Final = (
    *(
        HotCall(
            "row_law",
            f"{shape}-filters" if filters else shape,
            partial(make_row_law, shape, filters),
            launches=2,
            paths={"tile_stats_kernel": tile_path},
            counts=_counts(shape),
        )
        for shape, filters in [
            *(("bf16", False), ("bf16", True), ("f32", False), ("f32", True), ("f16", True)),
            *(("bf16-padded", False), ("bf16-odd", True), ("f32-odd", False)),
        ]
    ),
    *(
        HotCall(
            "adjust_logits_",
            f"{shape}-all" if everything else shape,
            partial(make_adjust, shape, everything),
            launches=1,
            paths={"adjust_kernel": tile_path},
            counts=_counts(shape) | _adjusted(everything),
        )
        for shape, everything in (("bf16", False), ("f32", True), ("bf16-odd", True))
    ),
    *(
        HotCall(
            "overlap",
            shape,
            partial(make_overlap, shape),
            launches=2,
            paths={"overlap_kernel": tile_path},
            counts=_counts(shape),
        )
        for shape in ("bf16", "f32", "bf16-odd")
    ),
)
