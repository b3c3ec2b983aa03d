"""The laws of the grid, read from the sources: each law is a function that lists its breaches.

A last test plants one fault per law in a copy of the package and sees it caught.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "spec_kernels"
LAYERS = ("reference", "eager", "kernels", "ops")

STAGES = {
    "random": ("exponential",),
    "law": ("tile_stats", "find_cutoff"),
    "sample": ("draw",),
    "accept": ("accept_scan", "residual_mass"),
}

GROUND = {"types", "_check", "tree"}
LOOP = GROUND | {"ops", "nn", "proposers", "targets", "stats", "cost_model", "decoder"}
LOOP |= {"adaptive", "requests", "stopping"}
ARROWS = {
    "_check": set(),
    "types": {"_check"},
    "tree": {"types", "_check"},
    "reference": {"types"},
    "eager": GROUND,
    "kernels": GROUND,
    "ops": GROUND | {"eager"},  # and kernels, inside a function
    "nn": GROUND | {"ops"},
    "targets": GROUND | {"ops", "nn"},
    "proposers": GROUND | {"ops", "nn", "targets"},
    "stats": GROUND,
    "cost_model": set(),
    "adaptive": GROUND | {"stats", "cost_model"},
    "requests": GROUND | {"ops", "stats"},
    "stopping": GROUND | {"requests"},
    "decoder": LOOP,
    "training": LOOP,
    "integrations": LOOP,
    "comparison": LOOP,
    "cli": LOOP | {"comparison", "integrations", "training", "conformance", "testing"},
    "__main__": {"cli"},
    "__init__": LOOP,
    "parallel": GROUND | {"ops", "eager", "kernels"},
    "conformance": GROUND | {"ops", "reference"},
    "testing": GROUND | {"kernels"},
}
"""What each part of the package may import from the package. A part may always import itself."""

THIRD_PARTY = {
    "cost_model": set(),
    "kernels": {"torch", "triton"},
    "nn": {"torch", "safetensors"},  # the files of MTP modules
    "training": {"torch", "safetensors"},
    "testing": {"torch", "triton", "numpy"},
    "integrations": None,  # adapters: whatever their host needs
    "cli": None,
    "__main__": None,
}
"""What each part may import from outside the standard library; torch alone unless listed."""


def sources(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package), ast.parse(path.read_text())


def part_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports(tree: ast.Module, path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield (dotted module, line, at module level) of every import."""
    outer = {id(node) for node in tree.body}
    package = ("spec_kernels", *path.parts[:-1])
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            bare = module == "spec_kernels"
            names = [f"{module}.{alias.name}" for alias in node.names] if bare else [module]
        for name in names:
            yield name, node.lineno, id(node) in outer


def public_functions(layer: Path) -> dict[str, tuple[str, ast.FunctionDef]]:
    """Find the functions that a layer's `__init__` exports: name -> (column, definition)."""
    tree = ast.parse((layer / "__init__.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        column = node.module.rpartition(".")[2]
        names = {alias.name for alias in node.names}
        body = ast.parse((layer / f"{column}.py").read_text()).body
        for function in body:
            if isinstance(function, ast.FunctionDef) and function.name in names:
                found[function.name] = (column, function)
    return found


def exported(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = list(ast.literal_eval(node.value))
    return names


def parameters(function: ast.FunctionDef) -> list[str]:
    """Describe each parameter as name, kind and default; annotations may be spelled freely."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    rows = [("positional", a, d) for a, d in zip(positional, defaults, strict=True)]
    rows += [("keyword", a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    starred = [f"*{a.arg}" for a in (args.vararg, args.kwarg) if a]
    return [f"{a.arg} {kind} {ast.unparse(d) if d else ''}" for kind, a, d in rows] + starred


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the outermost functions and the methods; what is nested counts inside them."""
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        yield from (m for m in members if isinstance(m, ast.FunctionDef))


def law_same_signatures(package: Path) -> list[str]:
    grid = {layer: public_functions(package / layer) for layer in LAYERS}
    breaches = []
    for layer, found in grid.items():
        breaches += [f"{layer} lacks {name}" for name in grid["ops"].keys() - found.keys()]
        breaches += [f"ops lacks {name} of {layer}" for name in found.keys() - grid["ops"].keys()]
        for name, (column, function) in found.items():
            judge_column, judge = grid["ops"].get(name, (column, function))
            if (column, parameters(function)) != (judge_column, parameters(judge)):
                breaches.append(f"{layer}.{column}.{name} differs from ops: {parameters(function)}")
    return breaches


def law_stages(package: Path) -> list[str]:
    """A stage is defined in its column, or imported into it."""
    breaches = []
    for layer in LAYERS[:3]:
        for column, stages in STAGES.items():
            file = package / layer / f"{column}.py"
            body = ast.parse(file.read_text()).body if file.exists() else []
            names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
            for node in body:
                if isinstance(node, ast.ImportFrom):
                    names |= {alias.name for alias in node.names}
            breaches += [f"{layer}/{column}.py lacks {stage}" for stage in {*stages} - names]
    return breaches


def law_exports_sorted(package: Path) -> list[str]:
    """Plainly, or constants before classes before functions."""
    breaches = []
    for path, tree in sources(package):
        names = exported(tree)
        kinds = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        if names not in (sorted(names), kinds):
            breaches.append(f"{path}: __all__ is not sorted")
    return breaches


def law_arrows(package: Path) -> list[str]:
    breaches = []
    for path, tree in sources(package):
        part = part_of(path)
        if part not in ARROWS:
            breaches.append(f"{path}: {part} has no place in ARROWS")
            continue
        for name, line, at_top in imports(tree, path):
            other = name.split(".")[1] if name.startswith("spec_kernels.") else None
            lazy_kernels = part == "ops" and other == "kernels" and not at_top
            fits = other in {None, part, "__version__", *ARROWS[part]} or lazy_kernels
            if name == "spec_kernels" or not fits:
                breaches.append(f"{path}:{line} imports {name}")
    return breaches


def law_third_party(package: Path) -> list[str]:
    breaches = []
    for path, tree in sources(package):
        allowed = THIRD_PARTY.get(part_of(path), {"torch"})
        for name, line, _ in imports(tree, path):
            top = name.split(".")[0]
            foreign = top not in sys.stdlib_module_names and top != "spec_kernels"
            if foreign and allowed is not None and top not in allowed:
                breaches.append(f"{path}:{line} imports {name}")
            if top == "triton" and part_of(path) not in ("kernels", "testing"):
                breaches.append(f"{path}:{line} imports {name}")
    return breaches


def law_sizes(package: Path) -> list[str]:
    """A function's size is that of its body behind the docstring."""
    breaches = []
    for path, tree in sources(package):
        kernels = part_of(path) == "kernels"
        lines = len((package / path).read_text().splitlines())
        if lines > (600 if kernels else 450):
            breaches.append(f"{path} has {lines} lines")
        for function in [] if kernels else functions(tree):
            has_docstring = ast.get_docstring(function) is not None
            body = function.body[1:] if has_docstring else function.body
            size = function.end_lineno - body[0].lineno + 1 if body else 0
            if size > 50:
                breaches.append(f"{path}: {function.name} has {size} lines")
            if nesting(function) > 3:
                breaches.append(f"{path}: {function.name} nests {nesting(function)} deep")
    return breaches


def nesting(node: ast.AST, depth: int = 0) -> int:
    deepest = depth
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        block = isinstance(child, ast.If | ast.For | ast.While | ast.With | ast.Try)
        deepest = max(deepest, nesting(child, depth + (block and not is_elif)))
    return deepest


MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def law_no_module_state(package: Path) -> list[str]:
    """`testing` is excepted: it swaps the globals of Triton's interpreter within a context."""
    breaches = []
    for path, tree in sources(package):
        if part_of(path) == "testing":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                breaches.append(f"{path}:{node.lineno} writes globals {node.names}")
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = node.value
            built = isinstance(value, ast.Call) and ast.unparse(value.func) in (
                "list",
                "dict",
                "set",
                "defaultdict",
                "deque",
                "Counter",
            )
            name = ast.unparse(target)
            constant = name == "__all__" or name.lstrip("_").isupper()
            if built or (isinstance(value, MUTABLE) and not constant):
                breaches.append(f"{path}:{node.lineno} keeps state in {name}")
    return breaches


def law_device_decides(package: Path) -> list[str]:
    """No switches, clocks, generators or synchronisation in the layers of operations."""
    banned = r"os\.environ|getenv|torch\.(rand|randn|randint|multinomial|Generator)\b|^time\."
    syncs = r"\.(item|tolist|cpu|numpy|nonzero|synchronize)$"
    breaches = []
    for path, tree in sources(package):
        part = part_of(path)
        if part not in (*LAYERS, "nn"):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            text = ast.unparse(node)
            waits = part in ("ops", "kernels", "nn") and re.search(syncs, text)
            if re.search(banned, text) or waits:
                breaches.append(f"{path}:{node.lineno} uses {text}")
    return breaches


def law_docstrings(package: Path) -> list[str]:
    """Every module, and every public class, function and method of a public module."""
    breaches = []
    for path, tree in sources(package):
        if ast.get_docstring(tree) is None:
            breaches.append(f"{path} has no docstring")
        if path.name.startswith("_"):
            continue
        for node in tree.body:
            is_class = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            for member in [node, *(node.body if is_class else [])]:
                if is_undocumented(member):
                    breaches.append(f"{path}: {member.name} has no docstring")
    return breaches


def is_undocumented(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or ast.get_docstring(node):
        return False
    traits = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
    exempt = traits & {"triton.jit", "overload"} or node.name.startswith(("_", "visit_"))
    return not exempt


def law_no_catch_all_files(package: Path) -> list[str]:
    names = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    return [str(path) for path, _ in sources(package) if path.name in names]


def law_no_machine(package: Path) -> list[str]:
    """No file of the project names a path of one machine or a package registry's host."""
    pattern = re.compile(
        r"(?<![\w.])/(home|root|work|Users|mnt)/\w|pypi\.org|pythonhosted|index-url|download\.pytorch"
    )
    breaches = []
    for path in sorted(package.parent.rglob("*")):
        relative = path.relative_to(package.parent)
        hidden = any(p.startswith(".") and p != ".ci" for p in relative.parts)
        hidden = hidden or relative.parts[0] in ("build", "dist")  # made here, not committed
        text = path.suffix in (".py", ".md", ".toml", ".txt", ".cu", ".cpp", ".json", ".sh")
        text = text or path.name in ("Makefile", "run")
        if hidden or not text or not path.is_file() or path == Path(__file__).resolve():
            continue
        for line, content in enumerate(path.read_text().splitlines(), start=1):
            if pattern.search(content):
                breaches.append(f"{relative}:{line} {content.strip()[:60]}")
    return breaches


LAWS: list[Callable[[Path], list[str]]] = [
    law_same_signatures,
    law_stages,
    law_exports_sorted,
    law_arrows,
    law_third_party,
    law_sizes,
    law_no_module_state,
    law_device_decides,
    law_docstrings,
    law_no_catch_all_files,
    law_no_machine,
]

FAULTS = [
    # law, file, text to replace ("" = append), what to put there
    (law_same_signatures, "kernels/accept.py", 'rule: str = "block"', 'rule: str = "token"'),
    (law_same_signatures, "eager/random.py", "def draft_coins(", "def draft_coin("),
    (law_stages, "eager/sample.py", "def draw(", "def pick("),
    (law_exports_sorted, "nn/__init__.py", "", '__all__ = ["b", "a"]'),
    (law_arrows, "eager/law.py", "", "from spec_kernels.kernels.law import row_law"),
    (law_arrows, "ops/law.py", "", "from spec_kernels import kernels"),
    (law_arrows, "nn/verifier.py", "", "def f():\n    import spec_kernels.eager.law"),
    (law_arrows, "reference/law.py", "", "from spec_kernels.eager import random"),
    (law_third_party, "eager/law.py", "", "import triton"),
    (law_third_party, "integrations/__init__.py", "", "import triton"),
    (law_third_party, "decoder.py", "", "from transformers import PreTrainedModel"),
    (law_sizes, "nn/verifier.py", "", "\n" * 450),
    (law_sizes, "nn/verifier.py", "", "def f():\n" + "    x = 1\n" * 51),
    (law_sizes, "nn/verifier.py", "", "def f():\n if 1:\n  for _ in x:\n   if 1:\n    if 1: pass"),
    (law_no_module_state, "ops/law.py", "", "cache = {}"),
    (law_no_module_state, "ops/law.py", "", "def f():\n    global count\n    count = 1"),
    (law_device_decides, "ops/law.py", "", "def f(x):\n    return x.item()"),
    (law_device_decides, "eager/law.py", "", "import os\nX = os.environ['X']"),
    (law_device_decides, "eager/sample.py", "", "x = torch.rand(3)"),
    (law_docstrings, "ops/law.py", "", "def f():\n    return 1"),
    (law_no_catch_all_files, "eager/utils.py", "", '"""Things."""'),
    (law_no_machine, "eager/law.py", "", "# see /ho" + "me/me/notes"),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_holds(law: Callable[[Path], list[str]]) -> None:
    assert law(PACKAGE) == []


@pytest.mark.parametrize(
    ("law", "path", "old", "new"),
    FAULTS,
    ids=[f"{fault[0].__name__}-{fault[1]}" for fault in FAULTS],
)
def test_planted_fault_is_caught(
    law: Callable[[Path], list[str]], path: str, old: str, new: str, tmp_path: Path
) -> None:
    package = tmp_path / "spec_kernels"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / path
    text = file.read_text() if file.exists() else ""
    assert old in text
    file.write_text(text.replace(old, new) if old else f"{text}\n{new}\n")
    assert law(package) != []


def test_every_fault_list_covers_every_law() -> None:
    assert {fault[0] for fault in FAULTS} == set(LAWS)


def test_every_operation_is_registered_for_every_device() -> None:
    from spec_kernels import ops

    keys = ("CPU", "CUDA", "Meta")
    missing = [
        (name, key)
        for name in ops.__all__
        for key in keys
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"spec_kernels::{name}", key)
    ]
    assert missing == []


def test_import_brings_in_torch_and_nothing_else() -> None:
    code = (
        "import sys, torch; before = {m.split('.')[0] for m in sys.modules}; import spec_kernels;"
        "print(*sorted({m.split('.')[0] for m in sys.modules} - before - sys.stdlib_module_names))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["spec_kernels"]
