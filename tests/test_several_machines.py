"""Several machines, a process each, give what one machine gives on their batches together."""

import re
from pathlib import Path

import pytest
import several_jobs
import several_machines
import torch
import zoo
from harness import assert_tensors_same
from patience import PATIENCE_S

pytestmark = pytest.mark.timeout(10 * PATIENCE_S)

CASES = {
    "adamw": {"late": 1.5},
    "looked at, and accumulated": {"blocking": True, "accumulate_grad_batches": 2, "steps": 5, "even": True},
    "clipped and accumulated": {
        "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "steps": 5, "devices": [2, 1], "even": True,
    },
    "a mean of its own": {"own_mean": True, "optimizer": "sgd"},
    "stale, clipped, state everywhere": {
        "options": {"staleness": 1, "shard_optimizer": False}, "gradient_clip_val": 0.1,
    },
    "dropout": {"dropout": 0.2},
    "small": {"model": "mlp"},
    "small, clipped and accumulated": {
        "model": "mlp", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "steps": 4,
    },
    "tied embeddings": {"model": "gpt2"},
    "experts that get tokens on one machine only": {"model": "gpt_oss"},
    "adapters over a frozen base": {"model": "llama", "lora": True},
    "no targets on one machine": {"nothing_on": 0, "microbatches": 2},
    "many microbatches": {"microbatches": 8, "blocking": True, "gradient_clip_val": 0.1},
    "a sum": {"options": {"loss_weight": "sum"}, "optimizer": "sgd", "gradient_clip_val": 0.5},
    "one device": {"devices": 1, "microbatches": 4},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "scaled": {"scaled": True, "gradient_clip_val": 0.1},
    "scaled, state everywhere": {"scaled": True, "options": {"shard_optimizer": False}},
}  # fmt: skip
QUICKLY = ("adamw", "clipped and accumulated", "a mean of its own")
"""Those that are compared in each run of the tests."""
SMALL = ("small", "small, clipped and accumulated")
ROUNDED = ("bf16-mixed", "bf16-true", "scaled", "scaled, state everywhere")
"""The same microbatches on one machine round alike, so both are near."""
UNEVEN = {"dropout": 0.2, "samples": 3, "steps": 1}
"""Two samples, and so two microbatches, on the first machine, and one on the second one."""
NEEDS_OURS = ("stale, clipped, state everywhere", "dropout", "a sum", *ROUNDED)
"""Plain training has nothing like it; one machine with our strategy has."""


def assert_one(case, found, *, ours, rtol=2e-5):
    """All machines have the same weights, to the bit, and those of one machine with all samples."""
    first, *others = found
    for other in others:
        assert all(torch.equal(first["state"][name], other["state"][name]) for name in first["state"])
    given = {"strategy": None if ours else "auto", "devices": 2 if ours else 1}
    one = several_jobs.train(**{**case, **given}, rank=0, machines=1)
    assert first["steps"] == one["steps"] > 0
    assert_tensors_same(one["state"], first["state"], rtol=rtol)
    start = zoo.make_module(case.get("model", "llama"), case.get("lora", False)).state_dict()
    assert any(not torch.equal(start[name], one["state"][name]) for name in start), "nothing was trained"


def compare(folder, names, *others):
    """Compare cases with one machine, and return what each machine found in the ``others``."""
    found = several_machines.results("cases", folder, cases=[*(CASES[name] for name in names), *others], limit=500)
    for name, ones in zip(names, zip(*found, strict=True), strict=False):
        print(name)
        assert_one(CASES[name], list(ones), ours=name in NEEDS_OURS, rtol=5e-3 if name in ROUNDED else 2e-5)
    return [results[len(names) :] for results in found]


def test_small_models_of_two_machines_are_one(tmp_path):
    """The optimizer steps behind the backward, each layer on one machine, by the gradients of both.

    With staleness 1, the step after a window that one machine looked into had all updates on that machine.
    """
    stale = {"model": "mlp", "options": {"staleness": 1}, "accumulate_grad_batches": 2, "steps": 8}
    for undisturbed, looked_into in compare(tmp_path, [*SMALL], stale, {**stale, "looks_after": 2}):
        assert all(torch.equal(undisturbed["state"][name], looked_into["state"][name]) for name in undisturbed["state"])


def test_two_machines_are_one_with_all_samples(tmp_path):
    """Targets are spread unevenly, so the machines' losses have to be weighed by them.

    One machine comes late, in the first case, with its last gradients: a wait that looked up every half second broke
    the connection when it ended.

    Machines with different numbers of microbatches draw different numbers: the number of a machine's first microbatch
    was its rank times its own count, so the second machine's only one drew what the first machine's second one drew.
    """
    first, second = (found[0]["drawn"] for found in compare(tmp_path, [*QUICKLY], UNEVEN))
    assert len(first) == 2 * len(second) > 0
    assert not first & second


@pytest.mark.slow
def test_slurm_with_one_task_on_each_machine(tmp_path):
    """Lightning learns who is who from SLURM, the address included."""
    case = {"steps": 2, "devices": [1, 2]}
    processes = several_machines.start("cases", 2, tmp_path, {"cases": [case]}, slurm=True)
    ended = several_machines.collect(processes, tmp_path, PATIENCE_S)
    assert [one.status for one in ended] == [0, 0], "\n\n".join(one.output for one in ended)
    found = [torch.load(tmp_path / f"result-{rank}.pt", weights_only=False)[0] for rank in range(2)]
    assert_one(case, found, ours=False)
    assert "roundpipe: plan" not in ended[1].output


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [False, True])
def test_in_other_ways(rounded, tmp_path):
    compare(tmp_path, [name for name in CASES if name not in (*QUICKLY, *SMALL) and (name in ROUNDED) is rounded])


@pytest.mark.slow
def test_three_machines_are_one(tmp_path):
    case = {"microbatches": 6, "samples": 12, "options": {"staleness": 1}, "gradient_clip_val": 0.1}
    found = several_machines.results("cases", tmp_path, machines=3, cases=[case])
    assert_one(case, [results[0] for results in found], ours=True)


@pytest.mark.slow
def test_gradients_in_bf16_are_near(tmp_path):
    case = {"options": {"network_dtype": "bfloat16"}, "optimizer": "sgd"}
    first, second = several_machines.results("cases", tmp_path, cases=[case])
    assert all(torch.equal(first[0]["state"][name], second[0]["state"][name]) for name in first[0]["state"])
    one = several_jobs.train(**{**case, "options": {}}, rank=0, machines=1)
    assert any(not torch.equal(first[0]["state"][name], one["state"][name]) for name in one["state"])
    assert_tensors_same(one["state"], first[0]["state"], rtol=1e-2, atol=1e-2)


# -------------------------------------------------------------------------------------------------------- checkpoints


def resumed(path, steps, **other):
    """One machine that goes on from ``path``."""
    return several_jobs.train(rank=0, machines=1, steps=steps, max_epochs=2, resume=str(path), **other)


@pytest.mark.slow
def test_checkpoints_are_those_of_one_machine(tmp_path):
    """Saved by two machines, each with a part of the optimizer's state; resumed by one, by plain Lightning, by two."""
    path = tmp_path / "two.ckpt"
    found = several_machines.results("cases", tmp_path, cases=[{"save": str(path)}])
    alone = tmp_path / "one.ckpt"
    one = several_jobs.train(rank=0, machines=1, save=str(alone))
    held = [results[0]["held"] for results in found]
    assert sum(held) == one["held"] and all(held), "each has the state of a part of the parameters"
    saved, expected = (torch.load(file, weights_only=False) for file in (path, alone))
    assert saved["optimizer_states"][0]["state"].keys() == expected["optimizer_states"][0]["state"].keys()
    assert_tensors_same(expected["optimizer_states"][0]["state"], saved["optimizer_states"][0]["state"])
    assert_tensors_same(expected["state_dict"], saved["state_dict"])
    plain = resumed(alone, 3, strategy="auto", devices=1)
    assert_tensors_same(plain["state"], resumed(path, 3)["state"])
    assert_tensors_same(plain["state"], resumed(path, 3, strategy="auto", devices=1)["state"])
    again = [{"resume": str(file), "max_epochs": 2} for file in (path, alone)]
    for results in several_machines.results("cases", tmp_path / "again", cases=again):
        for result in results:
            assert result["steps"] == plain["steps"] == 6
            assert_tensors_same(plain["state"], result["state"])


@pytest.mark.slow
def test_checkpoints_take_no_memory_for_the_state_of_other_machines(tmp_path):
    """The first machine held all of it at once when it saved, and each machine did when it went on: 64 MiB here."""
    first, second = several_machines.results("saves_much", tmp_path / "run")
    assert first["held"] > 60e6 and second["held"] > 60e6
    for one in (first, second):
        assert one["grew"] < 16e6, f"{one['grew'] / 1e6:.0f} MB while saving"
    saved = torch.load(tmp_path / "broad.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    assert len(saved) == 32 and all(one["exp_avg_sq"].any() for one in saved.values())
    again = several_machines.results("saves_much", tmp_path / "again", resume=True)
    for one in again:
        assert one["held"] in (first["held"], second["held"])
        assert one["loaded"] < 100e6, f"{one['loaded'] / 1e6:.0f} MB while loading; it was three times the weights"
    assert all(torch.equal(again[0]["state"][name], again[1]["state"][name]) for name in again[0]["state"])
    assert any(not torch.equal(first["state"][name], again[0]["state"][name]) for name in first["state"])


@pytest.mark.slow
def test_torchrun_starts_a_job_again_that_goes_on_from_the_last_checkpoint(tmp_path):
    """torchrun's store outlives the processes, and had the addresses of those that had ended."""
    processes = several_machines.torchrun("dies_once", 2, tmp_path, {"epochs": 3})
    ended = several_machines.collect(processes, tmp_path, 2 * PATIENCE_S)
    assert [one.status for one in ended] == [0, 0], "\n\n".join(one.output for one in ended)
    assert "machine 1 (" in ended[0].output and "Restored all states" in ended[0].output
    found = [torch.load(tmp_path / f"result-{rank}.pt", weights_only=False) for rank in range(2)]
    assert len(found[0]["losses"]) == 6, "two epochs after the checkpoint of the first one"
    assert_one({"max_epochs": 3}, found, ours=False)


# ------------------------------------------------------------------------------------------------- what surrounds it


@pytest.mark.slow
def test_what_lightning_exchanges(tmp_path):
    """Samplers, logs, metrics, early stopping, checkpoints, progress, evaluation: by machine, or by the first one."""
    first, second = several_machines.results("lightning", tmp_path)
    assert [one["world"] for one in (first, second)] == [(2, 0, 0, 0, 2), (2, 1, 0, 1, 2)]
    assert not torch.equal(first["start"]["model.0.weight"], second["start"]["model.0.weight"])
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in first["state"])
    epoch = len(first["seen"]) // first["epochs"]
    assert sorted(first["seen"][:epoch] + second["seen"][:epoch]) == [float(n) for n in range(24)]
    for one in (first, second):
        assert one["said"]["gathered"].tolist() == [[0, 5], [1, 5]]
        assert (one["said"]["sum"], one["said"]["mean"]) == (3.0, 1.5)
        assert one["said"]["text"] == {"from": 0, "list": [1, None]}
        assert one["said"]["path"] == Path("/of/0")
        assert (one["said"]["any"], one["said"]["all"]) == (True, False)
        assert one["metrics"]["everyones"] == one["metrics"]["metric"] == pytest.approx(11.5)
        assert one["metrics"]["val"] == 3.5 + 5  # in epoch 1, the mean of both machines'
        assert one["then"][0]["val"] == 3.5 + 10
        assert one["epochs"] == 2  # only the second machine's own value grew: without an agreement it would stop alone
    assert len(first["lines"]) > 8 and not second["lines"]
    assert first["best"] == second["best"]
    assert first["predicted"] == second["predicted"], "what predict_step has gathered"
    assert sorted(first["predicted"][0] + first["predicted"][1]) == [float(n) for n in range(10)]
    output = [(tmp_path / f"output-{rank}.txt").read_text() for rank in range(2)]
    assert "roundpipe: plan" in output[0] and "Epoch" in output[0]
    assert "roundpipe:" not in output[1] and "Epoch" not in output[1]


def test_a_machine_that_stops_stops_all(tmp_path):
    """After the batch in which its code says so. The others waited, until an error said where each machine was."""
    hooks = ["training_step", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end"]
    first, second = several_machines.results("stops", tmp_path, hooks=hooks)
    assert first == second
    assert [steps for steps, _, _ in first] == [3, 2, 4, 6]


# ----------------------------------------------------------------------------------------------------------- failures

REFUSED = {
    "fewer batches": "the machines differ in the number of training batches: machine 0 (.*) has '8', and machine 1",
    "another model": "the machines differ in the number of parameters and buffers: machine 0 (.*) has 4, and machine 1",
    "another setting": "the machines differ in staleness: machine 0 (.*) has 0, and machine 1 (.*) has 1",
    "another learning rate": "the machines differ in lr of group 0 of AdamW: machine 0 (.*) has '0.01', and machine 1",
    "another activation": r"the machines differ in module 'model.1': machine 0 (.*) has 'Tanh\(\)', and machine 1",
    "another dropout": r"the machines differ in module 'drop': machine 0 (.*) has 'Dropout\(p=0.1, inpl",
}
FAILED = {
    "raises": "machine 1 (.*) has failed: ValueError: the data is spilled",
    "raises in a hook": "machine 1 (.*) has failed: ValueError: the validation is spilled",
    "killed": "machine 1 (.*) has died: its connection broke",
    "stopped": "machine 1 (.*) has not answered for",
    "the first is killed": "machine 0 (.*) has died|machine 0 (.*), which keeps the job's store, does not answer",
    "fewer batches that nobody counts": "the machines have come to different places",
    "another exchange": r"places: machine 0 \(.*\) waits for the mean of a value float32 and .* waits for barrier",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_machines_that_differ_are_refused_before_training(kind, tmp_path):
    for one in several_machines.launch("fault", tmp_path, kind=kind, limit=PATIENCE_S):
        assert one.status == 1
        assert re.search(REFUSED[kind], one.output), one.output
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.slow
def test_learning_rates_that_go_apart_are_refused(tmp_path):
    """Each machine's scheduler saw the value of its own batches, and with state everywhere the weights went apart."""
    expected = "the machines differ in lr of group 0 of AdamW, after step .*: machine 0 (.*) has 0.001, and machine 1"
    for one in several_machines.launch("fault", tmp_path, kind="own plateau", limit=PATIENCE_S):
        assert one.status == 1
        assert re.search(expected, one.output), one.output
        assert "sync_dist=True" in one.output


def fails(folder, kind):
    """The other machine ends soon, with an error that says why; the last checkpoint is whole."""
    processes, other = several_machines.start("fault", 2, folder, {"kind": kind}), int("the first" in kind)
    left = several_machines.collect(processes, folder, PATIENCE_S, until=other)[other]
    assert left.status not in (0, several_machines.LEFT), left.output
    assert re.search(FAILED[kind], left.output), left.output
    saved = sorted((folder / "checkpoints").glob("*.ckpt"))
    assert saved
    for path in saved:
        assert torch.load(path, weights_only=False)["global_step"] in (2, 4, 6, 8)


def test_a_machine_that_fails_ends_the_others(tmp_path):
    fails(tmp_path, "raises")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAILED if kind != "raises"])
def test_a_machine_that_is_lost_ends_the_others(kind, tmp_path):
    fails(tmp_path, kind)


@pytest.mark.slow
def test_a_machine_that_is_asked_to_end_ends_all_after_the_same_batch(tmp_path):
    """Lightning called torch.distributed in the handler of SIGTERM, and the machine that got it stayed there."""
    first, second = several_machines.launch("fault", tmp_path, kind="is asked to end", limit=PATIENCE_S)
    assert several_machines.LEFT not in (first.status, second.status), first.output + second.output
    assert re.search(r"machine 1 \(.*\) received SIGTERM, and all machines end after this batch", first.output)
    assert "different places" not in first.output + second.output
    assert not list(tmp_path.glob("result-*.pt")), "fit returned"
    assert len(list((tmp_path / "checkpoints").glob("*.ckpt"))) == 2, "of steps 2 and 4"


@pytest.mark.slow
def test_a_slow_machine_is_waited_for(tmp_path):
    """Longer than the timeout, in which it answers all the time."""
    for one in several_machines.launch("fault", tmp_path, kind="is slow", limit=2 * PATIENCE_S):
        assert one.status == 0, one.output
