"""What a run says of itself: before the first batch, when the plan is there, when it is printed, and to loggers."""

import copy
import json
import pickle
import re

import lightning.pytorch as pl
import pytest
import zoo
from harness import loader, ours, quiet, run, trainer_of
from torch import nn

from lightning_roundpipe import RoundPipeStrategy, RoundPipeWarning
from lightning_roundpipe.planning.schedule import Plan

MLP = zoo.make_module("mlp")
BATCHES = zoo.make_batches("mlp", 4, samples=7)
NUMBER = sum(p.numel() for p in MLP.parameters())


def test_what_will_happen_and_then_the_plan(said):
    """Two lines, whatever the number of steps."""
    result = run(ours(num_microbatches=3), MLP, BATCHES, devices=2)
    begin, plan, *more = (line for line in said if "optimizer steps when" not in line)
    assert not more
    start = (
        f"roundpipe: 2 emulated devices, 3 microbatches of 2 to 3 samples, 32-true, 6 layers, {NUMBER / 1000:.1f} k "
    )
    assert begin.startswith(start + "parameters (all trained), about ")
    assert re.search(r", about [\d.,]+ [KMG]iB of host memory\.$", begin)
    memory = r"about [\d.,]+ \w+ on each device"
    found = re.fullmatch(rf'roundpipe: plan "(.+)": (\d+) stages?( on .+)?, {memory}, at least .+ a step\.', plan)
    assert found is not None, plan
    assert found[1] == result.report["plan"]
    assert int(found[2]) == len(Plan.parse(found[1]).stages())


def test_a_static_plan_promises_no_time(said):
    run(ours(num_microbatches=2, plan="static"), MLP, BATCHES[:2], devices=2)
    [line] = [line for line in said if line.startswith("roundpipe: plan ")]
    assert re.search(r", about [\d.,]+ \w+ on each device\.$", line)


def test_a_device_that_could_hold_the_whole_model_is_said_once(said):
    emulation = {"memory": "64MiB"}
    run(ours(num_microbatches=2, emulation=emulation), MLP, BATCHES, devices=2)
    [line] = [line for line in said if "holds" in line]
    assert re.fullmatch(
        r"roundpipe: A device of [\d.]+ MiB also holds all weights, gradients, optimizer state and a microbatch's "
        r'activations at once, about [\d.]+ [KM]iB: strategy="ddp" is likely faster\.',
        line,
    )


def test_a_budget_that_is_more_than_the_device():
    with pytest.warns(
        RoundPipeWarning, match=r"^roundpipe: memory_budget=1.0 GiB is more than the 512 KiB that a device"
    ):
        result = run(
            ours(num_microbatches=2, memory_budget="1GiB", emulation={"memory": "512KiB"}), MLP, BATCHES[:2], devices=2
        )
    assert result.report is not None and result.report["planned_device_bytes"] <= 512 * 1024


def test_the_strategy_prints_its_settings_devices_state_and_plan():
    strategy = ours(num_microbatches=3, memory_budget="20GiB", loss_weight=len, layers=[nn.Linear, "ResidualBlock"])
    settings = "num_microbatches=3, layers=[Linear, 'ResidualBlock'], loss_weight=len, memory_budget='20GiB')"
    assert repr(strategy) == f"RoundPipeStrategy({settings}"
    assert repr(RoundPipeStrategy()) == "RoundPipeStrategy()"
    assert str(strategy).splitlines()[1:] == [
        "  not set up yet, which Trainer.fit() does",
        "  plan: none yet, the first batch shows what it needs",
    ]
    seen = []

    class Prints(pl.Callback):
        roundpipe_passive_hooks = True

        def on_train_batch_end(self, trainer, *_):
            seen.append(str(trainer.strategy))

    trainer = trainer_of(strategy, devices=2, callbacks=[Prints()])
    with quiet():
        trainer.fit(copy.deepcopy(MLP), loader(BATCHES))
    plan = strategy.report()["plan"]
    assert seen[-1].splitlines()[1:] == ["  2 emulated devices, 32-true, 6 layers", f"  plan: {plan}"]
    assert str(strategy).splitlines()[1:] == ["  not training", f"  plan: {plan}"]


def test_the_report_prints_a_summary_and_is_a_dict():
    strategy = ours(num_microbatches=3)
    assert strategy.report() == {} and str(strategy.report()) == "No training step has finished yet."
    report = run(strategy, MLP, BATCHES, devices=2).trainer.strategy.report()
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "step", "plan", "bubble", "device", "host", "copies",
    ]  # fmt: skip
    assert lines[0].endswith(", 3 microbatches on 2 workers")
    assert report["plan"].split(";")[0] in str(report)
    assert isinstance(report, dict) and report == dict(report)
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(dict(report)))
    for made in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert made == report and str(made) == str(report)
