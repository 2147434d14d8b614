"""The engine without one of its lines: is there a test that notices?"""

import functools
import importlib
import inspect
import textwrap


def take_out(patch, where, line):
    """Compile ``where`` (such as ``engine.worker:Worker.open``) anew without ``line``.

    Raises:
        AssertionError: if the line is not there, or there twice.
    """
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"lightning_roundpipe.{module_name}")
    owner = functools.reduce(getattr, path.split(".")[:-1], module)
    name = path.split(".")[-1]
    lines = textwrap.dedent(inspect.getsource(getattr(owner, name))).splitlines()
    found = [i for i, text in enumerate(lines) if text.strip() == line]
    assert len(found) == 1, f"{where} has {len(found)} lines {line!r}"
    indent = lines[found[0]][: -len(lines[found[0]].lstrip())]
    lines[found[0]] = indent + "pass"
    made = {}
    code = compile("from __future__ import annotations\n" + "\n".join(lines), f"<{where} without {line}>", "exec")
    exec(code, vars(module), made)
    patch.setattr(owner, name, made[name])
