"""``roundpipe-plan model=``: what it answers and what it refuses."""

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import try_to_load_from_cache
from transformers import LlamaConfig

from lightning_roundpipe.commands import plan
from lightning_roundpipe.estimates.hardware import choose_machine, read_machine
from lightning_roundpipe.estimates.outlook import look_at, shape_of
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.memory import process_bytes, system_bytes
from lightning_roundpipe.planning.schedule import Plan

ROOT = Path(__file__).parents[2]
RTX4090X8 = (ROOT / "conf" / "hardware" / "rtx4090x8.yaml").read_text()
TINY = ["model=tiny_llama", "hardware=cpu", "sequence_length=64", "search_seconds=0.1"]
TINY_4090 = ["model=tiny_llama", "hardware=rtx4090x8", "sequence_length=64", "search_seconds=0.1"]


def test_json_says_all_that_the_table_does(command):
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
    assert host["trained weights, fp32, with their working copy"] == 4 * weights
    assert host["gradients, fp32"] == 4 * weights
    assert host["AdamW's two moments, fp32"] == 8 * weights
    assert host["the process itself: Python, PyTorch, CUDA"] == process_bytes(gpus=2)


def test_a_plan_that_leaves_no_memory_to_the_operating_system_says_so(command):
    tiny = ("model=tiny_llama", "gpu=rtx4090", "gpus=2", "sequence_length=64", "search_seconds=0")
    code, out, _ = command(*tiny, "host_memory=2GiB")
    assert code == 0
    assert f"There, plan with host_memory={(2**31 - system_bytes(2**31)) // 2**20}MiB." in " ".join(out.split())
    assert "operating system" not in command(*tiny, "host_memory=3GiB")[1]


def test_the_table_is_whole(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command(*TINY)
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert max(map(len, lines)) <= 80
    Plan.parse(shlex.split(last)[0].removeprefix("plan="))  # pasted back as it is
    assert "…" not in out
    assert re.fullmatch(r"Fits: [\d,]+ tokens/s, [\d.]+ m?s a step \(estimated\)\.", lines[0])
    for text in ("tokens/s", "Longest sequence: 256 tokens", "weights in the arena", "page-locked"):
        assert text in " ".join(out.split())


def test_the_faster_way_is_named_for_a_model_that_a_gpu_holds(command):
    options = [*TINY_4090, "workers=2", "microbatches=4", "microbatch_size=2"]
    found = json.loads(command(*options, "format=json")[1])
    rate = found["data_parallel_tokens_per_s"]
    assert rate > 1.02 * found["tokens_per_s"]
    assert (
        'A GPU also holds all weights, gradients and optimizer state at once: data parallelism (strategy="ddp") would'
        f" be faster, up to {rate:,.0f} tokens/s."
    ) in " ".join(command(*options)[1].split())


def test_pictures_and_traces(command, tmp_path):
    picture, trace = tmp_path / "plan.png", tmp_path / "plan.trace.json"
    options = [*TINY_4090, "microbatches=4", "microbatch_size=2", "workers=2", "staleness=1", "format=json"]
    code, out, err = command(*options, f"picture={picture}", f"trace={trace}")
    assert (code, err) == (0, "")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found, records = json.loads(out), json.loads(trace.read_text())["traceEvents"]
    names = {record["pid"]: record["args"]["name"] for record in records if record["name"] == "process_name"}
    assert {name.rpartition(": ")[2] for name in names.values()} == {"worker 0", "worker 1"}
    ours = max(name.rpartition(": ")[0] for name in names.values() if "simulation" in name or len(names) == 2)
    events = [r for r in records if r["ph"] == "X" and names[r["pid"]].startswith(ours)]
    end_ms = max(event["ts"] + event["dur"] for event in events) / 1e3
    assert found["makespan_ms"] < end_ms < 3 * found["makespan_ms"] * 1.001
    assert {event["name"].partition(" ")[0] for event in events} >= {"forward", "backward", "upload_weights"}
    slots = {event["args"]["slot"] for event in events if event["args"]["microbatch"] >= 0}
    rounds = -(-4 // found["round_microbatches"])
    assert len(slots) == 3 * rounds * (len(found["forward"]) + 1 + len(found["backward"]))


@pytest.mark.slow
def test_experts_with_adapters(command):
    """Their weights are adapted as parameters, which PEFT does under an autocast that needs a device with one."""
    options = ("model=tiny_qwen3_235b_a22b", *TINY[1:3], "search_seconds=0", "format=json")
    attention, *more = (
        json.loads(command(*options, f"lora={lora}")[1])["trained_parameters"]
        for lora in ("attention", "all_linear", "moe_experts")
    )
    assert 0 < attention < min(more)


def test_a_plan_of_ones_own_is_judged(command):
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


def test_a_plan_that_carries_says_what_it_takes(command):
    plan = "forward 0-2 3-5; fused 6-8; backward 3-5 0-2; round 4"
    options = ("model=tiny_llama", "hardware=cpu", "sequence_length=64", "microbatch_size=2")
    text = " ".join(command(*options, f"plan={plan}; carry 1-3")[1].split())
    assert "Carried: products of 3 of 6 calls outside of the fused stage go to the host" in text
    found, none = (
        json.loads(command(*options, f"plan={plan}{carry}", "format=json")[1]) for carry in ("; carry 1-3", "")
    )
    assert (found["carry"], none["carry"]) == ([1, 2, 3], [])
    for memory, name in (
        ("host_memory", "carried products of 3 calls"),
        ("device_memory", "carried products of 2 calls"),
    ):
        [size] = [item["bytes"] for item in found[memory]["items"] if item["name"] == name]
        assert 0 < size < found[memory]["needed_bytes"] - none[memory]["needed_bytes"] + 4096
    again = sum(stage["ms"] for stage in found["stages"])
    assert again < sum(stage["ms"] for stage in none["stages"])


@pytest.mark.slow
def test_what_does_not_fit_is_an_answer_with_what_would(command):
    """Each was tried: with its settings, the same command has the same figure. The least change is first."""
    options = [*TINY_4090[:2], "sequence_length=256", "microbatch_size=4", "precision=32-true"]
    options += ["search_seconds=0", "memory=4MB"]
    code, out, err = command(*options, "format=json")
    found = json.loads(out)
    assert (code, err, found["fits"], found["tokens_per_s"]) == (1, "", False, None)
    assert found["device_memory"]["needed_bytes"] > found["device_memory"]["limit_bytes"] == 4 * 10**6
    settings = [remedy["settings"] for remedy in found["would_fit"]]
    assert settings[0] == "microbatch_size=1 microbatches=64"
    for remedy in found["would_fit"]:
        changed = [option for option in options if option.partition("=")[0] not in remedy["changes"]]
        code, again, _ = command(*changed, *shlex.split(remedy["settings"]), "format=json")
        assert (code, json.loads(again)["tokens_per_s"]) == (0, remedy["tokens_per_s"])
    lines = command(*options)[1].splitlines()
    assert re.fullmatch(r"Does not fit: [\d.]+ of [1-9][\d.]+ MiB a worker\.", lines[0])
    start = next(number for number, line in enumerate(lines) if line.startswith("What would fit"))
    assert [line.split("tokens/s")[1].strip() for line in lines[start + 1 :][: len(settings)]] == settings


@pytest.mark.slow
def test_where_nothing_fits_that_is_said(command):
    code, out, _ = command(*TINY_4090, "memory=30KB", "microbatch_size=2")
    text = " ".join(out.split())
    assert code == 1 and "What would fit" not in out
    assert "Nothing that was tried fits (tried: lora=all_linear; lora=attention; " in text
    enough = re.search(r"Take (memory=[\d.]+[KM]iB) or more, or a smaller model\.", text)
    assert enough, text
    assert command(*TINY_4090, enough[1], "microbatch_size=2")[0] == 0


@pytest.mark.slow
def test_a_host_that_is_too_small_is_told_how_much_is_enough(command):
    """It is enough, and 1 MiB less is not."""
    options = ("model=tiny_llama", "gpu=rtx4090", "gpus=2", "sequence_length=256", "search_seconds=0", "microbatches=8")
    code, out, _ = command(*options, f"host_memory={process_bytes(gpus=2) + 2**20}", "format=json")
    [host] = [one for one in json.loads(out)["would_fit"] if set(one["changes"]) == {"host_memory"}]
    assert code == 1
    code, out, _ = command(*options, host["settings"], "format=json")
    found = json.loads(out)
    assert code == 0 and found["tokens_per_s"] == pytest.approx(host["tokens_per_s"], rel=0.1)
    assert command(*options, f"host_memory={host['changes']['host_memory'] - 2**20}")[0] == 1


@pytest.mark.slow
def test_rounds_run_side_by_side_where_worker_and_host_have_the_memory(command, tmp_path):
    options = (*TINY_4090, "microbatches=8", "workers=4", "microbatch_size=1")
    code, out, _ = command(*options, "format=json", f"trace={tmp_path / 'steps.json'}")
    found = json.loads(out)
    assert code == 0 and found["side_by_side"]
    [landing] = [item for item in found["host_memory"]["items"] if item["name"] == "gradients as they arrive"]
    [sums] = [item for item in found["host_memory"]["items"] if item["name"] == "gradients, fp32"]
    assert sums["bytes"] == 4 * found["trained_parameters"] >= landing["bytes"] and landing["page_locked"]
    assert "round 1" in (tmp_path / "steps.json").read_text()
    host = found["host_memory"]["needed_bytes"]
    worker = found["device_memory"]["needed_bytes"]
    for limit in (f"host_memory={host - 1}", f"memory={worker // 2}"):
        less = json.loads(command(*options, limit, "format=json")[1])
        assert less["fits"] and not less["side_by_side"]
        assert less["tokens_per_s"] < found["tokens_per_s"]
    text = command(*options[:3], *options[4:], f"plan={found['plan']}")[1]  # a search may find another one, as fast
    assert "\nThe 8 rounds of a step run side by side. Each is a whole microbatch" in text


# -- never slower than without a search -------------------------------------------------------------------------------


def rates(shape, request):
    """Tokens a second that are printed: with a search, and without; 0: it does not fit."""
    found, first = (look_at(shape, replace(request, search_seconds=seconds), longest=False) for seconds in (0.1, 0.0))
    assert found.fits == first.fits
    return (found.tokens_per_s, first.tokens_per_s) if found.fits else (0.0, 0.0)


@pytest.mark.parametrize(("workers", "memory", "staleness"), [(1, None, 0), (8, 1_000_000, 1)])
def test_a_search_makes_no_plan_slower(workers, memory, staleness):
    """By the printed figure, for a given size of microbatches and for the automatic one, whatever the limit."""
    request = PlanRequest(
        model="tiny_llama", hardware="rtx4090x8", workers=workers, lora="none", precision="bf16-mixed",
        sequence_length=64, microbatch_size=None, microbatches=8, staleness=staleness, memory=memory,
    )  # fmt: skip
    shape = shape_of(request, read_machine("rtx4090x8"))
    ours, others = rates(shape, request)
    each = [rates(shape, replace(request, microbatch_size=size)) for size in (8, 4, 2, 1)]
    assert all(one >= other for one, other in each)
    assert ours >= max(other for _, other in each) == others > 0, "the automatic size is the fastest"


# -- machines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "title", "host", "bandwidth"),
    [
        (("hardware=rtx4090x8",), "8 x RTX 4090", 1024, 409.6e9),
        (("gpu=rtx4090", "gpus=4"), "4 x RTX 4090", 512, 204.8e9),
        (("gpu=4090", "gpus=4"), "4 x RTX 4090", 512, 204.8e9),
        (("gpu=a100_80", "gpus=2"), "2 x A100 80GB", 256, 102.4e9),
        (("hardware=mi300xx2",), "2 x MI300X", 256, 102.4e9),
        (("hardware=rtx4090x8", "workers=4"), "4 of 8 x RTX 4090", 1024, 409.6e9),
        (("gpu=rtx4090", "gpus=2", "host_memory=64GiB"), "2 x RTX 4090", 64, 102.4e9),
    ],
)
def test_any_number_of_a_known_gpu(given, title, host, bandwidth):
    values, _ = plan.parser().read(given)
    names = ("hardware", "gpu", "gpus", "workers", "host_memory")
    found, assumed = choose_machine(*(values.get(name) for name in names))
    assert (found.title, found.host_memory, found.host_memory_bandwidth) == (title, host * 2**30, bandwidth)
    assert str(found.workers) == title.split()[0]
    assert "GB/s of memory bandwidth" in assumed[0]
    assert ("(or set host_memory=)" in assumed[0]) == ("host_memory" not in values)
    assert len(assumed) == 1 + ("workers" in values)


def test_what_is_assumed_of_the_host_is_said(command, tmp_path):
    options = ("model=tiny_llama", "search_seconds=0", "sequence_length=32")
    text = " ".join(command(*options, "hardware=rtx4090x8", "workers=4")[1].split())
    assert "Assumed of the host: 1,024 GiB (or set host_memory=), 410 GB/s of memory bandwidth" in text
    assert "Assumed of workers=4: the other 4 GPUs idle, and these have the whole host." in text
    file = tmp_path / "machine.yaml"
    file.write_text(RTX4090X8)
    assert "Assumed" not in command(*options, f"hardware={file}")[1], "their own numbers"
    assert len(json.loads(command(*options, "hardware=rtx4090x8", "format=json")[1])["assumed"]) == 1


# -- unequal devices -------------------------------------------------------------------------------------------------


def test_a_file_of_two_kinds(refused, tmp_path):
    kinds = "kinds:\n- {title: A, workers: 5}\n- {title: B, workers: 3, memory: 12GiB, upload: 12e9}\n"
    file = tmp_path / "machine.yaml"
    file.write_text(RTX4090X8 + kinds)
    found = read_machine(str(file))
    assert [device.title for device in found.devices].count("B") == 3
    a, b = found.kinds
    assert (a.memory, b.memory, b.upload, b.download) == (24 * 2**30, 12 * 2**30, 12e9, 25e9)
    assert found.of_each(lambda device: device.memory) == tuple(device.memory for device in found.devices)
    for wrong, message in (
        (kinds.replace("workers: 5", "workers: 4"), "workers=8 must be the number of devices of all kinds, which is 7"),
        (kinds.replace("upload: 12e9", "hop_s: 1"), "unknown key 'hop_s'"),
        (kinds.replace("title: A, ", ""), "each needs a title"),
        ("kinds: 3\n", "kinds must be a list"),
    ):
        file.write_text(RTX4090X8 + wrong)
        refused(message, "model=tiny_llama", f"hardware={file}")
    file.write_text(RTX4090X8 + kinds)
    refused("workers=4 takes some of several kinds of GPU", "model=tiny_llama", f"hardware={file}", "workers=4")


def test_devices_behind_an_uplink_share_it(command, tmp_path):
    file = tmp_path / "machine.yaml"
    options = ("model=tiny_llama", "sequence_length=64", "microbatches=8", "microbatch_size=1")

    def speed(*arguments):
        code, out, err = command(*options, f"hardware={file}", "search_seconds=0", "format=json", *arguments)
        assert (code, err) == (0, "")
        return float(json.loads(out)["tokens_per_s"])

    file.write_text(RTX4090X8)
    alone, one = speed(), speed("workers=1")
    file.write_text(f"{RTX4090X8}uplink: 24e9\nuplink_devices: 4\n")
    machine = read_machine(str(file))
    assert machine.links() == Links(6e9, 6e9)
    assert replace(machine, workers=2).links() == Links(12e9, 12e9)
    file.write_text(f"{RTX4090X8}uplink: 1e8\nuplink_devices: 4\n")
    assert speed() < 0.8 * alone
    file.write_text(f"{RTX4090X8}uplink: 25e9\nuplink_devices: 4\n")
    assert speed("workers=1") == one
    file.write_text(
        f"{RTX4090X8}kinds:\n- {{title: A, workers: 4}}\n- {{title: B, workers: 4, uplink: 2e9, uplink_devices: 2}}\n"
    )
    a, b = read_machine(str(file)).kinds
    assert (machine.link(a).upload, machine.link(b).upload) == (25e9, 1e9)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_longest_sequence_is_the_longest(command, tmp_path):
    """What is found fits, and one bucket more does not; the budget is named."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    ).to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"max_position_embeddings": 1 << 16, "model_type": "llama"}))
    options = (f"model={file}", "hardware=rtx4090x8", "memory=50MB", "search_seconds=0", "format=json")
    found = json.loads(command(*options, "sequence_length=256")[1])
    longest = found["longest_sequence"]
    assert 256 < longest < 1 << 16
    assert found["limited_by"].startswith("memory=47.68MiB of each worker, the largest part for activations")
    for length, fits in ((longest, True), (longest + 256, False)):
        again = json.loads(command(*options, f"sequence_length={length}", "microbatch_size=1")[1])
        assert again["fits"] is fits
    folder = json.loads(command(f"model={tmp_path}", *options[1:], "sequence_length=256")[1])
    assert folder["plan"] == found["plan"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Say what to plan for: model=NAME gpu=NAME gpus=NUMBER, as in model=llama3_1_8b"),
        (("model=qwen3_32b",), "the machine is missing: give gpu=NAME gpus=NUMBER, as in gpu=rtx4090 gpus=4"),
        (("model=qwen3_32b", "gpus=4"), "gpus=4 does not say which: give gpu=NAME gpus=NUMBER, as in gpu=rtx4090"),
        (("model=qwen3_32b", "gpu=rtx4070"), "There is no gpu=rtx4070. Did you mean rtx4090? Known are a10040gb"),
        (("model=qwen3_32b", "gpu=a100"), "There is no gpu=a100. Did you mean a10040gb or a10080gb? Known are"),
        (("model=qwen3_32b", "gpu=rtx4090x4"), "gpu=rtx4090x4 says how many, too: write gpu=rtx4090 gpus=4, or hard"),
        (("model=qwen3_32b", "gpu=rtx4090", "host_memory=64"), "host_memory='64' says bytes, as it has no unit: write"),
        (
            ("model=Qwen/Qwen3-32B", "gpu=rtx4090"),
            "which is not asked. Did you mean qwen3_32b? To get its configuration: hf download Qwen/Qwen3-32B config",
        ),
        (("model=qwen3_32b", "gpu=rtx4090", "hardware=cpu"), "hardware= and gpu= both say which machine"),
        ((*TINY[:2], "lora.r=4"), "lora.r= is about adapters, and lora=none has none"),
        (
            (*TINY[:2], "lora=all_linear", "lora.target_modules=[qproj]"),
            "Target modules {'qproj'} not found in the base model. Please check the target modules and try again",
        ),
        ((*TINY[:2], "model.hiden_size=4"), "Did you mean hidden_size?"),
        (
            ("model=qwen3_31b", "hardware=cpu"),
            "Did you mean qwen3_32b? Allowed are gemma3_12b, gemma3_27b, gpt_oss_20b",
        ),
        (("model=smollm2", "hardware=cpu"), "has no shape of its own"),
        (("model=tiny_llama", "hardware=nowhere.yaml"), "nowhere.yaml cannot be read"),
        ((*TINY[:2], "lora=all"), "Allowed are all_linear, attention, moe_experts, none"),
        ((*TINY[:2], "precision=8-true"), "must be one of 32-true, bf16-mixed, bf16-true, 16-mixed, 16-true, fp8"),
        (
            ("model=tiny_llama", "hardware=rtx4090x2+rtx3090x2", "precision=fp8"),
            "RTX 3090 has no rate of fp8 products (flops.fp8). GPUs before Ada and Hopper cannot multiply in fp8",
        ),
        (("model=tiny_llama", "gpu=a10040gb", "precision=fp8"), "A100 40GB has no rate of fp8 products"),
        (("model=tiny_llama", "hardware=auto", "precision=fp8"), "hardware=auto does not measure fp8 products"),
        (
            ("model=tiny_llama", "gpu=rtx4090", "precision=fp8", "lora=all_linear"),
            "torchao.float8 also computes gradients of frozen weights",
        ),
        (("model=tiny_llama", "gpu=rtx4090", "precision=fp8", "carry_products=true"), "nothing of these is carried"),
        ((*TINY[:2], "staleness=2"), "must be a whole number of 0 to 1"),
        ((*TINY[:2], "picture=plan.txt"), "must be the name of a file that ends in .png"),
        ((*TINY[:2], "plan=everything"), "expected text like 'forward 0-3"),
        ((*TINY[:2], "token_tiles=1.5"), "token_tiles='1.5' must be a whole number of tokens of at least 1"),
        ((*TINY[:2], "reduce_dtype=bf16"), "reduce_dtype='bf16' is no format"),
        ((*TINY[:2], "machines=2"), "say over what: network=25Gbit"),
        ((*TINY[:2], "machines=2", "network=fast"), "network='fast' must be a rate"),
        ((*TINY[:2], "machines=2", "network=0Gbit"), "network='0Gbit' must be a rate of more than 0, as 25Gbit"),
    ],
)
def test_mistakes_are_one_line(refused, arguments, message):
    assert len(refused(message, *arguments)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"model_type": "lama"}', "transformers has no model_type 'lama'. Did you mean llama?"),
        ('{"model_type": "clip"}', "makes no causal language model"),
    ],
)
def test_broken_configurations(refused, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    refused(message, f"model={tmp_path / 'config.json'}", "hardware=cpu")


def test_a_model_of_the_hub_that_is_in_the_cache(command, tmp_path, monkeypatch):
    """Without the network: its config.json is found where the hub's client keeps it."""
    commit = "0" * 40
    folder = tmp_path / "models--someone--tiny"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", partial(try_to_load_from_cache, cache_dir=tmp_path))
    code, out, err = command("model=someone/tiny", *TINY[1:])
    assert (code, err) == (0, "") and out.startswith("Fits: ")
    code, _, err = command("model=someone/other", *TINY[1:])
    assert code == 2 and "hf download someone/other config.json" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("fp32: 82.6e12", "fp23: 82.6e12"), "must have a number for each of fp32, bf16, fp16"),
        (("upload: 25e9", "uplaod: 25e9"), "unknown key 'uplaod'. Did you mean upload?"),
        (("upload: 25e9", ""), "lacks 'upload'"),
        (("matmul_efficiency: 0.8", "matmul_efficiency: 80"), "is a share, 1 at most"),
        (("workers: 8", "workers: 8\nuplink: 0"), "uplink=0 must be a number of more than 0"),
    ],
)
def test_broken_machines(refused, tmp_path, change, message):
    assert change[0] in RTX4090X8
    (tmp_path / "machine.yaml").write_text(RTX4090X8.replace(*change, 1))
    refused(message, "model=tiny_llama", f"hardware={tmp_path / 'machine.yaml'}")


def test_all_machines_can_be_read(command):
    for path in sorted((ROOT / "conf" / "hardware").glob("*.yaml")):
        code, out, err = command("model=tiny_llama", f"hardware={path.stem}", "search_seconds=0", "sequence_length=32")
        assert (code, err) == (0, ""), path
        assert out.startswith("Fits: ")


def test_positions_beyond_the_configurations_are_offered_and_never_assumed(command, refused):
    given = (*TINY[:2], "search_seconds=0", "microbatch_size=1", "format=json")
    offered = json.loads(command(*given, "max_positions=1024")[1])
    assert (offered["longest_sequence"], offered["limited_by"]) == (1024, "max_positions=1024")
    assert offered["max_positions"] == 1024
    code, out, _ = command(*given[:-1], "max_positions=1024", "sequence_length=900")
    said = " ".join(out.split())
    assert code == 0
    assert "Planned for 1,024 positions (max_positions=); the configuration has 256. To train beyond them" in said
    refused("Offer it more with max_positions=900.", *given, "sequence_length=900")
    refused("max_positions=256 is no more than the 256 tokens", *given, "max_positions=256")


@pytest.mark.slow
def test_tiles_of_tokens_are_planned_where_they_are_needed(command):
    """As the strategy's ``token_tiles``. They are proposed for what does not fit otherwise."""
    given = ("model=tiny_llama", "hardware=rtx4090x2", "microbatches=2", "microbatch_size=1", "search_seconds=0")
    given = (*given, "sequence_length=4096", "max_positions=8192", "format=json")

    def planned(*more):
        return json.loads(command(*given, *more)[1])

    whole, tiled, named = planned(), planned("token_tiles=512"), planned("token_tiles=mlp:512")
    assert (whole["token_tiles"], tiled["token_tiles"], named["token_tiles"]) == (None, 512, {"mlp": 512})
    needs = [found["device_memory"]["needed_bytes"] for found in (whole, tiled, named)]
    assert needs[1] <= needs[2] < needs[0]
    assert max(tiled["tokens_per_s"], named["tokens_per_s"]) < whole["tokens_per_s"]
    limit = "memory=14.5MB"
    refused, tight = planned(limit), planned(limit, "token_tiles=1024")
    assert not refused["fits"] and tight["fits"] and tight["token_tiles"] == 1024
    assert {"token_tiles": 1024} in [found["changes"] for found in refused["would_fit"]]
    assert tight["longest_sequence"] > refused["longest_sequence"]


# -- documents ---------------------------------------------------------------------------------------------------------


def test_the_documents_snippet_runs(capsys):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "planning.md").read_text(), flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "docs/planning.md", "exec"), {})
    assert capsys.readouterr().out.startswith("(")


def test_slower_links_stand_beside_an_answer_that_assumes_them(command, tmp_path):
    options = ("model=tiny_llama", "search_seconds=0", "sequence_length=64", "microbatches=4")
    text = " ".join(command(*options, "gpu=rtx4090", "gpus=2")[1].split())
    said = re.search(
        r"Assumes 25 GB/s to each GPU\. This plan reaches ([\d,]+) tokens/s over PCIe 3\.0 x16 or 4\.0 x8, ([\d,]+) "
        r"tokens/s over PCIe 3\.0 x8\.", text
    )  # fmt: skip
    assert said is not None, text
    fits = re.search(r"Fits: ([\d,]+) tokens/s", text)
    rates = [float(rate.replace(",", "")) for rate in (fits[1] if fits else "0", *said.groups())]
    assert rates == sorted(rates, reverse=True)
    file = tmp_path / "machine.yaml"
    file.write_text(RTX4090X8)
    assert "PCIe" not in command(*options, f"hardware={file}")[1], "their own numbers"
