"""Use any Hugging Face causal language model as a target or as a draft model.

`TransformersTarget` leaves transformers' caches aside, because they cannot hold rows of different
lengths. A registered attention function keeps K/V instead:

1. around each of our calls the model's attention implementation is `spec_kernels`, and the step's
   data travel to every layer as a keyword argument of the model;
2. the tokens of all requests are one row, `[1, tokens]`, each with its own position; on a CPU
   without padding, whatever the requests' lengths;
3. the attention of each layer appends its new K/V rows to our cache (`targets.open_cache`) and
   attends with `verify_attention`: there is no mask, trees bring ancestor words and depths.

Outside our calls the model works as before, with its own attention and its own caches.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from spec_kernels._check import require
from spec_kernels.integrations._attention import Probe, attend
from spec_kernels.targets import (
    Cache,
    KVCache,
    Nodes,
    TargetOutput,
    can_read,
    make_room,
    open_cache,
)
from spec_kernels.tree import depths

_NAME: Final = "spec_kernels"
_PREFILL_CHUNK: Final = 256  # bounds the memory of activations and scores
_ATTENTION_KINDS: Final = frozenset({"full_attention", "sliding_attention", "attention"})


class TransformersTarget:
    """Wrap a Hugging Face causal language model for `Decoder`, as target or as draft model.

    Args:
        model: any causal language model of transformers that calls the attention interface, in eval
            mode. Its weights are shared, its own behaviour does not change.
        block_size, num_blocks: of a paged cache; by default the device decides: blocks of 16 rows
            on a GPU, contiguous rows on a CPU.

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

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
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
        self._blocks = block_size, num_blocks
        self._probe: Probe | None = None
        AttentionInterface.register(_NAME, attend)

    @property
    def device(self) -> torch.device:
        """Where the model's weights are, and tokens must be."""
        device: torch.device = self.model.device
        return device

    def open(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for `batch` requests of at most `capacity` positions each.

        Raises:
            ValueError: `batch` is not positive, or `capacity` is not in 1..max_length.
            NotImplementedError: the model's rotary frequencies would change with the length, or its
                layers ask for what the attention here cannot do.
        """
        if batch < 1:
            raise ValueError(f"batch must be positive, got {batch}")
        if capacity < 1 or (self.max_length is not None and capacity > self.max_length):
            raise ValueError(f"capacity must be in 1..{self.max_length}, got {capacity}")
        _refuse_dynamic_rope(self._config, capacity)
        if self._probe is None:
            self._probe = self._find_shapes()
        return open_cache(
            [self._probe.shapes[layer] for layer in range(self._layers)],
            batch,
            capacity,
            dtype=self._probe.dtype,
            device=self.device,
            block_size=self._blocks[0],
            num_blocks=self._blocks[1],
        )

    def _find_shapes(self) -> Probe:
        """Run the model over one token, to learn what its layers store."""
        probe, one = Probe(), torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._run(one, one, probe, logits=False)
        if sorted(probe.shapes) != list(range(self._layers)):
            raise NotImplementedError(
                f"{len(probe.shapes)} attention layers ran for the {self._layers} layers of "
                f"{type(self.model).__name__}: not supported"
            )
        return probe

    def exit(self, layers: int) -> TransformersTarget:
        """Return the target of the first layers; see `ExitTarget`. It runs the model with a smaller
        `num_hidden_layers`, which a model must follow."""
        require(1 <= layers <= self._layers, f"layers must be in 1..{self._layers}, got {layers}")
        early = copy.copy(self)
        early._layers = layers
        early._probe = early._find_shapes()
        return early

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
        assert isinstance(cache, KVCache)
        lens = cache.context_lens.tolist()
        counts = [len(tokens) if b == row else 0 for b in range(cache.batch)]
        _check_capacity(cache, [n + c if c else 0 for n, c in zip(lens, counts, strict=True)])
        cache.tell(lens)
        cache.reserve(counts)
        num_nodes = torch.tensor(counts, dtype=torch.int32, device=self.device)
        states = [self.embed(torch.zeros(0, dtype=torch.int64, device=self.device))]
        for first in range(0, len(tokens), _PREFILL_CHUNK):
            ids = torch.tensor([list(tokens[first : first + _PREFILL_CHUNK])], device=self.device)
            end = first + ids.shape[1]
            part = [min(count, end) for count in counts]
            new = Nodes(cache, num_nodes, end, part, start=first, contained=False)
            states.append(self._run(ids, new.positions[None], new, logits=False)[1])
        cache.advance(counts)
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
            num_nodes: `[batch] int32`; on a CPU requests without a node from `start` on are left
                out of the forward.
            cache: from `open`. A failure leaves its lengths as they were.
            parents: `[batch, nodes] int32`; None = chains.
            start: first node to compute; the K/V of the nodes before it are in place.
            hidden: also return the input of the output layer.

        Returns:
            TargetOutput: one row of logits for every node from `start` on; `row` is -1 elsewhere.

        Raises:
            ValueError: wrong shapes, or (on a CPU) a request would become longer than the capacity.
            OutOfBlocks: of a cache with `num_blocks`; nothing was written.

        Note:
            Reads no device value.
        """
        assert isinstance(cache, KVCache)
        batch, nodes = tokens.shape
        if batch != cache.batch or list(num_nodes.shape) != [batch]:
            raise ValueError(f"tokens must be [{cache.batch}, nodes], got {list(tokens.shape)}")
        num_nodes = num_nodes.clamp(0, nodes).to(torch.int32)
        if can_read(num_nodes):
            deepest = num_nodes if parents is None else depths(parents, num_nodes).amax(1) + 1
            ends = torch.where(num_nodes > start, cache.context_lens + deepest, 0)
            _check_capacity(cache, ends.tolist())
        counts = make_room(cache, num_nodes, nodes, is_tree=parents is not None)
        if counts is not None and max(counts) <= start:
            empty = torch.empty(0, self.vocab_size, dtype=self.model.dtype, device=self.device)
            return TargetOutput(empty, torch.full_like(tokens, -1, dtype=torch.int32))
        new = Nodes(cache, num_nodes, nodes, counts, parents=parents, start=start)
        ids = new.pick(tokens[:, start:]).clamp(0, self.vocab_size - 1)[None]
        logits, states = self._run(ids, new.positions[None], new)
        if new.is_spoiled(states):
            logits, states = self._run(ids, new.positions[None], new)
        return TargetOutput(logits, new.row, states if hidden else None)

    @torch.no_grad()
    def _run(
        self, ids: Tensor, positions: Tensor, step: Nodes | Probe, *, logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return logits, if wanted, and last hidden states of all tokens, `[tokens, ...]` each."""
        if self.model.training:
            raise ValueError("the model must be in eval mode: call model.eval()")
        with self._attention(), self._hidden_states(logits) as states:
            output = self.model(
                input_ids=ids, position_ids=positions, use_cache=False, spec_kernels_step=step
            )
        return output.logits[0], states[0]

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """Let the model run our layers of it, with our attention."""
        saved = [config._attn_implementation for config in self._configs]
        layers = self._config.num_hidden_layers
        try:
            self._config.num_hidden_layers = self._layers
            for config in self._configs:
                config._attn_implementation = _NAME
            yield
        finally:
            self._config.num_hidden_layers = layers
            for config, name in zip(self._configs, saved, strict=True):
                config._attn_implementation = name

    @contextlib.contextmanager
    def _hidden_states(self, logits: bool) -> Iterator[list[Tensor]]:
        """Let the list receive what the output layer sees; without logits it then sees nothing."""
        states: list[Tensor] = []

        def note(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            states.append(inputs[0][0])
            return (inputs[0] if logits else inputs[0][:, :0],)

        handle = self._head.register_forward_pre_hook(note)
        try:
            yield states
        finally:
            handle.remove()


def _check_capacity(cache: KVCache, lens: Sequence[int]) -> None:
    for row, length in enumerate(lens):
        if length > cache.max_length:
            raise ValueError(
                f"request {row} needs {length} positions, the capacity is {cache.max_length}"
            )


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
