"""Trees of drafts: their forms, how they grow, and which one to draft.

For chains nothing of this is needed: `Draft.parents` is None.
"""

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
    "ancestor_mask",
    "ancestor_words",
    "check_parents",
    "choices_from_parents",
    "depths",
    "is_tree",
    "links_from_parents",
    "mask_from_parents",
    "pack_parents",
    "parents_from_choices",
    "parents_from_links",
    "parents_from_mask",
    "parents_from_paths",
    "paths_from_parents",
]
