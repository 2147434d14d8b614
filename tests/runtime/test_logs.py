"""What microbatches log, said once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_roundpipe.runtime.batch.logs import LogRecorder, gathered, issue, shadowed_log


class Module(nn.Module):
    """Takes what is logged in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self.said.append((name, value, kwargs))


def said(values: list[Any], weights: list[float], **kwargs: Any) -> Any:
    """What is said of one name that every microbatch logs."""
    recorders = [LogRecorder() for _ in values]
    for recorder, value in zip(recorders, values, strict=True):
        recorder.log("x", value, **kwargs)
    module = Module()
    issue(module, gathered(recorders), [2] * len(values), weights)
    [(name, value, _)] = module.said
    assert name == "x"
    return value


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mean", 3.5), ("sum", 6.0), ("min", 2.0), ("max", 4.0), (torch.max, 4.0), (torch.mean, 3.5)],
)
def test_values_are_merged_by_their_reduction(reduction: Any, expected: float) -> None:
    assert float(said([2.0, torch.tensor(4.0)], [1, 3], reduce_fx=reduction)) == expected


def test_one_microbatch_says_what_it_said() -> None:
    value = object()
    assert said([value], [1.0]) is value


def test_dicts_are_merged_by_entry() -> None:
    merged = said([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}], [1, 1])
    assert {key: float(value) for key, value in merged.items()} == {"a": 2.0, "b": 3.0}


def test_a_microbatch_without_weight_does_not_count() -> None:
    """Its loss is a mean over nothing, which is NaN."""
    assert float(said([float("nan"), 2.0], [0, 1])) == 2.0


def test_what_is_logged_is_kept_as_it_was() -> None:
    recorder, value = LogRecorder(), torch.ones((), requires_grad=True) * 2
    recorder.log("x", value)
    with torch.no_grad():
        value.zero_()
    kept: Tensor = recorder.calls[0][1]
    assert float(kept) == 2.0 and not kept.requires_grad


class Busy:
    """A device that takes its time: nothing is copied before the host waits."""

    torch_device = torch.device("meta")

    def __init__(self) -> None:
        self.compute = self.activations_down = self
        self.waited = 0
        self.hosts: list[Tensor] = []

    def host_like(self, t: Tensor) -> Tensor:
        return torch.full(t.shape, -1.0)

    def running(self) -> Any:
        return contextlib.nullcontext()

    def record(self) -> Any:
        return self

    def copy(self, host: Tensor, tensor: Tensor) -> None:
        assert tensor.device.type == "meta"
        self.hosts.append(host)

    def wait(self, event: object = None) -> None:
        if event is None:
            self.waited += 1
            for host in self.hosts:
                host.fill_(7.0)


def test_a_value_on_a_device_is_waited_for_when_logs_are_issued() -> None:
    """Within training_step, the microbatch would wait with the user-code lock in its hands."""
    device: Any = Busy()
    recorder, module = LogRecorder([device]), Module()
    recorder.log("x", torch.ones((), device="meta"))
    recorder.log("both", {"a": torch.ones((), device="meta"), "b": 2.0})
    assert not device.waited
    issue(module, gathered([recorder]), [1], [1.0])
    assert device.waited == 2
    (_, x, _), (_, both, _) = module.said
    assert float(x) == 7.0 and {key: float(value) for key, value in both.items()} == {"a": 7.0, "b": 2.0}


def test_batch_sizes_add_up() -> None:
    """What is logged without one is left to Lightning, which looks at the batch as ever, whoever has logged it."""
    recorders = [LogRecorder(), LogRecorder()]
    for recorder, size in zip(recorders, (3, 4), strict=True):
        recorder.log("given", 1.0, batch_size=size)
        recorder.log("unknown", 1.0)
    recorders[1].log("once", 1.0)
    module = Module()
    issue(module, gathered(recorders), [5, 6], [1, 1])
    expected = {"given": 7, "unknown": None, "once": None}
    assert {name: kwargs.get("batch_size") for name, _, kwargs in module.said} == expected


def test_a_name_that_is_logged_twice_is_said_twice() -> None:
    recorders = [LogRecorder(), LogRecorder()]
    for recorder in recorders:
        recorder.log("x", 1.0)
        recorder.log("x", 5.0)
    module = Module()
    issue(module, gathered(recorders), [1, 1], [1, 1])
    assert [float(value) for _, value, _ in module.said] == [1.0, 5.0]


def test_a_metric_is_said_as_it_is_with_the_step_value_of_all() -> None:
    """That of all samples, not the mean of the microbatches' values."""
    module, recorders = Module(), [LogRecorder(), LogRecorder()]
    module.metric = metric = MeanMetric()
    now = iter(recorders)
    with shadowed_log(module, lambda: next(now), several=True):
        for values in ([1.0, 2.0, 3.0], [10.0]):
            metric(torch.tensor(values))
            module.log("m", metric)
    issue(module, gathered(recorders), [3, 1], [1, 1])
    assert module.said[0][1] is metric and float(metric._forward_cache) == 4.0
    assert float(metric.compute()) == 4.0


def test_log_is_shadowed_for_the_time_of_a_step() -> None:
    module, recorder = Module(), LogRecorder()
    with shadowed_log(module, lambda: recorder, several=False):
        module.log("x", 1.0, True, False)  # type: ignore[call-arg]
    module.log("y", 2.0)
    assert recorder.calls == [("x", 1.0, {"prog_bar": True, "logger": False})]
    assert module.said == [("y", 2.0, {})]
