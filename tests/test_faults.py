"""What goes wrong reaches the caller: with its own type and traceback, saying where, and leaving nothing behind.

Each fault is planted with `faulty.fail`, which looks at all of that, and trains once more with the same Trainer. With a
cut at every call only the last layer is fused, so the others run twice in a microbatch: forward, and recomputation.
"""

import copy
import re

import faulty
import harness
import lightning.pytorch as pl
import pytest
from faulty import BATCHES, BLOCKS, CALLS, MODULE, PLANTED, SAMPLES, Boom, FaultyModule, fail, microbatch_of, notes
from harness import ours, run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


@pytest.fixture(autouse=True)
def _cleared():
    PLANTED.clear()
    yield
    PLANTED.clear()


# --------------------------------------------------------------------------------------------- any microbatch, any slot

PLACES = [
    *(f"block {i}{part}" for i in range(BLOCKS) for part in ("", " backward")),
    *(f"between {i}" for i in range(BLOCKS)),
    "training_step",
    "loss",
    "loss backward",
    "hook around",
    "hook inside",
]
settings.register_profile(
    "faults",
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # not shrunk: an example can be read as it is
)
faults = settings.get_profile("faults")


@st.composite
def planted(draw):
    """Arguments of `fail`."""
    microbatches = draw(st.integers(1, 4))
    round_ = draw(st.integers(1, microbatches))
    plan = draw(st.sampled_from([harness.per_call, harness.per_call, harness.halves, harness.single, None]))
    return {
        "batch": draw(st.integers(0, 2)),
        "where": draw(st.sampled_from(PLACES)),
        "sample": draw(st.integers(0, SAMPLES - 1)),
        "time": draw(st.integers(0, 1)),
        "devices": draw(st.integers(1, 3)),
        "num_microbatches": microbatches,
        "plan": plan and plan(CALLS, round_),
        "emulation": {"delay_seed": draw(st.none() | st.integers(0, 99))},
    }


def check(batch, where, sample, time, num_microbatches, **options):
    again = where.endswith(("0", "backward"))
    # In the first batch, and without a plan in the second one too, a layer is run once more to see if that differs.
    last_probe = 1 if num_microbatches == 1 and options["plan"] is None else 0
    probed = batch <= last_probe and time == 1 and where.startswith(("block", "hook inside"))
    planted = (where, sample, time)
    error = fail(batch, *planted, again=again, probed=probed, num_microbatches=num_microbatches, **options)
    if error is None:
        return  # it does not come there a second time
    assert type(error) is Boom and error.args == ("planted",)
    said = notes(error)
    inside = re.fullmatch(r"block (\d)( backward)?|hook inside", where)
    if inside is None:
        expected = "the code "
    elif where == "hook inside":
        expected = r"layer 'model\.blocks\.2', (forward pass|recomputation)"
    else:
        expected = rf"layer 'model\.blocks\.{inside[1]}', {'backward' if inside[2] else '(forward|recomput)'}"
    assert re.search(expected, said), said
    if where != "hook inside":  # which knows no samples
        assert f"microbatch {microbatch_of(sample, num_microbatches)}," in said, said
    assert re.search(r"(slot \d+ \((forward|fused|backward)\), )?(device cpu \(worker \d\)|on the host)", said), said
    assert said.count("microbatch") == 1, said


@pytest.mark.timeout(300)
@settings(faults, max_examples=6, derandomize=True, database=None)
@given(drawn=planted())
def test_an_exception_anywhere(drawn):
    check(**drawn)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(faults, max_examples=60, derandomize=True, database=None)
@given(drawn=planted())
def test_exceptions_everywhere(drawn):
    check(**drawn)


def test_user_code_may_catch_it():
    """As those do who skip a batch that is too large: with one microbatch, since a batch is skipped as a whole."""

    class Catching(FaultyModule):
        def training_step(self, batch, batch_idx):
            try:
                return super().training_step(batch, batch_idx)
            except Boom:
                return None

    results = []
    for chosen in ("auto", faulty.strategy(num_microbatches=1, plan=None), faulty.strategy(num_microbatches=1)):
        module = Catching()
        module.load_state_dict(MODULE.state_dict())
        plant = faulty.PlantAt(2, "block 2", 0)
        results.append(
            run(chosen, module, BATCHES, callbacks=[plant], devices=1 if chosen == "auto" else 2, watch=False)
        )
        assert len(PLANTED.raised_at) == 1
    for result in results[1:]:
        harness.assert_same(results[0], result)


@pytest.mark.parametrize("error", [StopIteration, SystemExit])
def test_exceptions_that_could_be_taken_for_something_else(error):
    """Python gives some of these a meaning of their own in loops, generators and threads."""
    plant = faulty.PlantAt(2, "block 1", 2, 0, error)
    module = copy.deepcopy(MODULE)
    trainer = harness.trainer_of(faulty.strategy(), devices=2, callbacks=[plant])
    if error is StopIteration:  # a data fetcher's end, for Lightning: plain training just stops
        trainer.fit(module, harness.loader(BATCHES))
    else:
        with pytest.raises(error, match="planted"):
            trainer.fit(module, harness.loader(BATCHES))
    assert len(PLANTED.raised_at) == 1
    faulty.assert_nothing_left(module)


# ---------------------------------------------------------------------------------------------- outside of the pipeline


def test_in_the_optimizer():
    fail(1, "optimizer")


HOOKS = ["setup", "on_train_batch_start", "on_after_backward", "on_before_optimizer_step"]
HOOKS += ["on_validation_batch_end", "on_train_epoch_end", "teardown"]


@pytest.mark.parametrize("hook", HOOKS)
def test_in_a_callback(hook):
    callback = type("Falls", (pl.Callback,), {hook: lambda *_, **__: PLANTED(hook)})()
    validation = {"val_dataloaders": harness.loader(BATCHES[:2])} if "validation" in hook else {}
    batch = 2 if "batch" in hook or "before" in hook or "after" in hook else None
    if "validation" in hook:
        batch = None
    again = hook in ("setup", "on_after_backward", "on_validation_batch_end")
    error = fail(batch, hook, again=again, trainer={"callbacks": [callback], **validation})
    assert type(error) is Boom


@pytest.mark.parametrize(("where", "time"), [("validation_step", 1), ("block 2", 0)])
def test_in_validation(where, time):
    """Before training, where it is the sanity check that fails."""
    trainer = {"val_dataloaders": harness.loader(BATCHES[:2]), "num_sanity_val_steps": 2}
    error = fail(None, where, None, time, again=where == "block 2", trainer=trainer)
    what = "layer 'model.blocks.2'" if where == "block 2" else "the code .*"
    assert re.search(f"roundpipe: in {what}, evaluation", notes(error))


class Rows(Dataset[dict[str, Tensor]]):
    """Batches; one of them raises."""

    def __init__(self, falls):
        self.falls = falls

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.falls:
            raise Boom("planted")
        return BATCHES[index % 4]


def test_in_a_data_loader_process():
    module = copy.deepcopy(MODULE)
    with pytest.raises(Boom, match="planted"):
        harness.trainer_of(faulty.strategy(), devices=2).fit(
            module, DataLoader(Rows(2), batch_size=None, num_workers=1)
        )
    faulty.assert_nothing_left(module)


def test_an_engine_that_cannot_be_made():
    """Nothing of it stays: the devices are there already, threads possibly as well."""
    module = copy.deepcopy(MODULE)
    for options in ({"emulation": {"memory": 1000}}, {"layers": ["Nothing"]}):
        with faulty.devices_made() as made:
            with pytest.raises(Exception, match=r"memory|Nothing"):
                harness.trainer_of(ours(**options), devices=2).fit(module, harness.loader(BATCHES))
            assert len(made) == 2
            faulty.assert_nothing_left(module, made)
