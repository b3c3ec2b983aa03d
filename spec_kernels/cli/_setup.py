"""Load the models that a command names, and make the decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_kernels.cli._common import progress
from spec_kernels.cli._drafting import Drafting
from spec_kernels.decoder import Decoder
from spec_kernels.targets import speed_up_linear_


@dataclass(frozen=True)
class Loaded:
    """A loaded model, with what reads and writes its text."""

    model: Any
    target: Any
    tokenizer: Any

    @staticmethod
    def load(model: str, dtype: str | torch.dtype, say: Callable[[str], None]) -> Loaded:
        """Load a model onto the GPU if there is one; transformers is imported here."""
        import transformers

        from spec_kernels.integrations import smollm2
        from spec_kernels.integrations.transformers import TransformersTarget

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded, tokenizer = smollm2.load(model, dtype=dtype, device=device, progress=say)
        return Loaded(loaded, TransformersTarget(loaded), tokenizer)

    @property
    def eos_ids(self) -> list[int]:
        """Return the ids that end a text."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return eos if isinstance(eos, list) else [] if eos is None else [eos]


def speed_up(models: Sequence[torch.nn.Module], say: Callable[[str], None]) -> None:
    """Make the linear layers of all models fast for few rows.

    Raises:
        ValueError: no layer can be, or there is no C++ compiler.
    """
    say("compiling the product of few rows")
    try:
        changed = speed_up_linear_(torch.nn.ModuleList(models))
    except RuntimeError as error:
        raise ValueError(f"--fast-linear: {error}") from error
    if not changed:
        raise ValueError("--fast-linear: no linear layer in float32 or bfloat16 on the CPU")


@dataclass
class Setup:
    """A loaded model and how it is to be decoded."""

    model: str
    target: Any
    tokenizer: Any
    drafting: Drafting
    proposer: Any
    gamma: int
    rule: str
    dtype: str
    eos_ids: list[int]
    fast_linear: bool = False
    is_adaptive: bool = False  # gamma is then the largest one

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def decoder(self, *, speculative: bool) -> Decoder:
        """Return the speculative or the plain decoder."""
        proposer = self.proposer if speculative else None
        return Decoder(
            self.target,
            proposer,
            gamma="auto" if self.is_adaptive and speculative else self.gamma,
            max_gamma=max(self.gamma, 1),
            rule=self.rule,
            eos_ids=self.eos_ids,
            detokenize=self.detokenize,
        )


def load(
    model: str,
    drafting: Drafting,
    rule: str,
    dtype: str,
    threads: int | None,
    *,
    fast_linear: bool = False,
) -> Setup:
    """Load what a command names.

    Raises:
        ValueError: the options do not fit together, before anything is loaded; or a model is
            missing, or does not fit.
    """
    drafting.check(model)
    if threads is not None:
        torch.set_num_threads(threads)
    with progress() as say:
        say("importing transformers")
        found = Loaded.load(model, dtype, say)
        models = [found.model]

        def load_draft(name: str) -> Any:
            small = Loaded.load(name, found.model.dtype, say)
            if small.tokenizer.get_vocab() != found.tokenizer.get_vocab():
                raise ValueError(f"{name} has another tokenizer than {model}")
            models.append(small.model)
            return small.target

        proposer, gamma = drafting.make(model, found.model, found.target, load_draft)
        if fast_linear:
            trained = (getattr(proposer, name, None) for name in ("mtp", "heads"))
            speed_up([*models, *(each for each in trained if each is not None)], say)
    return Setup(
        model=model,
        target=found.target,
        tokenizer=found.tokenizer,
        drafting=drafting,
        proposer=proposer,
        gamma=gamma,
        rule=rule,
        dtype=str(found.model.dtype).removeprefix("torch."),
        eos_ids=found.eos_ids,
        fast_linear=fast_linear,
    )
