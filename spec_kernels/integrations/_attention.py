"""The attention that `TransformersTarget` gives to the layers of a model."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from spec_kernels.nn import KVShape
from spec_kernels.targets import Nodes

_HARMLESS: Final = frozenset(
    {"position_ids", "position_embeddings", "cache", "past_key_values", "use_cache", "is_causal"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position"}
)
"""Keyword arguments of layers that change nothing here; any other one is refused."""


class Probe:
    """What one forward of a model asks of a cache, found without one.

    Attributes:
        shapes: of the rows of each layer, in the order of their calls.
        dtype: of the rows.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.dtype = torch.float32

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Note the shapes; the result means nothing."""
        self.shapes[layer] = KVShape(key.shape[1], key.shape[2], value.shape[2])
        self.dtype = key.dtype
        return query.new_zeros(*query.shape[:2], value.shape[2])


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    spec_kernels_step: Nodes | Probe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Append this layer's K/V and attend: the function that transformers' layers call. What a
    layer asks for is checked once, when a `Probe` runs.

    The batch is one row of packed tokens: query `[1, heads, tokens, qk_dim]`, and so on.
    """
    step = spec_kernels_step
    if step is None:
        name = type(module).__name__
        raise NotImplementedError(f"{name} does not hand keyword arguments on to its attention")
    if isinstance(step, Probe):
        _check_layer(module, sliding_window, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = step.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _check_layer(module: torch.nn.Module, window: int | None, kwargs: dict[str, Any]) -> None:
    """Refuse what this attention would silently get wrong."""
    layer, name = getattr(module, "layer_idx", None), type(module).__name__
    if not isinstance(layer, int):
        raise NotImplementedError(f"{name} does not know its number (layer_idx)")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise NotImplementedError(f"{name} attends in both directions")
    unknown = [k for k, v in kwargs.items() if v is not None and k not in _HARMLESS]
    if unknown:
        raise NotImplementedError(f"{name} asks for {', '.join(unknown)}, not supported here")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[layer] == "sliding_attention" and window is None:
        raise NotImplementedError(f"{name} hides its sliding window from the attention interface")
