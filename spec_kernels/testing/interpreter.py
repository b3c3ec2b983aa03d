"""Run `@triton.jit` kernels on CPU tensors, in the process that also compiles them.

Inside `interpreted()` a launch `kernel[grid](...)` runs program by program in Python, with the
numbers of the hardware (see `_builder`). `TRITON_INTERPRET` stays unset, so the same function can
be compiled before, after and between: `triton.language` is patched for the length of one launch
only. Not thread-safe: one thread launches at a time.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _reductions
from ._builder import ORIGIN, AccessHook, Builder, Semantic
from .errors import KernelError, source_line

Program = tuple[int, int, int]
_MISSING: Final = object()
_builder: Final = Builder()
_semantic: Final = Semantic(_builder)


class Observer(AccessHook, Protocol):
    """Sees a launch: chooses the order of programs, and is told of every access."""

    def begin(
        self,
        kernel: Callable[..., Any],
        tensors: list[tuple[str, torch.Tensor]],
        grid: Program,
    ) -> Sequence[Program]:
        """Start of a launch; return its programs in the order to run them."""

    def program(self, index: Program) -> None:
        """The next program starts."""

    def end(self) -> None:
        """All programs ran."""


_observer: Observer | None = None


def set_observer(observer: Observer | None) -> Observer | None:
    """Let this observer see the launches from here on; return the one before."""
    global _observer
    before, _observer = _observer, observer
    return before


# --------------------------------------------------------------------------- language patches


class _Patches:
    """Attributes of `triton.language` to replace during a launch, and to put back after it."""

    def __init__(self) -> None:
        self.wanted: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.saved: list[tuple[Any, str, Any]] = []
        self.depth = 0

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        """Note a replacement (the name that Triton's own patching code calls)."""
        self.wanted[id(owner), name] = (owner, name, value)

    def apply(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        wanted = self.wanted.values()
        self.saved = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in wanted]
        for owner, name, value in wanted:
            setattr(owner, name, value)

    def restore(self) -> None:
        self.depth -= 1
        if self.depth > 0:
            return
        for owner, name, value in reversed(self.saved):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _multiple_of(x: Any, values: Any) -> Any:
    """`tl.multiple_of`, which promises that the first element is a multiple: check it."""
    step = values[0] if isinstance(values, (list, tuple)) else values
    if isinstance(x, tl.tensor) and x.handle.data.size and x.handle.data.ndim <= 1:
        first, step = int(x.handle.data[0]), int(_reductions.plain(step))
        if first % step:
            raise KernelError(f"{source_line()}: promised a multiple of {step}, got {first}")
    return x


def _index(x: Any) -> int:
    """`int(x)` of a scalar, which the interpreter may hold in an array of one element."""
    return int(x.handle.data.item())


def _with_semantic(builtin: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return builtin(*args, **{**kwargs, "_semantic": _semantic})

    return call


def _patch_builtins(owner: Any, patches: _Patches) -> None:
    """Let the operations of `triton.language` use our semantics; Triton 3.6 would use its own."""
    for name, member in inspect.getmembers(owner):
        if tl.core.is_builtin(member):
            patches.set_attr(owner, name, _with_semantic(member))


def _language_patches() -> _Patches:
    patches = _Patches()
    for lang in (tl, tl.core):
        _patch_builtins(lang, patches)
        _patch_builtins(lang.tensor, patches)
        stock._patch_lang_tensor(lang.tensor, patches)
        patches.set_attr(lang.tensor, "__index__", _index)  # Triton 3.6's fails under numpy 2.4
        stock._patch_lang_core(lang, patches)
    for lang in (tl, tl.core):  # behind both: the stock patches of either touch the other
        patches.set_attr(lang, "reduce", _reductions.reduce)
        patches.set_attr(lang, "associative_scan", _reductions.associative_scan)
        patches.set_attr(lang, "multiple_of", _multiple_of)
    _patch_builtins(tl.math, patches)
    _patch_builtins(tl.core.tensor_descriptor_base, patches)
    patches.set_attr(stock, "interpreter_builder", _builder)
    patches.set_attr(stock, "interpreter_semantic", _semantic)
    patches.set_attr(JITFunction, "__call__", _call_device_function)
    return patches


# --------------------------------------------------------------------------- rewriting


class _Rewriter(stock.ASTTransformer):  # type: ignore[misc]
    """Triton's rewriting for the interpreter; global constexprs become their plain values."""

    def __init__(self, names: dict[str, Any], local: set[str]) -> None:
        self.names, self.local = names, local

    def _resolve(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id not in self.local:
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None

    def _plain(self, node: ast.Name | ast.Attribute) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and isinstance(self._resolve(node), tl.constexpr):
            return ast.copy_location(ast.Attribute(node, "value", ast.Load()), node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802 - an ast visitor
        return self._plain(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:  # noqa: N802 - an ast visitor
        self.generic_visit(node)
        return self._plain(node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:  # noqa: N802 - 3.6 skips the value
        node.targets = [self.visit(target) for target in node.targets]
        to_tensor = ast.Attribute(
            ast.Name("interpreter_semantic", ast.Load()), "to_tensor", ast.Load()
        )
        node.value = ast.Call(to_tensor, [self.visit(node.value), ast.Constant(False)], [])
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:  # noqa: N802
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        return node


def _rewrite(function: JITFunction) -> FunctionType:
    """Return the Python function that runs a `@triton.jit` function on interpreter tensors."""
    fn = function.fn
    lines, first = inspect.getsourcelines(fn)
    skip = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    tree = ast.parse(_dedent(lines[skip:]))
    closure = inspect.getclosurevars(fn).nonlocals
    local = set(fn.__code__.co_varnames)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    for argument in [*definition.args.args, *definition.args.kwonlyargs]:
        argument.annotation = None
    tree = _Rewriter({**fn.__globals__, **closure}, local).visit(tree)
    ast.increment_lineno(tree, first + skip - 1)
    # A function around it holds what the rewriting refers to, so that the module stays clean.
    given = {
        **closure,
        "interpreter_semantic": _semantic,
        "_InterpreterComparison": getattr(stock, "_InterpreterComparison", None),
    }
    factory = ast.parse(f"def factory({', '.join(given)}):\n    return {fn.__name__}").body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body.insert(0, tree.body[0])
    module = ast.fix_missing_locations(ast.Module([factory], []))
    code = compile(module, inspect.getsourcefile(fn) or "?", "exec", dont_inherit=True)
    made = next(c for c in code.co_consts if isinstance(c, CodeType))
    rewritten: FunctionType = FunctionType(made, fn.__globals__)(**given)
    rewritten.__defaults__, rewritten.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__
    return rewritten


def _dedent(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(line[indent:] if line.strip() else "\n" for line in lines)


_rewritten: dict[int, tuple[JITFunction, FunctionType]] = {}


def _python_function(function: JITFunction) -> FunctionType:
    known = _rewritten.get(id(function))
    if known is None:
        known = _rewritten[id(function)] = (function, _rewrite(function))
    return known[1]


def _call_device_function(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    return _python_function(self)(*args, **kwargs)


# --------------------------------------------------------------------------- launching


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, TensorWrapper):
        yield name, value.base
    elif isinstance(value, TensorDescriptor):
        yield from _tensors(name, value.base)
    elif isinstance(value, tuple):
        for member, item in _members(name, value):
            yield from _tensors(member, item)


def _members(name: str, value: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Name the members of a tuple argument: "inputs.tokens", or "shape[0]"."""
    fields = getattr(value, "_fields", None)
    for i, item in enumerate(value):
        yield f"{name}.{fields[i]}" if fields else f"{name}[{i}]", item


def named_tensors(arguments: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors among launch arguments with their names."""
    return [pair for name, value in arguments.items() for pair in _tensors(name, value)]


def _to_interpreter(name: str, value: Any) -> Any:
    """Turn a launch argument into what the kernel sees: floats are float32, as on the device."""
    if isinstance(value, (torch.Tensor, TensorWrapper)):
        pointer = stock._implicit_cvt(value)
        pointer.handle.attr[ORIGIN] = frozenset([name])
        return pointer
    if isinstance(value, tuple):
        items = (_to_interpreter(member, item) for member, item in _members(name, value))
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, float):
        return tl.tensor(stock.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
    return stock._implicit_cvt(value)


def bind(function: JITFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Match launch arguments to the kernel's parameters; launch options are dropped."""
    own = {k: v for k, v in kwargs.items() if k in function.arg_names}
    bound = inspect.signature(function.fn).bind(*args, **own)
    bound.apply_defaults()
    return dict(bound.arguments)


def resolve_grid(grid: Any, arguments: dict[str, Any]) -> Program:
    """Return the three sizes of a grid given as a tuple or as a function of the arguments."""
    sizes = tuple(int(n) for n in (grid(arguments) if callable(grid) else grid))
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"grid must have 1 to 3 sizes, got {sizes}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _run_programs(
    run: Callable[[], object], programs: Sequence[Program], observer: Observer | None
) -> None:
    """Run the body of a kernel once per program, in the order given."""
    with np.errstate(all="ignore"):
        for index in programs:
            _builder.set_grid_idx(*index)
            if observer is not None:
                observer.program(index)
            run()


def _launch(function: JITFunction, args: Sequence[Any], grid: Any, kwargs: dict[str, Any]) -> None:
    for hook in function.pre_run_hooks:
        hook(*args, **kwargs)
    arguments = bind(function, args, kwargs)
    named = named_tensors(arguments)
    for name, tensor in named:
        if tensor.device.type != "cpu":
            raise TypeError(
                f"{name} must be a CPU tensor inside interpreted(), got {tensor.device}"
            )
    x, y, z = resolve_grid(grid, arguments)
    constant = {p.name for p in function.params if p.is_constexpr}
    run = _python_function(function)
    programs: Sequence[Program] = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
    observer = _observer
    if observer is not None:
        programs = observer.begin(function.fn, named, (x, y, z))
    _patches.apply()
    hook_before, _builder.hook = _builder.hook, observer
    try:
        plain = {
            name: (value.value if isinstance(value, tl.constexpr) else value)
            if name in constant
            else _to_interpreter(name, value)
            for name, value in arguments.items()
        }
        _builder.set_grid_dim(x, y, z)
        _run_programs(partial(run, **plain), programs, observer)
    finally:
        _builder.hook = hook_before
        _patches.restore()
    if observer is not None:
        observer.end()


_patches: Final = _language_patches()
_compiled_run: Final = JITFunction.run
_depth = 0


def _run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if warmup:
        return _compiled_run(self, *args, grid=grid, warmup=True, **kwargs)
    return _launch(self, args, grid, kwargs)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run the launches inside this context in the corrected interpreter, on CPU tensors.

    That is: any `@triton.jit` kernel launched as `kernel[grid](...)`, also deep in library code.
    Launch options (`num_warps`, ...) are ignored. `device_assert` and 32-bit overflow raise. The
    context may be nested, and leaves no trace when it ends, by an error too.

    Raises:
        TypeError: a tensor argument is not on the CPU.
        IntegerOverflowError: 8, 16 or 32-bit integer arithmetic left its range.

    Note:
        `tl.dot` in the default tf32 precision is computed in full float32.

    Example:
        >>> import torch, triton
        >>> from triton.language.standard import zeros  # any @triton.jit code; here only the import
        >>> with interpreted():
        ...     pass  # kernel[grid](x, y, n, BLOCK=64, num_warps=4)
    """
    global _depth
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET: it replaces @triton.jit for the whole process")
    _depth += 1
    JITFunction.run = _run
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            JITFunction.run = _compiled_run
