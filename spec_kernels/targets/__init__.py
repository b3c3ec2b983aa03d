"""What a decoder must offer, and adaptors: for plain torch.nn models, and for a table."""

from spec_kernels.targets.attention import KVCache, Nodes, make_room, open_cache
from spec_kernels.targets.base import (
    Cache,
    ChainCache,
    ExitTarget,
    Target,
    TargetOutput,
    can_read,
    contain_faults,
)
from spec_kernels.targets.few_rows import speed_up_linear_
from spec_kernels.targets.module import Attend, DecoderModule, ModuleTarget
from spec_kernels.targets.table import TableTarget

__all__ = [
    "Attend",
    "Cache",
    "ChainCache",
    "DecoderModule",
    "ExitTarget",
    "KVCache",
    "ModuleTarget",
    "Nodes",
    "TableTarget",
    "Target",
    "TargetOutput",
    "can_read",
    "contain_faults",
    "make_room",
    "open_cache",
    "speed_up_linear_",
]
