"""Load the models that a command names, and make the decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_kernels.cli._common import progress
from spec_kernels.decoder import Decoder
from spec_kernels.proposers import BestFirst, DraftModelProposer, NgramProposer, TreeTemplate


@dataclass
class Setup:
    """A loaded model and how it is to be decoded."""

    model: str
    target: Any
    tokenizer: Any
    proposer: Any
    gamma: int
    rule: str
    dtype: str
    eos_ids: list[int]
    tree: str

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
            gamma=self.gamma,
            rule=self.rule,
            eos_ids=self.eos_ids,
            detokenize=self.detokenize,
        )


def load(
    model: str,
    draft_model: str | None,
    proposer: str,
    gamma: int,
    rule: str,
    dtype: str,
    threads: int | None,
    min_ngram: int,
    tree: str | None = None,
    nodes: int | None = None,
    children: str = "sampled",
) -> Setup:
    if proposer == "draft" and draft_model is None:
        raise ValueError("--proposer draft needs --draft-model DIRECTORY")
    if tree is not None and (proposer != "draft" or nodes is not None):
        raise ValueError("--tree needs --proposer draft and no --tree-nodes")
    shape = None if tree is None else TreeTemplate.parse(tree)
    gamma = gamma if shape is None else min(gamma, shape.depth)
    if threads is not None:
        torch.set_num_threads(threads)
    with progress() as say:
        say("importing transformers")
        import transformers

        from spec_kernels.integrations import smollm2
        from spec_kernels.integrations.transformers import TransformersTarget

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded, tokenizer = smollm2.load(model, dtype=dtype, device=device, progress=say)
        target = TransformersTarget(loaded)
        drafts: Any = None
        if proposer == "ngram":
            drafts = NgramProposer(max(4, min_ngram), min_ngram, nodes=nodes)
        elif proposer == "draft":
            assert draft_model is not None
            small, other = smollm2.load(
                draft_model, dtype=loaded.dtype, device=device, progress=say
            )
            if other.get_vocab() != tokenizer.get_vocab():
                raise ValueError(f"{draft_model} has another tokenizer than {model}")
            best = None if nodes is None else BestFirst(nodes, depth=max(gamma, 1))
            drafts = DraftModelProposer(
                TransformersTarget(small),
                padded_vocab=True,
                tree=best if shape is None else shape.parents,
                children=children,
            )
    eos = getattr(loaded.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    return Setup(
        model=model,
        target=target,
        tokenizer=tokenizer,
        proposer=drafts,
        gamma=gamma,
        rule=rule,
        dtype=str(loaded.dtype).removeprefix("torch."),
        eos_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        tree=f"{tree} {children}" if tree else f"{nodes} nodes" if nodes else "chain",
    )
