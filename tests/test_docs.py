"""The documentation runs: Python blocks, links, file tree, commands."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def run_block(text: str, names: dict[str, object], where: str) -> list[str]:
    """Run a block, as a doctest if it shows a prompt, and return what went wrong."""
    if ">>>" not in text:
        exec(compile(text, where, "exec"), names)
        return []
    test = doctest.DocTestParser().get_doctest(text, names, where, where, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    return report


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def tree_paths(text: str) -> list[str]:
    """Read the paths out of an indented file tree with a remark behind each name."""
    paths, folder = [], ""
    for line in text.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            paths.append(name)
        else:
            paths.append(folder + name)
    return paths


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_run(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__page__"}
    for number, text in enumerate(blocks(page, "python")):
        report = run_block(text, names, f"{page_id(page)}[{number}]")
        assert report == [], "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_local_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_pages_with_examples_are_found() -> None:
    assert blocks(ROOT / "README.md", "python") != []
    assert len(blocks(ROOT / "docs" / "accept.md", "python")) >= 2


def test_readme_verifies_a_batch_in_twelve_lines() -> None:
    text = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in text.splitlines() if line.strip()]) == 12
    names: dict[str, object] = {}
    run_block(text, names, "README.md")
    result = names["result"]
    assert result.output_tokens.shape == (2, 4)  # type: ignore[attr-defined]
    assert result.status.tolist() == [0, 0]  # type: ignore[attr-defined]


def test_readme_tree_names_every_part_once() -> None:
    tree = next(text for text in blocks(ROOT / "README.md", "") if "types.py" in text)
    paths = tree_paths(tree)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert all(len(line.split(None, 1)) == 2 for line in tree.splitlines() if "/" not in line)
    parts = [
        f"spec_kernels/{path.name}{'/' if path.is_dir() else ''}"
        for path in (ROOT / "spec_kernels").iterdir()
        if not path.name.startswith("_")
        and (path.suffix == ".py" or (path / "__init__.py").exists())
    ]
    pages = [f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")]
    assert sorted(set(parts + pages) - set(paths)) == []
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_named_in_docs_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    code = "\n".join(text for _, text in BLOCK.findall(page.read_text()))
    code += "\n".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    assert set(re.findall(r"\bmake ([a-z]+)\b", code)) - targets == set()


def test_broken_pages_are_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](#a-heading) [b](#none) [c](gone.md) [d](https://x.invalid)\n")
    assert broken_links(page) == ["#none", "gone.md"]
    assert run_block(">>> 1 + 1\n3\n", {}, "page") != []
    with pytest.raises(AssertionError):
        run_block("assert 1 + 1 == 3\n", {}, "page")
    assert tree_paths("a/   x\n  b.py  y\nc.md  z") == ["a/", "a/b.py", "c.md"]
