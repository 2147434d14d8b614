"""Pictures of steps: rows, colours, numbers, and how large a picture may become."""

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from reports.test_traces import synthetic

from lightning_roundpipe.reports.pictures import MOST_PIXELS, draw_steps


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: (saved.append(self), save(self, path, **kw)))
    return saved


def texts(figure):
    return [item.get_text() for item in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_steps_lie_below_each_other_on_one_scale(tmp_path, figures):
    """Each is described, and the legend names what occurs."""
    short = synthetic(2, 2, "forward 0; fused 1; backward 0; round 2")
    draw_steps({"short $": short, "long": synthetic()}, tmp_path / "picture.png")
    [figure] = figures
    assert imread(tmp_path / "picture.png").shape[1] == 1920
    tops = [axes.get_position().y1 for axes in figure.axes]
    assert tops == sorted(tops, reverse=True)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    written = texts(figure)
    assert {"short $", "long", "worker 0", "worker 3", "forward", "copies of gradients", "idle", "B1"} <= set(written)
    assert any("2 microbatches on 2 workers, bubble" in text for text in written)
    assert {"0", "1", "2", "3"} <= set(written), "microbatches have their numbers"
    assert any("time (s)" in text for text in written)
    draw_steps(
        {"only forward": short | {"events": [e for e in short["events"] if e["kind"] == "forward"]}},
        tmp_path / "one.png",
    )
    assert "backward" not in texts(figures[-1])


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (60, "forward " + " ".join(map(str, range(59))) + "; fused 59; backward 0-58; round 1"),
        (1, "forward none; fused 0; backward none; round 1"),
    ],
)
def test_a_picture_of_many_workers_or_of_very_little_is_legible(workers, plan, tmp_path):
    draw_steps({"step": synthetic(workers, 1, plan)}, tmp_path / "step.png")
    assert 1000 <= max(imread(tmp_path / "step.png").shape) <= MOST_PIXELS
