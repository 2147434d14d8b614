"""Which arguments of a layer are copied, so that it may write to them: those that are no more than their attributes."""

import enum
import logging
import math
import random
from collections import UserDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Normal

from lightning_roundpipe.engine.arguments import Arguments, is_box


class Cache:
    def __init__(self):
        self.keys = [torch.zeros(2)]


class Slotted:
    """Its attributes are not all in its ``__dict__``."""

    __slots__ = ("__dict__", "value")


class Colour(enum.Enum):
    RED = 1


class Pickled(Cache):
    def __reduce__(self):
        return Pickled, ()


COPIED = [[], {}, set(), deque(), Cache(), SimpleNamespace(), UserDict(), Normal(0.0, 1.0), Pickled()]
AS_THEY_ARE = [
    logging.getLogger("roundpipe"), Colour.RED, random.Random(0), torch.Generator(), ValueError("no"), math, len, Cache,
    torch.nn.Linear(1, 1), Slotted(), "text", 1.0,
]  # fmt: skip


@pytest.mark.parametrize("value", COPIED, ids=lambda value: type(value).__name__)
def test_objects_that_are_their_attributes_are_copied(value):
    arguments = Arguments((value,), {}, {})
    [copied] = arguments.build(arguments.tensors).args
    assert is_box(value) and copied is not value and type(copied) is type(value)


@pytest.mark.parametrize("value", AS_THEY_ARE, ids=lambda value: type(value).__name__)
def test_all_other_objects_go_in_as_they_are(value):
    [same] = Arguments((value,), {}, {}).build([]).args
    assert same is value
