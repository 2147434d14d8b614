"""Metrics whose state is on the host, fed with predictions of the device and targets of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, classification, regression, retrieval, text

from lightning_roundpipe.user_code.host_metrics import HostMetrics
from second_device.user_code import mode, there

N = 24
PARTS = torch.arange(N) // 6


def scores(classes: int | None = None) -> Tensor:
    return torch.rand(N) if classes is None else torch.rand(N, classes).softmax(-1)


def labels(classes: int = 2) -> Tensor:
    return torch.randint(0, classes, (N,))


METRICS: dict[str, tuple[Callable[[], Metric], Callable[[], tuple[Any, ...]]]] = {
    "mean": (torchmetrics.MeanMetric, lambda: (scores(),)),
    "cat": (torchmetrics.CatMetric, lambda: (scores(),)),
    "accuracy": (lambda: classification.MulticlassAccuracy(3), lambda: (scores(3), labels(3))),
    "confusion": (lambda: classification.MulticlassConfusionMatrix(3), lambda: (scores(3), labels(3))),
    "ranking": (classification.BinaryAUROC, lambda: (scores(), labels())),
    "correlation": (regression.PearsonCorrCoef, lambda: (scores(), scores())),
    "rank correlation": (regression.SpearmanCorrCoef, lambda: (scores(), scores())),
    "perplexity": (text.Perplexity, lambda: (torch.rand(2, 8, 5), torch.randint(0, 5, (2, 8)))),
    "retrieval": (retrieval.RetrievalMAP, lambda: (scores(), labels(), PARTS)),
    "text": (text.BLEUScore, lambda: (["the cat sat", "a dog"], [["the cat sat down"], ["the dog"]])),
}


def updated(name: str, put: Callable[[Any], Any], metric: Metric | None = None) -> Metric:
    """A metric that was fed twice; ``put`` brings the first argument, what a model predicts, to a device."""
    make, feed = METRICS[name]
    torch.manual_seed(0)
    metric = make() if metric is None else metric
    for _ in range(2):
        first, *rest = feed()
        metric.update(put(first), *rest)
    return metric


@pytest.mark.parametrize("outside", [False, True], ids=["in the step", "at the end of an epoch"])
@pytest.mark.parametrize("name", METRICS)
def test_values_are_those_on_the_cpu(name: str, outside: bool) -> None:
    """At the end of an epoch, Lightning asks for them outside the mode."""
    expected = updated(name, lambda value: value).compute()
    metric = METRICS[name][0]()
    gathered = HostMetrics(metric)
    with mode():
        updated(name, there, metric)
        result: Any = None if outside else metric.compute()
    if outside:
        gathered.bring_to_host()
        result = metric.compute()
        gathered.end()
        assert not metric.compute_on_cpu
    torch.testing.assert_close(tree_map_only(Tensor, lambda t: t.cpu(), result), expected, equal_nan=True)
