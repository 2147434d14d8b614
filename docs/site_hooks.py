"""What pages generate: tables from the code, and what MkDocs changes while it builds the site.

The pages in docs/ are read in two places, the site and the repository's web view. So generated parts are in the pages,
between two comments. Nothing between them is written by hand: run this file after a change, which a test asks for::

    <!-- options -->            every option of RoundPipeStrategy
    <!-- configuration -->      every group of conf/ and its choices
    <!-- commands -->           every console command with its help
    <!-- mistakes -->           what the strategy refuses in modules and the Trainer, from tests/mistakes
    <!-- end of options -->     and so on

Only on the site, ``<!-- api: lightning_roundpipe.callbacks -->`` stands for the documentation of every name in that
package's ``__all__``, or of one name. Links to files outside docs/ lead to the repository. A public name without
documentation is a warning, and MkDocs makes every warning an error. Nothing here imports the package: the code is read
by griffe, as mkdocstrings reads it.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STRATEGY = "lightning_roundpipe.strategy.RoundPipeStrategy"

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```\s*?$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
_API = re.compile(r"^<!-- api: (\S+) -->$", flags=re.MULTILINE)
_PART = re.compile(r"^<!-- (\w+) -->\n.*?^<!-- end of \1 -->$", flags=re.MULTILINE | re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.site")


# -- what MkDocs calls -------------------------------------------------------------------------------------------------


def on_pre_build(config: Any) -> None:
    """Warn of public names without documentation, which fails a strict build."""
    for name in undocumented():
        _log.warning("%s is public and has no docstring, or no place in docs/reference.md", name)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fill in the documentation of names, and lead links that leave docs/ to the repository."""
    source = Path(page.file.src_uri)
    markdown = _FENCE.sub(lambda match: match[0].replace("](", "]\0("), markdown)
    markdown = _LINK.sub(functools.partial(_absolute, DOCS / source.parent), markdown).replace("]\0(", "](")
    if source.parts[0].startswith("compatibility"):
        markdown = re.sub(r"^(\|[^|\n]+\|) (works|refused)", _marked, markdown, flags=re.MULTILINE)
        markdown = re.sub(r"`(tests/[\w/]+\.py)::(\w+)`", _shown_by, markdown)
    return _API.sub(lambda match: _api(match[1]), markdown)


def _absolute(folder: Path, link: re.Match[str]) -> str:
    target = (folder / link["target"].partition("#")[0]).resolve()
    if target.is_relative_to(DOCS) and target.suffix != ".py":
        return link[0]
    kind = "raw" if link["image"] else "tree" if target.is_dir() else "blob"
    repository = PROJECT["urls"]["Repository"]
    return f"{link['image']}[{link['text']}]({repository}/{kind}/main/{target.relative_to(ROOT)})"


def _marked(row: re.Match[str]) -> str:
    sign = {"works": "✓", "refused": "✗"}[row[2]]
    return f'{row[1]} <span class="state {row[2]}">{sign}</span> {row[2]}'


def _shown_by(test: re.Match[str]) -> str:
    name = test[2].replace("_", "_<wbr>")  # a narrow column breaks it there
    return f"[<code>{name}</code>]({PROJECT['urls']['Repository']}/blob/main/{test[1]})"


# -- the code ----------------------------------------------------------------------------------------------------------


@functools.cache
def package() -> Any:
    """The package as griffe reads it."""
    return griffe.load("lightning_roundpipe", search_paths=[str(ROOT)])


def public_modules() -> dict[str, list[str]]:
    """The packages that have ``__all__``, and the names in it."""

    def below(module: Any) -> Iterator[Any]:
        if module.is_init_module:
            yield module
            for inner in module.modules.values():
                yield from below(inner)

    exporting = [module for module in below(package()) if module.exports]
    return {module.path: [str(name) for name in module.exports if str(name) != "__version__"] for module in exporting}


def documented() -> set[str]:
    """The public names that docs/reference.md has, as it asks for them."""
    asked = _API.findall((DOCS / "reference.md").read_text())
    return {name for what in asked for name in _names(what)}


def undocumented() -> list[str]:
    """Public names, and public methods of public classes, without a docstring or a place in the reference."""
    found, shown = [], documented()
    for module, names in public_modules().items():
        for name in names:
            path = f"{module}.{name}"
            value = package()[path.partition(".")[2]]
            value = value.final_target if value.is_alias else value
            found += [path] if path not in shown or not value.docstring else []
            methods = value.functions.items() if value.is_class else ()
            found += [f"{path}.{method}" for method, function in methods if _needs_a_docstring(method, function)]
    return found


def _needs_a_docstring(name: str, function: Any) -> bool:
    """Overrides have the documentation of what they override."""
    overrides = any(str(decorator.value) == "override" for decorator in function.decorators)
    return not (name.startswith("_") or overrides or function.is_alias or function.docstring)


def _names(what: str) -> list[str]:
    return [f"{what}.{name}" for name in public_modules()[what]] if what in public_modules() else [what]


# -- what pages ask for ------------------------------------------------------------------------------------------------


def _api(what: str) -> str:
    return "\n\n".join(f"::: {name}" for name in _names(what))


def options() -> dict[str, tuple[str, str, str]]:
    """Every option of the strategy: its type, its default and its description."""
    strategy = package()[STRATEGY.partition(".")[2]]
    sections = strategy.docstring.parse("google", warnings=False)
    [described] = [section.value for section in sections if section.kind.value == "parameters"]
    meanings = {one.name: " ".join(one.description.split()) for one in described}
    # The keyword-only ones are Lightning's own, and it fills them in itself.
    own = [one for one in strategy["__init__"].parameters if one.kind.value == "positional or keyword"]
    return {one.name: (str(one.annotation), str(one.default), meanings[one.name]) for one in own if one.name != "self"}


EXPLAINED = {
    "batches.md#cutting-a-batch": ("num_microbatches", "microbatch_size", "loss_weight"),
    "batches.md#evaluation": ("evaluation_batches",),
    "batches.md#state-and-random-numbers": ("overlap",),
    "layers.md#layers-and-plans": ("layers", "plan", "stage_seconds"),
    "how-it-works.md#stages-go-to-the-gpus-not-the-other-way-round": ("round_microbatches",),
    "optimizer.md#one-step-late": ("staleness",),
    "optimizer.md#weights-in-4-bytes-moments-in-2-or-1": ("optimizer_state",),
    "optimizer.md#on-the-workers-devices": ("optimizer_device",),
    "planning.md#carried-products": ("carry_products",),
    "debugging.md#when-it-fails": ("watchdog_timeout",),
    "gpu.md#what-the-settings-do-on-a-gpu": ("memory_budget", "prefetch"),
    "layers.md#weights-in-files": ("pin_memory",),
    "layers.md#compiled-layers": ("compile_layers",),
    "precision.md#gradients-on-their-way-to-the-host": ("reduce_dtype",),
    "long-sequences.md#tiles-of-tokens": ("token_tiles",),
    "several-machines.md": ("machine_timeout", "shard_optimizer", "network_dtype"),
    "index.md#without-a-gpu": ("emulation",),
}
"""The places that explain options."""


def _options() -> str:
    places = {name: place for place, names in EXPLAINED.items() for name in names}
    return "\n\n".join(
        f"### `{name}`\n\n`{kind}`, default `{default}`\n\n{_sentence(meaning)} [More]({places[name]})"
        for name, (kind, default, meaning) in options().items()
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] if text[0].isalpha() else text


def groups() -> dict[str, str]:
    """Every configuration group, in the order of ``roundpipe-train --help``, and what it is for."""
    tree = ast.parse((ROOT / "lightning_roundpipe" / "overrides.py").read_text())
    [named] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "GROUPS"
    ]
    others = sorted(folder.name for folder in (ROOT / "conf").iterdir() if any(folder.glob("*.yaml")))
    return {**named, **{name: "machines that `roundpipe-plan` knows" for name in others if name not in named}}


def _configuration() -> str:
    lines = ["| group | what it is for | choices |", "| --- | --- | --- |"]
    for group, meaning in groups().items():
        files = sorted((ROOT / "conf" / group).glob("*.yaml"))
        choices = ", ".join(f"[`{file.stem}`](../conf/{group}/{file.name})" for file in files)
        lines.append(f"| `{group}` | {meaning} | {choices} |")
    return "\n".join(lines)


def _commands() -> str:
    parts = []
    for name, place in PROJECT["scripts"].items():
        module, _, function = place.partition(":")
        code = f"import sys; sys.argv = ['{name}', '--help']; from {module} import {function}; {function}()"
        environment = {**os.environ, "COLUMNS": "80"}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} --help failed:\n{done.stderr}")
        text = re.sub(r"(?ms)^groups and their choices:$.*?(?=^settings:)", "groups: below\n\n", done.stdout)
        text = re.sub(r"(?s) Examples:\n.*", "", text)  # other pages have them
        parts.append(f"## `{name}`\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(parts)


def mistakes() -> dict[str, list[list[str]]]:
    """The rows of each section of ``tests/mistakes``: what is wrong, how the message begins, what to do."""
    folder = ROOT / "tests" / "mistakes"
    tree = ast.parse((folder / "__init__.py").read_text())
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {name.name: str(node.module).rpartition(".")[2] for node in imported for name in node.names}
    [listed] = [node.value for node in tree.body if isinstance(node, ast.AnnAssign)]
    found: dict[str, list[list[str]]] = {}
    for part in ast.walk(listed):
        if isinstance(part, ast.Starred):
            section, rows = _section(folder / f"{homes[part.value.id]}.py", part.value.id)
            found.setdefault(section, []).extend(rows)
    return found


def _section(file: Path, name: str) -> tuple[str, list[list[str]]]:
    section = ""
    for node in ast.parse(file.read_text()).body:
        assigned = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(assigned, ast.Name) and assigned.id == "SECTION":
            section = ast.literal_eval(node.value)
        if isinstance(assigned, ast.Name) and assigned.id == name:
            return section, [[ast.literal_eval(text) for text in row.args[1:4]] for row in node.value.elts]
    raise LookupError(f"{file} has no {name}")


_CLEAR = ("Microbatches", "Layers and plans", "Memory", "Other options", "The batch", "Checkpoints")
"""Sections of values of options, batches to be cut, and files: their messages say all there is to say."""


def _mistakes() -> str:
    parts = []
    for section, rows in mistakes().items():
        # Messages of `roundpipe-train` are of files and settings, and name them.
        if section not in _CLEAR and "`roundpipe-train`" not in section:
            parts.append("\n".join([f"## {section}\n", *(f"- {what}" for what, *_ in rows)]))
    return "\n\n".join(parts)


_GENERATED = {"options": _options, "configuration": _configuration, "commands": _commands, "mistakes": _mistakes}


def filled(page: str) -> str:
    """The text of a page with its generated parts made anew."""
    return _PART.sub(lambda part: f"<!-- {part[1]} -->\n\n{_GENERATED[part[1]]()}\n\n<!-- end of {part[1]} -->", page)


if __name__ == "__main__":
    for path in DOCS.glob("*.md"):
        path.write_text(filled(path.read_text()))
