"""Metrics whose state is on the host, fed with predictions of the device and targets of the host."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_roundpipe.user_code.host_metrics import HostMetrics
from second_device import metrics
from second_device.user_code import mode, there

CLASSES = {kind.__name__: kind for kind in metrics.classes()}
SOME = [
    "MeanMetric",
    "SumMetric",
    "CatMetric",
    "MulticlassAccuracy",
    "MulticlassF1Score",
    "BinaryAUROC",
    "MeanSquaredError",
    "PearsonCorrCoef",
    "Perplexity",
    "RetrievalMAP",
    "MulticlassConfusionMatrix",
    "BLEUScore",
]


def _compare(name: str) -> None:
    kind: type[Metric] = CLASSES[name]
    case = metrics.case_of(kind)
    if case is None:
        pytest.skip("cannot be made or fed so")
    expected = metrics.updated(kind, case, lambda value: value).compute()
    metric = kind(**case[0])
    try:
        with mode():
            metrics.updated(kind, case, there, metric)
            result: Any = metric.compute()
    except NotImplementedError as error:
        if "Sparse" in str(error):
            pytest.skip("the device type has no sparse tensors")
        raise
    result = tree_map_only(torch.Tensor, lambda t: t.cpu(), result)
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("name", SOME)
def test_some_metrics(name: str) -> None:
    _compare(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CLASSES.keys() - set(SOME)))
def test_every_metric(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare(name)


@pytest.mark.slow
def test_there_are_many_metrics() -> None:
    assert sum(metrics.case_of(kind) is not None for kind in CLASSES.values()) >= 170


KEEPING = ["BinaryAUROC", "RetrievalMAP", "SpearmanCorrCoef"]
"""Some of those that keep all that they are given, here predictions of the device beside targets of the host."""


def _compare_outside(name: str) -> None:
    kind = CLASSES[name]
    case = metrics.case_of(kind)
    if case is None:
        pytest.skip("cannot be made or fed so")
    metric = kind(**case[0])
    gathered = HostMetrics(metric)
    try:
        with mode():
            metrics.updated(kind, case, there, metric)
    except NotImplementedError as error:
        if "Sparse" in str(error):
            pytest.skip("the device type has no sparse tensors")
        raise
    gathered.bring_to_host()
    expected = metrics.updated(kind, case, lambda value: value).compute()
    result: Any = metric.compute()
    result = tree_map_only(torch.Tensor, lambda t: t.cpu(), result)
    torch.testing.assert_close(result, expected, equal_nan=True)
    gathered.end()
    assert not metric.compute_on_cpu


@pytest.mark.parametrize("name", ["MulticlassF1Score", "CatMetric", "R2Score", *KEEPING])
def test_values_at_the_end_of_an_epoch(name: str) -> None:
    """Lightning asks for them outside the mode."""
    _compare_outside(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_value_at_the_end_of_an_epoch(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare_outside(name)
