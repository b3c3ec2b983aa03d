"""What one hot call is: how to launch it, which paths are counted, what it must read."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..dry_run import CompiledLaunch


class HotPath(NamedTuple):
    """A path through a kernel whose instructions are counted.

    Attributes:
        elements: what a program handles on it: vocabulary ids, pairs of ids, KV elements, bytes.
        name: "" for the path that streams; else what it does: "greedy", "draw".
        through, avoid, repeats: as in `Resources.path`.
        within: source lines; only instructions that stand for one of them count. Empty: all do.
    """

    elements: int
    name: str = ""
    through: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    repeats: int = 1
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class HotCall:
    """One way to call an operation at the size of production.

    Attributes:
        operation: the public function.
        configuration: the dtype, then options: "bf16-odd". "odd" means unaligned row starts.
        prepare: makes the call's arguments on a device, and returns a function that launches the
            kernels. "meta": at full size, for `dry_run`. "cpu": as few requests as show the bytes,
            with values, for `watch`.
        launches: how many kernels are launched.
        paths: by kernel: the paths that are counted in a compiled launch. Kernels that are not
            named have one path, and no count of instructions.
        counts: of the call on "cpu": the names in the floors of its kernels.
        reachable: names the tensors that a prepared call reaches through addresses in memory.
    """

    operation: str
    configuration: str
    prepare: Callable[[str], Callable[[], object]]
    launches: int
    paths: Mapping[str, Callable[[CompiledLaunch], tuple[HotPath, ...]]] = field(
        default_factory=dict
    )
    counts: Mapping[str, int] = field(default_factory=dict)
    reachable: Callable[[Any], Sequence[torch.Tensor]] = field(default=lambda _: ())

    def __str__(self) -> str:
        """Return an id like `accept-bf16-odd`."""
        return f"{self.operation}-{self.configuration}"


def tile_path(launch: CompiledLaunch) -> tuple[HotPath, ...]:
    """Count the one path of a kernel whose programs each handle `CHUNKS * LANES * WIDTH` ids."""
    x = launch.arguments
    return (HotPath(x["CHUNKS"] * x["LANES"] * x["WIDTH"]),)


def line_of(function: Any, text: str, occurrence: int = 0) -> str:
    """Return "file.py:line" of the n-th line of a `@triton.jit` function that holds a text.

    Args:
        function: the kernel or device function.
        text: part of the line.
        occurrence: which of several lines, from 0; negative from the last.

    Raises:
        ValueError: there are fewer such lines.
    """
    lines, first = inspect.getsourcelines(function.fn)
    found = [first + i for i, line in enumerate(lines) if text in line]
    if not -len(found) <= occurrence < len(found):
        raise ValueError(f"{text!r} is in {len(found)} lines of {function.fn.__name__}")
    return f"{function.fn.__code__.co_filename.rsplit('/', 1)[-1]}:{found[occurrence]}"


def floor_of(docstring: str | None, counts: Mapping[str, int]) -> int | None:
    """Evaluate the byte floor in a kernel's docstring; None if it states none.

    Args:
        docstring: holds "Floor: `formula` bytes", a formula of names, integers, +, -, * and //.
        counts: the names.

    Raises:
        ValueError: the formula holds something else, or a name that is not counted.

    Example:
        >>> floor_of("Floor: `rows * vocab * itemsize` bytes.", dict(rows=5, vocab=10, itemsize=2))
        100
    """
    found = re.search(r"Floor:\s+`([^`]+)`\s+bytes", docstring or "")
    if found is None:
        return None
    formula = " ".join(found.group(1).split())
    try:
        return _evaluate(ast.parse(formula, mode="eval").body, counts)
    except (KeyError, TypeError, SyntaxError) as error:
        raise ValueError(f"floor {formula!r}: {error!r}; known are {', '.join(counts)}") from None


def _evaluate(node: ast.expr, counts: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return counts[name]
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, counts), _evaluate(right, counts)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return a // b
    raise TypeError(ast.unparse(node))
