"""Tokens per second of the decoder by gamma, where the time goes, and what the model predicts.

For every proposer and gamma 0..8 (and "auto"): text per second of the rounds, the split of their
time, and beside the measured speed-up over plain decoding the one of `cost_model`, from numbers
that were measured apart from it:

- v: bare forwards over 1..9 nodes behind the prompt;
- c at gamma 1, 2, 4 and 8, o, and what a plain round takes beside its forward: rounds of another
  prompt;
- alpha of each position, and the share of rounds with drafts: the rounds of the largest gamma,
  replayed for the others. Where a round begins depends on gamma: after a failure more often the
  larger gamma is, so the alphas that one gamma counted are not those of another.

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
from typing import Any, Protocol
from unittest import mock

import torch

from benchmarks import harness
from benchmarks.bench_trees import skip_layers
from spec_kernels.adaptive import Judged
from spec_kernels.cost_model import StepCosts, conditional_acceptance, speedups
from spec_kernels.decoder import Decoder, Request
from spec_kernels.integrations.prompts import PROMPTS
from spec_kernels.integrations.smollm2_mtp import load_smollm2_mtp
from spec_kernels.integrations.transformers import TransformersTarget
from spec_kernels.proposers import DraftModelProposer, MTPProposer, NgramProposer
from spec_kernels.stats import Seconds

MAX_GAMMA = 8
GAMMAS = (*range(MAX_GAMMA + 1), "auto")
APART = (0, 1, 2, 4, MAX_GAMMA)
"""Gammas of the rounds that c and o come from."""
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


def replay(kept: Sequence[tuple[bool, int]], most: int, gamma: int) -> list[tuple[bool, int]]:
    """Return the rounds that `gamma` would have had where `most` had others.

    A draft is right or wrong by its place in the text, wherever the round began; so a run of right
    ones is cut into rounds of gamma + 1 tokens, the last of which ends at the wrong one. The token
    behind a full round was no draft: it counts as a right one if the next round begins with one.

    Args:
        kept: of each round of the larger gamma, whether there were drafts and how many were kept.
        most: that gamma.
        gamma: at least 1, at most `most`.

    Example:
        >>> replay([(True, 4), (True, 1), (False, 0)], 4, 2)
        [(True, 2), (True, 2), (True, 0), (False, 0)]
    """
    found, run = [], 0
    for place, (has_drafts, right) in enumerate(kept):
        run += right
        follows = kept[place + 1][1] if place + 1 < len(kept) else 0
        if right == most and follows:
            run += 1
            continue
        found += [(True, gamma)] * (run // (gamma + 1))
        found.append((has_drafts, run % (gamma + 1)))
        run = 0
    return found


def count(rounds: Sequence[tuple[bool, int]], gamma: int) -> tuple[list[float], float]:
    """Return the acceptance of each position, and the share of rounds with drafts.

    Example:
        >>> count([(True, 2), (True, 1), (False, 0)], 2)
        ([1.0, 0.5], 0.6666666666666666)
    """
    kept = [right for has_drafts, right in rounds if has_drafts]
    survived = [sum(right >= i for right in kept) / max(len(kept), 1) for i in range(1, gamma + 1)]
    return conditional_acceptance(survived), len(kept) / len(rounds)


def costs_of(forwards: Forwards, apart: Sequence[Lane]) -> list[StepCosts]:
    """Return the costs of each gamma: v of the bare forwards, o of the rounds apart, plain ones
    first, and c of those with the same gamma or, where there are none, between its neighbours'.

    c depends on gamma, since before the first draft of a round a proposer takes in what the last
    one accepted. Means, since what is predicted is a sum over rounds; the first one of a lane
    warms up.
    """
    plain, *others = (lane.rounds[1:] or lane.rounds for lane in apart)
    unit = statistics.fmean(seconds.decode for *_, seconds in plain)
    beside = statistics.fmean(seconds.decode - seconds.verify for *_, seconds in plain)
    times = {nodes: statistics.fmean(each) + beside for nodes, each in forwards.times.items()}
    drafting, rest = {}, []
    for gamma, rounds in zip(APART[1:], others, strict=True):
        asked = sum(asked for asked, *_ in rounds)  # the last one may ask for fewer
        drafting[gamma] = gamma * sum(seconds.draft for *_, seconds in rounds) / max(asked, 1)
        rest += [seconds.accept + seconds.state for _, depth, _, seconds in rounds if depth]
    o = max(statistics.fmean(rest) - beside, 0.0) if rest else 0.0
    v, between = {n: t / times[1] for n, t in times.items()}, StepCosts(drafting)
    return [
        StepCosts(v, c=between.verify(gamma) / gamma / unit if gamma else 0.0, o=o / unit)
        for gamma in range(MAX_GAMMA + 1)
    ]


def measure(
    target: Any, propose: Propose, prompts: Sequence[Sequence[int]], options: Any, end: float
) -> tuple[dict[Any, Lane], list[StepCosts]]:
    """Return what every gamma took on the second prompt, and the costs measured apart from it."""
    proposers = {gamma: propose(gamma) for gamma in range(1, MAX_GAMMA + 1)}
    proposers |= {0: None, "auto": proposers[MAX_GAMMA]}
    decoders = {
        gamma: Decoder(target, proposers[gamma], gamma=gamma, max_gamma=MAX_GAMMA)
        for gamma in GAMMAS
    }
    other, prompt = prompts
    apart = [Lane(decoders[gamma], other, options.apart) for gamma in APART]
    first = Lane(decoders["auto"], other, options.apart)
    forwards = Forwards(target, prompt, options.forwards)
    take_turns([*apart, first])
    lanes = {gamma: Lane(decoders[gamma], prompt, options.max_new_tokens) for gamma in GAMMAS}
    for work in (*lanes.values(), *[forwards] * len(forwards.times)):  # each once, however late
        work.step()
    take_turns([*lanes.values(), forwards], end)
    return lanes, costs_of(forwards, apart)


def judge(name: str, lanes: dict[Any, Lane], costs: Sequence[StepCosts]) -> list[dict[str, Any]]:
    """Return a row per gamma: what was measured and, except for "auto", predicted."""
    kept = [(one.drafts, one.accepted) for _, _, one, _ in lanes[MAX_GAMMA].rounds]
    speeds = {gamma: len(lane.tokens) / lane.seconds() for gamma, lane in lanes.items()}
    rows = []
    for gamma, lane in lanes.items():
        predicted: float | None = 1.0
        if gamma == "auto":
            predicted = None
        elif gamma:
            alpha, drafted = count(replay(kept, MAX_GAMMA, gamma), gamma)
            predicted = speedups(alpha, costs[gamma], max_gamma=gamma, drafted=drafted)[gamma]
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
            lanes, costs = measure(target, propose[name], prompts, options, end)
        record["rows"] += judge(name, lanes, costs)
        record["inputs"][name] = {
            "v": costs[0].v,
            "c": {gamma: costs[gamma].c for gamma in APART[1:]},
            "o": costs[0].o,
            "tokens": len(lanes[0].tokens),
        }
    if options.write:
        harness.write(record, "cpu")
    print(json.dumps(record))
    return record


if __name__ == "__main__":
    main()
