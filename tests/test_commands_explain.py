"""``roundpipe-plan explain=memory``: its rows are what the planner counts, for a plan and the longest sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY = ("model=tiny_llama", "sequence_length=64", "microbatch_size=2", "search_seconds=0", "explain=memory")


@pytest.fixture
def command(plan_command: Any) -> Any:
    return plan_command


@pytest.mark.parametrize(
    ("hardware", "given"),
    [("rtx4090x2", ()), ("rtx4090x2", ("memory=800KiB",)), ("cpu", ("max_fused=4", "staleness=1"))],
)
def test_the_rows_together_are_what_is_planned(command: Any, hardware: str, given: tuple[str, ...]) -> None:
    code, out, err = command(*TINY, f"hardware={hardware}", "microbatches=4", "format=json", *given)
    assert (code, err) == (0, "")
    found = json.loads(out)
    of_plan, of_longest = found["memory"]
    for one in (of_plan, of_longest):
        rows = sum(row["bytes"] for row in one["tensors"])
        assert rows + one["kept_by_other_calls_bytes"] == one["activation_bytes"]
        planned = [item["bytes"] for item in one["items"] if "activations" in item["name"]]
        assert one["activation_bytes"] == sum(planned)
        assert one["needed_bytes"] == sum(item["bytes"] for item in one["items"])
        for row in one["tensors"]:
            assert row["bytes_per_token"] == row["bytes"] / one["tokens"]
    assert of_plan["needed_bytes"] == found["device_memory"]["needed_bytes"]
    stage = found["stages"][of_plan["stage"]]
    assert (of_plan["phase"], of_plan["activation_bytes"]) == (stage["phase"], stage["activation_bytes"])
    assert (of_plan["tokens"], of_longest["tokens"]) == (128, found["longest_sequence"])
    tiles = found["in_tiles"]
    # It has fewer positions than a tile has tokens.
    assert (tiles["longest"]["tokens"], tiles["slowdown"]) == (found["longest_sequence"], 0.0)


@pytest.mark.parametrize("hardware", ["rtx4090x2", "cpu"])
def test_rows_in_tiles_are_what_is_planned(command: Any, hardware: str) -> None:
    _, out, _ = command(*TINY, f"hardware={hardware}", "microbatches=4", "format=json", "token_tiles=16")
    found = json.loads(out)
    assert found["in_tiles"] is None
    for one in found["memory"]:
        rows = sum(row["bytes"] for row in one["tensors"])
        planned = [item["bytes"] for item in one["items"] if "activations" in item["name"]]
        assert rows + one["kept_by_other_calls_bytes"] == one["activation_bytes"] == sum(planned)


def test_a_fused_stage_has_graphs_of_other_calls(command: Any) -> None:
    plan = "plan=forward 0-2; fused 3-8; backward 0-2; round 4"
    code, out, _ = command(*TINY[:3], "hardware=rtx4090x2", "microbatches=4", "format=json", "explain=memory", plan)
    assert code == 0
    (of_plan, _) = json.loads(out)["memory"]
    assert of_plan["phase"] == "fused"
    assert of_plan["kept_by_other_calls_bytes"] > 0
    rows = sum(row["bytes"] for row in of_plan["tensors"])
    assert rows + of_plan["kept_by_other_calls_bytes"] == of_plan["activation_bytes"]


def test_the_table_names_modules_and_has_room_for_its_columns(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command(*TINY, "hardware=rtx4090x2")
    assert code == 0
    shown = out[out.index("worst moment under the plan") : out.index("GiB of each stage")]
    assert "the longest sequence, 256 tokens" in shown
    assert "head room" in shown
    assert "mlp.gate_proj" in shown or "lm_head" in shown
    assert max(map(len, shown.splitlines())) <= 80
    said = " ".join(shown.split())
    assert "With strategy.token_tiles=4096 (planned, not measured)" in said


@pytest.mark.slow
def test_it_explains_what_does_not_fit(command: Any) -> None:
    code, out, _ = command(*TINY, "hardware=rtx4090x2", "memory=300KiB", "format=json")
    assert code == 1
    of_plan = json.loads(out)["memory"][0]
    assert of_plan["needed_bytes"] > of_plan["limit_bytes"] == 300 * 1024


def test_a_picture_of_it(command: Any, tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    code, *_ = command(*TINY, "hardware=rtx4090x2", "memory=800KiB", f"picture={picture}")
    assert code == 0
    drawn = picture.read_text()
    for text in ("forward", "backward", "inputs", "limit", "GiB of a worker"):
        assert text in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*TINY, "hardware=cpu", "format=csv"), "format=csv has no place for explain=: take format=json"),
        ((*TINY, "hardware=cpu,rtx4090x2"), "explain= is about one plan"),
        (("costs=paper", "case=llama3.1-8b", "explain=memory"), "explain= is about model=NAME"),
        ((*TINY[:-1], "hardware=cpu", "explain=time"), "explain='time' must be one of memory"),
    ],
)
def test_mistakes(command: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err
