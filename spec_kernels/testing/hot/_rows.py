"""Arguments that the hot calls of several columns share: rows of logits, laws, parameters."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from spec_kernels.types import Law, SamplingParams

SHAPES: Final[dict[str, tuple[int, int, torch.dtype]]] = {
    "bf16": (128256, 128256, torch.bfloat16),
    "f32": (128256, 128256, torch.float32),
    "f16": (151936, 151936, torch.float16),
    "bf16-padded": (50257, 50304, torch.bfloat16),
    "bf16-odd": (50257, 50257, torch.bfloat16),
    "f32-odd": (32001, 32001, torch.float32),
}
"""Vocabulary, elements from row to row, and dtype: divisible by 16 and not, aligned and not."""


def rows_of(
    rows: int, vocab: int, stride: int, dtype: torch.dtype, device: str, sharpness: float = 2.0
) -> Tensor:
    """Return rows of random logits; on "meta" nothing but their shape."""
    memory = torch.empty(rows, stride, dtype=dtype, device=device)
    if device != "meta":
        memory.copy_(torch.randn(memory.shape) * sharpness)
    return memory[:, :vocab]


def full(rows: int, value: float, dtype: torch.dtype, device: str) -> Tensor:
    """Return `[rows]` equal numbers."""
    return torch.full((rows,), value, dtype=dtype, device=device)


def params_of(batch: int, device: str, *, filters: bool) -> SamplingParams:
    """Return parameters of a sampled batch, with all filters or none."""
    temperature = full(batch, 0.8, torch.float32, device)
    if not filters:
        return SamplingParams(temperature, None, None, None)
    return SamplingParams(
        temperature,
        full(batch, 50, torch.int32, device),
        full(batch, 0.95, torch.float32, device),
        full(batch, 0.01, torch.float32, device),
    )


def law_of(logits: Tensor) -> Law:
    """Return the laws of rows at temperature 1, without a cutoff."""
    rows, device = logits.shape[0], logits.device.type
    if device == "meta":
        fields = [full(rows, 0, torch.float32, device) for _ in range(4)]
        fields += [full(rows, 0, kind, device) for kind in (torch.int64, torch.int32)]
        return Law(*fields)
    x = logits.float()
    row_max = x.amax(1)
    return Law(
        full(rows, 1.0, torch.float32, device),
        full(rows, float("-inf"), torch.float32, device),
        row_max,
        torch.logsumexp(x - row_max[:, None], 1),
        x.argmax(1),
        full(rows, 0, torch.int32, device),
    )
