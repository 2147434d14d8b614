"""Run a LightningModule and keep everything that a strategy must not change; then compare two such runs.

``run`` trains with a given strategy and records, step by step, the loss that callbacks see, each parameter's gradient
just before the optimizer takes it (a parameter without gradient stays ``None``), what reaches the loggers, and the
weights at the end. ``assert_same`` compares two of these within rounding, ``assert_identical`` to the bit; both name
what differs most.

The oracle is plain Lightning: for windows the same script, for a batch that is cut the one whose loader gives the parts
(``split``) with ``accumulate_grad_batches``. ``by_hand`` is the same without Lightning: parts one after another, which
may weigh otherwise.

How much of a difference is rounding depends on the model: a ReLU whose input is zero but for rounding passes a gradient
on one processor and none on another. So what ``assert_same`` finds beyond its tolerance is compared with what plain
training itself does when the last bits of its weights change (``Result.rounding_of``).
"""

import contextlib
import copy
import functools
import os
import re
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.optim.narrow_gradient import widened
from lightning_roundpipe.planning.memory import WorkerNeeds
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

Gradients = dict[str, Tensor | None]

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
"""The models are too small for more, and on two cores emulated devices then compute two layers at once."""

registry.entry_points = functools.cache(registry.entry_points)
"""Each Trainer looks for callbacks of installed packages, which reads the metadata of all of them."""

RTOL = 2e-5
"""Allowed difference, as a part of the tensor's largest value: some ten times what splitting a batch by hand gives."""
ATOL = 2e-6
"""And as a part of the largest value of all tensors compared together, for those that are zero but for rounding."""
ON_GPU = os.environ.get("ROUNDPIPE_TEST_DEVICE", "cpu") == "cuda"
"""Trainers of the harness that would be on the CPU are on the first GPU, which is as many workers as are asked for."""
NUDGES = 8
"""Plain runs that say how far a model carries rounding. Each falls to one side of a kink: rarely all to the same."""
NUDGE = 4.0
"""How far a weight is moved at most, in buckets of its last place: about as far as another order moves a sum."""
ROUNDING = 2.0
"""A difference is rounding up to this many times what the nudged runs show."""


@dataclass
class Result:
    """What one run left behind."""

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    """What ``on_train_batch_end`` was given, the loss included."""
    grads: list[Gradients] = field(default_factory=list)
    """One dict an optimizer step."""
    logged: list[tuple[int, dict[str, float]]] | None = field(default_factory=list)
    """What the logger was given: (step, metrics). ``None``: not recorded, not compared."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """``trainer.callback_metrics`` at the end."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""
    rng: list[Tensor] = field(default_factory=list)
    """The global generator's state after each batch."""
    report: dict[str, Any] | None = None
    trainer: pl.Trainer | None = None
    module: pl.LightningModule | None = None
    again: Any = None
    """The same run from weights whose last bits differ, by seed; ``None`` where a second run would not be the same."""

    @functools.cached_property
    def _rounding(self):
        assert self.again is not None
        largest = {}
        threads = torch.get_num_threads()
        for seed in range(NUDGES):
            # Devices share the cores: one may compute with fewer threads than plain training, which sums otherwise.
            torch.set_num_threads(1 if seed % 2 else threads)
            for found in _differences(self, self.again(seed), _equal, outputs=True, rng=False):
                if found.gap < float("inf"):
                    largest[found.label] = max(found.gap, largest.get(found.label, 0.0))
        torch.set_num_threads(threads)
        return largest

    def rounding_of(self, label):
        """How far the value that ``label`` names moves when the last bits of the weights change: the most of 8 runs."""
        return self._rounding.get(label, 0.0) if self.again is not None else 0.0


# -------------------------------------------------------------------------------------------------------------- running


class MemoryLogger(Logger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.lines = []

    @property
    def name(self):
        return "memory"

    @property
    def version(self):
        return 0

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.lines.append((-1 if step is None else step, dict(metrics)))

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs):
        pass


class Watch(pl.Callback):
    """Copies losses while training goes on."""

    roundpipe_passive_hooks = True

    def __init__(self, result):
        self.result = result

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        kept = _copied(outputs)
        self.result.outputs.append(kept)
        self.result.losses.append(kept["loss"] if isinstance(kept, Mapping) else kept)
        self.result.rng.append(torch.get_rng_state())


class WatchGradients(pl.Callback):
    """Copies gradients, as a user would; so the optimizer cannot be stepped apart."""

    def __init__(self, result):
        self.result = result

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.result.grads.append(gradients(pl_module))


def callback(*, passive=False, **hooks):
    """A callback with these ``hooks``; ``passive`` is its ``roundpipe_passive_hooks``."""
    methods = {name: staticmethod(function) for name, function in hooks.items()}
    return type("Own", (pl.Callback,), {"roundpipe_passive_hooks": passive, **methods})()


def save_after(batches, path):
    """Writes a checkpoint after ``batches`` batches of training."""

    def save(trainer, *_):
        if trainer.fit_loop.total_batch_idx + 1 == batches:
            trainer.save_checkpoint(path)

    return callback(passive=True, on_train_batch_end=save)


@contextlib.contextmanager
def overheard(result, module):
    """Copies what the optimizer takes, on its thread if it has one, without anybody who waits for it."""
    real, real_after = BucketStepper._gather, RoundPipePrecision._after_closure

    def gather(self, bucket, step):
        taken = real(self, bucket, step)
        # Asked for here, as configure_model may still have changed the parameters.
        names = {id(p): name for name, p in module.named_parameters()}
        while len(result.grads) < step.number:
            result.grads.append(dict.fromkeys(names.values()))
        result.grads[step.number - 1].update(
            {names[key]: widened(grad).clone() for key, grad in taken.items() if key in names}
        )
        return taken

    def after_closure(self, *args):
        if self.clipping is None:  # else gradients are not in .grad
            result.grads.append(gradients(module))
        real_after(self, *args)

    BucketStepper._gather, RoundPipePrecision._after_closure = gather, after_closure
    try:
        yield
    finally:
        BucketStepper._gather, RoundPipePrecision._after_closure = real, real_after


def ours(**options):
    """A new ``RoundPipeStrategy``."""
    return RoundPipeStrategy(**options)


@contextlib.contextmanager
def seeded(seed):
    """What is drawn within is drawn from ``seed``, and nothing else changes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Learner(pl.LightningModule):
    """Makes ``loss`` small, which a test writes, and logs it.

    ``class Net(Learner, lr=0.01)`` says with which optimizer; it is given what requires grad.
    """

    optimizer = functools.partial(torch.optim.SGD, lr=0.1)

    def __init_subclass__(cls, optimizer=torch.optim.SGD, **options):
        if options:
            cls.optimizer = functools.partial(optimizer, **options)

    def loss(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


class Chain(Learner):
    """Layers, one after another."""

    def __init__(self, layers):
        super().__init__()
        with seeded(5):
            self.layers = torch.nn.ModuleList(layers)

    def loss(self, batch):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


def assert_plain(module, batches, strategy=None, *, devices=2, **options):
    """Train plainly, and on ``devices`` workers with ``strategy``'s options. Both results, which are the same."""
    plain = run("auto", module, batches, **options)
    result = run(ours(**(strategy or {})), module, batches, devices=devices, **options)
    assert_same(plain, result)
    return plain, result


def loader(batches):
    """A data loader that hands out ``batches`` as they are."""
    return DataLoader(list(batches), batch_size=None)


def trainer_of(strategy="auto", *, devices=1, **options):
    """A Trainer on the CPU, with everything off that writes files or draws."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    options = defaults | options
    if ON_GPU and options["accelerator"] == "cpu":
        strategy, devices = _on_gpu(strategy, devices, options)
    return pl.Trainer(strategy=strategy, devices=devices, **options)


def _on_gpu(strategy, devices, options):
    """Plain training on the first GPU, or as many workers on it, which Lightning's own ``devices=[0, 0]`` refuses."""
    torch.backends.cudnn.allow_tf32 = False
    if strategy == "auto":
        options["accelerator"] = "gpu"
        return strategy, 1
    strategy = ours() if strategy == "roundpipe" else strategy
    if not hasattr(strategy, "options"):
        pytest.skip("of another strategy")
    if strategy.options.emulation != type(strategy.options.emulation)():
        pytest.skip("GPUs are not emulated")
    strategy.parallel_devices = [torch.device("cuda", 0)] * devices
    options["accelerator"] = "auto"
    return strategy, "auto"


def run(
    strategy,
    module,
    batches,
    *,
    steps=3,
    devices=1,
    val_batches=None,
    callbacks=(),
    watch=True,
    blocking=False,
    seed=1,
    fit=None,
    **options,
):
    """Train a copy of ``module``.

    Args:
        strategy: ``"auto"`` for plain Lightning, or a strategy.
        module: is left untouched; the trained copy is ``result.module``. A batch that is cut is weighed as the module's
            attribute ``weighs`` says, unless the strategy has a ``loss_weight`` of its own.
        batches: a list of batches (one epoch of them), or one batch that is repeated ``steps`` times.
        steps: only for a single batch.
        devices: how many workers; plain Lightning always gets one device.
        watch: ``False`` leaves out the callback that copies losses, in case watching changes what happens.
        blocking: gradients are looked at before each optimizer step, for which our strategy has to wait. Without it
            they are taken from its optimizer's thread.
        fit: more arguments for ``Trainer.fit``.
        options: more arguments for the ``Trainer``.
    """
    given, module = module, copy.deepcopy(module)
    batches = list(batches) if isinstance(batches, (list, tuple)) else [batches] * steps
    result = Result(module=module)
    if strategy == "auto" and module is not given and not (callbacks or fit or options.keys() & WITH_STATE):
        same = {"val_batches": val_batches, "watch": watch, "seed": seed, **options}
        result.again = lambda nudge: run("auto", nudged(given, nudge), batches, **same)
    cut = getattr(strategy, "options", None)
    if cut is not None and (cut.num_microbatches or 1) > 1 and cut.loss_weight is None:
        strategy.options = replace(cut, loss_weight=getattr(module, "weighs", None))
    memory = MemoryLogger()
    options = {"logger": memory} | options
    watching = [Watch(result)] if watch else []
    if watch and (strategy == "auto" or blocking):
        watching.append(WatchGradients(result))
    trainer = trainer_of(strategy, devices=devices, callbacks=[*callbacks, *watching], **options)
    torch.manual_seed(seed)
    evaluation = {} if val_batches is None else {"val_dataloaders": loader(val_batches)}
    listening = watch and strategy != "auto" and not blocking
    with quiet(), overheard(result, module) if listening else contextlib.nullcontext():
        trainer.fit(module, loader(batches), **evaluation, **(fit or {}))
    result.trainer = trainer
    result.logged = memory.lines
    result.metrics = {name: value.detach().clone() for name, value in trainer.callback_metrics.items()}
    result.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    if hasattr(trainer.strategy, "report"):
        result.report = trainer.strategy.report()
    return result


WITH_STATE = {"logger", "profiler", "plugins", "enable_checkpointing"}
"""Options of a Trainer that a second run would share with the first, or that write files."""


def nudged(module, seed):
    """A copy of ``module`` in which the last bits of the weights differ, as they do after sums in another order."""
    module = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dtype in (torch.float32, torch.float64):
                by = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) * 2 - 1
                parameter.mul_(1 + by * NUDGE * torch.finfo(parameter.dtype).eps)
    return module


def by_hand(module, batches, microbatches, weight=None, *, bf16=False):
    """Train a copy of ``module`` in a plain loop that runs the parts of each batch one after another.

    ``weight`` says what a part weighs; by default ``module.targets``, which gives the whole batch's mean.
    ``bf16`` computes under autocast, as precision ``bf16-mixed`` does.
    """
    given, module = module, copy.deepcopy(module)
    module.log = module.log_dict = lambda *args, **kwargs: None
    weight = weight or module.targets
    optimizer = module.configure_optimizers()
    result = Result(logged=None)
    result.again = lambda nudge: by_hand(nudged(given, nudge), batches, microbatches, weight, bf16=bf16)
    for batch in batches:
        parts = split(batch, microbatches)
        weights = [float(weight(part)) for part in parts]
        total = torch.zeros(())
        for part, share in zip(parts, weights, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = module.training_step(part, 0) * (share / sum(weights))
            loss.backward()
            total += loss.detach()
        result.losses.append(total)
        result.grads.append(gradients(module))
        optimizer.step()
        optimizer.zero_grad()
    result.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return result


def split(batch, microbatches):
    """``batch`` along dim 0, in parts that differ by one sample at most."""
    parts = {name: torch.tensor_split(value, microbatches) for name, value in batch.items()}
    return [{name: pieces[i] for name, pieces in parts.items()} for i in range(microbatches)]


def gradients(module):
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


@contextlib.contextmanager
def quiet():
    """Without Lightning's advice to use more data loader workers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        yield


def _copied(value):
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


# ---------------------------------------------------------------------------------------------- what a plan's text says


@contextlib.contextmanager
def arenas_of(share):
    """Workers reserve the smallest arena, and ``share`` of what the largest one has more, as if memory were short."""
    real = WorkerNeeds.reserved

    def reserved(needs, *args):
        least, most = needs.arena
        return real(needs, *args)._replace(arena=least + int(share * (most - least)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerNeeds, "reserved", reserved)
        yield


def call_count(plan):
    """How many calls the trace has, by a plan's text: the fused stage ends with the last one."""
    return 1 + max(int(number) for number in re.findall(r"\d+", plan.split("round")[0]))


def per_call(n, round_microbatches=1):
    """A plan with a cut at every call."""
    return str(Plan.per_call(n, round_microbatches))


def single(n, round_microbatches=1):
    """A plan with everything in the fused stage."""
    return str(Plan.single(n, round_microbatches))


def halves(n, round_microbatches=1):
    """A plan whose forward and backward passes are cut at different places."""
    first, second, third = n // 3, n // 2, n - 1
    return (
        f"forward 0-{second - 1}; fused {second}-{third}; "
        + "backward "
        + (f"{first}-{second - 1} 0-{first - 1}" if 0 < first < second else f"0-{second - 1}")
        + f"; round {round_microbatches}"
    )


# ------------------------------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class _Difference:
    label: str
    what: str
    excess: float
    """Difference over tolerance; what differs in kind is infinite."""
    gap: float = float("inf")
    """The difference itself."""

    def __str__(self):
        return f"{self.label}: {self.what} ({self.excess:.3g} times the tolerance)"


def assert_same(plain, other, rtol=RTOL, atol=ATOL, *, outputs=False, rng=False):
    """Losses, gradients, logged values and weights agree within rounding.

    ``rtol`` and ``atol`` allow what every model makes of rounding. A difference beyond them passes only if the model
    makes as much of rounding itself: if that value moves as far in ``plain`` when the last bits of its weights change.
    """
    found = _differences(plain, other, _near(rtol, atol), outputs, rng)
    if all(difference.gap < float("inf") for difference in found):
        found = [d for d in found if d.gap > ROUNDING * plain.rounding_of(d.label)]
    _fail_on(found)


def assert_identical(one, other, *, outputs=False, rng=False):
    """Losses, gradients, logged values and weights agree to the bit."""
    _fail_on(_differences(one, other, _equal, outputs, rng))


def assert_tensors_same(plain, other, rtol=RTOL, atol=ATOL, what="value"):
    """Two tensors, or two collections of tensors of one structure, agree within rounding."""
    _fail_on(_compare_group(dict(_leaves(what, plain)), dict(_leaves(what, other)), _near(rtol, atol)))


def _near(rtol, atol):
    def judge(a, b, scale):
        nan = torch.isnan(a) | torch.isnan(b)
        if bool((torch.isnan(a) != torch.isnan(b)).any()):
            return float("inf")
        gap = (a - b).abs().masked_fill(nan, 0).max()
        allowed = rtol * a.abs().masked_fill(nan, 0).max() + atol * scale
        return float(gap / allowed) if gap > 0 else 0.0

    return judge


def _equal(a, b, scale):
    if torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
        return 0.0
    gap = (a - b).abs().max() / max(scale, 1e-30)
    return 1.0 + float(gap) if torch.isfinite(gap) else float("inf")


def _groups(result, outputs, rng, logged):
    """What is compared of a run, by label. A group's tensors have one scale; logged values are groups of their own."""
    steps = {"loss": result.losses, "gradient of": result.grads}
    steps |= ({"output": result.outputs} if outputs else {}) | ({"random state": result.rng} if rng else {})
    for what, values in steps.items():
        yield from ((f"step {step}: {what}", value) for step, value in enumerate(values))
    yield "final", result.state
    for line, (step, metrics) in enumerate(result.logged if logged else ()):
        yield from ((f"line {line}, logged at step {step}: {name}", value) for name, value in metrics.items())
    yield from ((f"metric {name}", value) for name, value in (result.metrics if logged else {}).items())


def _differences(plain, other, judge, outputs, rng):
    logged = plain.logged is not None and other.logged is not None
    one, two = (dict(_groups(result, outputs, rng, logged)) for result in (plain, other))
    found = [_Difference(label, _ONLY[label in one], float("inf")) for label in sorted(one.keys() ^ two.keys())]
    for label in (label for label in one if label in two):
        exact = _equal if label.endswith("random state") else judge
        found += _compare_group(dict(_leaves(label, one[label])), dict(_leaves(label, two[label])), exact)
    return found


_ONLY = {True: "only in the first run", False: "only in the second run"}


def _compare_group(a, b, judge):
    found = [_Difference(name, _ONLY[name in a], float("inf")) for name in sorted(a.keys() ^ b.keys())]
    scale = max((float(v.abs().nan_to_num().max()) for v in a.values() if _is_number(v)), default=0.0)
    for name in sorted(a.keys() & b.keys()):
        found += _compare(name, a[name], b[name], scale, judge)
    return found


def _compare(name, x, y, scale, judge):
    inf = float("inf")
    if x is None or y is None or not isinstance(x, Tensor) or not isinstance(y, Tensor):
        same = x is y or (type(x) is type(y) and not isinstance(x, Tensor) and x == y)
        return [] if same else [_Difference(name, f"{_shown(x)} in the first run, {_shown(y)} in the second", inf)]
    if x.shape != y.shape:
        shapes = f"shape {tuple(x.shape)} in the first run, {tuple(y.shape)} in the second"
        return [_Difference(name, shapes, inf)]
    if x.numel() == 0:
        return []
    a, b = x.detach().cpu().double(), y.detach().cpu().double()
    excess = judge(a, b, scale)
    if excess <= (0.0 if judge is _equal else 1.0):
        return []
    gap = float((a - b).abs().nan_to_num().max())
    largest = float(a.abs().nan_to_num().max())
    nan = bool((torch.isnan(a) != torch.isnan(b)).any())
    return [_Difference(name, f"differs by {gap:.3g}, its largest value is {largest:.3g}", excess, inf if nan else gap)]


def _shown(value):
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _is_number(value):
    return isinstance(value, Tensor) and value.numel() > 0


def _leaves(label, value):
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{label} {key}", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(f"{label}[{i}]", item)
    elif isinstance(value, float):
        yield label, torch.tensor(value, dtype=torch.float64)
    else:
        yield label, value


def _fail_on(found):
    if not found:
        return
    worst = sorted(found, key=lambda d: -d.excess)
    lines = [str(d) for d in worst[:8]]
    more = [f"... and {len(worst) - 8} more"] if len(worst) > 8 else []
    raise AssertionError("\n".join([f"{len(found)} differences, the worst:", *lines, *more]))


# -------------------------------------------------------------------------------------------------------------- threads


def roundpipe_threads():
    """Names of the package's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("roundpipe")]
