"""Tokens per second of the decoder by gamma, where the time goes, and what the model predicts.

For every proposer and gamma 0..8 (and "auto"): text per second of the rounds, the split of their
time, and beside the measured speed-up over plain decoding the one of `cost_model`, from numbers
that were measured apart from it:

- v: bare forwards over 1..9 nodes behind the prompt;
- c, catch_up, o, and what a plain round takes beside its forward: rounds of another prompt, with
  gamma 0, 1, 3 and 8;
- alpha of each position, and the share of rounds with drafts: drafts behind every place of the
  text, in a run that accepts none of them. Where a round begins depends on gamma: after a failure
  more often the larger gamma is, so the alphas of one gamma are not those of another; but what is
  right behind a place gives the rounds of every gamma.

All gammas decode the same text at the same time: the one that has the least of it takes the next
round, and bare forwards come in between. So a machine that drifts drifts for all, and the run may
stop at any time (`--budget`). "auto" has learned its costs on the other prompt. `--clock cpu` takes
CPU seconds instead, for one thread on a machine that others use.

Greedy, batch 1, prompts of one kind (`--kind`). The draft model is the target without three of its
layers: too slow to gain time, but its rounds have a c. An MTP proposer of depth gamma drafts with
the weights in the package; they were trained for three depths.

    python -m benchmarks.bench_decoder --threads 2

Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch

from benchmarks import harness
from benchmarks.bench_trees import skip_layers
from spec_kernels.adaptive import Judged
from spec_kernels.cost_model import StepCosts, conditional_acceptance, practical_speedup
from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations.prompts import PROMPTS
from spec_kernels.integrations.smollm2_mtp import load_smollm2_mtp
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import DraftModelProposer, MTPProposer, NgramProposer
from spec_kernels.proposers.base import DecodingState, fit_draft, root_draft
from spec_kernels.stats import Seconds
from spec_kernels.types import Draft

MAX_GAMMA = 8
GAMMAS = (*range(MAX_GAMMA + 1), "auto")
APART = (0, 1, 3, MAX_GAMMA)
"""Gammas of the rounds that c, catch_up and o come from."""
PARTS = ("draft", "verify", "accept", "state")
METRIC = "tokens per second of the rounds, prefill left out; speed-up over plain decoding"
Propose = Callable[[int], Any]
"""Makes the proposer for a largest gamma."""


class Work(Protocol):
    """Something that is done bit by bit, in turns with the others."""

    @property
    def done(self) -> float:
        """How much of it is done; from 1 on, all."""

    def step(self) -> None:
        """Do one bit."""


class Lane:
    """A prompt being decoded with one gamma.

    Attributes:
        tokens: that it has emitted.
        rounds: drafts asked for, drafts that were there, what was judged, and the times.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int], tokens: int) -> None:
        self._wanted = tokens
        self.tokens: list[int] = []
        self.rounds: list[tuple[int, int, Judged, Seconds]] = []
        self._run = decoder.start([Request(prompt, max_new_tokens=tokens)])
        self._run.pace = _Recorder(self._run.pace, self.rounds)

    @property
    def done(self) -> float:
        """The share of the tokens that it has."""
        return 1.0 if self._run.is_done else len(self.tokens) / self._wanted

    def step(self) -> None:
        """Run one round."""
        self.tokens += [token for chunk in self._run.step() for token in chunk.tokens]

    def seconds(self, part: str = "decode") -> float:
        """Return the time of its rounds, or of a part of it."""
        return sum(getattr(seconds, part) for *_, seconds in self.rounds)


class Measured(NamedTuple):
    """What came of one proposer.

    Attributes:
        lanes: the text with every gamma.
        drafts: behind each place of it.
        costs: of the rounds, measured apart.
    """

    lanes: dict[Any, Lane]
    drafts: list[list[int]]
    costs: StepCosts


class _Recorder:
    """A pace that writes down what its rounds came to."""

    def __init__(self, pace: Any, rounds: list[tuple[int, int, Judged, Seconds]]) -> None:
        self._pace, self._rounds, self._asked = pace, rounds, 0

    def begin(self, room: int) -> int:
        self._asked = self._pace.begin(room)
        return self._asked

    def end(self, draft: Any, judged: Any, lap: Any) -> None:
        (one,) = judged
        self._rounds.append((self._asked, draft.tokens.shape[1] - 1, one, lap.seconds()))
        self._pace.end(draft, [one], lap)


class Forwards:
    """Bare forwards over 1..9 nodes behind a prompt.

    Attributes:
        times: seconds by number of nodes.
    """

    def __init__(self, target: Any, prompt: Sequence[int], sweeps: int) -> None:
        self._target, self._last, self._sweeps = target, prompt[-1], sweeps
        self._cache = target.open(1, len(prompt) + MAX_GAMMA + 1)
        target.prefill(self._cache, 0, prompt[:-1])
        self._lens = self._cache.context_lens.clone()
        self.times: dict[int, list[float]] = {nodes: [] for nodes in range(1, MAX_GAMMA + 2)}

    @property
    def done(self) -> float:
        """The share of the sweeps over all widths."""
        return sum(map(len, self.times.values())) / (self._sweeps * len(self.times))

    @torch.no_grad()
    def step(self) -> None:
        """Measure the next width once: like those of rounds, the forward comes after other work."""
        nodes, times = min(self.times.items(), key=lambda item: len(item[1]))
        tokens = torch.tensor([[self._last] * nodes])
        count = torch.tensor([nodes], dtype=torch.int32)
        begin = time.perf_counter()
        self._target.forward(tokens, count, self._cache)
        times.append(time.perf_counter() - begin)
        self._cache.truncate(self._lens)


def take_turns(works: Sequence[Work], end: float = math.inf) -> None:
    """Do all works, always a bit of the one that is least done, until `end` by the clock."""
    while time.monotonic() < end:
        work = min(works, key=lambda work: work.done)
        if work.done >= 1.0:
            return
        work.step()


class Noted:
    """A proposer, and its sessions, whose drafts are noted and then left out: each round is plain.

    Attributes:
        drafts: of each round, what was drafted behind its root.
    """

    def __init__(self, proposer: Any) -> None:
        self._proposer, self.drafts = proposer, list[list[int]]()

    def open(self, state: DecodingState, capacity: int) -> Noted:
        """Open the session that drafts, and stand before it."""
        self._session = session = self._proposer.open(state, capacity)
        self.wants_hidden = session.wants_hidden
        self.prefill, self.commit = session.prefill, session.commit
        self.rollback = session.rollback
        return self

    def propose(self, state: DecodingState, limits: torch.Tensor, gamma: int) -> Draft:
        """Note the drafts of the one request."""
        draft = fit_draft(self._session.propose(state, limits, gamma), limits, gamma)
        self.drafts.append(draft.tokens[0, 1:].tolist())
        return root_draft(state, limits)


def walk(
    drafts: Sequence[Sequence[int]], text: Sequence[int], gamma: int
) -> list[tuple[bool, int]]:
    """Return the rounds of a gamma: whether there were drafts, and how many of them are right.

    Args:
        drafts: behind each place, as many as the largest gamma; there or right by the place alone.
        text: behind the first place; longer than `drafts`, or as long.
        gamma: at least 1.

    Example:
        >>> walk([[7, 8, 0], [8, 9, 7], [], [7, 8, 9]], [7, 8, 9, 7], 2)
        [(True, 2), (True, 1)]
        >>> walk([[7, 8, 0], [8, 9, 7], [], [7, 8, 9]], [7, 8, 9, 7], 1)
        [(True, 1), (False, 0), (True, 1)]
    """
    rounds, place = [], 0
    while place < len(drafts):
        pairs = zip(drafts[place][:gamma], text[place:], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        rounds.append((bool(drafts[place]), right))
        place += right + 1
    return rounds


def count(rounds: Sequence[tuple[bool, int]], gamma: int) -> tuple[list[float], float]:
    """Return the acceptance of each position, and the share of rounds with drafts.

    Example:
        >>> count([(True, 2), (True, 1), (False, 0)], 2)
        ([1.0, 0.5], 0.6666666666666666)
    """
    kept = [right for has_drafts, right in rounds if has_drafts]
    survived = [sum(right >= i for right in kept) / max(len(kept), 1) for i in range(1, gamma + 1)]
    return conditional_acceptance(survived), len(kept) / len(rounds)


def costs_of(forwards: Forwards, apart: Sequence[Lane]) -> StepCosts:
    """Return the costs: v of the bare forwards, the others of the rounds apart, plain ones first.

    c is the time of drafts over the drafts asked for, in rounds that do not follow one that
    accepted every draft, if there are any; catch_up is what drafting takes more than that in those
    that do. Means, since what is predicted is a sum over rounds; the first round of a lane warms
    up.
    """
    plain, *others = (lane.rounds[1:] or lane.rounds for lane in apart)
    unit = statistics.fmean(seconds.decode for *_, seconds in plain)
    beside = statistics.fmean(seconds.decode - seconds.verify for *_, seconds in plain)
    v = {nodes: statistics.fmean(each) + beside for nodes, each in forwards.times.items()}
    behind: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
    for (_, _, before, _), (asked, _, _, seconds) in (p for r in others for p in pairwise(r)):
        behind[before.is_full].append((asked, seconds.draft))
    asked, drafting = map(sum, zip(*(behind[False] or behind[True]), strict=True))
    c = drafting / max(asked, 1)
    more = [seconds - asked * c for asked, seconds in behind[True]]
    rest = [s.accept + s.state for rounds in others for _, depth, _, s in rounds if depth]
    return StepCosts(
        {nodes: time_ / v[1] for nodes, time_ in v.items()},
        c=c / unit,
        o=max(statistics.fmean(rest or [beside]) - beside, 0.0) / unit,
        catch_up=max(statistics.fmean(more or [0.0]), 0.0) / unit,
    )


def measure(
    target: Any, propose: Propose, prompts: Sequence[Sequence[int]], options: Any, end: float
) -> Measured:
    """Decode the second prompt with every gamma, and measure apart from that what it costs."""
    proposers = {gamma: propose(gamma) for gamma in range(1, MAX_GAMMA + 1)}
    proposers |= {0: None, "auto": proposers[MAX_GAMMA]}
    decoders = {
        gamma: Decoder(target, proposers[gamma], gamma=gamma, max_gamma=MAX_GAMMA)
        for gamma in GAMMAS
    }
    other, prompt = prompts
    apart = [Lane(decoders[gamma], other, options.apart) for gamma in APART]
    first = Lane(decoders["auto"], other, options.apart)
    forwards, noted = Forwards(target, prompt, options.forwards), Noted(propose(MAX_GAMMA))
    take_turns([*apart, first])
    tokens = options.max_new_tokens
    lanes = {gamma: Lane(decoders[gamma], prompt, tokens) for gamma in GAMMAS}
    noting = Lane(Decoder(target, noted, gamma=MAX_GAMMA), prompt, tokens)
    for work in (*lanes.values(), noting, *[forwards] * len(forwards.times)):
        work.step()  # each once, however late
    take_turns([*lanes.values(), noting, forwards], end)
    return Measured(lanes, noted.drafts, costs_of(forwards, apart))


def judge(name: str, measured: Measured) -> list[dict[str, Any]]:
    """Return a row per gamma: what was measured and, except for "auto", predicted."""
    lanes, drafts, costs = measured
    text = max((lane.tokens for lane in lanes.values()), key=len)
    drafts = drafts[: len(text)]
    speeds = {gamma: len(lane.tokens) / lane.seconds() for gamma, lane in lanes.items()}
    rows = []
    for gamma, lane in lanes.items():
        predicted: float | None = 1.0
        if gamma == "auto":
            predicted = None
        elif gamma:
            alpha, drafted = count(walk(drafts, text, gamma), gamma)
            predicted = practical_speedup(alpha, gamma, costs, drafted=drafted)
        row = {
            "proposer": name,
            "gamma": gamma,
            "tokens_per_second": speeds[gamma],
            "tokens_per_round": len(lane.tokens) / len(lane.rounds),
            "measured": speeds[gamma] / speeds[0],
            "predicted": predicted,
            **{part: lane.seconds(part) / lane.seconds() for part in PARTS},
        }
        rows.append(row)
        print(describe(row), flush=True)
    return rows


def describe(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    split = "  ".join(f"{part} {row[part]:4.0%}" for part in PARTS)
    guess = "" if row["predicted"] is None else f"{row['predicted']:9.2f}"
    return (
        f"{row['proposer']:12}{row['gamma']!s:>6}{row['tokens_per_second']:9.1f}"
        f"{row['tokens_per_round']:7.2f}{row['measured']:10.2f}{guess:>9}   {split}"
    )


def make_proposers(model: Any, skipped: Sequence[int]) -> dict[str, Propose]:
    """Return the proposers by name."""
    drafter = TransformersTarget(skip_layers(model, skipped))
    mtp = load_smollm2_mtp(model, "sequential")
    return {
        "ngram": lambda gamma: NgramProposer(4, 2),
        "draft-model": lambda gamma: DraftModelProposer(drafter),
        "mtp": lambda gamma: MTPProposer(mtp, depth=gamma),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--forwards", type=int, default=12, help="of each width")
    parser.add_argument("--apart", type=int, default=24, help="tokens of the other prompt")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--clock", choices=harness.CLOCKS, default="wall", help="cpu: 1 thread")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all of it")
    parser.add_argument("--skipped", type=int, nargs="+", default=[14, 18, 22])
    parser.add_argument("--proposers", nargs="+", default=["ngram", "draft-model", "mtp"])
    parser.add_argument("--kind", choices=("copy", "code", "free"), default="copy", help="of text")
    parser.add_argument("--write", action="store_true", help="keep the record in results/")
    parser.add_argument("--append", action="store_true", help="to the rows of the record there")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    model, tokenizer = harness.load_demo_model("float32")
    target = TransformersTarget(model)
    texts = [prompt for prompt in PROMPTS if prompt.kind == options.kind]
    prompts = [texts[place].encode(tokenizer) for place in (1, 0)]
    propose = make_proposers(model, options.skipped)
    head = harness.header(
        model="smollm2",
        dtype="float32",
        batch=1,
        context=len(prompts[1]),
        prompt=texts[0].name,
        gamma=f"0..{MAX_GAMMA} and auto",
        sampling="greedy",
        clock=options.clock,
        draft_model=f"the model without layers {options.skipped}",
        metric=METRIC,
        command="python -m benchmarks.bench_decoder " + " ".join(given),
    )
    print(f"{'proposer':12}{'gamma':>6}{'tok/s':>9}{'/round':>7}{'measured':>10}{'predicted':>9}")
    record: dict[str, Any] = {"benchmark": "decoder", **head, "inputs": {}, "rows": []}
    file = harness.RESULTS / "decoder-cpu.json"
    if options.append:
        earlier = json.loads(file.read_text())
        record = {**earlier, "command": f"{earlier['command']}`, `{head['command']}"}
    clock = harness.CLOCKS[options.clock]
    for place, name in enumerate(options.proposers, start=1):
        end = began + options.budget * place / len(options.proposers)
        with mock.patch.object(time, "perf_counter", clock):
            measured = measure(target, propose[name], prompts, options, end)
        record["rows"] += judge(name, measured)
        tokens = len(measured.lanes[0].tokens)
        record["inputs"][name] = {**asdict(measured.costs), "tokens": tokens}
    if options.write:
        harness.write(record, "cpu")
    print(json.dumps(record))
    return record


if __name__ == "__main__":
    main()
