"""The benchmarks' harness, and the native floors against the reference before anyone times them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import harness, native
from benchmarks.bench_accept import check, make_problem, ours, softmax_multinomial
from spec_kernels import reference


@pytest.fixture(scope="module")
def floors(tmp_path_factory: pytest.TempPathFactory) -> native.Floors:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("the native floors need CMake and a C++ compiler")
    return native.Floors(native.build(tmp_path_factory.mktemp("floors")))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("vocab", [5, 257, 8192, 20_000])
def test_native_acceptance_equals_the_reference(
    floors: native.Floors, rule: str, vocab: int
) -> None:
    for seed in range(4):
        problem = make_problem(9, 3, vocab, 0.4, seed)
        expected = ours(problem, rule, reference.accept)()
        found = floors.accept(
            rule,
            problem.target,
            problem.draft,
            problem.tokens,
            problem.accept_coins[:, 1:].contiguous(),
            problem.final_coins,
            0.7,
        )
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_native_copies_move_every_row(floors: native.Floors) -> None:
    source = torch.randn(50, 7)
    copied, gathered, index = torch.zeros_like(source), torch.zeros(3, 7), torch.tensor([4, 0, 49])
    floors.copy(copied, source)
    floors.gather(gathered, source, index)
    assert torch.equal(copied, source)
    assert torch.equal(gathered, source[index])
    assert floors.read(source) == pytest.approx(source.double().sum().item(), abs=1e-3)


def test_a_wrong_variant_is_not_timed() -> None:
    problem = make_problem(40, 3, 257, 0.4)
    peer = softmax_multinomial(problem)
    check(problem, {"token": ours(problem, "token"), "multinomial token": peer})
    with pytest.raises(AssertionError, match="token: "):
        check(problem, {"token": lambda: ours(problem, "token")().roll(1, 0)})


def test_variants_run_in_turns_and_the_first_turn_does_not_count() -> None:
    calls: list[str] = []
    ticks = iter(range(100))

    def clock() -> float:
        return float(next(ticks) ** 2)

    variants = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = harness.measure(variants, repeats=3, clock=clock)
    assert calls == ["a", "b"] * 4
    # a call k starts at tick 2k: it lasts (2k + 1)^2 - (2k)^2 = 4k + 1
    assert times["a"].p50 == 4 * 4 + 1
    assert times["b"].p50 == 4 * 5 + 1
    assert times["a"].ratio_to(times["b"]) == times["b"].p50 / times["a"].p50
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        harness.measure(variants, repeats=0)


def test_the_record_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    times = harness.measure({"nothing": lambda: None}, repeats=1)
    harness.print_record("nothing", harness.header(batch=3), [{"size": 1, **times}])
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["benchmark"] == "nothing"
    assert record["batch"] == 3
    assert set(record["rows"][0]["nothing"]) == {"p20", "p50", "p80"}
    assert {"device", "versions", "commit", "threads"} <= set(record)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install cmake"):
        native.build(tmp_path)
