"""What a user can get wrong: an error that names the setting and the remedy, before any training.

The table is in ``tests/mistakes``; the page of ``docs/errors.md`` shows it to users.
"""

import re
from itertools import groupby

import harness
import pytest
from harness import ours
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from mistakes import MISTAKES, CommandError, User

from lightning_roundpipe.config import RoundPipeError


@pytest.fixture
def user(tmp_path, monkeypatch, capfd):
    return User(tmp_path, monkeypatch, capfd)


def _cases():
    for mistake in MISTAKES:
        name = re.sub(r"\W+", "-", mistake.what).strip("-")
        for number, way in enumerate(mistake.ways):
            yield pytest.param(mistake, way, id=name + (f"-{number}" if number else ""))


def _pattern(text):
    return ".*".join(re.escape(part) for part in text.split("…"))


@pytest.mark.parametrize(("mistake", "way"), [*_cases()])
def test_refused_by_name(mistake, way, user):
    """The message begins as the page says and goes on to the remedy; nothing was trained, and no thread is left."""
    with pytest.raises(
        (ValueError, TypeError, OSError, ImportError, MisconfigurationException, RoundPipeError, CommandError)
    ) as caught:
        way(user)
    said = " ".join(str(caught.value).split())
    assert re.match(f"{_pattern(mistake.says)}.*{_pattern(mistake.remedy)}", said), said
    assert user.finished == mistake.finished
    assert user.is_untouched() or mistake.finished
    assert harness.roundpipe_threads() == []


def test_the_rows_are_different():
    """Each section once, no row twice, and nothing that would break a table."""
    assert len({m.section for m in MISTAKES}) == len([s for s, _ in groupby(MISTAKES, lambda m: m.section)])
    assert len({m.what for m in MISTAKES}) == len(MISTAKES)
    assert not [m for m in MISTAKES if "|" in m.what + m.says + m.remedy or "`" in m.says or not m.ways]


# ------------------------------------------------------------------------------- what looks like a mistake and is none


def test_what_lightning_refuses_is_one_line_as_well(user):
    with pytest.raises(CommandError, match=r"^roundpipe-train: .*devices=.?0"):
        user.command("trainer.devices=0")


def test_a_plan_is_refused_when_the_strategy_is_made():
    """As far as it can be seen without the trace: not after a first batch that may have taken minutes."""
    with pytest.raises(ValueError, match=r"^plan: the forward pass"):
        ours(plan="forward 0-1; fused 3-5; backward 0-2; round 2")
