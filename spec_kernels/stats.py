"""What happened while decoding: counters of drafts and tokens, and where the time went.

Counting rules, the same for every proposer:

- `drafted` counts drafts that were really there and really tested: padding, and drafts behind a
  malformed one or behind a stop, count nowhere.
- `accepted` counts accepted drafts that reached the output; `emitted` counts tokens of the output.
- A stop inside an accepted run cuts all of them at the stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


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
        """Share of the drafts at each position that were accepted."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def count(self, *, drafted: int, accepted: int, emitted: int) -> None:
        """Add one round."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        missing = drafted - len(self.drafted_at)
        self.drafted_at.extend([0] * missing)
        self.accepted_at.extend([0] * missing)
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    @staticmethod
    def total(parts: Iterable[DecoderStats]) -> DecoderStats:
        """Add up the counters of the requests of one batch.

        The seconds are the largest ones: the request that stayed longest saw every round.
        """
        whole = DecoderStats()
        for part in parts:
            for name in ("steps", "drafted", "accepted", "emitted"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            for name in ("drafted_at", "accepted_at"):
                ours, theirs = getattr(whole, name), getattr(part, name)
                ours.extend([0] * (len(theirs) - len(ours)))
                for position, value in enumerate(theirs):
                    ours[position] += value
            for name, value in vars(part.seconds).items():
                setattr(whole.seconds, name, max(getattr(whole.seconds, name), value))
        return whole


class Stopwatch:
    """Measures the parts of a round; on a CUDA device by events, so that nothing waits.

    Example:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> with watch.part("draft"):
        ...     pass
        >>> watch.seconds().draft >= 0.0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._done = Seconds()
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to the part `name` of `Seconds`."""
        if self._events:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._open.append((name, begin, end))
            return
        start = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - start)

    def seconds(self) -> Seconds:
        """Return what was measured so far; waits for the device if it must."""
        for name, begin, end in self._open:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000.0)
        self._open.clear()
        return Seconds(**vars(self._done))

    def _add(self, name: str, seconds: float) -> None:
        setattr(self._done, name, getattr(self._done, name) + seconds)
