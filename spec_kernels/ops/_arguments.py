"""What several operations ask of their arguments, and how the tuples travel flat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_kernels._check import FLOATS, IDS, check
from spec_kernels.tree import MAX_NODES
from spec_kernels.types import Draft, Law, SamplingParams

_LAW_DTYPES = (
    torch.float32,
    torch.float32,
    torch.float32,
    torch.float32,
    torch.int64,
    torch.int32,
)
_PARAM_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32)


def check_logits(name: str, logits: Tensor, device: torch.device | None = None) -> None:
    """Check a `[rows, vocab]` tensor of logits; rows and columns may lie at any stride."""
    check(name, logits, ("rows", "vocab"), FLOATS, device)
    vocab = logits.shape[1]
    if vocab == 0:
        raise ValueError(f"{name} must have at least one column, got {list(logits.shape)}")


def check_law(name: str, law: object, rows: int, device: torch.device) -> None:
    """Check a `Law` of `rows` rows."""
    if not isinstance(law, Law):
        raise TypeError(f"{name} must be a Law or None, got {type(law).__name__}")
    for field, tensor, dtype in zip(Law._fields, law, _LAW_DTYPES, strict=True):
        check(f"{name}.{field}", tensor, (rows,), dtype, device)


def check_params(name: str, params: object, device: torch.device, batch: int | None = None) -> None:
    """Check `SamplingParams`: four columns of one length, the optional ones possibly None."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{name} must be SamplingParams, got {type(params).__name__}")
    if batch is None:
        check(f"{name}.temperature", params.temperature, ("batch",), torch.float32, device)
        batch = params.temperature.shape[0]
    for field, tensor, dtype in zip(SamplingParams._fields, params, _PARAM_DTYPES, strict=True):
        if tensor is not None or field == "temperature":
            check(f"{name}.{field}", tensor, (batch,), dtype, device)


def check_draft(draft: object) -> tuple[int, int, torch.device]:
    """Check a `Draft` and return its `batch`, `nodes` and device."""
    if not isinstance(draft, Draft):
        raise TypeError(f"draft must be a Draft, got {type(draft).__name__}")
    check("draft.tokens", draft.tokens, ("batch", "nodes"), IDS)
    batch, nodes = draft.tokens.shape
    device = draft.tokens.device
    if nodes == 0:
        raise ValueError(f"draft.tokens must have a column for the root, got [{batch}, 0]")
    check("draft.num_nodes", draft.num_nodes, (batch,), torch.int32, device)
    if draft.parents is not None:
        check("draft.parents", draft.parents, (batch, nodes), torch.int32, device)
        if nodes > MAX_NODES:
            raise ValueError(f"draft.parents must have at most {MAX_NODES} columns, got {nodes}")
    if draft.row is not None:
        check("draft.row", draft.row, (batch, nodes), torch.int32, device)
    if draft.logits is not None:
        check_logits("draft.logits", draft.logits, device)
    if draft.law is not None:
        if draft.logits is None:
            raise ValueError("draft.law must be None where draft.logits is None")
        check_law("draft.law", draft.law, draft.logits.shape[0], device)
    return batch, nodes, device


def check_id_map(target_to_draft: Tensor | None, target_logits: Tensor) -> None:
    """Check the map from target ids to columns of the draft logits."""
    if target_to_draft is not None:
        vocab, device = target_logits.shape[1], target_logits.device
        check("target_to_draft", target_to_draft, (vocab,), torch.int32, device)


def check_max_depth(max_depth: int) -> None:
    """Check the host integer that sizes the results of `accept` and `match`."""
    if max_depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}")


def pack_law(law: Law | None) -> list[Tensor]:
    """Make the flat form of a law: its six tensors, or none where rows are probabilities."""
    return [] if law is None else list(law)


def unpack_law(tensors: Sequence[Tensor]) -> Law | None:
    """Undo `pack_law`."""
    return Law(*tensors) if tensors else None


def detached(tensor: Tensor) -> Tensor:
    """Cut a tensor from autograd, for operations with float results: none has a gradient."""
    return tensor.detach() if tensor.requires_grad else tensor
