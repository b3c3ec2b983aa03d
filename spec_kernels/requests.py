"""What goes into a decoder and what comes out: requests, chunks, generations."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.ops import adjust_logits_
from spec_kernels.stats import DecoderStats
from spec_kernels.tree import ancestor_mask
from spec_kernels.types import PAD_TOKEN, SamplingParams

_LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Request:
    """What to generate, and how. Checked when it is made.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: token budget, never exceeded.
        temperature: 0 is greedy.
        top_k: keep the k largest logits; None or 0 keeps all.
        top_p: keep the smallest set that holds this mass; None or 1 keeps all.
        min_p: keep ids with this share of the largest probability; None or 0 keeps all.
        seed: in [0, 2**63); None draws one, which the `Generation` reports.
        stop_ids: ids that end the request, beside the decoder's `eos_ids`.
        stop_strings: strings that end it; they need the decoder's `detokenize`.
        repetition_penalty: > 0; logits of ids in the prompt or the output are divided (if
            positive) or multiplied by it.
        presence_penalty: subtracted once from the logits of ids in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: added to the logits of these ids; `-inf` bans one.
        allowed_ids: the only ids that may be emitted; None allows all.

    Raises:
        TypeError: an id, the budget or the seed is no integer, or stop_strings is one string or
            holds something else.
        ValueError: an empty prompt, a negative id, a number outside its range, an empty stop string
            or set of allowed ids.

    Example:
        >>> Request([1, 2], temperature=0.8, top_p=0.9, seed=7).prompt
        (1, 2)
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "stop_ids", "allowed_ids"):
            ids = getattr(self, name)
            if ids is not None:
                object.__setattr__(self, name, check_ids(name, ids))
        require(len(self.prompt) > 0, "prompt must have at least one token, got none")
        object.__setattr__(self, "max_new_tokens", operator.index(self.max_new_tokens))
        require(
            self.max_new_tokens >= 0,
            f"max_new_tokens must be at least 0, got {self.max_new_tokens}",
        )
        SamplingParams.make(self.temperature, self.top_k, self.top_p, self.min_p)
        if self.seed is not None:
            object.__setattr__(self, "seed", operator.index(self.seed))
            require(0 <= self.seed < 2**63, f"seed must be in [0, 2**63), got {self.seed}")
        self._check_stop_strings()
        self._check_adjustments()

    def _check_stop_strings(self) -> None:
        if isinstance(self.stop_strings, str):
            raise TypeError("stop_strings must be a sequence of strings, got one string")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        for stop in self.stop_strings:
            if not isinstance(stop, str):
                raise TypeError(f"stop_strings must hold strings, got {type(stop).__name__}")
        require(all(self.stop_strings), "stop_strings must not hold an empty string")

    def _check_adjustments(self) -> None:
        penalty = self.repetition_penalty
        valid = penalty is None or 1 / _LARGEST <= penalty <= _LARGEST
        require(valid, f"repetition_penalty must be positive and finite in float32, got {penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            valid = value is None or abs(value) <= _LARGEST
            require(valid, f"{name} must be finite in float32, got {value}")
        if self.logit_bias is not None:
            check_ids("logit_bias", list(self.logit_bias))
            for value in self.logit_bias.values():
                valid = value <= _LARGEST
                require(valid, f"logit_bias must be finite in float32 or -inf, got {value}")
        allowed = self.allowed_ids
        require(allowed is None or len(allowed) > 0, "allowed_ids must allow at least one id")

    def all_ids(self) -> Iterator[tuple[str, int]]:
        """Yield every id that has to be in the vocabulary, with the name of its field."""
        for name in ("prompt", "stop_ids", "allowed_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                yield name, token


def check_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return the ids as a tuple of non-negative ints, or raise TypeError or ValueError."""
    ids = tuple(operator.index(value) for value in values)
    lowest = min(ids, default=0)
    require(lowest >= 0, f"{name} must not hold negative ids, got {lowest}")
    return ids


@dataclass(frozen=True)
class Generation:
    """The finished output of one request.

    Attributes:
        tokens: emitted ids. A stop id, or the tokens that spell a stop string, are the last ones.
        text: their text without the stop; "" without `detokenize`.
        finish_reason: "stop" (stop id or string), "length" (budget), "context" (the model's length
            is used up) or "invalid" (the target computed a row of NaN, +inf, or nothing allowed).
        seed: the seed that was used.
        stats: counters of this request.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    seed: int
    stats: DecoderStats


@dataclass(frozen=True)
class Chunk:
    """What one round added to one request.

    Attributes:
        request: index of the request.
        tokens: new ids.
        text: new text; may lag behind the tokens while a character or a stop string is unfinished.
        finish_reason: None while the request goes on.
        generation: the whole output, in the last chunk only.
    """

    request: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    generation: Generation | None = None


class Adjustments(NamedTuple):
    """Penalties, bias and allowed ids of a batch, as the tensors that `adjust_logits_` takes.

    Attributes:
        allowed_words: `[batch, words] int32`: bits of the allowed ids.
        bias_ids: `[batch, max_bias] int64`.
        bias_values: `[batch, max_bias] float32`.
        output_counts: `[batch, vocab] int32`: occurrences in the committed output.
        prompt_words: `[batch, words] int32`: bits of the ids in the prompt.
        repetition_penalty: `[batch] float32`.
        presence_penalty: `[batch] float32`.
        frequency_penalty: `[batch] float32`.
    """

    allowed_words: Tensor | None
    bias_ids: Tensor | None
    bias_values: Tensor | None
    output_counts: Tensor | None
    prompt_words: Tensor | None
    repetition_penalty: Tensor | None
    presence_penalty: Tensor | None
    frequency_penalty: Tensor | None

    @staticmethod
    def make(requests: Sequence[Request], vocab: int, device: torch.device) -> Adjustments | None:
        """Collect the fields of the requests; None if none of them has any."""
        penalties = {
            "repetition_penalty": _column([r.repetition_penalty for r in requests], 1.0, device),
            "presence_penalty": _column([r.presence_penalty for r in requests], 0.0, device),
            "frequency_penalty": _column([r.frequency_penalty for r in requests], 0.0, device),
        }
        bias = _bias([r.logit_bias or {} for r in requests], device)
        allowed = [r.allowed_ids for r in requests]
        has_allowed = any(ids is not None for ids in allowed)
        has_penalty = any(column is not None for column in penalties.values())
        if not (has_allowed or has_penalty or bias):
            return None
        seen = penalties["repetition_penalty"] is not None
        counts = torch.zeros(len(requests), vocab, dtype=torch.int32, device=device)
        return Adjustments(
            allowed_words=_words(allowed, vocab, device) if has_allowed else None,
            bias_ids=bias[0] if bias else None,
            bias_values=bias[1] if bias else None,
            output_counts=counts if has_penalty else None,
            prompt_words=_words([r.prompt for r in requests], vocab, device) if seen else None,
            **penalties,
        )

    def apply_(
        self,
        logits: Tensor,
        row_request: Tensor,
        draft_tokens: Tensor,
        row_node: Tensor,
        parents: Tensor | None = None,
    ) -> None:
        """Adjust the logits of nodes in place.

        Args:
            logits: `[rows, width]`; a width below the vocabulary is adjusted as far as it goes.
            row_request: `[rows] int32`.
            draft_tokens: `[batch, nodes] int64`.
            row_node: `[rows] int32`.
            parents: `[batch, nodes] int32`; None = chains. In a tree a row counts its own path.
        """
        width = logits.shape[1]
        words = (width + 31) // 32
        fields = self._asdict()
        if self.allowed_words is not None:
            fields["allowed_words"] = self.allowed_words[row_request.clamp(min=0).long(), :words]
        if self.prompt_words is not None:
            fields["prompt_words"] = self.prompt_words[:, :words]
        if self.output_counts is not None:
            fields["output_counts"] = self.output_counts[:, :width]
            fields.update(draft_tokens=draft_tokens, row_node=row_node)
            if parents is not None:
                row_request = _spread(fields, row_request, row_node, parents)
        adjust_logits_(logits, row_request, **fields)

    def commit_(self, tokens: Tensor) -> None:
        """Count the tokens that a round emitted, `[batch, width] int64`, `PAD_TOKEN` = none."""
        if self.output_counts is not None:
            present = (tokens >= 0).to(torch.int32)
            self.output_counts.scatter_add_(1, tokens.clamp(min=0), present)


def _spread(
    fields: dict[str, Tensor | None], row_request: Tensor, row_node: Tensor, parents: Tensor
) -> Tensor:
    """Make each row of logits a request of its own, whose drafts are the path to the row's node;
    return the new `row_request`."""
    owner, node = row_request.clamp(min=0).long(), row_node.clamp(min=0).long()
    num_nodes = torch.full_like(parents[:, 0], parents.shape[1])
    is_on_path = ancestor_mask(parents, num_nodes)[owner, node]
    for name, value in fields.items():
        if value is not None and name not in ("allowed_words", "row_node"):
            fields[name] = value[owner]
    drafts = fields["draft_tokens"]
    assert drafts is not None
    fields["draft_tokens"] = torch.where(is_on_path, drafts, PAD_TOKEN)
    rows = torch.arange(len(row_request), dtype=torch.int32, device=row_request.device)
    return torch.where(row_request >= 0, rows, -1)


def stack_params(requests: Sequence[Request], device: torch.device) -> SamplingParams:
    """Stack the sampling parameters of a batch; a filter that nobody uses stays None."""

    def column(name: str, off: float) -> list[float] | None:
        values = [getattr(request, name) for request in requests]
        if all(value is None or value == off for value in values):
            return None
        return [off if value is None else value for value in values]

    return SamplingParams.make(
        [request.temperature for request in requests],
        column("top_k", 0),  # type: ignore[arg-type]
        column("top_p", 1.0),
        column("min_p", 0.0),
        device=device,
    )


def _column(values: Sequence[float | None], neutral: float, device: torch.device) -> Tensor | None:
    if all(value is None or value == neutral for value in values):
        return None
    filled = [neutral if value is None else value for value in values]
    return torch.tensor(filled, dtype=torch.float32, device=device)


def _bias(
    biases: Sequence[Mapping[int, float]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    width = max(len(bias) for bias in biases)
    if width == 0:
        return None
    ids = torch.full((len(biases), width), PAD_TOKEN, dtype=torch.int64)
    values = torch.zeros(len(biases), width)
    for row, bias in enumerate(biases):
        ids[row, : len(bias)] = torch.tensor(list(bias), dtype=torch.int64)
        values[row, : len(bias)] = torch.tensor(list(bias.values()))
    return ids.to(device), values.to(device)


def _words(ids: Sequence[Sequence[int] | None], vocab: int, device: torch.device) -> Tensor:
    """Pack sets of ids into `[batch, words] int32`, bit x % 32 of word x // 32; None = all ids."""
    bits = torch.zeros(len(ids), (vocab + 31) // 32 * 32, dtype=torch.int64)
    for row, members in enumerate(ids):
        bits[row, ... if members is None else torch.tensor(list(members), dtype=torch.int64)] = 1
    words = (bits.view(len(ids), -1, 32) << torch.arange(32)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).to(device)
