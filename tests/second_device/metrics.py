"""Every metric of torchmetrics that can be made and fed offline, with what feeds it."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

PACKAGES = (
    "aggregation", "audio", "classification", "clustering", "detection", "image", "nominal", "regression", "retrieval",
    "segmentation", "shape", "text", "wrappers",
)  # fmt: skip
N = 24
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_classes": 3},
    {"num_labels": 3},
    {"task": "binary"},
    {"num_outputs": 3},
    {"fs": 8000},
    {"fs": 8000, "mode": "nb"},
    {"num_classes": 3, "input_format": "index"},
    {"beta": 2.0},
    {"beta": 2.0, "num_classes": 3},
    {"beta": 2.0, "num_labels": 3},
    {"min_recall": 0.5},
    {"min_recall": 0.5, "num_classes": 3},
    {"min_recall": 0.5, "num_labels": 3},
    {"min_precision": 0.5},
    {"min_precision": 0.5, "num_classes": 3},
    {"min_precision": 0.5, "num_labels": 3},
    {"min_sensitivity": 0.5},
    {"min_sensitivity": 0.5, "num_classes": 3},
    {"min_sensitivity": 0.5, "num_labels": 3},
    {"min_specificity": 0.5},
    {"min_specificity": 0.5, "num_classes": 3},
    {"min_specificity": 0.5, "num_labels": 3},
    {"num_groups": 2},
    {"p": 2.0},
    {"weights": (0.5, 0.5)},
    {"ratio": 4},
    {"things": {0, 1}, "stuffs": {2}},
    {"metric_func": lambda a, b: (a - b).abs().mean(-1)},
)
"""Tried in this order; the first that works is taken."""


def _ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


_FEEDS: tuple[Callable[[], tuple[Any, ...]], ...] = (
    lambda: (torch.rand(N), _ints(2, N)),
    lambda: (torch.rand(N, 3).softmax(-1), _ints(3, N)),
    lambda: (torch.rand(N, 3), _ints(2, N, 3)),
    lambda: (torch.rand(N), torch.rand(N)),
    lambda: (torch.rand(N, 3), torch.rand(N, 3)),
    lambda: (torch.rand(N),),
    lambda: (_ints(3, N), _ints(3, N)),
    lambda: (torch.rand(N, 3), _ints(3, N)),
    lambda: (torch.rand(N), _ints(2, N), torch.arange(N) // 6),
    lambda: (torch.rand(N), _ints(2, N), _ints(2, N)),
    lambda: (torch.rand(2, 3, 48, 48), torch.rand(2, 3, 48, 48)),
    lambda: (torch.rand(2, 3, 48, 48), {"ms": torch.rand(2, 3, 12, 12), "pan": torch.rand(2, 3, 48, 48)}),
    lambda: (torch.rand(2, 3, 48, 48),),
    lambda: (_ints(2, 2, 3, 8, 8), _ints(2, 2, 3, 8, 8)),
    lambda: (_ints(3, 2, 8, 8), _ints(3, 2, 8, 8)),
    lambda: (_ints(2, 2, 8, 8, 2), _ints(2, 2, 8, 8, 2)),
    lambda: (torch.randn(2, 400), torch.randn(2, 400)),
    lambda: (torch.randn(2, 2, 400), torch.randn(2, 2, 400)),
    lambda: (torch.randn(2, 2, 2, 400), torch.randn(2, 2, 2, 400)),
    lambda: (torch.rand(2, 8, 5), _ints(5, 2, 8)),
    lambda: (torch.rand(4, 10, 3), torch.rand(4, 10, 3)),
    lambda: (_boxes(scores=True), _boxes(scores=False)),
    lambda: (["the cat sat", "a dog"], ["the cat sat down", "the dog"]),
    lambda: (["the cat sat", "a dog"], [["the cat sat down"], ["the dog"]]),
)


def _boxes(*, scores: bool) -> list[dict[str, Tensor]]:
    found = {"boxes": torch.tensor([[1.0, 2, 9, 9], [3, 3, 20, 20]]), "labels": torch.tensor([0, 1])}
    return [found | ({"scores": torch.rand(2)} if scores else {})]


_NEED_WEIGHTS = {
    "ARNIQA", "BERTScore", "CLIPImageQualityAssessment", "CLIPScore", "DeepImageStructureAndTextureSimilarity",
    "DeepNoiseSuppressionMeanOpinionScore", "FrechetInceptionDistance", "InceptionScore", "InfoLM",
    "KernelInceptionDistance", "LearnedPerceptualImagePatchSimilarity", "MemorizationInformedFrechetInceptionDistance",
    "NonIntrusiveSpeechQualityAssessment", "PerceptualPathLength",
}  # fmt: skip
"""Of models that would have to be downloaded."""


def classes() -> Iterator[type[Metric]]:
    """All of torchmetrics', each once; abstract ones, and those that wrap others, are tried and found unusable."""
    seen = set()
    for package in PACKAGES:
        if importlib.util.find_spec(f"torchmetrics.{package}") is None:  # of newer versions
            continue
        module = importlib.import_module(f"torchmetrics.{package}")
        for name in sorted(getattr(module, "__all__", None) or vars(module)):
            found = getattr(module, name)
            if not (inspect.isclass(found) and issubclass(found, Metric)) or name in _NEED_WEIGHTS or name[0] == "_":
                continue
            if found not in seen:
                seen.add(found)
                yield found


Case = tuple[dict[str, Any], int]


def updated(kind: type[Metric], case: Case, put: Callable[[Any], Any], metric: Metric | None = None) -> Metric:
    """A metric that was fed twice; ``put`` brings the first argument, what a model predicts, to a device."""
    options, feed = case
    torch.manual_seed(0)
    if metric is None:
        metric = kind(**options)
    for _ in range(2):
        first, *rest = _FEEDS[feed]()
        metric.update(put(first), *rest)
    return metric


@functools.cache
def case_of(kind: type[Metric]) -> Case | None:
    """The first options and inputs with which the CPU gives a result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in _OPTIONS:
            try:
                kind(**options)
            except Exception:
                continue
            for feed in range(len(_FEEDS)):
                try:
                    updated(kind, (options, feed), lambda value: value).compute()
                except Exception:
                    continue
                return options, feed
    return None
