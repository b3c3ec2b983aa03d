"""The MTP weights in the package: they load, they are small, and their records add up."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from benchmarks import mtp_acceptance
from spec_kernels.cost_model import conditional_acceptance, expected_tokens
from spec_kernels.integrations.smollm2_mtp import weights_folder
from spec_kernels.nn.mtp import load_mtp

ROOT = Path(__file__).resolve().parents[1]
KINDS = sorted(path.name for path in weights_folder("sequential").parent.iterdir() if path.is_dir())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_load_and_are_small(kind: str) -> None:
    folder = weights_folder(kind)  # type: ignore[arg-type]
    matrix = torch.empty(49_152, 576)
    module = load_mtp(folder, matrix, matrix)
    assert (module.config.kind, module.config.depth, module.draft_vocab) == (kind, 3, 8192)
    ids = module.draft_to_target
    assert ids is not None
    assert bool((ids.diff() > 0).all())
    assert all(bool(tensor.isfinite().all()) for tensor in module.parameters())
    assert (folder / "model.safetensors").stat().st_size <= 10e6


@pytest.mark.parametrize("kind", KINDS)
def test_records_add_up(kind: str) -> None:
    record = json.loads((weights_folder(kind) / "record.json").read_text())  # type: ignore[arg-type]
    held_out = record["held_out"]
    rows = held_out["by_sequence"]
    assert mtp_acceptance.survivors(rows) == pytest.approx(held_out["survival"], abs=1e-4)
    judged = mtp_acceptance.judge(held_out)
    assert judged["tokens"] == pytest.approx(1 + sum(held_out["survival"]), abs=1e-3)
    alphas = conditional_acceptance(mtp_acceptance.survivors(rows))
    assert expected_tokens(alphas, 3) == pytest.approx(judged["tokens"])
    low, high = judged["tokens_interval"]
    assert low < judged["tokens"] < high
    assert not low < judged["pooled_alpha"] < high
    assert abs(judged["other_half"]) < judged["by_chance"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_card_and_page_state_the_record(kind: str) -> None:
    record = json.loads((weights_folder(kind) / "record.json").read_text())  # type: ignore[arg-type]
    card = (weights_folder("sequential").parent / "README.md").read_text()
    page = (ROOT / "docs" / "mtp.md").read_text()
    for text in (card, page):
        assert f"{record['training_tokens']:,}" in text
        assert f"{record['held_out']['places']:,}" in text
        for depth, (right, kept) in enumerate(
            zip(record["held_out"]["top1"], record["held_out"]["survival"], strict=True), 1
        ):
            assert f"| {depth} | {right:.3f} | {kept:.3f}" in text
    assert f"--kind {kind} --steps {record['steps']} --prompts {record['prompts']}" in card


def test_the_package_ships_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["spec_kernels"]
    shipped = {file for pattern in patterns for file in (ROOT / "spec_kernels").glob(pattern)}
    data = {file for file in (ROOT / "spec_kernels" / "data").rglob("*") if file.is_file()}
    assert data <= shipped
