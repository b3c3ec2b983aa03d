"""Forms of a tree: parents, paths, nested choices, links, masks, depths and ancestor words.

A tree of n nodes is its list of parents: `parents[0] == -1` is the root, `0 <= parents[i] < i` for
every other node. Siblings are tried in ascending order of their nodes. Functions that take a list
run on the host and raise on anything that is no tree; those that take `[batch, nodes]` tensors run
on the tensors' device without waiting for it, and say what is wrong in their result; only other
dtypes (TypeError), shapes and devices (ValueError) raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from spec_kernels._check import IDS, check, require

MAX_NODES: Final = 1024
"""Most nodes of a tree, its root included."""

FEW: Final = 64
"""Numbers that are read into a list on a CPU: an operation costs what some thirty of them do."""


def check_parents(parents: Sequence[int], *, max_depth: int | None = None) -> None:
    """Raise unless `parents` is a tree: a root, then nodes behind their parents.

    Args:
        parents: the parent of each node, -1 for the root.
        max_depth: deepest node allowed; the root has depth 0.

    Raises:
        ValueError: no node or more than `MAX_NODES`; a second root, a parent that does not exist,
            a cycle, a parent behind its child, or a node deeper than `max_depth`. The message
            names the first such node.

    Example:
        >>> check_parents([-1, 0, 0, 1], max_depth=2)
        >>> check_parents([-1, 0, 3, 2])
        Traceback (most recent call last):
        ...
        ValueError: parents: node 2 is its own ancestor (parent 3)
    """
    n = len(parents)
    require(1 <= n <= MAX_NODES, f"parents must name 1 to {MAX_NODES} nodes, got {n}")
    require(parents[0] == -1, f"parents: node 0 must be the root (-1), got parent {parents[0]}")
    depth = [0] * n
    for node in range(1, n):
        parent = parents[node]
        require(parent != -1, f"parents: node {node} is a second root")
        require(0 <= parent < n, f"parents: node {node} has parent {parent}, outside [0, {n})")
        if parent >= node:
            fault = "is its own ancestor" if _is_on_cycle(parents, node) else "precedes its parent"
            raise ValueError(f"parents: node {node} {fault} (parent {parent})")
        depth[node] = depth[parent] + 1
        require(
            max_depth is None or depth[node] <= max_depth,
            f"parents: node {node} has depth {depth[node]}, deeper than {max_depth}",
        )


def _is_on_cycle(parents: Sequence[int], node: int) -> bool:
    """Say whether following the parents of `node` leads back to it."""
    at = parents[node]
    for _ in parents:
        if at == node or not 0 <= at < len(parents):
            break
        at = parents[at]
    return at == node


def pack_parents(
    trees: Sequence[Sequence[int]],
    *,
    nodes: int | None = None,
    max_depth: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Pack a tree per request into the tensors of a `Draft`, checking each one.

    Args:
        trees: parents of each request's tree; an empty list is an absent request.
        nodes: width of the result; by default the largest tree's.
        max_depth: deepest node allowed.
        device: where the tensors go.

    Returns:
        parents `[batch, nodes] int32`, -1 behind each tree, and num_nodes `[batch] int32`.

    Raises:
        ValueError: see `check_parents`; or a tree has more nodes than `nodes`.

    Example:
        >>> pack_parents([[-1, 0, 0], [-1], []])
        (tensor([[-1,  0,  0],
                [-1, -1, -1],
                [-1, -1, -1]], dtype=torch.int32), tensor([3, 1, 0], dtype=torch.int32))
    """
    for tree in trees:
        if len(tree):
            check_parents(tree, max_depth=max_depth)
    sizes = [len(tree) for tree in trees]
    largest = max(sizes, default=0)
    width = largest if nodes is None else nodes
    require(largest <= width, f"parents must fit into {width} nodes, got a tree of {largest}")
    rows = [[*tree, *[-1] * (width - len(tree))] for tree in trees]
    parents = torch.tensor(rows, dtype=torch.int32, device=device).view(len(trees), width)
    return parents, torch.tensor(sizes, dtype=torch.int32, device=device)


def paths_from_parents(parents: Sequence[int]) -> list[list[int]]:
    """List the root-to-leaf paths of a tree as nodes, in ascending order of their leaves.

    Raises:
        ValueError: see `check_parents`.

    Example:
        >>> paths_from_parents([-1, 0, 0, 1])
        [[0, 2], [0, 1, 3]]
    """
    check_parents(parents)
    inner = set(parents)
    paths = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while path[-1] != 0:
                path.append(parents[path[-1]])
            paths.append(path[::-1])
    return paths


def parents_from_paths(paths: Sequence[Sequence[int]]) -> list[int]:
    """Join root-to-leaf paths of nodes into a tree.

    Args:
        paths: each starts at node 0; together they name every node.

    Raises:
        ValueError: a path does not start at 0, a node is negative or too large, has two parents or
            is on no path, or the result is no tree.

    Example:
        >>> parents_from_paths([[0, 2], [0, 1, 3]])
        [-1, 0, 0, 1]
    """
    found = {0: -1}
    for path in paths:
        require(len(path) > 0 and path[0] == 0, f"paths must start at node 0, got {list(path)}")
        for parent, node in pairwise(path):
            require(0 <= node < MAX_NODES, f"paths: node {node} is outside [0, {MAX_NODES})")
            known = found.setdefault(node, parent)
            require(known == parent, f"paths: node {node} has parents {known} and {parent}")
    size = max(found) + 1
    missing = next((node for node in range(size) if node not in found), None)
    require(missing is None, f"paths: node {missing} is on no path")
    parents = [found[node] for node in range(size)]
    check_parents(parents)
    return parents


def parents_from_choices(
    choices: Sequence[Sequence[int]], *, max_depth: int | None = None
) -> tuple[list[int], list[int]]:
    """Build a tree from nested choices (Medusa): each node is the tuple of ranks that leads to it.

    Nodes are sorted by depth, then by ranks; so node i at depth d takes the `ranks[i]`-th best
    token of whatever proposes for depth d.

    Args:
        choices: tuples of ranks from 0, the root left out, in any order.
        max_depth: how many depths there are proposals for.

    Returns:
        parents and ranks, `ranks[0] == -1`.

    Raises:
        ValueError: a choice is empty, is there twice, lacks its prefix, holds a negative rank or
            is deeper than `max_depth`; or there are too many.

    Example:
        >>> parents_from_choices([(0,), (0, 0), (0, 1), (2,)])
        ([-1, 0, 0, 1, 1], [-1, 0, 2, 0, 1])
    """
    ordered = sorted((tuple(choice) for choice in choices), key=lambda c: (len(c), c))
    index: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks = [-1], [-1]
    for choice in ordered:
        require(len(choice) > 0, "choices must not hold the root, got ()")
        require(choice not in index, f"choices: {choice} is there twice")
        require(choice[-1] >= 0, f"choices: {choice} has a negative rank")
        require(choice[:-1] in index, f"choices: {choice} lacks its prefix {choice[:-1]}")
        index[choice] = len(parents)
        parents.append(index[choice[:-1]])
        ranks.append(choice[-1])
    check_parents(parents, max_depth=max_depth)
    return parents, ranks


def choices_from_parents(
    parents: Sequence[int], ranks: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Name each node but the root by the ranks that lead to it: nested choices in node order.

    Args:
        parents: a tree.
        ranks: rank of each node among its siblings' proposals; by default its place among them.

    Raises:
        ValueError: see `check_parents`; or ranks and parents differ in length.

    Example:
        >>> choices_from_parents([-1, 0, 0, 1, 1], [-1, 0, 2, 0, 1])
        [(0,), (2,), (0, 0), (0, 1)]
    """
    check_parents(parents)
    require(
        ranks is None or len(ranks) == len(parents),
        f"ranks must have {len(parents)} entries, one per node, got {len(ranks or ())}",
    )
    children = [0] * len(parents)
    choices: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        parent = parents[node]
        rank = children[parent] if ranks is None else ranks[node]
        children[parent] += 1
        choices.append((*choices[parent], rank))
    return choices[1:]


def links_from_parents(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first child and the next sibling of each node, -1 where there is none.

    Raises:
        ValueError: see `check_parents`.

    Example:
        >>> links_from_parents([-1, 0, 0, 1])
        ([1, 3, -1, -1], [-1, 2, -1, -1])
    """
    check_parents(parents)
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        next_sibling[node] = first_child[parents[node]]
        first_child[parents[node]] = node
    return first_child, next_sibling


def parents_from_links(first_child: Sequence[int], next_sibling: Sequence[int]) -> list[int]:
    """Build a tree from the first child and the next sibling of each node.

    Raises:
        ValueError: the lists differ in length, a link leads outside them, a node is linked
            twice or never, or siblings do not ascend.

    Example:
        >>> parents_from_links([1, 3, -1, -1], [-1, 2, -1, -1])
        [-1, 0, 0, 1]
    """
    n = len(first_child)
    require(len(next_sibling) == n, f"next_sibling must have {n} entries, got {len(next_sibling)}")
    parents = [-1] * n
    for parent in range(n):
        child, before = first_child[parent], -1
        while child != -1:
            require(0 <= child < n, f"links: node {parent} leads to {child}, outside [0, {n})")
            require(before < child, f"links: sibling {child} comes behind {before}")
            require(parents[child] == -1, f"links: node {child} is linked twice")
            parents[child] = parent
            child, before = next_sibling[child], child
    check_parents(parents)
    return parents


def mask_from_parents(parents: Sequence[int]) -> Tensor:
    """Return `[nodes, nodes] bool`: which nodes each node sees, itself and its ancestors.

    Raises:
        ValueError: see `check_parents`.

    Example:
        >>> mask_from_parents([-1, 0, 0]).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 1]], dtype=torch.int32)
    """
    return ancestor_mask(*pack_parents([parents]))[0]


def parents_from_mask(mask: Tensor) -> list[int]:
    """Read a tree back from the mask of which nodes each node sees.

    Args:
        mask: `[nodes, nodes] bool`.

    Raises:
        TypeError: no bool tensor.
        ValueError: not square, or no tree has this mask; the message names the first row that
            does not fit.

    Example:
        >>> parents_from_mask(mask_from_parents([-1, 0, 0, 1]))
        [-1, 0, 0, 1]
    """
    check("mask", mask, ["nodes", "nodes"], torch.bool)
    check("mask", mask, [mask.shape[0]] * 2, torch.bool)
    rows = [{j for j, is_seen in enumerate(row) if is_seen} for row in mask.tolist()]
    parents: list[int] = []
    for node, seen in enumerate(rows):
        parent = max(seen - {node}, default=-1)
        above = rows[parent] if 0 <= parent < node else set()
        require(seen == above | {node}, f"mask: row {node} is no node behind its ancestors")
        parents.append(parent)
    check_parents(parents)
    return parents


def depths(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Return each node's distance from the root; so its position is the root's plus this.

    Args:
        parents: `[batch, nodes] int32`; column 0 is not read.
        num_nodes: `[batch] int32`, clamped to [0, nodes].

    Returns:
        `[batch, nodes] int32`; -1 behind `num_nodes`, and where the parents do not lead to node 0.

    Example:
        >>> depths(torch.tensor([[-1, 0, 0, 2]]), torch.tensor([4]))
        tensor([[0, 1, 1, 2]], dtype=torch.int32)
    """
    is_plain = type(parents) is Tensor and parents.is_cpu and not torch.compiler.is_compiling()
    if is_plain and 0 < parents.numel() <= FEW:
        return _depths_of_few(parents, num_nodes)
    above, present = _links(parents, num_nodes)
    distance = (above != torch.arange(above.shape[1], device=above.device)).int()
    for _ in range(_rounds(above.shape[1])):
        distance = distance + distance.gather(1, above)
        above = above.gather(1, above)
    return torch.where(present & (above == 0), distance, -1)


def _depths_of_few(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Do as `depths`, on the host."""
    _check_rows(parents, num_nodes)
    found = []
    for row, count in zip(parents.tolist(), num_nodes.tolist(), strict=True):
        own = [0 if count > 0 else -1]
        for node, parent in enumerate(row[1:], 1):
            is_linked = node < count and 0 <= parent < node and own[parent] >= 0
            own.append(own[parent] + 1 if is_linked else -1)
        found.append(own)
    return torch.tensor(found, dtype=torch.int32)


def is_tree(parents: Tensor, num_nodes: Tensor, max_depth: int) -> Tensor:
    """Say of each request whether its parents are a tree at most `max_depth` deep.

    Args:
        parents: `[batch, nodes] int32`.
        num_nodes: `[batch] int32`, clamped to [0, nodes].
        max_depth: deepest node allowed.

    Returns:
        `[batch] bool`: `parents[b, 0] == -1`, `0 <= parents[b, i] < i` for the nodes behind, and
        no depth above `max_depth`. An absent request is fine.

    Example:
        >>> is_tree(torch.tensor([[-1, 0, 1], [-1, 0, 2]]), torch.tensor([3, 3]), max_depth=2)
        tensor([ True, False])
    """
    depth = depths(parents, num_nodes)
    present = _is_present(parents, num_nodes)
    is_fine = (depth >= 0) & (depth <= max_depth)
    is_fine[:, :1] &= parents[:, :1] == -1
    return (is_fine | ~present).all(1)


def ancestor_words(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Pack, for each node, which nodes it sees: itself and its ancestors.

    Args:
        parents: `[batch, nodes] int32`; column 0 is not read.
        num_nodes: `[batch] int32`, clamped to [0, nodes].

    Returns:
        `[batch, nodes, ceil(nodes / 32)] int32`: bit `j % 32` of word `j // 32` of row i is set
        iff node j is i or an ancestor of i. Rows behind `num_nodes` are 0.

    Example:
        >>> ancestor_words(torch.tensor([[-1, 0, 0, 2]]), torch.tensor([4]))[0, :, 0]
        tensor([ 1,  3,  5, 13], dtype=torch.int32)
    """
    above, present = _links(parents, num_nodes)
    nodes = above.shape[1]
    node = torch.arange(nodes, device=above.device)
    bit = torch.ones_like(node) << (node % 32)
    bit = torch.where(node % 32 == 31, -(2**31), bit).int()  # bit 31 is the sign
    word = torch.arange(-(-nodes // 32), device=above.device)
    own = torch.where(word == node[:, None] // 32, bit[:, None], 0)
    words = torch.where(present[:, :, None], own, 0)
    for _ in range(_rounds(nodes)):
        words = words | words.gather(1, above[:, :, None].expand_as(words))
        above = above.gather(1, above)
    return words


def ancestor_mask(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Return `[batch, nodes, nodes] bool`, the bits of `ancestor_words`.

    Example:
        >>> ancestor_mask(torch.tensor([[-1, 0, 0]]), torch.tensor([2]))[0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 0]], dtype=torch.int32)
    """
    words = ancestor_words(parents, num_nodes)
    node = torch.arange(parents.shape[1], device=parents.device)
    return ((words[:, :, node // 32] >> (node % 32).int()) & 1).bool()


def _is_present(parents: Tensor, num_nodes: Tensor) -> Tensor:
    return torch.arange(parents.shape[1], device=parents.device) < num_nodes[:, None]


def _check_rows(parents: Tensor, num_nodes: Tensor) -> None:
    check("parents", parents, ["batch", "nodes"], IDS)
    check("num_nodes", num_nodes, parents.shape[:1], IDS, parents.device)


def _links(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each node leads, to itself if it has no parent before it, and which exist."""
    _check_rows(parents, num_nodes)
    node = torch.arange(parents.shape[1], device=parents.device)
    present = _is_present(parents, num_nodes)
    is_linked = present & (parents >= 0) & (parents < node) & (node > 0)
    return torch.where(is_linked, parents.long(), node), present


def _rounds(nodes: int) -> int:
    """Return how often a link must be doubled to span the longest path."""
    return max(nodes - 1, 0).bit_length()
