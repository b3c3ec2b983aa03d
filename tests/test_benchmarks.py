"""The benchmarks' harness, and the native floors against the reference before anyone times them."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    bench_accept,
    bench_attention,
    bench_mla,
    bench_scaling,
    compare,
    gpu,
    harness,
    native,
    report,
    suite,
)
from benchmarks.bench_accept import check, make_problem, ours, softmax_multinomial
from benchmarks.workloads import WORKLOADS
from spec_kernels import ops, reference
from spec_kernels.types import SamplingParams

ROOT = Path(__file__).resolve().parents[1]


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
@pytest.mark.parametrize("vocab", [5, 8192, 20_000])
def test_native_laws_and_draws_equal_the_reference(floors: native.Floors, vocab: int) -> None:
    logits, coins = 3 * torch.randn(40, vocab), torch.rand(40, dtype=torch.float64)
    law = reference.row_law(logits, SamplingParams.make(0.7), torch.zeros(40, dtype=torch.int32))
    row_max, log_sum = floors.row_laws(logits, 0.7)
    assert torch.equal(row_max, law.row_max.float())
    assert torch.allclose(log_sum, law.log_sum.float(), atol=1e-5)
    drawn = floors.sample(logits, row_max, log_sum, coins, 0.7)
    expected = reference.sample(logits, law, coins=coins)[:, 0]
    assert int((drawn != expected).sum()) <= 1  # a coin beside a boundary


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
    ticks = iter(range(1000))

    def clock() -> float:
        return float(next(ticks) ** 2)

    variants = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = harness.measure(variants, repeats=31, clock=clock)
    turns = [tuple(calls[k : k + 3]) for k in range(0, len(calls), 3)]
    assert len(turns) == 32
    assert set(turns) == set(permutations("abc"))  # none always follows a certain other
    for name in "abc":
        # the call k starts at tick 2k: it lasts (2k + 1)^2 - (2k)^2 = 4k + 1
        lasted = [4 * k + 1 for k, called in enumerate(calls) if called == name]
        assert times[name].p50 == statistics.median(lasted[1:])
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


def _case(**changes: Any) -> harness.Case:
    settings = dict.fromkeys(harness.REQUIRED) | {"batch": 3}
    fields = {"settings": settings, "variants": {"ours": lambda: None, "peer": "no peer here"}}
    return harness.Case(**{**fields, "moved": 7, **changes})


def test_a_row_names_what_it_depends_on() -> None:
    row = harness.time_cases([_case()], "cpu", repeats=2)[0]
    assert (row["batch"], row["bytes"], row["absent"]) == (3, 7, {"peer": "no peer here"})
    assert set(row["times"]) == {"ours"}
    settings = dict.fromkeys(set(harness.REQUIRED) - {"sampling"})
    with pytest.raises(ValueError, match=r"must name \['sampling'\]"):
        harness.time_cases([_case(settings=settings)], "cpu", repeats=2)


def test_times_are_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked: list[str] = []

    def measure(
        calls: object, *, repeats: int, device: str, clock: object
    ) -> dict[tuple[int, str], harness.Times]:
        clocked.append(device)
        return {(0, "ours"): harness.Times(2.0, 4.0, 6.0)}

    monkeypatch.setattr(harness, "measure", measure)
    harness.time_cases([_case(on_host=True)], "cuda", repeats=1)
    row = harness.time_cases([_case(calls=4)], "cuda", repeats=1)[0]
    assert clocked == ["cpu", "cuda"]
    assert row["times"]["ours"] == {"p20": 0.5, "p50": 1.0, "p80": 1.5}


def test_the_points_of_a_sweep_take_turns() -> None:
    order: list[int] = []
    sweep = [_case(variants={"ours": lambda size=size: order.append(size)}) for size in (1, 2)]
    record = harness.run("none", "seconds", lambda _: [sweep], harness.Options(), repeats=2)
    assert [sorted(order[k : k + 2]) for k in (0, 2, 4)] == [[1, 2]] * 3
    assert [set(row["times"]) for row in record["rows"]] == [{"ours"}] * 2
    assert list(harness.each([sweep, sweep[0]])) == [*sweep, sweep[0]]


def test_growth_is_told_from_a_line() -> None:
    found = report._straight([(x, 5.0 + 2.0 * x) for x in (1.0, 10.0, 1000.0)])
    assert found == pytest.approx((5.0, 2.0, 0.0))
    assert report._straight([(1.0, 1.0), (2.0, 4.0), (3.0, 9.0)])[2] > 0.1


def test_a_suite_ends_in_time_and_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Endless:
        METRIC = "seconds"

        @staticmethod
        def cases(options: harness.Options) -> Iterator[harness.Case]:
            while True:
                yield _case()

    class Wrong(Endless):
        @staticmethod
        def cases(options: harness.Options) -> Iterator[harness.Case]:
            raise AssertionError("peer: other tokens")

    modules = {"endless": Endless, "wrong": Wrong}
    monkeypatch.setattr(suite, "load", modules.__getitem__)
    records, failed = suite.run_all(["wrong", "endless"], harness.Options(), 0.05)
    assert failed == {"wrong": "AssertionError: peer: other tokens"}
    (record,) = records
    assert "were over" in record["left_out"]
    assert report.missing_keys({**record, "benchmark": "law"}) == []
    assert suite.run_all(["endless"], harness.Options(), -1.0)[1] == {"endless": "no time was left"}


@pytest.mark.parametrize("name", [n for n in (*suite.OPERATIONS, *suite.OTHERS) if n != "cache"])
def test_every_benchmark_checks_its_variants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda device: "not built for this test")
    monkeypatch.setattr(bench_accept, "assisted", lambda problem: "its import takes seconds")
    for w in WORKLOADS.values():
        small = w._replace(batch=16, gamma=2, vocab=512, context=20, heads=2)
        monkeypatch.setitem(WORKLOADS, w.name, small)
    monkeypatch.setattr(bench_mla, "CONTEXTS", (16,))
    monkeypatch.setattr(bench_attention, "CONTEXTS", (20, 33))
    monkeypatch.setattr(bench_scaling, "SIZES", {"batch": 1, "gamma": 2, "vocab": 64})
    monkeypatch.setattr(bench_scaling, "ACCEPT", {"vocab": (32,), "batch": (2,), "gamma": (1,)})
    monkeypatch.setattr(bench_scaling, "ATTEND", {"nodes": (3,), "context": (16,)})
    cases = list(harness.each(suite.load(name).cases(harness.Options())))
    assert len(cases) >= 1
    for case in cases:
        assert set(harness.REQUIRED) <= set(case.settings)
        assert next(iter(case.variants)).startswith(("ours", "accept", "row_law", "verify"))


def test_a_benchmark_refuses_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda device: "not built for this test")
    monkeypatch.setitem(WORKLOADS, "chat-8b", WORKLOADS["chat-8b"]._replace(vocab=512))
    honest = ops.sample
    monkeypatch.setattr(ops, "sample", lambda *args, **kwargs: honest(*args, **kwargs) + 1)
    with pytest.raises(AssertionError, match="other tokens"):
        list(suite.load("sample").cases(harness.Options()))


def test_peak_memory_is_that_of_the_call() -> None:
    size, slack = 40 << 20, 1 << 20  # the kernel counts pages of a process in batches

    def prepare(count: int) -> Any:
        return lambda: lambda: [torch.ones(size, dtype=torch.uint8) for _ in range(count)]

    one, three = bench_attention.peak_bytes(prepare(1)), bench_attention.peak_bytes(prepare(3))
    assert size - slack <= one < 1.2 * size
    assert 3 * size - slack <= three < 3.2 * size


def test_two_checkouts_take_turns() -> None:
    asked: list[str] = []

    class Fake:
        def __init__(self, name: str, seconds: float) -> None:
            self._name, self._seconds, self._rows = name, seconds, iter([{"benchmark": "law"}])

        def ask(self, line: str) -> Any:
            asked.append(f"{self._name} {line}")
            return next(self._rows, None) if line == "next" else {"ours": self._seconds}

    (row,) = compare.compare(Fake("base", 3.0), Fake("here", 2.0), 2)  # type: ignore[arg-type]
    assert row["variants"]["ours"] == {"base": 3.0, "here": 2.0, "ratio": 1.5}
    assert asked[2:6] == ["base turn", "here turn"] * 2


@pytest.mark.slow
def test_a_checkout_compares_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    compare.main(["HEAD", "dispatch", "--repeats", "1"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["operation"] for row in record["rows"]} >= {"accept", "sample"}
    assert all(row["variants"]["ours"]["ratio"] > 0 for row in record["rows"])


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert capsys.readouterr().out == "make gpu: nothing can run here: torch finds no GPU\n"


def test_tests_of_a_gpu_are_found() -> None:
    found = {p.name for p in (ROOT / "tests").glob("test_*.py") if gpu._may_be_marked(p)}
    assert {"test_accept.py", "test_law.py", "test_attention.py", "test_public_edges.py"} <= found


def test_the_page_is_what_the_records_give() -> None:
    assert report.stale(report.make(report.load())) == []


def test_records_name_their_settings(tmp_path: Path) -> None:
    for record in report.load():
        assert report.missing_keys(record) == []
    record = json.loads((harness.RESULTS / "trees.json").read_text())
    del record["gamma"]
    (tmp_path / "trees.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"trees\.json does not name gamma"):
        report.load(tmp_path)


def test_a_changed_number_makes_the_page_stale(tmp_path: Path) -> None:
    files = {Path("a.md"): "1", Path("docs/plots/scaling-vocab.svg"): "2"}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert report.stale(files, tmp_path) == []
    assert report.stale({Path("a.md"): "3"}, tmp_path) == sorted(files)


def test_plots_hold_every_point() -> None:
    lines = {"ours": [(1.0, 10.0), (8.0, 80.0)], "peer": [(1.0, 20.0), (8.0, 900.0)]}
    picture = report._svg.plot("Cost", "batch", "us", lines)
    assert len(re.findall(r'r="3"', picture)) == 4
    assert picture == report._svg.plot("Cost", "batch", "us", lines)
    # one tick per power: 1, 2, 4, 8 across and 10, 100, 1000 upwards
    assert picture.count('class="grid"') == 7
