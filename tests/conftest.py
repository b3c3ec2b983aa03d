"""Shared set-up: one thread, fixed hypothesis profile, and the implementations under contract."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
