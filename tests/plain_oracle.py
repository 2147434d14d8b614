"""Plain Lightning as the oracle: the same script under both strategies, and all that a user can see of it.

``train`` runs one script and records every call of a hook, in order, with what hooks can find: the batch, outputs,
progress, the module's attributes and buffers, metrics. ``assert_same`` compares two records within rounding; modules
are in double precision, so that rounding is far below any mistake. ``assert_plain`` does both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import MemoryLogger, ours, quiet, trainer_of
from torch import Tensor

PLAIN = 0
"""Instead of a number of devices: plain Lightning."""
RTOL = 1e-6


def on_devices(*numbers):
    """Parametrize ``devices``."""
    return pytest.mark.parametrize("devices", numbers)


# ------------------------------------------------------------------------------------------------------------ recording


@dataclass
class Record:
    """What one run has shown and left."""

    calls: list[Any] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    trainer: Any = None
    module: Any = None

    def of(self, name):
        """The calls of the hook ``name``."""
        return [call for call in self.calls if call[0] == name]


def kept(value):
    """A copy of ``value`` that later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    return value if isinstance(value, (int, float, str, bytes, type(None))) else type(value).__name__


def attributes(module):
    """Copies of a module's public numbers, strings and tensors, and of all buffers."""
    found = {n: v for n, v in vars(module).items() if n[0] != "_" and isinstance(v, (int, float, str, Tensor))}
    return kept(found | dict(module.named_buffers()))


class Recorder(pl.Callback):
    """Records the calls of hooks that have nothing to do with gradients."""

    def __init__(self, calls):
        self.calls = calls


class Watcher(Recorder):
    """Records the calls of all hooks. It does not look at gradients, so that windows are pipelined."""

    roundpipe_passive_hooks = "on_after_backward"


def _recorded(name):
    def hook(self, trainer, module, *args, **kwargs):
        args = () if name.endswith("_checkpoint") else args  # test_window.py compares the files
        found = {"args": kept(args), **kept(kwargs), "module": attributes(module)}
        found |= {"at": (trainer.global_step, trainer.current_epoch)}
        if name.endswith("_batch_end"):
            found |= {"metrics": kept(trainer.callback_metrics), "bar": kept(trainer.progress_bar_metrics)}
        self.calls.append((name, found))

    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") or _name in ("setup", "teardown"):
        _of_gradients = "backward" in _name or "optimizer" in _name or "zero_grad" in _name
        setattr(Watcher if _of_gradients else Recorder, _name, _recorded(_name))


def train(
    devices,
    make,
    loader,
    *,
    val=None,
    options=None,
    callbacks=tuple,
    watch=False,
    error=None,
    ckpt_path=None,
    **trainer_options,
):
    """Train a new module with plain Lightning (``devices=PLAIN``) or with the strategy.

    Args:
        make: makes the module, after seeding. Its attribute ``calls`` becomes the list of recorded calls.
        loader, val: make the loaders.
        options: of the strategy.
        watch: record the hooks that may look at gradients, too.
        error: what ``fit`` must raise.
    """
    record, memory = Record(), MemoryLogger()
    torch.manual_seed(1)
    record.module = make()
    record.module.calls = record.calls
    strategy = "auto" if devices == PLAIN else ours(**(options or {}))
    recorder = Watcher(record.calls) if watch else Recorder(record.calls)
    trainer_options = {"logger": memory} | trainer_options
    record.trainer = trainer_of(
        strategy, devices=max(devices, 1), callbacks=[*callbacks(), recorder], **trainer_options
    )
    torch.manual_seed(2)
    arguments = {"train_dataloaders": loader(), "val_dataloaders": val() if val else None, "ckpt_path": ckpt_path}
    with quiet():
        if error is None:
            record.trainer.fit(record.module, **arguments)
        else:
            with pytest.raises(error):
                record.trainer.fit(record.module, **arguments)
    record.lines = [(step, kept(metrics)) for step, metrics in memory.lines]
    record.final = _left(record.trainer, record.module)
    return record


def _left(trainer, module):
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return {
        "weights": kept(module.state_dict()),
        "attributes": attributes(module),
        "metrics": kept(trainer.callback_metrics),
        "optimizers": [(kept(s["state"]), [group["lr"] for group in s["param_groups"]]) for s in states],
        "loops": kept(trainer.fit_loop.state_dict()),
        "progress": (trainer.global_step, trainer.current_epoch, trainer.num_val_batches),
    }


# ------------------------------------------------------------------------------------------------------------ comparing


def differences(a, b, path, rtol=RTOL):
    """Where ``b`` is not ``a``, within rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{path}: {a.dtype} of {tuple(a.shape)}, but {b.dtype} of {tuple(b.shape)}"
        elif not torch.allclose(a.double().cpu(), b.double().cpu(), rtol=rtol, atol=rtol, equal_nan=True):
            yield f"{path}: {a.flatten()[:4].tolist()}, but {b.flatten()[:4].tolist()}"
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from (f"{path}: only one has {key!r}" for key in a.keys() ^ b.keys())
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{path}[{key!r}]", rtol)
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            name = f" {x[0]}" if isinstance(x, tuple) and x and isinstance(x[0], str) else ""
            yield from differences(x, y, f"{path}[{i}]{name}", rtol)
        if len(a) != len(b):
            extra = (a if len(a) > len(b) else b)[min(len(a), len(b))]
            yield f"{path}: {len(a)} entries, but {len(b)}; the first more is {str(extra)[:80]}"
    elif isinstance(a, float) and isinstance(b, float):
        if a != pytest.approx(b, rel=rtol, abs=rtol, nan_ok=True):
            yield f"{path}: {a}, but {b}"
    elif type(a) is not type(b) or a != b:
        yield f"{path}: {str(a)[:80]}, but {str(b)[:80]}"


def assert_equal(a, b, what="value", rtol=RTOL):
    found = list(differences(a, b, what, rtol))
    assert not found, "\n".join([f"{len(found)} differences from plain Lightning, the first:", *found[:6]])


def assert_same(plain, other, rtol=RTOL):
    """All calls of hooks in order, all logged lines, and what is left."""
    assert_equal(plain.calls, other.calls, "calls", rtol)
    assert_equal(plain.lines, other.lines, "logged", rtol)
    assert_equal(plain.final, other.final, "final", rtol)


def assert_plain(devices, make, loader, **script):
    """The script does the same under the strategy as under plain Lightning."""
    rtol, options = script.pop("rtol", RTOL), script.pop("options", None)
    plain = train(PLAIN, make, loader, **script)
    other = train(devices, make, loader, options=options, **script)
    assert_same(plain, other, rtol)
    return plain, other
