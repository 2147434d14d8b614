"""The documentation site: pages have their place, public names their documentation, and the build is strict."""

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mistakes import MISTAKES

from lightning_roundpipe import RoundPipeStrategy

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hooks():
    """docs/site_hooks.py, which MkDocs runs."""
    pytest.importorskip("griffe", reason="the extra `docs` is not installed")
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["commands.md", "errors.md", "reference.md"])
def test_generated_parts_are_those_of_the_code(hooks, page):
    """They are in the pages, so that the repository's web view has them, too."""
    text = (DOCS / page).read_text()
    assert hooks._PART.search(text), "the page has lost its marks"
    assert hooks.filled(text) == text, "run `python docs/site_hooks.py`"


def test_the_reference_has_every_option(hooks):
    """With type and default, as the code has them."""
    parameters = inspect.signature(RoundPipeStrategy).parameters.values()
    # Keyword-only parameters are Lightning's own, which it fills in itself.
    own = {p.name: repr(p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    options = hooks.options()
    assert {name: default.replace('"', "'") for name, (_, default, _) in options.items()} == own
    assert all(kind and meaning for kind, _, meaning in options.values())
    assert sorted(name for names in hooks.EXPLAINED.values() for name in names) == sorted(own)


def test_the_errors_are_those_of_the_table_of_mistakes(hooks):
    """So every message on the page is one that the package raises: `tests/test_bad_input.py` makes each mistake."""
    sections = {mistake.section: list[list[str]]() for mistake in MISTAKES}
    for mistake in MISTAKES:
        sections[mistake.section].append([mistake.what, mistake.says, mistake.remedy])
    assert hooks.mistakes() == sections
    page = (DOCS / "errors.md").read_text()
    explained = re.findall(r"^- `([^`]+)`:", page, flags=re.MULTILINE)
    assert explained and set(explained) <= {mistake.says for mistake in MISTAKES}


@pytest.mark.parametrize(
    ("page", "text", "wanted"),
    [
        (
            "a.md",
            "[x](../Makefile) ![y](../examples/z.png)",
            "[x]({r}/blob/main/Makefile) ![y]({r}/raw/main/examples/z.png)",
        ),
        ("compatibility.md", "| a | works; b | c |", '| a | <span class="state works">✓</span> works; b | c |'),
        ("compatibility.md", "| `tests/a.py::test_b` |", "| [<code>test_<wbr>b</code>]({r}/blob/main/tests/a.py) |"),
    ],
)
def test_what_the_site_changes(hooks, page, text, wanted):
    file = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    shown = hooks.on_page_markdown(text, page=file, config=None, files=None)
    assert shown == wanted.format(r=hooks.PROJECT["urls"]["Repository"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_build_is_strict(tmp_path):
    """A broken link, a broken anchor, a page without a place and a public name without a docstring fail it."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    for folder in ("docs", "conf", "lightning_roundpipe"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "mistakes", tmp_path / "tests" / "mistakes")
    for file in ("mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    page = tmp_path / "docs" / "data.md"
    page.write_text(page.read_text() + "\n[a](nothing.md) [b](layers.md#nowhere)\n")
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    home = tmp_path / "lightning_roundpipe" / "tasks" / "__init__.py"
    home.write_text(home.read_text().replace('["CausalLM"', '["lost", "CausalLM"') + "\n\ndef lost() -> None: ...\n")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0, done.stderr
    for fault in ("'nothing.md'", "'layers.md#nowhere'", "lost.md", "lightning_roundpipe.tasks.lost"):
        assert fault in done.stderr, done.stderr
