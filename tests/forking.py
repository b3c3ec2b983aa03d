"""Sum a piece of the reference exactly over everything that its coins could decide.

`outcomes(run)` calls `run` once for every combination of answers that `random.decide` and
`random.choose` can give, by replaying a script: the first answers are prescribed, the first
possible one is taken behind them. The last answer that has an alternative is then changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from spec_kernels.reference import random

T = TypeVar("T")


class _Script:
    """One path through the tree of answers."""

    def __init__(self) -> None:
        self.forks: list[list[tuple[int, float]]] = []  # what is left at each fork, first = taken
        self.at = 0

    def answer(self, options: list[tuple[int, float]]) -> int:
        """Return the answer at the next fork, opening the fork when it is new."""
        if self.at == len(self.forks):
            self.forks.append([option for option in options if option[1] > 0.0])
        self.at += 1
        return self.forks[self.at - 1][0][0]

    def weight(self) -> float:
        """Return the probability of the path taken."""
        weight = 1.0
        for fork in self.forks:
            weight *= fork[0][1]
        return weight

    def advance(self) -> bool:
        """Turn to the next path; False when none is left."""
        while self.forks and len(self.forks[-1]) == 1:
            self.forks.pop()
        if self.forks:
            self.forks[-1].pop(0)
        self.at = 0
        return bool(self.forks)

    def decide(self, coin: float, numerator: float, denominator: float = 1.0) -> bool:
        yes = 1.0 if numerator >= denominator and numerator > 0.0 else 0.0
        if 0.0 < numerator < denominator:
            yes = numerator / denominator
        return bool(self.answer([(1, yes), (0, 1.0 - yes)]))

    def choose(self, coin: float, weights: Tensor) -> int:
        values = weights.double().tolist()
        total = sum(values)
        return self.answer([(index, value / total) for index, value in enumerate(values)])


@contextmanager
def scripted(script: _Script) -> Iterator[None]:
    """Replace the two deciding functions of the reference by those of a script."""
    originals = random.decide, random.choose
    random.decide, random.choose = script.decide, script.choose
    try:
        yield
    finally:
        random.decide, random.choose = originals


def outcomes(run: Callable[[], T]) -> Iterator[tuple[float, T]]:
    """Yield each possible result of `run` with its probability."""
    script = _Script()
    while True:
        with scripted(script):
            result = run()
        yield script.weight(), result
        if not script.advance():
            return
