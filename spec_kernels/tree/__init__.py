"""Trees of drafts: their forms, how they grow, and which one to draft.

For chains nothing of this is needed: `Draft.parents` is None.
"""

from spec_kernels.tree.growth import (
    keep_best,
    path_scores,
    top_children,
)
from spec_kernels.tree.optimal import (
    StaticTree,
    best_expected_tokens,
    expected_tokens,
    optimal_tree,
)
from spec_kernels.tree.topology import (
    MAX_NODES,
    ancestor_mask,
    ancestor_words,
    check_parents,
    choices_from_parents,
    depths,
    is_tree,
    links_from_parents,
    mask_from_parents,
    pack_parents,
    parents_from_choices,
    parents_from_links,
    parents_from_mask,
    parents_from_paths,
    paths_from_parents,
)

__all__ = [
    "MAX_NODES",
    "StaticTree",
    "ancestor_mask",
    "ancestor_words",
    "best_expected_tokens",
    "check_parents",
    "choices_from_parents",
    "depths",
    "expected_tokens",
    "is_tree",
    "keep_best",
    "links_from_parents",
    "mask_from_parents",
    "optimal_tree",
    "pack_parents",
    "parents_from_choices",
    "parents_from_links",
    "parents_from_mask",
    "parents_from_paths",
    "path_scores",
    "paths_from_parents",
    "top_children",
]
