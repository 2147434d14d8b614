"""The documentation site: pages have their place, public names their documentation, and a browser finds no fault."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from chromium import chromium, served
from mistakes import MISTAKES

from lightning_roundpipe import RoundPipeStrategy

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS) for page in DOCS.rglob("*.md"))
WORDS = 2200
"""What is read in ten minutes."""


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/site_hooks.py, which MkDocs runs."""
    pytest.importorskip("griffe", reason="the extra `docs` is not installed")
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- pages -------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Of mkdocs.yml, which names a function."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def in_navigation() -> list[str]:
    """The pages in the navigation of mkdocs.yml."""

    def below(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in below(one)]

    return below(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"])


def test_the_navigation_has_every_page_once() -> None:
    named = in_navigation()
    missing = sorted({str(page) for page in PAGES} - set(named))
    assert not missing, f"add {missing} to nav in mkdocs.yml, in the section that fits"
    assert sorted(named) == sorted({str(page) for page in PAGES}), "a page is in nav twice, or is not in docs/"


def words(text: str) -> int:
    """What is read: no blocks of code, no names of tests, no targets of links."""
    text = re.sub(r"^\s*```.*?^\s*```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`tests/[^`]+`|^\|[-:| ]+\|$|\]\([^)]*\)|\|", " ", text, flags=re.MULTILINE)
    return len(text.split())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_is_read_in_ten_minutes(page: Path) -> None:
    count = words((DOCS / page).read_text())
    assert count <= WORDS, f"docs/{page} has {count} words: move a subject to a page of its own, or fold tables up"


# -- the reference -----------------------------------------------------------------------------------------------------


def test_public_names_have_documentation_and_a_place(hooks: ModuleType) -> None:
    """A missing one needs a docstring, and a mark `<!-- api: NAME -->` in docs/reference.md."""
    assert hooks.undocumented() == []
    assert {"lightning_roundpipe.RoundPipeStrategy", "lightning_roundpipe.callbacks.RunFolder"} <= hooks.documented()


def test_an_undocumented_name_is_found(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = hooks.package()["strategy.RoundPipeStrategy"]
    monkeypatch.setattr(strategy.members["report"], "docstring", None)
    monkeypatch.setattr(hooks, "documented", lambda: hooks_documented - {"lightning_roundpipe.tasks.CausalLM"})
    hooks_documented = {f"{module}.{name}" for module, names in hooks.public_modules().items() for name in names}
    assert hooks.undocumented() == [
        "lightning_roundpipe.RoundPipeStrategy.report",
        "lightning_roundpipe.tasks.CausalLM",
    ]


def test_the_reference_has_every_option(hooks: ModuleType) -> None:
    """With type and default, as the code has them."""
    parameters = inspect.signature(RoundPipeStrategy).parameters.values()
    # The keyword-only ones are Lightning's own, which fills them in; `**unknown` is for errors.
    own = {p.name: repr(p.default) for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    options = hooks.options()
    assert {name: default.replace('"', "'") for name, (_, default, _) in options.items()} == own
    assert all(kind and meaning for kind, _, meaning in options.values())
    page = (DOCS / "reference.md").read_text()
    assert "<!-- options -->" in page
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", page.split("## Where")[1], flags=re.MULTILINE)))
    assert named and set(named) <= set(own)


def test_the_reference_has_every_group_and_command(hooks: ModuleType) -> None:
    folders = {file.parent.name for file in (ROOT / "conf").glob("*/*.yaml")}
    assert set(hooks.groups()) == folders
    made = hooks._configuration("")
    for file in (ROOT / "conf").glob("*/*.yaml"):
        assert f'"conf/{file.parent.name}/{file.name}"' in made
    page = (DOCS / "commands.md").read_text()
    assert "<!-- commands -->" in page and "<!-- configuration -->" in page


def test_the_errors_are_those_of_the_table_of_mistakes(hooks: ModuleType) -> None:
    """So every message on the page is one that the package raises: `tests/test_bad_input.py` makes each mistake."""
    sections = {mistake.section: list[list[str]]() for mistake in MISTAKES}
    for mistake in MISTAKES:
        sections[mistake.section].append([mistake.what, mistake.says, mistake.remedy])
    assert hooks.mistakes() == sections
    page = (DOCS / "errors.md").read_text()
    assert "<!-- mistakes -->" in page
    explained = re.findall(r"^- `([^`]+)`", page, flags=re.MULTILINE)
    assert explained and set(explained) <= {mistake.says for mistake in MISTAKES}


@pytest.mark.parametrize(
    ("page", "text", "wanted"),
    [
        (
            "a.md",
            "[x](../Makefile) ![y](../examples/z.png)",
            "[x]({r}/blob/main/Makefile) ![y]({r}/raw/main/examples/z.png)",
        ),
        ("b/a.md", "[x](../../conf) [y](../lora.md#a)", "[x]({r}/tree/main/conf) [y](../lora.md#a)"),
        ("a.md", "`[x](../Makefile)` [y](https://x.y)", "`[x](../Makefile)` [y](https://x.y)"),
        ("compatibility.md", "| a | works; b | c |", '| a | <span class="state works">✓</span> works; b | c |'),
        ("compatibility.md", "| `tests/a.py::test_b` |", "| [<code>test_<wbr>b</code>]({r}/blob/main/tests/a.py) |"),
        ("lora.md", "| a | works | `tests/a.py::test_b` |", "| a | works | `tests/a.py::test_b` |"),
    ],
)
def test_what_the_site_changes(hooks: ModuleType, page: str, text: str, wanted: str) -> None:
    file = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    shown = hooks.on_page_markdown(text, page=file, config=None, files=None)
    assert shown == wanted.format(r=hooks.PROJECT["urls"]["Repository"])


# -- the build ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_build_is_strict(tmp_path: Path) -> None:
    """A broken link, a broken anchor, a page without a place and a public name without a docstring fail it."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    for folder in ("docs", "conf", "lightning_roundpipe"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "mistakes", tmp_path / "tests" / "mistakes")
    for file in ("mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    page = tmp_path / "docs" / "lora.md"
    page.write_text(page.read_text() + "\n[a](nothing.md) [b](data.md#nowhere)\n")
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    home = tmp_path / "lightning_roundpipe" / "tasks" / "__init__.py"
    home.write_text(home.read_text().replace('["CausalLM"]', '["CausalLM", "lost"]') + "\n\ndef lost() -> None: ...\n")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0, done.stderr
    for fault in ("'nothing.md'", "'data.md#nowhere'", "lost.md", "lightning_roundpipe.tasks.lost"):
        assert fault in done.stderr, done.stderr


# -- a browser ---------------------------------------------------------------------------------------------------------

SCREENS = {"desktop, light": (1280, 900, "light"), "desktop, dark": (1280, 900, "dark"), "phone": (390, 844, "dark")}
SCHEMES = {"light": "default", "dark": "slate"}
SEARCHES = {
    "staleness": "/optimizer/",
    "watchdog_timeout": "/reference/",
    "QLoRA": "/quantization/",
    "roundpipe-export": "/export/",
    "microbatch": "/batches/",
}
"""Words, and a page that is among those that the search finds for each."""

MISSING_PICTURES = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
LINKS = "[...document.querySelectorAll('a[href]')].map(a => a.href)"
WIDER_THAN_THE_SCREEN = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
SCHEME = "document.body.dataset.mdColorScheme"
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("screen", SCREENS)
def test_a_browser_finds_no_fault(site: Path, screen: str, tmp_path: Path) -> None:
    """Pictures are there, links lead somewhere, nothing is fetched from elsewhere, and no page is too wide."""
    pages = sorted(str(page.parent.relative_to(site)) for page in site.rglob("index.html"))
    assert len(pages) == len(PAGES)
    with served(site) as address, chromium(tmp_path) as browser:
        browser.screen(*SCREENS[screen])
        targets: dict[str, str] = {}
        anchors: dict[str, set[str]] = {}
        for page in pages:
            here = address if page == "." else f"{address}{page}/"
            browser.open(here)
            browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            browser.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
            browser.wait_for("[...document.images].every(i => i.complete)")
            assert browser.evaluate(MISSING_PICTURES) == [], page
            assert not browser.evaluate(WIDER_THAN_THE_SCREEN), f"{page} is wider than the screen"
            assert browser.evaluate(SCHEME) == SCHEMES[SCREENS[screen][2]]
            targets |= {link: page for link in browser.evaluate(LINKS) if link.startswith(address)}
            anchors[here] = set(browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)"))
            assert not browser.faults, f"{page}: {browser.faults}"
        for link, page in targets.items():
            there, _, anchor = link.partition("#")
            assert there in anchors or (site / there.removeprefix(address)).is_file(), f"{page} links to {link}"
            assert not anchor or anchor in anchors[there], f"{page} links to {link}, which has no such place"


@pytest.mark.slow
def test_the_site_follows_the_system(site: Path, tmp_path: Path) -> None:
    """A visit by day leaves a setting in the browser, which kept the site light in the evening."""
    with served(site) as address, chromium(tmp_path) as browser:
        for scheme in ("light", "dark", "light"):
            browser.screen(1280, 900, scheme)
            browser.open(address)
            browser.wait_for(f"{SCHEME} == '{SCHEMES[scheme]}'")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_search_finds_words(site: Path, tmp_path: Path) -> None:
    with served(site) as address, chromium(tmp_path) as browser:
        browser.screen(*SCREENS["desktop, light"])
        for word, page in SEARCHES.items():
            browser.open(address)
            browser.evaluate("document.querySelector('.md-search__input').focus()")
            browser.call("Input.insertText", text=word)
            browser.wait_for(f"{FOUND}.length > 0")
            found = browser.evaluate(FOUND)
            assert any(page in link for link in found), f"{word}: {found}"
        browser.open(address)
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text="xylophone")
        browser.wait_for("/No matching/.test(document.querySelector('.md-search-result__meta').textContent)")
        assert not browser.faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<script>console.error('x')</script>", "console"),
        ("<script>undefinedName</script>", "exception"),
        ("<img src=missing.png>", "404"),
        ("<img src=http://example.invalid/a.png>", "leaves the machine"),
    ],
)
def test_faults_are_seen(body: str, fault: str, tmp_path: Path) -> None:
    """Else a browser that hears nothing would find no fault."""
    (tmp_path / "index.html").write_text(f"<!doctype html><link rel=icon href=data:,><p>text</p>{body}")
    with served(tmp_path) as address, chromium(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.readyState == 'complete'")
        assert any(fault in found for found in browser.faults), browser.faults
