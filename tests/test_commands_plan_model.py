"""``roundpipe-plan model=``: what it answers and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from lightning_roundpipe.commands import plan
from lightning_roundpipe.planning.schedule import Plan

ROOT = Path(__file__).parents[1]
TINY = ["model=tiny_llama", "hardware=cpu", "sequence_length=64", "search_seconds=0.1"]
TINY_4090 = ["model=tiny_llama", "hardware=rtx4090x8", "sequence_length=64", "search_seconds=0.1"]

LORA = ("attention", "all_linear")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["roundpipe-plan", *arguments])
        code = plan.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_json_says_all_that_the_table_does(command: Any) -> None:
    code, out, err = command(*TINY_4090, "format=json", "microbatches=8", "microbatch_size=4", "workers=2")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["fits"] is True
    assert (found["workers"], found["microbatches"], found["microbatch_size"]) == (2, 8, 4)
    assert found["tokens_per_s"] == pytest.approx(8 * 4 * 64 / (found["period_ms"] / 1e3))
    assert 0 < found["period_ms"] <= found["makespan_ms"] * 1.001
    assert 0 <= found["bubble_pct"] < 100
    Plan.parse(found["plan"]).validate()
    assert sum(found["forward"]) + found["fused"] + 1 == 6 + 3 == sum(found["backward"]) + found["fused"] + 1
    assert (found["longest_sequence"], found["limited_by"]) == (256, "the model's max_position_embeddings")
    for memory in ("device_memory", "host_memory"):
        needed, items = found[memory]["needed_bytes"], found[memory]["items"]
        assert 0 < needed == sum(item["bytes"] for item in items) <= found[memory]["limit_bytes"]
    weights = found["parameters"]
    host = {item["name"]: item["bytes"] for item in found["host_memory"]["items"]}
    assert host["trained weights, fp32"] == host["gradients, fp32"] == 4 * weights
    assert host["their working copy in compute precision"] == 2 * weights
    assert host["AdamW's two moments, fp32"] == 8 * weights


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_whole(command: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = command(*TINY)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= width
    assert "…" not in out
    for text in ("Fits. Estimated", "tokens/s", "Longest sequence: 256 tokens", "arenas for weights", "page-locked"):
        assert text in " ".join(out.split())


@pytest.mark.parametrize("staleness", [0, 1])
def test_pictures_and_traces(command: Any, tmp_path: Path, staleness: int) -> None:
    picture, trace = tmp_path / "plan.png", tmp_path / "plan.trace.json"
    options = [*TINY_4090, "microbatches=4", "microbatch_size=2", "workers=2", f"staleness={staleness}", "format=json"]
    code, out, err = command(*options, f"picture={picture}", f"trace={trace}")
    assert (code, err) == (0, "")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found, processes = json.loads(out), _events(trace)
    ours = processes[max(processes)]  # a machine that is busy may find no better plan than the paper's in the time
    steps = 3 if staleness else 2
    assert (
        found["makespan_ms"]
        < max(event["ts"] + event["dur"] for event in ours) / 1e3
        < steps * found["makespan_ms"] * 1.001
    )
    assert any(event["name"] == "waits for weights" for event in ours)
    stages = {event["args"]["stage"] for event in ours if "args" in event}
    assert len(stages) == steps * (len(found["forward"]) + 1 + 2 * len(found["backward"]))  # recomputations, too
    assert {stage.partition(" of step ")[2] for stage in stages} == {str(step) for step in range(steps)}


def test_the_papers_plan_is_drawn_once(command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "plan.trace.json"
    assert command(*TINY_4090, "partitioner=paper", "microbatch_size=2", f"trace={trace}")[0] == 0
    assert len(_events(trace)) == 1


def _events(trace: Path) -> dict[int, list[Any]]:
    processes: dict[int, list[Any]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            processes.setdefault(event["pid"], []).append(event)
    return processes


def test_what_does_not_fit_has_no_picture(command: Any, tmp_path: Path) -> None:
    code, out, err = command(*TINY_4090, "memory=300KB", "microbatch_size=2", f"picture={tmp_path / 'plan.png'}")
    assert (code, out) == (2, "")
    assert "picture= has no steps to draw, as tiny_llama does not fit" in err
    assert not (tmp_path / "plan.png").exists()


def test_adapters_need_less(command: Any) -> None:
    full, lora = (
        json.loads(command(*TINY, "format=json", f"lora={name}", "microbatches=4")[1]) for name in ("none", "attention")
    )
    assert lora["trained_parameters"] < full["trained_parameters"] == full["parameters"] < lora["parameters"]
    assert lora["host_memory"]["needed_bytes"] < full["host_memory"]["needed_bytes"]
    assert lora["tokens_per_s"] > full["tokens_per_s"]


def test_experts_with_adapters(command: Any, tmp_path: Path) -> None:
    """Their weights are adapted as parameters, which PEFT does under an autocast that needs a device with one."""
    settings = {
        "model_type": "qwen3_moe",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    options = (f"model={tmp_path}", *TINY[1:3], "search_seconds=0", "format=json")
    trained = [json.loads(command(*options, f"lora={lora}")[1])["trained_parameters"] for lora in LORA]
    assert 0 < trained[0] < trained[1]


def test_a_plan_of_ones_own_is_judged(command: Any) -> None:
    """The one that was found gets the same figures, another one others; it is checked like the engine's."""
    options = (*TINY_4090[:3], "format=json", "microbatches=8", "microbatch_size=2", "workers=2")
    found = json.loads(command(*options, "search_seconds=0.1")[1])
    assert json.loads(command(*options, f"plan={found['plan']}")[1]) == found
    other = "forward 0-2 3-5; fused 6-8; backward 3-5 0-2; round 4"
    judged = json.loads(command(*options, f"plan={other}")[1])
    assert judged["plan"] == other
    assert [(stage["phase"], stage["calls"]) for stage in judged["stages"]] == [
        *(("forward", "0-2"), ("forward", "3-5"), ("fused", "6-8"), ("backward", "3-5"), ("backward", "0-2"))
    ]
    weights = [stage["weight_bytes"] for stage in judged["stages"]]
    assert weights[1] == weights[3] > 0 and weights[0] == weights[4]
    assert 4 * judged["parameters"] / 2 == pytest.approx(sum(weights[:3]), rel=0.1)  # bf16, in the fused stage too
    fitting = judged["device_memory"]["needed_bytes"] - 1
    assert json.loads(command(*options, f"plan={other}", f"memory={fitting // 2}")[1])["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan=forward 0; fused 1; backward 0; round 4",), "plan"),
        (("plan=everything",), "expected text like 'forward 0-3"),
        (("plan=forward none; fused 0-8; backward none; round 4", "min_round=2"), "min_round= is about finding a plan"),
        (
            ("plan=forward none; fused 0-8; backward none; round 4", "partitioner=paper"),
            "partitioner= is about finding",
        ),
    ],
)
def test_a_plan_that_is_none(command: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = command(*TINY_4090[:3], *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_stages_of_a_given_length(command: Any) -> None:
    options = (*TINY_4090[:3], "format=json", "microbatches=8", "microbatch_size=2", "workers=2")
    long, short = (json.loads(command(*options, f"stage_seconds={seconds}")[1]) for seconds in (10, 0.0006))
    assert max(stage["ms"] for stage in short["stages"]) <= 0.6
    assert len(short["stages"]) > len(long["stages"])
    code, _, err = command(*options, "stage_seconds=1e-9")
    assert code == 2 and "stage_seconds=1e-09 is shorter than one layer takes" in err
    assert "more than 0 seconds" in command(*options, "stage_seconds=0")[2]
    assert "search_seconds= is about finding a plan, and stage_seconds=" in command(*TINY_4090, "stage_seconds=1")[2]


def test_what_does_not_fit_is_an_answer_with_a_remedy(command: Any) -> None:
    options = (*TINY_4090, "memory=300KB", "microbatch_size=2")
    code, out, _ = command(*options, "format=json")
    found = json.loads(out)
    assert (code, found["fits"], found["tokens_per_s"]) == (0, False, None)
    assert found["device_memory"]["needed_bytes"] > found["device_memory"]["limit_bytes"] == 300_000
    assert "Does not fit into a worker's memory. Lower microbatch_size" in command(*options)[1]


def test_the_longest_sequence_is_the_longest(command: Any, tmp_path: Path) -> None:
    """What is found fits, and one unit more does not; the budget is named."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    ).to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"max_position_embeddings": 1 << 16, "model_type": "llama"}))
    options = (f"model={file}", "hardware=rtx4090x8", "memory=50MB", "search_seconds=0", "format=json")
    found = json.loads(command(*options, "sequence_length=256")[1])
    longest = found["longest_sequence"]
    assert 256 < longest < 1 << 16
    assert found["limited_by"].startswith("memory=0.05GiB of each worker, most of it for activations")
    for length, fits in ((longest, True), (longest + 256, False)):
        again = json.loads(command(*options, f"sequence_length={length}", "microbatch_size=1")[1])
        assert again["fits"] is fits
    folder = json.loads(command(f"model={tmp_path}", *options[1:], "sequence_length=256")[1])
    assert folder["plan"] == found["plan"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give either costs=FILE.json, or model=NAME with hardware=NAME"),
        (("model=qwen3_32b", "costs=x.json"), "Give either"),
        (("model=qwen3_32b",), "hardware= is missing"),
        (("model=qwen3_31b", "hardware=cpu"), "Did you mean qwen3_32b? Allowed are gpt_oss_20b, llama3_1_8b"),
        (("model=smollm2", "hardware=cpu"), "has no shape of its own"),
        (("model=tiny_llama", "hardware=rtx4090"), "Did you mean rtx4090x8? Allowed are a800x8, cpu, h200, rtx3090x4"),
        (("model=tiny_llama", "hardware=nowhere.yaml"), "nowhere.yaml cannot be read"),
        (("model=nowhere/config.json", "hardware=cpu"), "nowhere/config.json cannot be read"),
        (("model=tiny_llama", "hardware=cpu", "lora=all"), "Allowed are all_linear, attention, moe_experts, none"),
        (("model=tiny_llama", "hardware=cpu", "precision=fp8"), "must be one of 32-true, bf16-mixed, 16-mixed"),
        (("model=tiny_llama", "hardware=cpu", "sequence_length=257"), "longer than the 256 tokens"),
        (("model=tiny_llama", "hardware=cpu", "staleness=2"), "must be 0 or 1"),
        (("model=tiny_llama", "hardware=cpu", "microbatches=5000"), "more than the 4,096"),
        (("model=tiny_llama", "hardware=cpu", "case=x"), "case= is about costs="),
        (("model=tiny_llama", "hardware=cpu", "picture=plan.txt"), "must be the name of a file that ends in .png"),
        (("costs=x.json", "lora=attention"), "lora= is about model="),
    ],
)
def test_mistakes_are_one_line(command: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1 and len(err) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no Hugging Face configuration: it has no model_type"),
        ('{"model_type": "lama"}', "transformers has no model_type 'lama'. Did you mean 'llama'?"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers does not take these settings"),
        ('{"model_type": "llama", "hidden_size": 30}', "does not"),
        ('{"model_type": "clip"}', "makes no causal language model"),
    ],
)
def test_broken_configurations(command: Any, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    code, out, err = command(f"model={tmp_path / 'config.json'}", "hardware=cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("workers: 8", "workers: 0"), "workers=0 must be a whole number of 1 to 1024"),
        (("fp32: 82.6e12", "fp23: 82.6e12"), "must have a number for each of fp32, bf16, fp16"),
        (("upload: 25e9", "uplaod: 25e9"), "unknown key 'uplaod'. Did you mean 'upload'?"),
        (("upload: 25e9", ""), "lacks 'upload'"),
        (("memory: 24GiB", "memory: much"), "is not a size"),
        (("matmul_efficiency: 0.8", "matmul_efficiency: 80"), "is a share, 1 at most"),
        (("download: 25e9", "download: fast"), "must be a number of more than 0"),
        (("workers: 8", "workers: ["), "is not YAML"),
    ],
)
def test_broken_machines(command: Any, tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = (ROOT / "conf" / "hardware" / "rtx4090x8.yaml").read_text()
    assert change[0] in text
    (tmp_path / "machine.yaml").write_text(text.replace(*change, 1))
    code, out, err = command("model=tiny_llama", f"hardware={tmp_path / 'machine.yaml'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_all_machines_can_be_read(command: Any) -> None:
    for path in sorted((ROOT / "conf" / "hardware").glob("*.yaml")):
        code, out, err = command("model=tiny_llama", f"hardware={path.stem}", "search_seconds=0", "sequence_length=32")
        assert (code, err) == (0, ""), path
        assert "Fits." in out
