"""``self.log`` from several microbatches, issued once.

If each microbatch called Lightning's own ``log``, it would keep the last step value, count sums twice and lose updates
between threads. So ``log`` is shadowed during the step. The recorded values are merged by their reduction and logged
once, on the main thread. Scalars are merged by the weights of the loss, because a step usually logs the loss itself or
another mean over the same targets.

Metric objects accumulate over an epoch and see each microbatch once. For their value of the batch see `BatchValue`, and
for those that count updates `metric_updates`.

User code may read back what it has just logged, in ``trainer.callback_metrics`` and its like. If `training_step` runs
once, nothing has to be merged, and its values are issued at that moment.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.batch.log_sizes import is_unsure, merged_size
from lightning_roundpipe.runtime.batch.losses import Counts
from lightning_roundpipe.runtime.batch.metric_updates import MetricUpdates
from lightning_roundpipe.runtime.batch.microbatches import (
    Addend,
    combined,
    dtype_of_numbers,
    is_number,
    weighted_mean,
)
from lightning_roundpipe.runtime.batch.unmerged import refuse_unmerged


class LogRecorder:
    """What one microbatch logged, in order.

    ``self.log`` runs while the microbatch holds the user-code lock, so it never waits for a device. A value on a device
    starts its download; the step waits for it when it issues its logs.

    Args:
        devices: devices on which logged values may lie.
        counts: what the microbatch has counted, such as its targets.
        observe: called with the frame that logs, and what.

    Attributes:
        calls: names, values and other arguments.
        weights: the count of each value that is a mean itself, else None.
        counts: the argument.
    """

    def __init__(
        self, devices: Sequence[Device] = (), counts: Counts | None = None,
        observe: Callable[[FrameType, str], None] | None = None,
    ) -> None:  # fmt: skip
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.weights: list[float | None] = []
        self.counts = Counts() if counts is None else counts
        self._devices, self._observe = devices, observe

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        if self._observe is not None and not is_returned(kwargs):
            self._observe(sys._getframe(1), log_call(name))
        with torch._C.DisableTorchFunction():  # what copies the value is no operation of training_step
            self.calls.append((name, self._kept(value), kwargs))
        self.weights.append(self.counts.behind(value))

    def see_given(self, value: Any) -> None:
        """Observe that a metric is given ``value``."""

    def take(self) -> LogRecorder:
        """Return a recorder with what was logged so far, and forget it here."""
        taken = self.another()
        taken.calls, self.calls = self.calls, taken.calls
        taken.weights, self.weights = self.weights, taken.weights
        return taken

    def put_back(self, taken: LogRecorder) -> None:
        """Undo a `take`; the last one first."""
        self.calls, self.weights = [*taken.calls, *self.calls], [*taken.weights, *self.weights]

    def another(self) -> LogRecorder:
        """Return an empty recorder for the same devices."""
        return LogRecorder(self._devices, self.counts, self._observe)

    def _kept(self, value: Any) -> Any:
        """Return a copy of ``value``, because user code may write to it later."""
        if isinstance(value, dict):
            return {key: self._kept(item) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        refuse_unmerged([value])
        device = next((d for d in self._devices if d.torch_device == value.device), None)
        if device is None or value.device.type == "cpu":
            return value.detach().cpu().clone()
        return _Download(value, device)


def log_call(name: str) -> str:
    """Return the name under which `NewCode` knows a call that logs ``name``."""
    return f"self.log({name!r})"


class _Download:
    """A copy of a tensor on its way from ``device``, whose compute stream produces the tensor, to the host."""

    def __init__(self, tensor: Tensor, device: Device) -> None:
        with device.compute.running():  # the caller's stream may be another one: a comparison's, after training_step
            tensor = tensor.detach().clone()
        self._host = device.host_like(tensor)
        stream = device.activations_down
        stream.wait(device.compute.record())
        stream.copy(self._host, tensor)
        self._end = stream.record()

    def wait(self) -> Tensor:
        """Wait for the tensor and return it on the host."""
        self._end.wait()
        return self._host.clone()  # in pageable memory, as loggers may keep it


def _arrived(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrived(item) for key, item in value.items()}
    value = value.wait() if isinstance(value, _Download) else value
    return value.squeeze() if isinstance(value, Tensor) and value.numel() == 1 else value  # as Lightning does


@contextlib.contextmanager
def log_as(module: nn.Module, stand_in: Callable[..., None]) -> Iterator[None]:
    """Put ``stand_in`` in place of ``module.log``, whether the class defines it or the module has its own."""
    own = vars(module)
    before = {"log": own["log"]} if "log" in own else {}
    own["log"] = stand_in
    try:
        yield
    finally:
        del own["log"]
        own.update(before)


def _reading(name: str) -> Any:
    """Return a method that calls ``before_read`` and then the next ``name`` in the order of the classes."""

    def method(self: Any, *args: Any) -> Any:
        self.before_read()
        return getattr(super(_WatchedResults, self), name)(*args)

    return method


class _WatchedResults:
    """Mixin of Lightning's collection of logged values during a step.

    Attributes:
        before_read: called before user code reads the collection.
    """

    before_read: Callable[[], None]
    __len__, __iter__, __contains__ = _reading("__len__"), _reading("__iter__"), _reading("__contains__")
    __getitem__, get = _reading("__getitem__"), _reading("get")
    keys, values, items = _reading("keys"), _reading("values"), _reading("items")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle it as the collection that it is outside of a step."""
        own = {name: value for name, value in vars(self).items() if name not in ("log", "before_read")}
        again: Any = copyreg.__newobj__  # type: ignore[attr-defined]
        return again, (type(self).__mro__[2],), own, None, iter(list(self.items()))


@functools.cache
def _watched_class(kind: Any) -> type:
    return type(kind.__name__, (_WatchedResults, kind), {})


class _Watch:
    """Context in which Lightning's collection of logged values is watched. `log_as` replaces ``log`` meanwhile.

    Calls of a ``log`` that was bound before are refused, because they would log values of single microbatches. Before
    the collection is read, ``to_issue`` is called. If it returns something to call, the collection is as usual
    meanwhile. Other threads may read, too: for them it returns None.
    """

    def __init__(self, results: Any, to_issue: Callable[[], Callable[[], None] | None]) -> None:
        self._results, self._kind, self._to_issue = results, type(results), to_issue

    def __enter__(self) -> None:
        results = self._results
        results.log, results.before_read, results.__class__ = _refuse, self._read, _watched_class(self._kind)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        self._results.__class__ = self._kind
        del self._results.log, self._results.before_read

    def _read(self) -> None:
        if (issue_now := self._to_issue()) is None:
            return
        self.__exit__()
        try:
            issue_now()
        finally:
            self.__enter__()


def _refuse(*_: Any, **__: Any) -> None:
    raise RoundPipeError(
        "self.log was called through a reference that was taken before training_step, such as one that was handed "
        "to another module; its values would be those of single microbatches. Call self.log of the LightningModule "
        "in training_step itself."
    )


def _results_of(module: Any) -> Any:
    """Return Lightning's collection of logged values; None outside its loops."""
    trainer = getattr(module, "_trainer", None)
    return None if trainer is None else trainer._results


@contextlib.contextmanager
def undone_logs(module: Any) -> Iterator[None]:
    """For a rehearsal: let Lightning forget afterwards what was logged meanwhile."""
    results = _results_of(module)
    if results is None:
        yield
        return
    connector = module._trainer._logger_connector
    shown = [connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics]
    shown_before = [dict(values) for values in shown]
    fx, own = connector._current_fx, dict(vars(results))
    entries = {key: (entry, _copied(vars(entry))) for key, entry in results.items()}
    try:
        yield
    finally:
        for values, before in zip(shown, shown_before, strict=True):
            values.clear()
            values.update(before)
        results.clear()
        vars(results).update(own)
        connector._current_fx = fx
        for key, (entry, state) in entries.items():
            vars(entry).update(state)
            results[key] = entry


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


@contextlib.contextmanager
def shadowed_log(
    module: Any, current: Any, *, several: bool, to_read: Callable[[], tuple[LogRecorder, int] | None] = lambda: None,
    updates: MetricUpdates | None = None,
) -> Iterator[None]:  # fmt: skip
    """Send ``module.log`` to ``current().log``, the recorder of the calling microbatch.

    Args:
        module: the user's LightningModule.
        current: returns the calling microbatch's recorder.
        several: whether the batch has several microbatches; metrics then get their `BatchValue`.
        to_read: called before what Lightning knows of logged values is read. It returns what is to be issued now, taken
            from the recorder of a whole batch, with the batch's samples; None if there is nothing.
        updates: records the updates of metrics.
    """
    plain_log = module.log

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"log() takes {2 + len(_POSITIONAL)} positional arguments, {2 + len(args)} were given")
        kwargs.update(zip(_POSITIONAL, args, strict=False))
        current().log(name, value, **kwargs)

    def to_issue() -> Callable[[], None] | None:
        found = to_read()
        return None if found is None else functools.partial(issue_now, *found)

    def issue_now(logs: LogRecorder, size: int) -> None:
        with log_as(module, plain_log), torch._C.DisableTorchFunction():
            issue(module, gathered([logs]), [size], [1.0])

    with contextlib.ExitStack() as stack:
        stack.enter_context(log_as(module, log))
        if (results := _results_of(module)) is not None:
            stack.enter_context(_Watch(results, to_issue))
        metrics = dict(_metrics_outside_layers(module)) if several or updates else {}
        if updates is not None:
            stack.enter_context(updates.recorded(metrics, current))
        for metric in metrics.values() if several else ():
            stack.enter_context(BatchValue(metric, updates))
        yield


def _metrics_outside_layers(module: nn.Module, name: str = "") -> Iterator[tuple[str, Metric]]:
    """Yield what calls within user code update, by name. Those in layers are attributes of the layers' replicas."""
    if getattr(vars(module).get("forward"), "runs_on_worker", False):
        return
    if isinstance(module, Metric):
        yield name, module
    for key, inner in module.named_children():
        yield from _metrics_outside_layers(inner, f"{name}.{key}" if name else key)


_POSITIONAL = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip


class HostMetrics:
    """Keeps on the host what the metrics of a module accumulate while its steps run on devices.

    Predictions come from the device on which a microbatch ends, and targets from the host. Lightning computes a metric
    at the end of an epoch, outside the mode that brings them together, and a GPU would hold all of them until then.

    Args:
        module: the module with the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._changed = [m for m in self._metrics if not m.compute_on_cpu]
        for metric in self._changed:
            metric.compute_on_cpu = True  # torchmetrics moves lists to the host after each update

    def bring_to_host(self) -> None:
        """After a step: move tensors that an update has replaced (``self.total = self.total + x``) to the host."""
        for metric in self._metrics:
            for name, value in metric.metric_state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    setattr(metric, name, value.cpu())

    def end(self) -> None:
        """Restore the metrics' settings."""
        for metric in self._changed:
            metric.compute_on_cpu = False


class _UpdateHook:
    """A hook that does nothing in a copy of its module."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: Any) -> _UpdateHook:
        return _UpdateHook(lambda *_: None)


class BatchValue:
    """The value of a metric over all its calls in one step, as if the microbatches were one batch.

    Calling a metric accumulates and returns the value of this call alone, which it also keeps for
    ``log(on_step=True)``. The batch's value does not follow from the microbatches' values, weighted or not: sums,
    extremes, F1. So the inputs of the step's calls are accumulated a second time, apart, and the metric keeps the value
    computed from these.
    """

    def __init__(self, metric: Metric, updates: MetricUpdates | None = None) -> None:
        self._paused = contextlib.nullcontext if updates is None else updates.paused
        self._parts = [part for part in metric.modules() if isinstance(part, Metric)]  # wrappers contain others
        self._metric = metric
        self._apart: list[dict[str, Any]] | None = None

    def __enter__(self) -> None:
        self._hook = self._metric.register_forward_hook(_UpdateHook(self._called), with_kwargs=True)

    def __exit__(self, error: object, *_: object) -> None:
        self._hook.remove()
        called: Any = self._metric._forward_cache
        if self._apart is None or error is not None or called is None:
            return  # a window's call keeps no value, so that plain training logs none of a step
        with self._paused(), self._swapped():
            for part in self._parts:
                part._to_sync = False  # of this machine's batch, as in plain training; epochs are over all machines
            value = self._metric.compute()
        # On the host: the caller's stream reads a state whose memory the devices use again.
        self._metric._forward_cache = tree_map_only(Tensor, lambda tensor: tensor.cpu(), value)

    def _called(self, metric: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with self._paused(), self._swapped():
            self._metric.update(*args, **kwargs)
            self._apart = [dict(vars(part)) for part in self._parts]

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        """Let the metric hold what it has accumulated in this step alone; at first nothing."""
        kept = [dict(vars(part)) for part in self._parts]
        try:
            if self._apart is not None:
                self._load(self._apart)
            else:
                # ``reset`` clears lists in place, and may leave out parts, whose updates then add to tensors in place.
                for part in self._parts:
                    vars(part).update({k: [] for k, v in vars(part).items() if type(v) is list})
                    vars(part).update({k: v.clone() for k, v in vars(part).items() if isinstance(v, Tensor)})
                self._metric.reset()
            yield
        finally:
            self._load(kept)

    def _load(self, state: list[dict[str, Any]]) -> None:
        for part, attributes in zip(self._parts, state, strict=True):
            vars(part).clear()
            vars(part).update(attributes)


Key = tuple[str, int]
"""Name of a logged value, and how many values the microbatch logged under that name before."""


class Saying(NamedTuple):
    """A logged value of one microbatch: microbatch number, value, its own weight if any, other arguments of ``log``."""

    part: int
    value: Any
    weight: float | None
    kwargs: dict[str, Any]


Said = dict[Key, list[Saying]]
"""The microbatches' values by key."""


def gathered(recorders: Sequence[LogRecorder]) -> Said:
    """Collect what the microbatches logged, by key; waits for downloads."""
    merged: Said = {}
    for index, recorder in enumerate(recorders):
        said: dict[str, int] = {}
        for (name, value, kwargs), weight in zip(recorder.calls, recorder.weights, strict=True):
            nth = said[name] = said.get(name, -1) + 1
            merged.setdefault((name, nth), []).append(Saying(index, _arrived(value), weight, kwargs))
    return merged


_RETURNED = "returned "
_IS_RETURNED = {"is_returned": True}
"""Argument that tells a returned number from one that user code logs under such a name."""


def is_returned(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a value with these arguments is one that `log_returned` has recorded."""
    return kwargs == _IS_RETURNED


def log_returned(logs: LogRecorder, output: Any) -> None:
    """Record the numbers that ``training_step`` returns beside the loss as if it logged them: the same rules hold."""
    for key, value in output.items() if isinstance(output, Mapping) else ():
        if key != "loss" and is_returned_number(value):
            logs.log(f"{_RETURNED}{key!r}", value, **_IS_RETURNED)


def is_returned_number(value: Any) -> bool:
    """Return whether `log_returned` records ``value``."""
    is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    return (is_one and value.dtype is not torch.bool) or (
        isinstance(value, (int, float)) and not isinstance(value, bool)
    )


def returned(said: Said, output: Any) -> dict[Any, Key]:
    """Return the keys of ``output`` whose values `log_returned` has recorded, and the keys in ``said``."""
    known = {key: (f"{_RETURNED}{key!r}", 0) for key in output} if isinstance(output, Mapping) else {}
    return {key: name for key, name in known.items() if name in said}


def lost(said: Said, weights: Sequence[float]) -> list[str]:
    """Return names of values that are NaN in some of the microbatches that count, but not in all."""
    found = []
    for (name, _), parts in said.items():
        counting = [p for p in parts if (weights[p.part] if p.weight is None else p.weight)]
        numbers = [p.value for p in counting if isinstance(p.value, (float, Tensor))]
        nans = [bool(torch.as_tensor(value).isnan().any()) for value in numbers]
        if any(nans) and not all(nans):
            found.append(name)
    return found


def issue(
    module: Any, said: Said, sizes: list[int], weights: list[float], losses: Sequence[Tensor] | None = None,
    rules: Mapping[Key, str] | None = None, *, added: Sequence[Addend] | None = None, fixed_sizes: Collection[Key] = (),
    astray: Collection[Key] = (), size_rules: Mapping[Key, Collection[str]] | None = None,
) -> None:  # fmt: skip
    """Call ``module.log`` once per key, on the main thread.

    Args:
        module: the user's LightningModule.
        said: see `gathered`.
        sizes: samples of each microbatch.
        weights: how much each microbatch counts.
        losses: those of the microbatches, if all have one.
        rules: how to merge values that are not merged as `USUAL`, by key; see `RULES`.
        added: the losses, if the loss is their sum.
        fixed_sizes: values whose ``batch_size`` is that of the whole batch in each microbatch, such as a constant. That
            of others is counted by each microbatch.
        astray: values that user code has computed in another way than that of which a rule is known.
        size_rules: the rules of `log_sizes` by which other batch sizes may follow from those of the microbatches.
    """
    numbers = [float(loss) for loss in losses or ()] if said else []
    for (name, nth), parts in said.items():
        kwargs = dict(parts[-1].kwargs)
        if is_returned(kwargs):
            continue
        given: list[Any] = [p.kwargs.get("batch_size") for p in parts]
        if None not in given:
            samples, fitting = [sizes[p.part] for p in parts], (size_rules or {}).get((name, nth), ())
            is_fixed = (name, nth) in fixed_sizes and len(set(given)) == 1
            kwargs["batch_size"] = (
                given[0] if is_fixed else merged_size(given, counts_of(parts, weights), samples, fitting)
            )
        rule = (rules or {}).get((name, nth), USUAL)
        is_known = rule not in (USUAL, OPEN) and (name, nth) not in astray
        merged = merged_as_known(rule, parts, sizes, weights, added, numbers, is_known=is_known)
        module.log(name, merged, **kwargs)


def unsure_sizes(
    said: Said, sizes: Sequence[float], weights: Sequence[float], rules: Mapping[Key, Collection[str]]
) -> list[str]:
    """Return names of values of which nothing shows how the ``batch_size`` of the batch follows from those of parts."""
    found = []
    for key, parts in said.items():
        given: list[Any] = [p.kwargs.get("batch_size") for p in parts]
        samples = [sizes[p.part] for p in parts]
        if None not in given and is_unsure(given, counts_of(parts, weights), samples, rules.get(key, ())):
            found.append(key[0])
    return found


def counts_of(parts: Sequence[Saying], weights: Sequence[float]) -> list[float]:
    """Return how much each part's value counts: by its own count, or by the ``weights`` of the loss."""
    return [weights[p.part] if p.weight is None else p.weight for p in parts]


def are(parts: Sequence[Saying], losses: Sequence[float]) -> bool:
    """Return whether a logged value is the loss of each microbatch."""
    return len(parts) == len(losses) > 1 and all(map(is_number, (p.value for p in parts), losses))


def merged_as_known(
    rule: str, parts: Sequence[Saying], sizes: Sequence[float], weights: Sequence[float],
    added: Sequence[Addend] | None, losses: Sequence[float], *, is_known: bool,
) -> Any:  # fmt: skip
    """Return the batch's value by ``rule`` if it is known to be the value's, else as the loss if the value is the loss.

    In microbatches of one sample, the largest loss of a sample and the sum of these are the loss, too.

    Args:
        rule, parts, sizes, weights: see `merged_by`.
        added: the losses, if the loss is their sum.
        losses: those of the microbatches.
        is_known: whether the rule is more than `USUAL`, and that of the code that has computed the value.
    """
    if not is_known and are(parts, losses):
        return combined([_tensor(p.value) for p in parts], [*weights], added)
    return merged_by(rule, parts, sizes, weights, added)


def merged_by(
    rule: str, parts: Sequence[Saying], sizes: Sequence[float], weights: Sequence[float],
    added: Sequence[Addend] | None = None,
) -> Any:  # fmt: skip
    """Return the batch's value by ``rule``.

    Args:
        rule: `USUAL`, `OPEN`, one of `RULES` or one that `of_mean` has given.
        parts: the value of each microbatch.
        sizes, weights: see `issue`.
        added: see `microbatches.combined`.
    """
    values = [p.value for p in parts]
    mine = counts_of(parts, weights)
    if not any(mine):  # whatever it is where nothing is counted
        mine = [float(sizes[p.part]) for p in parts]
    if rule not in (USUAL, OPEN) and len(values) > 1:
        return ruled(rule, values, mine, [sizes[p.part] for p in parts])
    theirs = None if added is None else [added[p.part] for p in parts]
    return _merged(values, parts[-1].kwargs.get("reduce_fx", "mean"), mine, theirs)


USUAL = "by what the loss weighs"
"""Rule: merge by ``reduce_fx``, and means by the weights of the loss."""
BY_ITS_COUNT = "mean by its own count"
"""Rule: merge as a mean by what each part has counted, whatever ``reduce_fx`` says of steps."""
OPEN = "unknown"
"""Rule: merge as `USUAL`, without knowing that it is right."""


def _mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    return weighted_mean(list(values), list(weights))


_RULES: dict[str, Callable[[Tensor, Sequence[float], Sequence[float]], Tensor]] = {
    BY_ITS_COUNT: lambda v, weights, sizes: _mean(v, weights),
    "mean over samples": lambda v, weights, sizes: _mean(v, sizes),
    "sum": lambda v, weights, sizes: v.sum(0),
    "largest": lambda v, weights, sizes: v.amax(0),
    "smallest": lambda v, weights, sizes: v.amin(0),
}
"""Other rules by which the value of a batch may follow from those of its microbatches (values, weights, sizes)."""
LINEAR = frozenset({USUAL, BY_ITS_COUNT, "mean over samples"})
"""Rules that are means of the values themselves."""
_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "exp": (torch.exp, torch.log),
    "root": (torch.sqrt, torch.square),
    "reciprocal": (torch.reciprocal, torch.reciprocal),
    "log": (torch.log, torch.exp),
}
"""Functions of a mean, up to a factor, and their inverses."""
_OF_THE_MEAN, _OVER_SAMPLES = " of the mean", " over samples"
RULES = (*_RULES, *(f"{name}{_OF_THE_MEAN}{over}" for name in _FUNCTIONS for over in ("", _OVER_SAMPLES)))
"""Rules that a comparison tries beside `USUAL`."""


def of_mean(function: str) -> str:
    """Return the rule for a function of a mean: "exp", "root", "reciprocal", "log", or a factor and "log"."""
    return function + _OF_THE_MEAN


def function_of(rule: str) -> str:
    """Return the function of which ``rule`` is `of_mean`; empty if it is another one."""
    return rule.removesuffix(_OF_THE_MEAN) if rule.endswith(_OF_THE_MEAN) else ""


def over_samples(rule: str) -> str:
    """Return the rule for the same function of a mean over samples."""
    return rule + _OVER_SAMPLES


def is_of_a_mean(rule: str) -> bool:
    """Return whether ``rule`` is one for a function of a mean, over samples or not."""
    return _OF_THE_MEAN in rule


def ruled(rule: str, values: Sequence[Any], weights: Sequence[float], sizes: Sequence[float]) -> Tensor:
    """Return the value of the batch by one of `RULES`, or by one that `of_mean` has given."""
    tensors = [torch.as_tensor(value).detach().cpu() for value in values]
    stacked = torch.stack([t.double() for t in tensors])
    function, _, over = rule.partition(_OF_THE_MEAN)
    if is_of_a_mean(rule):
        factor, _, name = function.rpartition(" ")
        forward, back = _FUNCTIONS[name]
        scale = float(factor or 1.0)
        made = scale * forward(_mean(back(stacked / scale), sizes if over else weights))
    else:
        made = _RULES[rule](stacked, weights, sizes)
    return made.to(tensors[0].dtype if tensors[0].is_floating_point() else torch.float32)


_REDUCTIONS: dict[str, Any] = {"min": torch.amin, "max": torch.amax, "sum": torch.sum}
_REDUCTIONS |= {"amin": torch.amin, "amax": torch.amax}
"""What ``reduce_fx`` may name beside a mean."""


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype_of_numbers())


def _merged(values: list[Any], reduce_fx: Any, weights: list[float], added: Sequence[Addend] | None) -> Any:
    first = values[0]
    if isinstance(first, Metric):
        return first
    if isinstance(first, dict):
        return {k: _merged([v[k] for v in values], reduce_fx, weights, added) for k in first}
    if len(values) == 1:
        return first
    tensors = [_tensor(value) for value in values]
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](torch.stack(tensors), 0)
    return combined(tensors, weights, added)
