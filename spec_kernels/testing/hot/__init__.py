"""How the library's operations are called where it matters, at the sizes of production.

One module per column holds `CALLS`. A new column needs a module here and nothing else: budgets, dry
runs on every target, counted bytes and `bench --static` take the calls from `COLUMNS`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Final

from ._call import HotCall, HotPath, line_of

COLUMNS: Final[dict[str, tuple[HotCall, ...]]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").CALLS
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}
"""The hot calls of every column; the first of an operation is the one that tables show."""

__all__ = ["COLUMNS", "HotCall", "HotPath", "line_of"]
