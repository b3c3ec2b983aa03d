"""`train-mtp` on a model of two layers: weights, resuming, refusals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner, Result

from spec_kernels import cli, training
from spec_kernels.cli import train as command
from spec_kernels.nn.mtp import load_mtp
from tests.test_cli import WORDS, save_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["<other>", *WORDS]
    return save_model(tmp_path_factory.mktemp("model"), 2, words, unknown="<other>", length=256)


def run(model: Path, out: Path, *arguments: object) -> Result:
    base = ("train-mtp", "--model", model, "--out", out, "--draft-vocab", 9, "--steps", 6)
    return CliRunner().invoke(cli.app, [str(argument) for argument in (*base, *arguments)])


def from_self(model: Path, out: Path, kind: str, *arguments: object) -> Result:
    sizes = ("--kind", kind, "--prompts", 6, "--new-tokens", 8, "--others", 2)
    return run(model, out, *sizes, *arguments)


def weights(out: Path, kind: str) -> dict[str, torch.Tensor]:
    return load_file(out / kind / "weights" / "model.safetensors")


def test_both_kinds_learn_from_the_text_that_the_model_wrote(
    model_folder: Path, tmp_path: Path
) -> None:
    for kind in ("parallel", "sequential"):
        result = from_self(model_folder, tmp_path, kind)
        assert result.exit_code == 0, result.output
        assert "held-out acceptance by depth" in result.stdout
        assert all(
            tensor.dtype == torch.bfloat16
            for name, tensor in weights(tmp_path, kind).items()
            if name != "draft_to_target"
        )
        record = json.loads((tmp_path / kind / "weights" / "record.json").read_text())
        assert record["steps"] == 6
        held_out = record["held_out"]
        assert len(held_out["top1"]) == 3
        totals = torch.tensor(held_out["by_sequence"]).sum(0).tolist()
        assert totals[0] == held_out["places"]
        shares = [survivors / totals[0] for survivors in totals[1:]]
        assert shares == pytest.approx(held_out["survival"], abs=1e-4)
        matrix = LlamaForCausalLM.from_pretrained(model_folder).lm_head.weight.detach()
        assert load_mtp(tmp_path / kind / "weights", matrix, matrix).draft_vocab == 9
    assert sorted(file.name for file in (tmp_path / "states").iterdir()) == [
        "held-out-000.safetensors",
        "settings.json",
        "training-000.safetensors",
    ]


def test_training_again_gives_the_same_weights_stopped_or_not(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = from_self(model_folder, tmp_path / "one", "sequential")
    assert result.exit_code == 0, result.output
    whole = command.train

    def interrupted(*arguments: object, **named: object) -> int:
        inner = named["report"]

        def report(step: int, losses: list[float]) -> None:
            inner(step, losses)  # type: ignore[operator]
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)

        return whole(*arguments, **(named | {"report": report}))  # type: ignore[arg-type]

    monkeypatch.setattr(command, "train", interrupted)
    result = from_self(model_folder, tmp_path / "two", "sequential")
    assert result.exit_code == 130, result.output
    assert "stopped after step 3 of 6" in result.stderr
    assert not (tmp_path / "two" / "sequential" / "weights").exists()
    monkeypatch.setattr(command, "train", whole)
    result = from_self(model_folder, tmp_path / "two", "sequential")
    assert result.exit_code == 0, result.output
    one, two = weights(tmp_path / "one", "sequential"), weights(tmp_path / "two", "sequential")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_text_files_are_read_in_pieces(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on a mat and then it ran home again " * 40)
    result = run(model_folder, tmp_path / "out", "--kind", "parallel", "--data", file)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out/parallel/weights/record.json").read_text())
    assert record["training_tokens"] == 2 * 192
    assert record["held_out"]["places"] == 480 - 2 * 192 - 4 + 1


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_bad_text_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    no_model = tmp_path / "no model"
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "short").write_text("a few words")
    for file, message in (
        ("missing", "no such file"),
        ("binary", "no UTF-8 text"),
        ("short", "fewer than 32 words"),
    ):
        result = run(no_model, tmp_path / "out", "--kind", "parallel", "--data", tmp_path / file)
        assert message in refused(result)
    both = ("--data", "self", "--data", tmp_path / "short")
    result = run(no_model, tmp_path / "out", "--kind", "parallel", *both)
    assert "not both" in refused(result)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_training_is_refused(model_folder: Path, tmp_path: Path) -> None:
    assert from_self(model_folder, tmp_path, "parallel").exit_code == 0
    assert "batch 4, not 2" in refused(from_self(model_folder, tmp_path, "parallel", "--batch", 2))
    message = refused(from_self(model_folder, tmp_path, "sequential", "--seed", 5))
    assert "seed 0, not 5" in message


def test_training_goes_on_with_given_modules(model_folder: Path, tmp_path: Path) -> None:
    assert from_self(model_folder, tmp_path / "one", "sequential").exit_code == 0
    start = tmp_path / "one/sequential/weights"
    # a rate of almost 0: what was given stays as it is, up to the dtype that it is stored in
    more = ("--start", start, "--skip-prompts", 6, "--learning-rate", 1e-9)
    result = from_self(model_folder, tmp_path / "two", "sequential", *more)
    assert result.exit_code == 0, result.output
    (start / "model.safetensors").touch()  # the same bytes: the same training
    again = from_self(model_folder, tmp_path / "two", "sequential", *more)
    assert again.exit_code == 0, again.output
    one, two = weights(tmp_path / "one", "sequential"), weights(tmp_path / "two", "sequential")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    record = json.loads((tmp_path / "two/sequential/weights/record.json").read_text())
    assert record["start"] == start.as_posix()
    assert record["skip_prompts"] == 6
    every = ("--draft-vocab", 0, "--prompts", 6)  # all ids, as many as there are
    assert from_self(model_folder, tmp_path / "all", "parallel", *every).exit_code == 0
    most = ("--start", tmp_path / "all/parallel/weights", "--draft-vocab", 8192)
    rest = ("--skip-prompts", len(training.recipe.training_prompts(0)) - 3)
    result = from_self(model_folder, tmp_path / "most", "parallel", *most, *rest)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "most/parallel/weights/record.json").read_text())
    assert record["prompts"] == 3


def test_answers_are_those_of_a_text_that_leaves_no_questions_out(
    model_folder: Path, tmp_path: Path
) -> None:
    assert from_self(model_folder, tmp_path / "whole", "parallel").exit_code == 0
    rest = ("--prompts", 4, "--skip-prompts", 2)
    assert from_self(model_folder, tmp_path / "rest", "parallel", *rest).exit_code == 0
    whole, part = (
        load_file(tmp_path / name / "states/training-000.safetensors")["tokens"]
        for name in ("whole", "rest")
    )
    assert len(part) == 4
    for one, two in zip(whole[2:], part, strict=True):
        assert one[one >= 0].tolist() == two[two >= 0].tolist()


def test_modules_to_go_on_with_must_be_those_asked_for(model_folder: Path, tmp_path: Path) -> None:
    assert from_self(model_folder, tmp_path, "parallel").exit_code == 0
    start, out, broken = tmp_path / "parallel/weights", tmp_path / "out", tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"none")
    for arguments, message in (
        (("--start", start, "--depth", 2), "depth 3, not 2"),
        (("--start", start, "--draft-vocab", 8), "draft_vocab 9, not 8"),
        (("--start", tmp_path), "has no model.safetensors"),
        (("--start", broken), "broken: cannot read MTP modules"),
        (("--skip-prompts", 10**6), "0 questions"),
    ):
        assert message in refused(from_self(model_folder, out, "parallel", *arguments))
    assert "kind parallel" in refused(from_self(model_folder, out, "sequential", "--start", start))
    assert not out.exists()


def test_held_out_questions_share_no_topic_with_training() -> None:
    held_out = " ".join(training.recipe.held_out_prompts())
    assert not [topic for topic in training.recipe.TRAINING_TOPICS if topic in held_out]
    assert not {*training.recipe.held_out_prompts()} & {*training.recipe.training_prompts(0)}
