"""Who drafts, and in which shape: checked before a model is loaded, made when one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from spec_kernels._check import require
from spec_kernels.integrations.smollm2_mtp import matrices_of, weights_folder
from spec_kernels.nn.mtp import MTP, ParallelHeads, load_mtp
from spec_kernels.proposers import (
    BestFirst,
    DraftModelProposer,
    EarlyExitProposer,
    HeadsProposer,
    MTPProposer,
    NgramProposer,
    Proposer,
    TreeTemplate,
)
from spec_kernels.tree import MAX_NODES

ProposerName = Literal["ngram", "draft", "heads", "mtp", "early-exit", "none"]
ChildrenName = Literal["sampled", "replacement", "fixed", "mixed"]

_WITH_LAWS: Final = ("draft", "heads", "mtp", "early-exit")
_OPTIONS: Final = {
    "draft_model": ("--draft-model", ("draft",)),
    "weights": ("--proposer-weights", ("heads", "mtp")),
    "exit_layer": ("--exit-layer", ("early-exit",)),
    "tree": ("--tree", _WITH_LAWS),
    "nodes": ("--tree-nodes", ("ngram", *_WITH_LAWS)),
}
"""Which proposers an option is for."""


@dataclass(frozen=True)
class Drafting:
    """The options of the command line that make a proposer.

    Attributes:
        proposer: who drafts.
        gamma: most drafts per round.
        draft_model: directory of the draft model.
        weights: directory of trained heads or modules; None = those that come along.
        exit_layer: layers of the target that draft.
        min_ngram: shortest match that is used whatever stands before it.
        tree: children by depth, as "4,2,2", or parents, as "-1,0,0,1".
        nodes: of a tree that grows.
        children: how the siblings of `tree` are chosen; None = sampled.
    """

    proposer: ProposerName = "ngram"
    gamma: int = 8
    draft_model: str | None = None
    weights: str | None = None
    exit_layer: int | None = None
    min_ngram: int = 2
    tree: str | None = None
    nodes: int | None = None
    children: ChildrenName | None = None

    def check(self, model: str) -> None:
        """Refuse options that do not fit together.

        Raises:
            ValueError: in one line, by the names of the options.
        """
        for field, (option, proposers) in _OPTIONS.items():
            if getattr(self, field) is not None and self.proposer not in proposers:
                raise ValueError(f"{option} needs --proposer {' or '.join(proposers)}")
        for name, field in (("draft", "draft_model"), ("early-exit", "exit_layer")):
            if self.proposer == name and getattr(self, field) is None:
                option = _OPTIONS[field][0]
                raise ValueError(f"--proposer {name} needs {option}")
        require(
            self.tree is None or self.nodes is None,
            "--tree and --tree-nodes are two kinds of trees: give one of them",
        )
        require(self.children is None or self.tree is not None, "--tree-children needs --tree")
        require(
            self.nodes is None or 2 <= self.nodes <= MAX_NODES,
            f"--tree-nodes must be in [2, {MAX_NODES}], got {self.nodes}",
        )
        if self.tree is not None:
            TreeTemplate.parse(self.tree)
        if self.proposer in ("heads", "mtp"):
            config = self._folder(model) / "config.json"
            require(config.is_file(), f"--proposer-weights: {config} does not exist")

    @property
    def shape(self) -> str:
        """Name the shape of the drafts."""
        if self.tree is not None:
            return f"{self.tree} {self.children or 'sampled'}"
        return "chain" if self.nodes is None else f"{self.nodes} nodes"

    def make(
        self, model: str, loaded: Any, target: Any, load_draft: Callable[[str], Any]
    ) -> tuple[Proposer | None, int]:
        """Return the proposer, or None for plain decoding, and the most drafts per round.

        Args:
            model: name of the target's model.
            loaded: the target's model.
            target: the target.
            load_draft: loads the draft model of a directory as a target.
        """
        template = None if self.tree is None else TreeTemplate.parse(self.tree)
        gamma = self.gamma if template is None else min(self.gamma, template.depth)
        if self.proposer == "none" or gamma == 0:
            return None, 0
        if self.proposer == "ngram":
            longest = max(4, self.min_ngram)
            return NgramProposer(longest, self.min_ngram, nodes=self.nodes), gamma
        mtp = self._load_mtp(model, loaded) if self.proposer in ("heads", "mtp") else None
        if mtp is not None and (template is None or isinstance(mtp, ParallelHeads)):
            gamma = min(gamma, mtp.config.depth)
        tree = None if template is None else template.parents
        best = None if self.nodes is None else BestFirst(self.nodes, depth=gamma)
        options: dict[str, Any] = {"tree": tree or best, "children": self.children or "sampled"}
        if isinstance(mtp, ParallelHeads):
            return HeadsProposer(mtp, **options), gamma
        if mtp is not None:
            return MTPProposer(mtp, depth=gamma, **options), gamma
        if self.proposer == "early-exit":
            assert self.exit_layer is not None
            return EarlyExitProposer(target, self.exit_layer, **options), gamma
        assert self.draft_model is not None
        small = load_draft(self.draft_model)
        return DraftModelProposer(small, padded_vocab=True, **options), gamma

    def _folder(self, model: str) -> Path:
        """Return the directory of the weights."""
        if self.weights is not None:
            return Path(self.weights)
        require(
            model == "smollm2",
            f"--proposer {self.proposer} needs --proposer-weights for other models than smollm2",
        )
        return weights_folder("parallel" if self.proposer == "heads" else "sequential")

    def _load_mtp(self, model: str, loaded: Any) -> MTP:
        """Load heads or modules for the loaded model."""
        folder = self._folder(model)
        mtp = load_mtp(folder, *matrices_of(loaded)).requires_grad_(False).eval()
        kind = mtp.config.kind
        right = {"parallel": "heads", "sequential": "mtp"}[kind]
        require(
            right == self.proposer,
            f"the weights in {folder} are of kind {kind}: use --proposer {right}",
        )
        return mtp
