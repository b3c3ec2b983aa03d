"""Use any Hugging Face causal language model as a target or as a draft model.

`TransformersTarget` leaves transformers' caches aside, because they cannot hold rows of different
lengths. A registered attention function keeps K/V instead:

1. around each of our calls the model's attention implementation is `spec_kernels`, and the step's
   data travel to every layer as a keyword argument of the model;
2. the attention of each layer writes its new K/V rows behind the context of their request, in
   buffers `[batch, kv_heads, rows + 1, head_dim]` allocated once (padding: to the last row);
3. it then attends with `scaled_dot_product_attention` to the rows visible from each node, the
   query heads of a K/V head packed into one tile, so that K/V are read once; a tree adds a mask
   over its own rows;
4. accepting or rejecting drafts changes the per-request lengths; the rows of a path through a tree
   move together first.

Outside our calls the model works as before, with its own attention and its own caches.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from spec_kernels.integrations._attention import Step, TransformersCache, Trees, attend
from spec_kernels.targets import Cache, TargetOutput

_NAME: Final = "spec_kernels"
_PREFILL_CHUNK: Final = 256  # bounds the attention mask: chunk x context
_ATTENTION_KINDS: Final = frozenset({"full_attention", "sliding_attention", "attention"})


class TransformersTarget:
    """Wrap a Hugging Face causal language model for `Decoder`, as target or as draft model.

    Args:
        model: any causal language model of transformers that calls the attention interface, in eval
            mode. Its weights are shared, its own behaviour does not change.

    Attributes:
        vocab_size: ids that the model has logits for.
        max_length: most positions of a request, or None.
        device: where tokens must be.

    Raises:
        TypeError: `model` is no transformers model.
        NotImplementedError: lengths cannot roll the model back, or positions alone cannot mask it:
            recurrent state, encoder-decoder, attention of its own, chunked attention, shared K/V.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        >>> config = LlamaConfig(vocab_size=11, num_attention_heads=2, **sizes)
        >>> target = TransformersTarget(LlamaForCausalLM(config).eval())
        >>> cache = target.open(batch=1, capacity=8)
        >>> target.prefill(cache, 0, [3, 1, 4])
        >>> tokens, num_nodes = torch.tensor([[1, 5]]), torch.tensor([2], dtype=torch.int32)
        >>> target.forward(tokens, num_nodes, cache).logits.shape
        torch.Size([2, 11])
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
        self.model = model
        self._config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        _refuse_unsupported(model, self._config, head)
        self._head: torch.nn.Module = head
        self._configs = _collect_configs(model)
        self.vocab_size: int = head.weight.shape[0]
        self.max_length: int | None = getattr(self._config, "max_position_embeddings", None)
        self._layers: int = self._config.num_hidden_layers
        AttentionInterface.register(_NAME, attend)

    @property
    def device(self) -> torch.device:
        """Where the model's weights are, and tokens must be."""
        device: torch.device = self.model.device
        return device

    def open(self, batch: int, capacity: int) -> TransformersCache:
        """Return an empty cache for `batch` requests of at most `capacity` positions each.

        Raises:
            ValueError: `batch` is not positive, or `capacity` is not in 1..max_length.
            NotImplementedError: the model's rotary frequencies would change with the length.
        """
        if batch < 1:
            raise ValueError(f"batch must be positive, got {batch}")
        if capacity < 1 or (self.max_length is not None and capacity > self.max_length):
            raise ValueError(f"capacity must be in 1..{self.max_length}, got {capacity}")
        _refuse_dynamic_rope(self._config, capacity)
        return TransformersCache(batch, capacity, self._layers, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of `tokens`, `[...] int64`, as `[..., size]`."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    def prefill(
        self, cache: Cache, row: int, tokens: Sequence[int], *, hidden: bool = False
    ) -> Tensor | None:
        """Append `tokens` to one request and commit them; no logits are computed.

        Returns:
            `[len(tokens), size]` last hidden states if `hidden`, else None.

        Raises:
            ValueError: the request would become longer than the capacity.
        """
        assert isinstance(cache, TransformersCache)
        start = int(cache.context_lens[row])
        states = [self.embed(torch.zeros(0, dtype=torch.int64, device=self.device))]
        _check_capacity(cache, [row], [start + len(tokens)])
        for first in range(0, len(tokens), _PREFILL_CHUNK):
            ids = torch.tensor([list(tokens[first : first + _PREFILL_CHUNK])], device=self.device)
            width = ids.shape[1]
            step = Step(cache, [row], [start + first], [width], contained=False)
            wanted = list(range(width)) if hidden else []
            states.append(self._run(ids, step, wanted, logits=False)[1])
        cache.context_lens[row] += len(tokens)
        return torch.cat(states) if hidden else None

    def forward(
        self,
        tokens: Tensor,
        num_nodes: Tensor,
        cache: Cache,
        *,
        parents: Tensor | None = None,
        start: int = 0,
        hidden: bool = False,
    ) -> TargetOutput:
        """Run the model over the nodes of chains or trees; K/V are written behind the context.

        Args:
            tokens: `[batch, nodes] int64`; what stands behind `num_nodes` is not read.
            num_nodes: `[batch] int32`; requests without a node from `start` on are left out of
                the forward.
            cache: from `open`. A failure leaves its lengths as they were.
            parents: `[batch, nodes] int32`; None = chains.
            start: first node to compute; the K/V of the nodes before it are in place.
            hidden: also return the input of the output layer.

        Returns:
            TargetOutput: one row of logits for every node from `start` on; `row` is -1 elsewhere.

        Raises:
            ValueError: wrong shapes, or a request would become longer than the capacity.

        Note:
            Reads the lengths from the device, once.
        """
        assert isinstance(cache, TransformersCache)
        batch, nodes = tokens.shape
        if batch != cache.batch or list(num_nodes.shape) != [batch]:
            raise ValueError(f"tokens must be [{cache.batch}, nodes], got {list(tokens.shape)}")
        trees = None if parents is None else Trees.make(parents, num_nodes, start)
        deepest = num_nodes - 1 if trees is None else trees.depth.amax(1)
        columns = [cache.context_lens, num_nodes, deepest]
        lens, given, depth = torch.stack([c.to(torch.int32) for c in columns]).tolist()
        counts = [min(n, nodes) - start for n in given]
        rows = [row for row in range(batch) if counts[row] > 0]
        if not rows:
            empty = torch.empty(0, self.vocab_size, dtype=self.model.dtype, device=self.device)
            return TargetOutput(empty, torch.full_like(tokens, -1, dtype=torch.int32))
        _check_capacity(cache, rows, [lens[row] + depth[row] + 1 for row in rows])
        cache.holds_tree = trees is not None
        if trees is not None:
            cache.extend(nodes)
            trees = trees if len(rows) == batch else trees.of(torch.tensor(rows))
        active = [counts[row] for row in rows]
        step = Step(cache, rows, [lens[row] + start for row in rows], active, trees)
        ids = tokens[:, start : start + step.width]
        ids = ids if len(rows) == batch else ids[rows]
        numbers, wanted = _number_rows(rows, active, step.width, (batch, nodes, start))
        logits, states = self._run(ids.clamp(0, self.vocab_size - 1), step, wanted)
        return TargetOutput(logits, numbers.to(self.device), states if hidden else None)

    @torch.no_grad()
    def _run(
        self, ids: Tensor, step: Step, wanted: list[int], *, logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return logits and last hidden states of the wanted places, `[len(wanted), ...]` each."""
        if self.model.training:
            raise ValueError("the model must be in eval mode: call model.eval()")
        with self._attention(), self._select_rows(wanted, ids.numel(), logits) as states:
            output = self.model(
                input_ids=ids,
                position_ids=step.position_ids,
                use_cache=False,
                spec_kernels_step=step,
            )
        if step.layers_seen != self._layers:
            raise NotImplementedError(
                f"{step.layers_seen} attention layers ran for the {self._layers} layers of "
                f"{type(self.model).__name__}: not supported"
            )
        return output.logits[0], states[0]

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        saved = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = _NAME
            yield
        finally:
            for config, name in zip(self._configs, saved, strict=True):
                config._attn_implementation = name

    @contextlib.contextmanager
    def _select_rows(self, wanted: list[int], places: int, logits: bool) -> Iterator[list[Tensor]]:
        """Let the output layer see the wanted places only; the list receives their states."""
        states: list[Tensor] = []
        everything = len(wanted) == places

        def select(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            flat = inputs[0].flatten(0, 1)
            states.append(flat if everything else flat[wanted])
            return (states[0][None] if logits else flat[None, :0],)

        handle = self._head.register_forward_pre_hook(select)
        try:
            yield states
        finally:
            handle.remove()


def _check_capacity(cache: TransformersCache, rows: list[int], lens: list[int]) -> None:
    for row, length in zip(rows, lens, strict=True):
        if length > cache.capacity:
            raise ValueError(
                f"request {row} needs {length} positions, the capacity is {cache.capacity}"
            )


def _number_rows(
    rows: list[int], counts: list[int], width: int, shape: tuple[int, int, int]
) -> tuple[Tensor, list[int]]:
    """Return each node's row of logits, -1 for padding, and its place in `[rows, width]`."""
    batch, nodes, start = shape
    numbers = torch.full((batch, nodes), -1, dtype=torch.int32)
    wanted: list[int] = []
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        numbers[row, start : start + count] = torch.arange(len(wanted), len(wanted) + count)
        wanted.extend(range(place * width, place * width + count))
    return numbers, wanted


def _refuse_unsupported(model: PreTrainedModel, config: Any, head: torch.nn.Module | None) -> None:
    name = type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    accepted = inspect.signature(model.forward).parameters
    reasons = {
        "is an encoder-decoder": model.config.is_encoder_decoder,
        "keeps recurrent state, which lengths cannot roll back": getattr(
            model, "_is_stateful", False
        ),
        f"has layers of kind {', '.join(sorted(kinds - _ATTENTION_KINDS))}": kinds
        - _ATTENTION_KINDS,
        "shares K/V between layers": getattr(config, "num_kv_shared_layers", 0),
        "does not use transformers' attention interface": not (
            getattr(model, "_supports_attention_backend", False)
            or model._can_set_attn_implementation()
        ),
        "takes no position_ids": "position_ids" not in accepted,
        "has no output embeddings": head is None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotImplementedError(f"{name} {reason}: not supported")


def _refuse_dynamic_rope(config: Any, capacity: int) -> None:
    """Frequencies that depend on the longest request would make cached keys stale."""
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        original = entry.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", config.max_position_embeddings
        )
        if entry.get("rope_type") in ("dynamic", "longrope") and capacity > original:
            raise NotImplementedError(
                f"{entry['rope_type']} rotary frequencies change beyond {original} positions; "
                f"open the cache with a smaller capacity, got {capacity}"
            )


def _collect_configs(model: PreTrainedModel) -> list[Any]:
    """Return every distinct config that the model's modules read, parents first."""
    found: dict[int, Any] = {}
    queue = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while queue:
        config = queue.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            queue.extend(
                sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None
            )
    return list(found.values())
