"""What training_step does for the first time in a later batch is compared on that batch.

The batch itself was trained on in parts; a warning says so, and from the next one on training equals plain training.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from harness import assert_identical, assert_same, ours, run
from test_parts_are_the_whole import LAYERS, Batch, Module, batches, contrasts, cut_by, entropy, looked_at, trained
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.profile.verdict import Verdict
from lightning_roundpipe.runtime.user_code.module_state import ModuleStateIsolation

Step = Callable[[Any, Tensor, Batch], Any]
LATE = 3
"""The batch that does something new."""


def late(step: Step, before: Step = entropy) -> Step:
    def chosen(module: Any, logits: Tensor, batch: Batch) -> Any:
        return (step if module.trainer.global_step >= LATE else before)(module, logits, batch)

    return chosen


def data_of(count: int = 7, samples: int = 8) -> list[Batch]:
    data = batches(count, samples)
    for batch in data:
        batch["z"] = batch["x"][:, :5] * 2
    return data


def logs_a_sum(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    module.log("sum", logits.detach().square().sum())
    return entropy(module, logits, batch)


def counts(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    module.calls += 1
    return loss * (1 + 0.1 * module.calls)


def mines_the_hardest(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["y"], reduction="none").topk(2).values.mean()


def logs_a_metric(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = entropy(module, logits, batch)
    module.average(loss)
    module.log("average", module.average, on_step=False, on_epoch=True)
    return loss


def said_by(step: Step, data: list[Batch], microbatches: int = 2, devices: int = 2, **options: Any) -> tuple[Any, str]:
    attributes = options.pop("attributes", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RoundPipeWarning)
        result = trained(Module(step, **attributes), data, microbatches, devices, **options)
    return result, "\n".join(str(w.message) for w in caught if issubclass(w.category, RoundPipeWarning))


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    return looked_at(monkeypatch)


@pytest.mark.parametrize("step", [contrasts, counts, mines_the_hardest])
def test_a_later_loss_that_parts_do_not_have(step: Step) -> None:
    """Plain training goes on from the batch that was trained on in parts as the strategy does."""
    attributes = {"calls": 0} if step is counts else {}
    result, said = said_by(late(step), data_of(), attributes=attributes)
    assert "for the first time" in said
    assert "From the next one on, training_step runs once" in said
    assert cut_by(result) == "model"
    # Until then, all is as in plain training:
    plain = run("auto", Module(late(step), **attributes), data_of(LATE))
    assert_same(plain, trained(Module(late(step), **attributes), data_of(LATE), 2, 2))
    # From there on, each batch adds to the state what a whole batch adds:
    if step is counts:
        assert result.module.calls == 2 + 7 - LATE - 1


def masked(logits: Tensor, batch: Batch) -> Tensor:
    mask = batch["y"] < 3
    return (logits.square().mean(1) * mask).sum() / mask.sum()


def logs_it(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = masked(logits, batch)
    module.log("loss", loss)
    return loss


def logs_a_number(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = masked(logits, batch)
    module.log("loss", loss.item())
    return loss


def returns_it(module: Any, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    loss = masked(logits, batch)
    return {"loss": loss, "kept": loss.detach()}


@pytest.mark.parametrize("step", [logs_it, logs_a_number, returns_it])
def test_a_later_mean_by_counts_that_is_logged(step: Step) -> None:
    """Its logged value shows the count. The next batch is weighed by it, but not the one that was trained on."""
    data = data_of()
    for batch in data[LATE:]:
        batch["y"] = torch.tensor([0, 1, 2, 0, 4, 4, 4, 1])
    result, said = said_by(late(step), data)
    assert "for the first time" in said and "the loss" in said and "This batch was trained on in parts" in said
    plain = run("auto", Module(late(step)), data)
    differ = [not torch.allclose(a, b) for a, b in zip(plain.losses, result.losses, strict=True)]
    assert not any(differ[:LATE]) and differ[LATE]


def divides_by_nothing(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return masked(logits, batch)


def picks_nothing(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return logits.square().mean(1)[batch["y"] < 3].mean()


def takes_a_logarithm(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    return (logits.square().mean(1) * (batch["y"] < 3)).mean().log()


def divides_by_a_mean(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """Which is zero in a part without targets, so that the loss is infinite."""
    return logits.square().mean() / (batch["y"] < 3).float().mean()


def passes_nothing_on(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    kept = [x for x, y in zip(logits.square().mean(1), batch["y"].tolist(), strict=True) if y < 3]
    return sum(kept, logits.new_zeros(())) / torch.tensor(float(len(kept)))


def guards_the_value(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    """The loss of a part without targets is zero, but the gradient of what is not taken is none."""
    mask = batch["y"] < 3
    total, count = (logits.square().mean(1) * mask).sum(), mask.sum()
    return torch.where(count > 0, total / count, 0 * total)


class KeepsTheModule(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.module = pl_module


@pytest.mark.parametrize("part", [0, 3])
@pytest.mark.parametrize(
    "step",
    [divides_by_nothing, picks_nothing, takes_a_logarithm, divides_by_a_mean, passes_nothing_on, guards_the_value],
)
def test_a_later_loss_that_only_a_part_does_not_have_is_refused(step: Step, part: int) -> None:
    """The batch that would make all weights NaN is not trained on."""
    data = data_of()
    data[LATE]["y"] = torch.tensor([0, 1, 2, 0, 1, 1, 2, 1]).index_fill(0, torch.tensor([2 * part, 2 * part + 1]), 4)
    keeps = KeepsTheModule()
    with warnings.catch_warnings(), pytest.raises(RoundPipeError, match="is infinite or not a number, so the batch"):
        warnings.simplefilter("ignore", RoundPipeWarning)
        run(ours(num_microbatches=4, layers=LAYERS), Module(late(step)), data, devices=2, callbacks=[keeps])
    for name, parameter in run("auto", Module(late(step)), data[:LATE]).module.named_parameters():
        assert torch.allclose(parameter, keeps.module.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_a_part_without_targets_counts_nothing() -> None:
    """Its loss is not a number, and nothing depends on it."""

    def hides(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        hidden = batch["y"].masked_fill(batch["x"][:, 0] > 40, -100)
        return F.cross_entropy(logits * logits.detach().std(0).mean(), hidden)

    data = data_of()
    data[LATE]["x"][2:4, 0] = 50.0
    result, said = said_by(late(hides), data, 4)
    assert "ran for the first time" in said
    assert all(bool(parameter.isfinite().all()) for parameter in result.module.parameters())


def test_a_later_loss_that_is_undefined_on_the_whole_batch_is_trained_on() -> None:
    """As in plain training, which goes on with weights that are no numbers."""

    def nothing(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return entropy(module, logits, batch) * (logits.detach() * 0 - 1).log()[0, 0]

    plain, (result, _) = run("auto", Module(late(nothing)), data_of()), said_by(late(nothing), data_of())
    for one in (plain, result):
        assert not any(parameter.isfinite().any() for parameter in one.module.parameters())


def test_a_later_logged_value_that_is_no_mean() -> None:
    result, said = said_by(late(logs_a_sum), data_of())
    assert "'sum' was logged for the first time" in said
    assert "From the next batch on it is computed as the whole batch's (sum)" in said
    assert cut_by(result) == "step"
    plain = run("auto", Module(late(logs_a_sum)), data_of())
    (mean, *sums), (whole, *rest) = ([line for _, line in one.logged if "sum" in line] for one in (result, plain))
    assert len(sums) == 7 - LATE - 1 == len(rest)
    assert mean["sum"] == pytest.approx(whole["sum"] / 2, rel=0.5)
    mean["sum"] = whole["sum"]
    assert_same(plain, result)


def test_what_other_samples_do(verdicts: list[Verdict]) -> None:
    """Only the last microbatch of the first batch has a number of that size."""

    def finds(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = entropy(module, logits, batch)
        if bool((batch["x"] > 40).any()):
            loss = loss + logits.std(0).mean()
        return loss

    data = data_of(3, 16)
    for batch in data:
        batch["x"][-1, 0] = 50.0
    result, said = said_by(finds, data, 4)
    assert "std" not in said and "ran for the first time" in said
    assert len(verdicts) == 2
    assert cut_by(result) == "model"


@pytest.mark.parametrize("late_name", [False, True])
def test_nothing_new_is_compared_once(late_name: bool, verdicts: list[Verdict]) -> None:
    def logs(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        name = f"loss {module.trainer.global_step >= LATE and late_name}"
        loss = entropy(module, logits, batch)
        module.log(name, loss)
        return loss

    _, said = said_by(logs, data_of())
    assert said == ""
    assert len(verdicts) == 1 + late_name


def compiles(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    space = {"F": F}
    exec("def loss(logits, y):\n    return F.cross_entropy(logits, y)", space)
    return space["loss"](logits, batch["y"])


def calls_builtins(module: Any, logits: Tensor, batch: Batch) -> Tensor:
    loss = F.cross_entropy(logits, batch["y"])
    return sum([loss, logits.detach().sum() * 0]) * (len(logits) / len(batch["y"]))


@pytest.mark.parametrize("step", [compiles, calls_builtins])
def test_the_same_code_is_not_new(step: Step, verdicts: list[Verdict]) -> None:
    """Not if it is compiled anew for each batch, nor once Python specializes its calls."""
    said_by(step, data_of(12))
    assert len(verdicts) == 1


def test_a_weight_that_is_zero_at_first(verdicts: list[Verdict]) -> None:
    """No line is new."""

    def warms_up(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        other = logits.view(2, -1, 5).flip(0).reshape(-1, 5)  # joins samples along none of their dimensions
        return entropy(module, logits, batch) + max(0, module.trainer.global_step - LATE) * (logits * other).mean()

    result, said = said_by(warms_up, data_of(18))
    assert "after 16 batches, training_step was compared again" in said
    assert len(verdicts) == 2
    assert cut_by(result) == "model"


def test_what_cannot_be_cut_goes_on_in_parts_with_a_warning() -> None:
    result, said = said_by(late(counts), data_of(), attributes={"calls": 0}, microbatch_scope="step")
    assert "So are later ones" in said
    assert result.module.calls == 2 * (7 - LATE)


def test_it_is_compared_sixteen_times_at_most(verdicts: list[Verdict]) -> None:
    def logs(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = entropy(module, logits, batch)
        module.log(f"loss {module.trainer.global_step}", loss)
        return loss

    said_by(logs, data_of(24))
    assert len(verdicts) == 17


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("options", [{"staleness": 1}, {"staleness": 0}, {"microbatch_scope": "step"}])
def test_a_comparison_in_between_changes_no_bit(
    options: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spells_it_out(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return F.nll_loss(logits.log_softmax(1), batch["y"])

    def once() -> Any:
        strategy = ours(num_microbatches=2, layers=LAYERS, **options)
        module = Module(late(spells_it_out) if window == 1 else from_the_fourth_batch)
        return run(strategy, module, data_of(), devices=2, accumulate_grad_batches=window)

    def from_the_fourth_batch(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        return (spells_it_out if module.trainer.fit_loop.epoch_loop.batch_idx >= 3 else entropy)(module, logits, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        compared = once()
    monkeypatch.setattr("lightning_roundpipe.runtime.profile.scope.Scope.look_again", lambda *_: None)
    assert_identical(once(), compared)


def test_a_batch_that_was_written_to_is_compared_as_it_was(tmp_path: Path, verdicts: list[Verdict]) -> None:
    """Targets that are shifted in place were shifted once more, which a GPU does not survive."""
    wrong = tmp_path / "wrong"  # a rehearsal puts back what is in memory

    def shifts(step: Step) -> Step:
        def shifting(module: Any, logits: Tensor, batch: Batch) -> Tensor:
            if bool((batch["y"].sub_(1) < 0).any()):
                wrong.touch()
            return step(module, logits, batch)

        return shifting

    data = data_of()
    for batch in data:
        batch["y"].add_(1)
    result, said = said_by(shifts(late(mines_the_hardest)), data)
    assert not wrong.exists()
    assert len(verdicts) == 2 and "ran for the first time" in said
    assert cut_by(result) == "model"


def test_a_later_error_is_raised_by_the_step() -> None:
    def fails(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        raise RoundPipeError(f"at {logits.shape}")

    with pytest.raises(RoundPipeError, match="at "):
        said_by(late(fails), data_of())


def test_a_later_error_on_fewer_samples_than_parts_have() -> None:
    """The second batch's first sample is compared with those of its own part only."""

    def counts_near_ones(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        if bool((batch["y"] == 4).any()):
            assert torch.cdist(batch["x"], batch["x"]).topk(3, largest=False).values.isfinite().all()
        return entropy(module, logits, batch)

    data = data_of(3)
    for batch in data:
        batch["y"].clamp_(max=3)
    data[1]["y"][0] = 4
    result, said = said_by(counts_near_ones, data)
    assert said == ""
    assert cut_by(result) == "step"


def test_attributes_that_are_set_later() -> None:
    """No torch function is new: only the attribute shows it."""

    def keeps(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = entropy(module, logits, batch)
        if module.trainer.global_step >= LATE:
            module.calls += 1
        return loss

    result, said = said_by(keeps, data_of(), attributes={"calls": 0})
    assert "attribute 'calls' was set for the first time" in said
    assert result.module.calls == 2 + 7 - LATE - 1


def halves_the_rate(module: Any) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.5


LATE_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "a learning rate": halves_the_rate,
    "a scheduler": lambda module: module.lr_schedulers().step(),
    "a scheduler's count": lambda module: setattr(
        module.lr_schedulers(), "last_epoch", 3 + module.lr_schedulers().last_epoch
    ),
}


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("name", LATE_SETTINGS)
def test_settings_that_are_changed_later(name: str) -> None:
    """Each part of the batch has changed them."""

    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        if module.trainer.global_step == 2:
            LATE_SETTINGS[name](module)
        return entropy(module, logits, batch)

    with pytest.warns(RoundPipeWarning, match=r"(lr|last_epoch)'\]\" was set for the first time, and in parts"):
        run(ours(num_microbatches=2), Scheduled(step), batches(5), devices=2)


def test_settings_that_are_set_to_the_same_are_no_difference() -> None:
    def step(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        for group in module.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + module.trainer.global_step)
        return entropy(module, logits, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        result = run(ours(num_microbatches=2), Scheduled(step), batches(5), devices=2)
    assert cut_by(result) == "step"
    assert_same(run("auto", Scheduled(step), batches(5)), result)


def test_which_attributes_are_set() -> None:
    """Not those that others move to another place, and those with the value of another, too."""
    module = nn.Linear(2, 2)
    module.cache, module.kept = 1, 2  # type: ignore[assignment]
    state = ModuleStateIsolation(module, [])
    state.begin()
    del module.cache
    module.other = 3  # type: ignore[assignment]
    assert state.finished() == ["cache", "other"]
    module.same = module.training
    assert state.finished() == ["same"]
    assert state.finished() == []


def test_a_metric_has_seen_parts(verdicts: list[Verdict]) -> None:
    """It counts its updates, so it is that of the parts in any comparison after the first."""
    module = Module(late(logs_a_metric), average=torchmetrics.MeanMetric())
    plain = run("auto", module, data_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        assert_same(plain, trained(module, data_of(), 2, 2))
    assert len(verdicts) == 2


def test_a_metric_that_keeps_all_samples_has_seen_parts() -> None:
    """The lengths of its lists are not compared, as little as its other state."""

    def logs_a_curve(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        module.curve.update(logits.softmax(1), batch["y"])
        module.log("area", module.curve, on_step=False, on_epoch=True)
        return entropy(module, logits, batch)

    area = torchmetrics.AUROC("multiclass", num_classes=5)
    for step in (logs_a_curve, late(logs_a_curve)):
        result, said = said_by(step, data_of(), attributes={"curve": area})
        assert said == ""
        assert cut_by(result) == "step"
        assert_same(run("auto", Module(step, curve=area), data_of()), result)


CLOCK = {"seconds": 0.0}


@pytest.mark.parametrize("scope", ["auto", "step", "model"])
def test_times_are_not_compared(scope: str) -> None:
    """Two runs on the same samples give other ones."""

    def measures(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        start = time.perf_counter()
        loss = entropy(module, logits, batch)
        module.seconds = CLOCK["seconds"] = time.perf_counter() - start
        module.log("samples per second", len(logits) / module.seconds)
        return loss

    for step in (measures, late(measures)):
        result, said = said_by(step, data_of(), microbatch_scope=scope)
        assert said == ""
        assert cut_by(result) == ("model" if scope == "model" else "step")


def test_a_comparison_waits_for_no_other_machine(tmp_path: Path) -> None:
    """A metric that was updated is computed, as it would be of all machines at the end of an epoch."""

    def updates(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = entropy(module, logits, batch)
        module.average.update(loss)
        return loss

    waited = tmp_path / "waited"  # a rehearsal puts back what is in memory

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        waited.touch()
        return [value, value]

    average = torchmetrics.MeanMetric(distributed_available_fn=lambda: True, dist_sync_fn=gather)
    result, _ = said_by(late(entropy, updates), data_of(), attributes={"average": average})
    assert not waited.exists()
    result.module.average.compute()
    assert waited.exists()


def takes_an_extreme(module: Any, logits: Tensor, batch: Batch, late: bool) -> Tensor:
    squares = (logits - batch["z"]).square()
    return (torch.max if late else torch.mean)(squares)


def takes_a_norm(module: Any, logits: Tensor, batch: Batch, late: bool) -> Tensor:
    return getattr((logits - batch["z"]).abs(), "norm" if late else "mean")()


def calls_a_metric(module: Any, logits: Tensor, batch: Batch, late: bool) -> Tensor:
    functions = torchmetrics.functional
    return (functions.concordance_corrcoef if late else functions.mean_absolute_error)(logits[:, 0], batch["z"][:, 0])


Other = Callable[[Any, Tensor, Batch, bool], Tensor]


def switched(step: Other) -> Step:
    def chosen(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        loss = step(module, logits, batch, module.trainer.global_step >= LATE)
        module.log("loss", loss)
        return loss.squeeze()

    return chosen


@pytest.mark.parametrize("step", [takes_an_extreme, takes_a_norm, calls_a_metric])
def test_a_known_line_that_calls_another_function(step: Other) -> None:
    """Only the line was known, so that nothing was noticed before the 16th batch."""
    result, said = said_by(switched(step), data_of(5))
    assert "called" in said and "for the first time" in said
    assert cut_by(result) == "model"


@pytest.mark.parametrize("by", ["argument", "module"])
@pytest.mark.parametrize("late", [("mean", "sum"), ("sum", "mean")])
def test_a_loss_that_is_reduced_otherwise_later(late: tuple[str, str], by: str) -> None:
    """Its logged value was merged as that of the first batches was: a sum over microbatches as their mean."""
    losses = [nn.MSELoss(reduction=reduction) for reduction in late]

    def reduced(module: Any, logits: Tensor, batch: Batch, later: bool) -> Tensor:
        if by == "module":
            return losses[later](logits, batch["z"])  # type: ignore[no-any-return]
        return F.mse_loss(logits, batch["z"], reduction=late[later])

    step = switched(reduced)
    result, said = said_by(step, data_of(5))
    assert said == ""
    assert_same(run("auto", Module(step), data_of(5)), result)


def test_a_branch_that_only_some_microbatches_take() -> None:
    """Both branches were known, and each microbatch took its own, where the whole batch takes one."""

    def scales(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        if bool(batch["x"].abs().max() > 40):
            return entropy(module, logits / 4, batch)
        return entropy(module, logits * 2, batch)

    data = data_of(6)
    data[0]["x"][:, 0] = 50.0
    for batch in data[2:]:
        batch["x"][0, 0] = 50.0
    result, said = said_by(scales, data)
    assert "in some microbatches only" in said
    assert cut_by(result) == "model"


def test_branches_that_give_the_same_are_compared_once(verdicts: list[Verdict]) -> None:
    def each(module: Any, logits: Tensor, batch: Batch) -> Tensor:
        if bool(batch["x"].max() > 40):
            logits = logits.clone()
        return entropy(module, logits, batch)

    data = data_of(6)
    for batch in data[1:]:
        batch["x"][0, 0] = 50.0
    _, said = said_by(each, data)
    assert said == ""
    assert len(verdicts) <= 3


class Guard(nn.Module):
    """Asks whether any sample is large, as a layer does that clamps what overflows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(6, 6), factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if (x.abs() > 40).any():
            y = y * self.factor
        return torch.tanh(y)


def guarded(factor: float) -> Module:
    module = Module(entropy)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        module.model = nn.Sequential(Guard(factor), Guard(factor), nn.Linear(6, 5))
    return module


@pytest.mark.parametrize(
    "plan", ["forward 0-1; fused 2; backward 1 0; round 2", "forward none; fused 0-2; backward none; round 1"]
)
@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_branch_that_a_layer_takes_by_a_value_of_all_samples(
    plan: str, factor: float, verdicts: list[Verdict]
) -> None:
    """Of later batches, a part has a large sample and the others have none."""
    data = data_of(7)
    for batch in data[LATE:]:
        batch["x"][0, 0] = 50.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RoundPipeWarning)
        strategy = ours(num_microbatches=2, layers=["Guard", "Linear"], plan=plan)
        result = run(strategy, guarded(factor), data, devices=2)
    said = [str(w.message) for w in caught if issubclass(w.category, RoundPipeWarning)]
    if factor == 1.0:
        assert said == []
        assert_same(run("auto", guarded(factor), data), result)
    else:
        [one] = said
        assert "took a branch by a tensor that was True for the first time" in one and "So are later ones" in one
    assert len(verdicts) <= 3, "before the first batch, after it, and where a part has the first large sample"
