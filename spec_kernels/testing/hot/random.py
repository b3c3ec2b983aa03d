"""Hot calls of `coins` and `draft_coins`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from spec_kernels.kernels import coins, draft_coins

from ..dry_run import CompiledLaunch
from ._call import HotCall, HotPath


def make_coins(function: Callable[..., object], device: str, *sizes: Any) -> Callable[[], object]:
    """Prepare the coins of 32 requests."""
    numbers = torch.arange(32, device=device)
    return partial(function, numbers, numbers, *sizes)


def _coins(device: str) -> Callable[[], object]:
    return make_coins(coins, device, 5)


def _draft_coins(device: str) -> Callable[[], object]:
    return make_coins(draft_coins, device, 5, 1)


def _path(launch: CompiledLaunch) -> tuple[HotPath, ...]:
    return (HotPath(launch.arguments["BLOCK"]),)


CALLS: Final = (
    HotCall("coins", "g4", _coins, 1, {"coins_kernel": _path}, {"coins": 32 * 6}),
    HotCall("draft_coins", "g4", _draft_coins, 1, {"draft_coins_kernel": _path}, {"coins": 32 * 5}),
)
