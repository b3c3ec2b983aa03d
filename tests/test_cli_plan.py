"""`plan`: numbers against the model, both sources, the curve, and errors in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from spec_kernels import cli
from spec_kernels.cost_model import (
    Machine,
    Model,
    StepCosts,
    best_gamma,
    practical_speedup,
    roofline_costs,
)
from tests.test_cli import WORDS, generate, save_model

NUMBERS = ("--alpha", "0.9,0.8,0.7", "--v", "1:1,5:1.4", "--c", "0.05", "--o", "0.02")
MEASURED = {
    "alpha": [0.8, 0.5],
    "drafted": 0.6,
    "costs": {"v": {"1": 1.0, "3": 1.5}, "c": 0.1, "o": 0.05, "catch_up": 0.3},
    "matrix": {"tried": [[10, 10], [8]], "accepted": [[6, 2], [4]]},
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def record(*arguments: object) -> dict[str, Any]:
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text("some text\n" + json.dumps({"profile": MEASURED}) + "\n")
    return path


def test_numbers_give_the_models_speedups() -> None:
    found = record(*NUMBERS, "--gamma-max", 5)
    costs = StepCosts({1: 1.0, 5: 1.4}, c=0.05, o=0.02)
    alphas = [0.9, 0.8, 0.7, 0.7, 0.7]  # the last one goes on
    expected = [practical_speedup(alphas, gamma, costs) for gamma in range(6)]
    assert [row["practical"] for row in found["rows"]] == pytest.approx(expected)
    assert (found["best_gamma"], found["best_speedup"]) == best_gamma(alphas, costs, max_gamma=5)
    assert found["rows"][2]["tokens"] == pytest.approx(1 + 0.9 + 0.72)
    assert found["best_tree"] is None


def test_the_table_names_the_best_gamma() -> None:
    result = run(*NUMBERS)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if "best" in line]
    assert int(line.split()[0]) == record(*NUMBERS)["best_gamma"]


def test_widths_may_be_given_in_turn() -> None:
    one = record("--alpha", 0.5, "--v", "1,1.5,2", "--gamma-max", 2)
    assert [row["v"] for row in one["rows"]] == [1.0, 1.5, 2.0]


def test_a_measured_run_is_a_source(profile: Path) -> None:
    found = record("--profile", profile, "--gamma-max", 2)
    costs = StepCosts({1: 1.0, 3: 1.5}, c=0.1, o=0.05, catch_up=0.3)
    expected = [practical_speedup([0.8, 0.5], g, costs, drafted=0.6) for g in range(3)]
    assert [row["practical"] for row in found["rows"]] == pytest.approx(expected)
    assert found["best_tree"]["tokens"] == pytest.approx(1.6)
    other = record("--profile", profile, "--gamma-max", 2, "--c", 0.9)
    assert other["rows"][2]["practical"] < found["rows"][2]["practical"]


def test_a_roofline_gives_v_and_the_crossover() -> None:
    machine = ("--bandwidth", 3350, "--tflops", 990)
    mixture = ("--experts", 64, "--experts-per-token", 4, "--expert-parameters", 0.1)
    base = ("--alpha", 0.7, "--parameters", 8, *machine, "--gamma-max", 4, "--batch", 8)
    dense, sparse = record(*base), record(*base, *mixture)
    costs = roofline_costs(Machine(3.35e12, 9.9e14), Model(8e9), batch=8, context=0, max_gamma=4)
    assert dense["rows"][4]["practical"] == pytest.approx(practical_speedup(0.7, 4, costs))
    assert dense["crossover_batch"] > 8
    assert sparse["rows"][4]["v"] > dense["rows"][4]["v"]


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.svg"
    assert run(*NUMBERS, "--plot", path).exit_code == 0
    assert "<svg" in path.read_text()


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(*NUMBERS, "--plot", tmp_path / "curve.svg")
    assert result.exit_code == 2
    assert "pip install 'spec-kernels[plot]'" in result.stderr


def test_a_profile_without_a_plain_step_says_what_to_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"profile": {**MEASURED, "costs": None}}))
    result = run("--profile", path)
    assert result.exit_code == 2
    assert "--gamma auto or --compare" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no acceptance: pass --alpha"),
        (("--alpha", "0.8"), "no costs: pass --v"),
        (("--alpha", "high", "--v", "1"), "--alpha must be numbers"),
        (("--alpha", "1.5", "--v", "1"), "alpha must be in [0, 1]"),
        (("--alpha", "0.8", "--v", "1:1,x:2"), "--v must look like"),
        (("--alpha", "0.8", "--v", "1", "--c", "-1"), "c and o must be >= 0"),
        (("--alpha", "0.8", "--v", "1", "--drafted", "2"), "drafted must be in [0, 1]"),
        (("--alpha", "0.8", "--parameters", "8"), "--parameters needs --bandwidth"),
        (("--alpha", "0.8", "--parameters", "8", "--v", "1"), "exclude each other"),
        (("--profile", "/no/such/file"), "No such file"),
        (("--profile", __file__), "must end with a line of generate --json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message in line


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), 2, WORDS)


def test_generate_auto_writes_what_plan_reads(model_folder: Path, tmp_path: Path) -> None:
    prompt = "the cat sat on the cat sat on the cat"
    found = generate(model_folder, "--gamma", "auto", prompt)
    assert found["text"] == generate(model_folder, "--gamma", 0, prompt)["text"]
    assert found["settings"]["gamma"] == "auto"
    assert sum(found["rounds_by_gamma"].values()) >= 1
    path = tmp_path / "run.json"
    path.write_text(json.dumps(found))
    assert len(record("--profile", path, "--alpha", 0.5)["rows"]) == 9


def test_a_fixed_gamma_with_compare_is_a_profile(model_folder: Path, tmp_path: Path) -> None:
    found = generate(model_folder, "--gamma", 2, "--compare", "the cat sat on the cat sat on the")
    assert found["profile"]["costs"]["v"]["1"] == pytest.approx(1.0)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(found))
    assert record("--profile", path, "--alpha", 0.5)["rows"][0]["practical"] == pytest.approx(1.0)
