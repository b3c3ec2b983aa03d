"""`plan`: what to expect of every gamma, from numbers or from a measured run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spec_kernels.cli._common import OUT, friendly_errors
from spec_kernels.comparison import Comparison, TimedRun
from spec_kernels.cost_model import (
    Machine,
    Model,
    StepCosts,
    best_tree_size,
    crossover_batch,
    expected_tokens,
    ideal_speedup,
    roofline_costs,
    speedups,
)
from spec_kernels.stats import AcceptanceMatrix
from spec_kernels.tree import optimal_tree, paths_from_parents

MAX_BATCH = 4096


@dataclass
class Profile:
    """What a plan starts from.

    Attributes:
        alpha: acceptance of each position, given that those before were accepted.
        drafted: share of the rounds that had drafts, of those that asked for some.
        costs: v, c, o and catch_up; None if no plain step was measured.
        matrix: acceptance by depth and rank, for trees.
    """

    alpha: list[float]
    drafted: float = 1.0
    costs: StepCosts | None = None
    matrix: AcceptanceMatrix = field(default_factory=AcceptanceMatrix)

    @staticmethod
    def of(timed: TimedRun, result: Comparison | None) -> Profile:
        """Read it from a finished run, and from the plain one beside it if there is one."""
        stats, meter = timed.result.stats, timed.run.pace.meter
        if result is not None:
            meter.borrow(result.plain.run.pace.meter)
        rows = zip(stats.matrix.accepted, stats.matrix.tried, strict=True)
        alpha = [sum(kept) / tried[0] for kept, tried in rows if tried and tried[0]]
        asked = sum(rounds for gamma, rounds in timed.run.pace.rounds.items() if gamma > 0)
        answered = sum(stats.matrix.tried[0][:1]) if stats.matrix.tried else 0
        drafted = min(answered / asked, 1.0) if asked else 1.0
        return Profile(alpha, drafted, meter.costs(), stats.matrix)

    @staticmethod
    def load(path: Path) -> Profile:
        """Read what `generate --json` printed, the last line of it.

        Raises:
            ValueError: there is no profile in it, or no costs.
        """
        lines = path.read_text().strip().splitlines()
        try:
            values = json.loads(lines[-1] if lines else "")["profile"]
            costs = values["costs"]
            if costs is None:
                raise ValueError(
                    f"{path} has no cost of a plain step: run generate with --gamma auto or "
                    "--compare"
                )
            v = {int(width): float(cost) for width, cost in costs["v"].items()}
            alpha = [float(one) for one in values["alpha"]]
            catch_up = float(costs.get("catch_up", 0.0))  # records of old have none
            found = StepCosts(v, c=float(costs["c"]), o=float(costs["o"]), catch_up=catch_up)
            matrix = AcceptanceMatrix(**values["matrix"])
            return Profile(alpha, float(values["drafted"]), found, matrix)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} must end with a line of generate --json") from error


@dataclass
class Plan:
    """Every gamma, as the model sees it.

    Attributes:
        profile: what it starts from; its costs are known.
        max_gamma: largest gamma.
        crossover: smallest batch at which no drafts pay; None without a roofline, or beyond 4096.
        tree_nodes: most nodes of a tree.
    """

    profile: Profile
    max_gamma: int
    crossover: int | None = None
    tree_nodes: int = 16

    def rows(self) -> list[dict[str, float]]:
        """Return expected tokens and the speed-ups of each gamma."""
        profile, costs = self.profile, self.profile.costs
        assert costs is not None
        gains = speedups(profile.alpha, costs, max_gamma=self.max_gamma, drafted=profile.drafted)
        share = profile.drafted
        return [
            {
                "gamma": gamma,
                "tokens": 1.0 + share * (expected_tokens(profile.alpha, gamma) - 1.0),
                "v": costs.verify(gamma + 1),
                "ideal": ideal_speedup(profile.alpha, gamma, costs.c),
                "practical": gain,
            }
            for gamma, gain in enumerate(gains)
        ]

    def tree(self) -> dict[str, Any] | None:
        """Return the best tree for the acceptance matrix, None without one."""
        costs, rates = self.profile.costs, self.profile.matrix.rates()
        if not rates or not rates[0]:
            return None
        assert costs is not None
        trees = [optimal_tree(rates, nodes) for nodes in range(1, self.tree_nodes + 1)]
        deep = [max(map(len, paths_from_parents(tree.parents))) - 1 for tree in trees]
        nodes, gain = best_tree_size(
            [tree.expected_tokens for tree in trees],
            costs,
            draft_steps=lambda count: deep[count - 1],
        )
        best = trees[nodes - 1]
        return {"parents": best.parents, "tokens": best.expected_tokens, "practical": gain}

    def record(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        rows = self.rows()
        best = max(rows, key=lambda row: row["practical"])
        return {
            "best_gamma": best["gamma"],
            "best_speedup": best["practical"],
            "rows": rows,
            "best_tree": self.tree(),
            "crossover_batch": self.crossover,
            "profile": asdict(self.profile),
        }


def draw(plan: Plan, path: Path) -> None:
    """Draw speed-up against gamma; the ending of the path names the format.

    Raises:
        ValueError: matplotlib is missing, or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "--plot needs matplotlib; run: python -m pip install 'spec-kernels[plot]'"
        ) from error
    rows = plan.rows()
    gammas = [row["gamma"] for row in rows]
    best = max(rows, key=lambda row: row["practical"])
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(gammas, [row["ideal"] for row in rows], "--", label="ideal: verification is free")
    axes.plot(gammas, [row["practical"] for row in rows], "o-", label="practical")
    axes.plot(best["gamma"], best["practical"], "s", color="black", label="best")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="gamma", ylabel="speed-up over plain decoding")
    axes.legend()
    figure.savefig(path)


def parse_numbers(text: str, name: str) -> list[float]:
    """Read "0.9,0.8".

    Example:
        >>> parse_numbers("0.9, 0.8", "--alpha")
        [0.9, 0.8]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{name} must be numbers with commas between, got {text!r}") from error


def parse_widths(text: str) -> dict[int, float]:
    """Read costs by width, "1:1,5:1.3", or of the widths 1, 2, 3 in turn, "1,1.1,1.2".

    Example:
        >>> parse_widths("1:1, 5:1.3"), parse_widths("1,1.5")
        ({1: 1.0, 5: 1.3}, {1: 1.0, 2: 1.5})
    """
    if ":" not in text:
        return dict(enumerate(parse_numbers(text, "--v"), start=1))
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(width): float(cost) for width, cost in pairs}
    except ValueError as error:
        raise ValueError(f"--v must look like 1:1,5:1.3 or 1,1.1,1.2, got {text!r}") from error


def _alphas(alpha: str | None, found: list[float], max_gamma: int) -> list[float]:
    """Extend the given acceptances, or else the measured ones, by the last of them."""
    each = found if alpha is None else parse_numbers(alpha, "--alpha")
    if not each:
        raise ValueError("no acceptance: pass --alpha, or a --profile of a run that drafted")
    return [*each, *[each[-1]] * max_gamma][:max_gamma]


def _machine(bandwidth: float | None, tflops: float | None) -> Machine:
    if bandwidth is None or tflops is None:
        raise ValueError("--parameters needs --bandwidth and --tflops")
    return Machine(bandwidth * 1e9, tflops * 1e12)


def _show(plan: Plan) -> None:
    record = plan.record()
    table = Table("gamma", "tokens", "v", "ideal", "practical", box=None, padding=(0, 2, 0, 0))
    for row in record["rows"]:
        mark = " best" if row["gamma"] == record["best_gamma"] else ""
        numbers = [f"{row[name]:.3f}" for name in ("tokens", "v", "ideal", "practical")]
        table.add_row(f"{row['gamma']}{mark}", *numbers)
    OUT.print(table)
    if record["best_tree"] is not None:
        tree = record["best_tree"]
        OUT.print(
            f"best tree of at most {plan.tree_nodes} nodes: {len(tree['parents'])} nodes, "
            f"{tree['tokens']:.3f} tokens where there are drafts, {tree['practical']:.3f}x"
        )
        OUT.print(f"  parents {tree['parents']}", soft_wrap=True)
    if plan.crossover is not None:
        OUT.print(f"no gamma pays from a batch of {plan.crossover}")


def plan(
    alpha: Annotated[
        str | None, typer.Option(help="Acceptance: one number, or one a position: 0.9,0.8.")
    ] = None,
    v: Annotated[
        str | None, typer.Option(help="Cost of a forward by nodes, in plain steps: 1:1,5:1.3.")
    ] = None,
    c: Annotated[float | None, typer.Option(help="Cost of a draft, in plain steps.")] = None,
    o: Annotated[float | None, typer.Option(help="What remains of a round, likewise.")] = None,
    drafted: Annotated[
        float | None, typer.Option(help="Share of the rounds that have drafts.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Last line of generate --json, in a file.")
    ] = None,
    gamma_max: Annotated[int, typer.Option(min=1, help="Largest gamma.")] = 8,
    tree_nodes: Annotated[int, typer.Option(min=1, help="Most nodes of a tree.")] = 16,
    bandwidth: Annotated[float | None, typer.Option(help="Roofline: GB/s of memory.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Roofline: 1e12 operations/s.")] = None,
    parameters: Annotated[
        float | None, typer.Option(help="Roofline: billions that every token uses.")
    ] = None,
    bytes_per_parameter: Annotated[float, typer.Option(help="2 for bfloat16.")] = 2.0,
    kv_bytes: Annotated[float, typer.Option(help="Cache bytes of one token.")] = 0.0,
    attention_flops: Annotated[float, typer.Option(help="4 * heads * head_dim * layers.")] = 0.0,
    experts: Annotated[int, typer.Option(min=0, help="Routed experts of a layer.")] = 0,
    experts_per_token: Annotated[int, typer.Option(min=0, help="Of them, used by a token.")] = 0,
    expert_parameters: Annotated[
        float, typer.Option(help="Billions in one routed expert, all layers.")
    ] = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Roofline: requests.")] = 1,
    context: Annotated[int, typer.Option(min=0, help="Roofline: cached tokens of each.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Say what to expect of every gamma: tokens per round, speed-up, the best one.

    From numbers (--alpha, --v, --c, --o), from a measured run (--profile), whose numbers the
    former replace, or with v from a roofline (--parameters, --bandwidth, --tflops).
    """
    with friendly_errors():
        base = Profile([]) if profile is None else Profile.load(profile)
        known = base.costs or StepCosts({1: 1.0})
        draft_cost, overhead = known.c if c is None else c, known.o if o is None else o
        base.alpha = _alphas(alpha, base.alpha, gamma_max)
        base.drafted = base.drafted if drafted is None else drafted
        crossover = None
        if parameters is not None:
            if v is not None:
                raise ValueError("--parameters and --v exclude each other")
            machine = _machine(bandwidth, tflops)
            model = Model(
                parameters * 1e9,
                bytes_per_parameter,
                kv_bytes,
                attention_flops,
                experts,
                experts_per_token,
                expert_parameters * 1e9,
            )

            def costs_at(batch: int) -> StepCosts:
                where = {"batch": batch, "context": context, "max_gamma": gamma_max}
                return roofline_costs(machine, model, **where, c=draft_cost, o=overhead)

            base.costs = costs_at(batch)
            crossover = crossover_batch(
                base.alpha, costs_at, max_gamma=gamma_max, max_batch=MAX_BATCH
            )
        elif v is None and profile is None:
            raise ValueError("no costs: pass --v, --profile, or --parameters with a machine")
        else:
            widths = known.v if v is None else parse_widths(v)
            base.costs = StepCosts(widths, c=draft_cost, o=overhead, catch_up=known.catch_up)
        made = Plan(base, gamma_max, crossover, tree_nodes)
        if plot is not None:
            draw(made, plot)
        if as_json:
            OUT.file.write(json.dumps(made.record()) + "\n")
        else:
            _show(made)
