"""What happened while decoding: counters of drafts and tokens, and where the time went.

Counting rules, the same for every proposer:

- `drafted` counts drafts that were really there and really tested: padding, and drafts behind a
  malformed one or behind a stop, count nowhere.
- `accepted` counts accepted drafts that reached the output; `emitted` counts tokens of the output.
- A stop inside an accepted run cuts all of them at the stop.
- In a tree every node is a draft; its position is its depth, and its rank its place among its
  siblings. A child counts in the acceptance matrix when its parent was kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from spec_kernels._check import require
from spec_kernels.tree import check_parents


@dataclass
class Seconds:
    """Wall-clock seconds by part of the loop.

    Attributes:
        prefill: filling the caches with the prompt.
        draft: the proposer.
        verify: the target's forward.
        accept: penalties, acceptance and sampling, and reading the result.
        state: caches and sequences: keeping, rolling back, stop conditions.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    state: float = 0.0

    @property
    def decode(self) -> float:
        """All but the prefill."""
        return self.draft + self.verify + self.accept + self.state


@dataclass
class AcceptanceMatrix:
    """How often a child was kept when its parent was, by its depth and its rank among siblings.

    The children of a node exclude each other, so the rates of one depth add up to at most 1, if
    the kept nodes there had equally many: a child that was not there was not tried. This is what
    the best static tree is built from.

    Attributes:
        tried: `[depth][rank]`, depth 1 first: rounds with such a child behind a kept node.
        accepted: `[depth][rank]`: rounds that kept it.

    Example:
        >>> matrix = AcceptanceMatrix()
        >>> for taken in (0, 1, 1, None):
        ...     matrix.count(1, 2, taken)
        >>> matrix.rates(), matrix.expected([-1, 0, 0])
        ([[0.25, 0.5]], [1.0, 0.25, 0.5])
    """

    tried: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    def count(self, depth: int, children: int, taken: int | None) -> None:
        """Add one kept node with `children` at `depth`, of which rank `taken` was kept."""
        self._reach(depth, children)
        for rank in range(children):
            self.tried[depth - 1][rank] += 1
            self.accepted[depth - 1][rank] += rank == taken

    def rates(self) -> list[list[float]]:
        """Return accepted over tried, `[depth][rank]`, all rows of one length; 0 where nothing was
        tried. What `optimal_tree` takes."""
        width = max(map(len, self.tried), default=0)
        rows = []
        for kept, tried in zip(self.accepted, self.tried, strict=True):
            row = [a / t if t else 0.0 for a, t in zip(kept, tried, strict=True)]
            rows.append(row + [0.0] * (width - len(row)))
        return rows

    def expected(self, parents: Sequence[int]) -> list[float]:
        """Return the chance that a round keeps each node of a tree, if its drafts are all there;
        their sum is the expected number of tokens per round. Depths and ranks never seen count 0.

        Args:
            parents: the tree; siblings in the order of their ranks.

        Raises:
            ValueError: parents are no tree (`check_parents`).
        """
        check_parents(parents)
        rates = self.rates()
        chances = [1.0]
        for depth, rank, parent in _places(parents)[1:]:
            known = depth <= len(rates) and rank < len(rates[depth - 1])
            chances.append(chances[parent] * rates[depth - 1][rank] if known else 0.0)
        return chances

    def add(self, other: AcceptanceMatrix) -> None:
        """Add the counts of another one."""
        for depth, row in enumerate(other.tried, start=1):
            self._reach(depth, len(row))
            for rank, tried in enumerate(row):
                self.tried[depth - 1][rank] += tried
                self.accepted[depth - 1][rank] += other.accepted[depth - 1][rank]

    def save(self, path: str | Path) -> None:
        """Write the counts as JSON."""
        Path(path).write_text(json.dumps(vars(self)) + "\n")

    @staticmethod
    def load(path: str | Path) -> AcceptanceMatrix:
        """Read what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no counts, or more accepted than tried.
        """
        try:
            values = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} must hold JSON: {error}") from error
        known = isinstance(values, dict) and set(values) == {"tried", "accepted"}
        known = known and all(map(_are_counts, values.values()))
        require(known, f"{path} must hold the counts tried and accepted")
        tried, accepted = values["tried"], values["accepted"]
        fits = [len(row) for row in tried] == [len(row) for row in accepted] and all(
            0 <= a <= t
            for kept, row in zip(accepted, tried, strict=True)
            for a, t in zip(kept, row, strict=True)
        )
        require(fits, f"{path} must hold as many counts accepted as tried, none above it")
        return AcceptanceMatrix(tried, accepted)

    def _reach(self, depth: int, ranks: int) -> None:
        for counts in (self.tried, self.accepted):
            counts.extend([] for _ in range(depth - len(counts)))
            _reach(counts[depth - 1], ranks)


def _are_counts(value: object) -> bool:
    """Say whether a value from a file is a list of lists of ints."""
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and all(type(n) is int for n in row) for row in rows)


@dataclass
class DecoderStats:
    """Counters of one request, and the seconds of the rounds that it took part in.

    Attributes:
        seconds: wall-clock time; requests of a batch share their rounds, so do not add them up.
        steps: rounds.
        drafted: draft tokens tested.
        accepted: draft tokens accepted and emitted.
        emitted: tokens of the output.
        drafted_at: drafts tested at each position, the first behind the root first.
        accepted_at: drafts accepted at each position.
        node_drafted: rounds that tested each node, the root left out; for static trees.
        node_accepted: rounds that accepted each node.
        matrix: acceptance by depth and rank.

    Example:
        >>> stats = DecoderStats()
        >>> stats.count(drafted=3, accepted=1, emitted=2)
        >>> stats.count(drafted=1, accepted=1, emitted=2)
        >>> stats.acceptance_rate, stats.mean_accepted_length, stats.acceptance_by_position
        (0.5, 2.0, [1.0, 0.0, 0.0])
    """

    seconds: Seconds = field(default_factory=Seconds)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    node_drafted: list[int] = field(default_factory=list)
    node_accepted: list[int] = field(default_factory=list)
    matrix: AcceptanceMatrix = field(default_factory=AcceptanceMatrix)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over tested drafts; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Emitted tokens over rounds, so `1 + accepted / steps` unless a stop cut a run; 0 before
        the first round."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at each position that were accepted; in a tree at most one is."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def count(self, *, drafted: int, accepted: int, emitted: int) -> None:
        """Add one round over a chain."""
        self.count_tree(range(-1, drafted), range(accepted + 1), emitted)

    def count_tree(self, parents: Sequence[int], path: Sequence[int], emitted: int) -> None:
        """Add one round over a tree.

        Args:
            parents: of each node; -1 for the root and for nodes that were not tested.
            path: kept nodes, the root first.
            emitted: tokens of the output.
        """
        self.steps += 1
        self.emitted += emitted
        self.accepted += len(path) - 1
        kept = set(path)
        taken: dict[int, int] = {}
        children: dict[int, int] = {}
        for node, (depth, rank, parent) in enumerate(_places(parents)):
            if depth < 1:
                continue
            for counts, one in (
                (self.drafted_at, depth),
                (self.accepted_at, depth),
                (self.node_drafted, node),
                (self.node_accepted, node),
            ):
                _reach(counts, one)
            is_kept = node in kept
            self.drafted += 1
            self.drafted_at[depth - 1] += 1
            self.accepted_at[depth - 1] += is_kept
            self.node_drafted[node - 1] += 1
            self.node_accepted[node - 1] += is_kept
            children[parent] = rank + 1
            if is_kept:
                taken[parent] = rank
        for depth, node in enumerate(path, start=1):
            self.matrix.count(depth, children.get(node, 0), taken.get(node))

    @staticmethod
    def total(parts: Iterable[DecoderStats]) -> DecoderStats:
        """Add up the counters of the requests of one batch.

        The seconds are the largest ones: the request that stayed longest saw every round.
        """
        whole = DecoderStats()
        for part in parts:
            for name in ("steps", "drafted", "accepted", "emitted"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            for name in ("drafted_at", "accepted_at", "node_drafted", "node_accepted"):
                ours, theirs = getattr(whole, name), getattr(part, name)
                _reach(ours, len(theirs))
                for position, value in enumerate(theirs):
                    ours[position] += value
            whole.matrix.add(part.matrix)
            for name, value in vars(part.seconds).items():
                setattr(whole.seconds, name, max(getattr(whole.seconds, name), value))
        return whole


def cut_below(parents: Sequence[int], depth: int) -> list[int]:
    """Return the parents with those of deeper nodes set to -1: they do not count.

    Example:
        >>> cut_below([-1, 0, 1, 2], 2)
        [-1, 0, 1, -1]
    """
    return [
        parent if place.depth <= depth else -1
        for parent, place in zip(parents, _places(parents), strict=True)
    ]


class _Place(NamedTuple):
    """Where a node stands in its tree."""

    depth: int  # 0 for the root and for nodes that count nowhere
    rank: int
    parent: int


def _places(parents: Sequence[int]) -> list[_Place]:
    """Find the place of every node; node 0 is the root, and others with parent -1, or behind such
    a one, count nowhere."""
    places = [_Place(0, 0, -1)]
    children = [0] * len(parents)
    for node in range(1, len(parents)):
        parent = parents[node]
        is_real = parent == 0 or (parent > 0 and places[parent].depth > 0)
        if not is_real:
            places.append(_Place(0, 0, -1))
            continue
        places.append(_Place(places[parent].depth + 1, children[parent], parent))
        children[parent] += 1
    return places


def _reach(counts: list[int], length: int) -> None:
    """Extend a list of counters by zeros."""
    counts.extend([0] * (length - len(counts)))


class Lap:
    """The parts of one round, as a `Stopwatch` measured them."""

    def __init__(self, parts: Sequence[tuple[str, float | _Events]]) -> None:
        self._parts = parts

    def seconds(self) -> Seconds | None:
        """Return the time of each part, or None while the device is still at one; never waits."""
        total = Seconds()
        for name, time_ in self._parts:
            if isinstance(time_, _Events) and not time_.is_over:
                return None
            spent = time_.seconds() if isinstance(time_, _Events) else time_
            setattr(total, name, getattr(total, name) + spent)
        return total


class _Events(NamedTuple):
    """Begin and end of a part on a CUDA device."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    def seconds(self) -> float:
        """Return the time between them; both must have happened."""
        return float(self.begin.elapsed_time(self.end)) / 1000.0

    @property
    def is_over(self) -> bool:
        """Whether the device has passed the end."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]


class Stopwatch:
    """Measures the parts of a round; on a CUDA device by events, so that nothing waits.

    Example:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> with watch.part("draft"):
        ...     pass
        >>> watch.seconds().draft >= 0.0, watch.lap().seconds().verify
        (True, 0.0)
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._done = Seconds()
        self._open: list[tuple[str, _Events]] = []
        self._lap: list[tuple[str, float | _Events]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to the part `name` of `Seconds`."""
        if self._events:
            events = _Events(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[no-untyped-call]
            events.begin.record()
            yield
            events.end.record()
            self._open.append((name, events))
            self._lap.append((name, events))
            return
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self._add(name, spent)
        self._lap.append((name, spent))

    def lap(self) -> Lap:
        """Return the parts since the last lap, and begin another one."""
        parts, self._lap = self._lap, []
        return Lap(parts)

    def seconds(self) -> Seconds:
        """Return what was measured so far; waits for the device if it must."""
        for name, events in self._open:
            events.end.synchronize()
            self._add(name, events.seconds())
        self._open.clear()
        return Seconds(**vars(self._done))

    def _add(self, name: str, seconds: float) -> None:
        setattr(self._done, name, getattr(self._done, name) + seconds)
