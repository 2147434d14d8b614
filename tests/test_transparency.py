"""Training with the strategy gives plain Lightning's numbers: losses, outputs, logged values, gradients and weights.

Each case trains three steps: the first runs its microbatches one after another and finds the trace, later ones are
pipelined by a plan, so a fault of either way shows. Windows are compared with the same script under plain Lightning.
Batches that are cut are compared with plain Lightning on whole batches, and ``loss_weight="targets"`` weighs the parts
of padded ones. Tolerances are those of rounding.
"""

import harness
import pytest
import zoo
from harness import assert_identical, assert_plain, assert_same
from zoo_runs import calls, expected, module, plain, train, trained


def _cases(names):
    """Every model, and again with adapters where it has them."""
    return [
        pytest.param(name, lora, id=f"{name}-lora" if lora else name)
        for name in names
        for lora in ([False, True] if zoo.ENTRIES[name].lora else [False])
    ]


def _slow_but(wanted, names):
    """All of them, slow but for those ``wanted``."""
    return [
        case if case.values in wanted else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        for case in _cases(names)
    ]


UNEVEN = ["llama", "t5", "gpt_oss", "gemma", "mlp", "batch_norm", "layer_drop"]


# ---------------------------------------------------------------------------------------------- equal to plain training


@pytest.mark.parametrize(
    ("name", "lora", "window"),
    [
        *(pytest.param(*case.values, 3, id=case.id) for case in _cases(zoo.ENTRIES)),
        ("llama", False, 1),
        ("t5", False, 1),
    ],
)
def test_equals_plain(name, lora, window):
    result = trained(name, lora, 2, window)
    assert_same(plain(name, lora, window=window), result, outputs=True)
    assert result.report["microbatches"] == window


@pytest.mark.parametrize(("name", "lora"), _slow_but({("llama", True), ("mlp", False), ("batch_norm", False)}, UNEVEN))
def test_cut_at_every_call_and_uneven(name, lora):
    """5 samples in 3 microbatches: 2, 2 and 1."""
    plan = harness.per_call(calls(name, lora))
    result = train(name, lora, 2, samples=5, num_microbatches=3, plan=plan)
    assert_same(expected(name, lora, 3, samples=5), result, outputs=not zoo.ENTRIES[name].coupled)
    assert result.report["plan"].split("; round")[0] == plan.split("; round")[0]


def test_a_microbatch_without_any_target():
    """Its own mean is 0/0; the batch's is not, and neither are plain training's gradients."""
    given = zoo.make_batches("llama")
    for batch in given[1:]:
        batch["labels"][2:4] = -100
    assert_plain(module("llama", False), given, {"num_microbatches": 3, "loss_weight": "targets"})


@pytest.mark.parametrize(("name", "lora"), [("llama", False), ("qwen3", True)])
def test_bf16_mixed(name, lora):
    """Each microbatch is rounded as in plain training, within fp32's tolerances; and it is not fp32."""
    result = train(name, lora, 2, precision="bf16-mixed", window=3)
    in_bf16 = plain(name, lora, precision="bf16-mixed", window=3)
    assert_same(in_bf16, result, outputs=True)
    assert all(value.dtype == in_bf16.state[name].dtype for name, value in result.state.items())
    with pytest.raises(AssertionError):
        assert_same(plain(name, lora, window=3), result, rtol=20 * harness.RTOL, atol=20 * harness.ATOL)


# ---------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(("name", "lora", "window"), [("llama", False, 4), ("t5", False, 3)])
def test_rounds(name, lora, window):
    """Two full rounds, and one and a half."""
    result = train(name, lora, 2, window=window, round_microbatches=2)
    assert_same(plain(name, lora, window=window), result)
    assert {slot["round"] for slot in result.report["slots"]} == {0, 1}


def test_the_plan_in_use_can_be_given_back():
    first = trained("llama", False, 2, 3)
    again = train("llama", False, 2, window=3, plan=first.report["plan"])
    assert again.report["plan"] == first.report["plan"]
    assert_identical(first, again)


# ----------------------------------------------------------------------------------------------------- equal to the bit


def variants(name, lora):
    """How else the same can be computed. They differ from each other in everything."""
    n = calls(name, lora)
    return [
        (4, {}),
        (3, {"round_microbatches": 3}),
        (2, {"plan": harness.per_call(n)}),
        (2, {"plan": harness.halves(n, 2)}),
        (3, {"plan": harness.single(n), "emulation": {"poison": True, "delay_seed": 3, "bandwidth": "100MB"}}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora", "precision"),
    [("batch_norm", False, "32-true"), ("qwen3", True, "32-true"), ("llama", False, "bf16-mixed")],
)
def test_workers_rounds_and_plans_do_not_change_a_bit(name, lora, precision):
    """Given the microbatches, nothing else decides an order of summation, or of running averages."""
    reference = train(name, lora, 1, window=3, precision=precision)
    for devices, options in variants(name, lora):
        result = train(name, lora, devices, window=3, precision=precision, **options)
        try:
            assert_identical(reference, result, rng=True)
        except AssertionError as error:
            raise AssertionError(f"devices={devices}, {options}: {error}") from None


@pytest.mark.slow
def test_attention_whose_bias_begins_at_zero():
    """Torch chooses another attention kernel without grad, and in the first batch both return the same bits."""
    fused, alone = (harness.single(calls("swin", False), 3), harness.per_call(calls("swin", False)))
    first, second = (train("swin", False, 2, window=3, plan=plan) for plan in (fused, alone))
    assert_identical(first, second, rng=True)
