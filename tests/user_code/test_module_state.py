"""What one view finds of what others have set on modules."""

from torch import nn

from lightning_roundpipe.user_code.module_state import AttributeView, SharedAttributes, observed_writes


def _set(view, module, value):
    view.enter()
    module.seen = value
    view.exit()


def test_values_that_no_view_finds_any_more_are_dropped():
    """An evaluation of many batches keeps one value of an attribute for each batch that is in flight."""
    module = nn.Module()
    shared = SharedAttributes(module)
    with observed_writes():
        views = [AttributeView(shared) for _ in range(9)]
        for number, view in enumerate(views):
            _set(view, module, number)
            if number >= 3:
                views[number - 3].end()
    place = id(module), "seen"
    assert len(shared._latest[place]) <= 4
    last = shared.latest(place)
    assert last is not None
    assert last.value == 8
