"""The workloads that benchmarks name: shapes of models and of the traffic that they serve.

A GPU runs them as they stand. A CPU runs an eighth of the batch over at most 4,096 positions; every
row of a record says what it really ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.harness import Options
from spec_kernels.types import SamplingParams

CPU_CONTEXT = 4096


class Workload(NamedTuple):
    """One step of verification: what is served, and the model that serves it."""

    name: str
    batch: int
    gamma: int  # most drafts per request
    context: int  # committed rows of every request
    vocab: int
    layers: int
    heads: int
    kv_heads: int  # 0 = one latent row for all heads
    head_dim: int  # of keys and values; of the latent row
    temperature: float
    top_p: float = 1.0

    def on(self, device: str) -> Workload:
        """Return what the device runs."""
        if device != "cpu":
            return self
        context = min(self.context, CPU_CONTEXT)
        return self._replace(batch=max(1, self.batch // 8), context=context)

    def params(self, device: str, *, filters: bool = True) -> SamplingParams:
        """Return the sampling parameters of the batch."""
        top_p = self.top_p if filters and self.top_p < 1.0 else None
        return SamplingParams.make(self.temperature, top_p=top_p, batch=self.batch, device=device)

    def sampling(self, *, filters: bool = True) -> str:
        """Return the sampling parameters in words."""
        top_p = f", top-p {self.top_p}" if filters and self.top_p < 1.0 else ""
        return f"temperature {self.temperature}{top_p}"

    def settings(self, *, filters: bool = True) -> dict[str, object]:
        """Return what a row of a record says of the workload."""
        return {
            "workload": self.name,
            "batch": self.batch,
            "context": self.context,
            "gamma": self.gamma,
            "sampling": self.sampling(filters=filters),
            "vocab": self.vocab,
        }

    def request_of_rows(self, device: str, rows: int) -> torch.Tensor:
        """Return the request of each row, `rows` of them per request: `[batch * rows] int32`."""
        requests = torch.arange(self.batch, dtype=torch.int32, device=device)
        return requests.repeat_interleave(rows)


WORKLOADS = {
    w.name: w
    for w in (
        # the shape of Llama 3.1 8B in a chat service
        Workload("chat-8b", 8, 4, 2048, 128_256, 32, 32, 8, 128, 0.7, 0.95),
        # that of a 70B model that completes code: cold, long drafts
        Workload("code-70b", 4, 8, 8192, 128_256, 80, 64, 8, 128, 0.2, 0.95),
        # one request over a long document
        Workload("long-context", 1, 4, 131_072, 128_256, 32, 32, 8, 128, 0.7),
        # Gemma 3 12B: the largest vocabulary in use, heads of 256
        Workload("big-vocab", 16, 4, 4096, 262_144, 48, 16, 8, 256, 1.0, 0.95),
        # a server under load: drafts pay least here
        Workload("batch-256", 256, 3, 1024, 128_256, 32, 32, 8, 128, 0.7),
        # DeepSeek-V3: latent attention, drafts by multi-token prediction
        Workload("moe-latent", 32, 2, 4096, 129_280, 61, 128, 0, 576, 0.6, 0.95),
    )
}


def chosen(options: Options, *more: str) -> Iterator[Workload]:
    """Yield chat-8b, and in full runs `more`, as the device runs them."""
    for name in ("chat-8b", *(more if options.full else ())):
        yield WORKLOADS[name].on(options.device)
