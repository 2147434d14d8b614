"""What the documents say about the code is true: options, links, commands, plans, messages. Their Python compiles."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from lightning_roundpipe.planning.schedule import Plan

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
]
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(path):
    """The fenced code blocks: language, number of the first line, text."""
    found, language, start, lines = [], None, 0, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = re.fullmatch(r"\s*```(\S*)", line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, start, lines = fence[1], number + 1, []
        else:
            found.append((language, start, textwrap.dedent("\n".join(lines))))
            language = None
    assert language is None, f"{path}: the code block from line {start} on is not closed"
    return found


def prose(path):
    """The document without its code blocks."""
    return re.sub(r"^\s*```.*?^\s*```\s*$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def rows(text):
    """The cells of all table rows."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def anchors(path):
    """What GitHub lets a link point to: each heading in lower case, without punctuation, with dashes for spaces."""
    headings = re.findall(r"^#+ (.+?)\s*$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_relative_links_resolve(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.is_relative_to(ROOT), f"{path.name} links outside the repository: {target}"
        assert there.exists(), f"{path.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(there), f"{path.name} links to {target}, but there is no such heading"


@documents
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for command in re.findall(r"`make ([a-z -]+)", path.read_text()):
        assert set(command.split()) <= targets, f"{path.name}: make {command}"


@documents
def test_plans_parse(path):
    for plan in re.findall(r"forward (?:none|\d)(?!.*\.\.\.)[^`\"\n]*", path.read_text()):
        assert str(Plan.parse(plan)) == plan


def test_quoted_messages_exist():
    """The left column under "When it fails" quotes errors that the package raises; … stands for what varies."""
    package = (ROOT / "lightning_roundpipe").rglob("*.py")
    nodes = [node for file in package for node in ast.walk(ast.parse(file.read_text()))]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    guide = (ROOT / "docs" / "debugging.md").read_text()
    quoted = [text for row in rows(guide.split("## When it fails")[1])[2:] for text in re.findall(r"`([^`]+)`", row[0])]
    assert quoted
    for fragment in (part.strip() for text in quoted for part in text.split("…")):
        assert any(fragment in string for string in strings), f"no message says {fragment!r}"


def test_named_tests_exist():
    """`docs/compatibility.md` says of each row which test shows it."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for row in rows(page):
        if row[0] == "feature" or set(row[0]) == {"-"}:
            continue
        assert len(row) == 3 and row[1].startswith(("works", "refused")), row
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])
        assert named, f"no test shows {row[0]!r}"
        for file, name in named:
            functions = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), flags=re.MULTILINE)
            assert name in functions, f"{row[0]}: {file} has no {name}"


@documents
def test_python_compiles(path):
    for language, line, text in blocks(path):
        if language == "python":
            compile("\n" * (line - 1) + text, str(path), "exec")


def test_the_tests_that_are_listed_as_slow_exist():
    """A renamed test would be fast again."""
    for listed in Path(__file__).with_name("slow_tests.txt").read_text().splitlines():
        file, *_, name = listed.partition("[")[0].split("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), listed
