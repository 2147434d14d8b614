"""``roundpipe-plan costs=``: what it prints and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from patience import PATIENCE_S
from planning.judge import Times, step_ends
from planning.making import keeps

from lightning_roundpipe.commands import plan
from lightning_roundpipe.commands.conf_files import find_cases
from lightning_roundpipe.commands.machines import choose_machine
from lightning_roundpipe.commands.options import parse_all
from lightning_roundpipe.commands.plan_costs import Question, answer, does_not_fit
from lightning_roundpipe.planning import CallCost, Costs, Plan, search
from lightning_roundpipe.planning.limits import Limits

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "conf" / "cases" / "paper.json"
COSTS = {
    "layers": 9,
    "forward_ms": 10,
    "backward_ms": 22.5,
    "head_forward_ms": 8,
    "head_backward_ms": 16,
    "hop_ms": 0.5,
    "workers": 3,
    "microbatches": 6,
    "model": "some",
    "stages": [9],
}
SIZES = {"weight_bytes": 100, "gradient_bytes": 100, "activation_bytes": 10, "head_weight_bytes": 200}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    file = tmp_path / "costs.json"
    # Hardly any work, in time that no busy machine exceeds.
    monkeypatch.setattr(search, "_WORK_PER_SECOND", 0.005)

    def command(*arguments: str, **changes: Any) -> tuple[int, str, str]:
        data = changes.pop("data", {k: v for k, v in (COSTS | changes).items() if v is not ...})
        file.write_text(data if isinstance(data, str) else json.dumps(data))
        given = {argument.partition("=")[0] for argument in arguments}
        usual = [a for a in (f"costs={file}", "format=json") if a.partition("=")[0] not in given]
        monkeypatch.setattr(sys, "argv", ["roundpipe-plan", *usual, *arguments])
        code = plan.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.mark.parametrize("staleness", [0, 1])
def test_json_says_what_an_independent_judge_finds(call: Any, staleness: int) -> None:
    code, out, err = call(f"staleness={staleness}")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["fits"] is True
    assert [len(span) for span in Plan.parse(found["plan"]).forward] == found["forward"]
    assert list(found)[2:] == [
        "forward",
        "fused",
        "backward",
        "round_microbatches",
        "side_by_side",
        "makespan_ms",
        "period_ms",
        "bubble_pct",
    ]
    assert sum(found["forward"]) + found["fused"] == sum(found["backward"]) + found["fused"] == 9
    assert found["round_microbatches"] >= 3 and found["fused"] <= 2
    times = Times(9, 10, 22.5, 8, 16, 0.5)
    ends = step_ends(times, found, 3, 6, 33)
    assert found["makespan_ms"] == pytest.approx(ends[0])
    work = 6 * (9 * 42.5 + 24 - 10 * found["fused"])
    if staleness:
        assert found["period_ms"] == pytest.approx((ends[31] - ends[15]) / 16)
        # A mean of 16 steps may be below the work, as what three workers do repeats after three steps.
        assert found["bubble_pct"] == pytest.approx(max(100 * (1 - work / 3 / found["period_ms"]), 0), abs=1e-9)
    else:
        assert found["period_ms"] == pytest.approx(found["makespan_ms"])
        assert found["bubble_pct"] == pytest.approx(100 * (1 - work / 3 / found["makespan_ms"]))


def test_the_command_line_wins(call: Any) -> None:
    found = json.loads(call("workers=2", "microbatches=4", "min_round=4", "max_fused=0")[1])
    assert (found["round_microbatches"], found["fused"]) == (4, 0)
    same = json.loads(call(workers=2, microbatches=4, min_round=4, max_fused=0)[1])
    assert same == found


def test_rounds_have_no_more_microbatches_than_the_command_line_says(call: Any) -> None:
    """Fewer than there are workers, too."""
    for most in (1, 2, 3):
        found = json.loads(call("workers=2", "microbatches=6", f"max_round={most}")[1])
        assert found["round_microbatches"] <= most
        assert json.loads(call(workers=2, microbatches=6, max_round=most)[1]) == found


def test_the_papers_algorithm_by_name(call: Any) -> None:
    paper = json.loads(call("partitioner=paper")[1])
    ours = json.loads(call()[1])
    assert ours["makespan_ms"] <= paper["makespan_ms"]


@pytest.mark.parametrize("seed", range(12))
def test_never_slower_than_the_papers_plan(seed: int) -> None:
    """By the printed figure, for layers of any lengths and sizes, with and without a limit of memory."""
    random = Random(seed)
    for staleness in (0, 1):
        calls = [
            CallCost(
                f"layers.{n}", random.uniform(0, 2), random.uniform(0, 5), random.randint(0, 99), random.randint(0, 99),
                9, random.randint(0, 99), needs_backward=n > 1 or seed % 2 > 0, waiting_bytes=random.randint(0, 9),
            )
            for n in range(random.randint(2, 14))
        ]  # fmt: skip
        costs, workers, microbatches = Costs(tuple(calls)), random.randint(1, 6), random.randint(1, 18)
        for memory in (None, 900, 700):
            limits = Limits.usual(costs, workers, microbatches, memory)
            question = Question(costs, random.choice((0.0, 0.3)), workers, microbatches, staleness, limits, "random")
            if does_not_fit(question, None, "table") is not None:
                continue
            ours, papers = (answer(question, 0.1, partitioner) for partitioner in ("search", "paper"))
            assert ours.period_s <= papers.period_s
            assert keeps(limits, ours.plan, costs, workers)


def test_memory_limits_stages(call: Any) -> None:
    free = json.loads(call(**SIZES)[1])
    tight = json.loads(call("memory=409", **SIZES)[1])
    assert tight["makespan_ms"] >= free["makespan_ms"]
    assert max(tight["backward"]) == 1  # two layers have 400 bytes of weights and gradients, and 10 of activations
    assert tight != free


def test_what_does_not_fit_is_an_answer(call: Any) -> None:
    code, out, err = call("memory=300", **SIZES)
    assert (code, err) == (1, "")
    assert json.loads(out) == {"fits": False, "needed_bytes": 310, "limit_bytes": 300, "would_fit": []}
    assert call("memory=310", **SIZES)[0] == 0
    waiting = [call_of(f"layers.{n}", 1.0, 100) | {"waiting_bytes": 100} for n in range(6)]
    data = json.dumps({"calls": waiting, "workers": 4, "microbatches": 8})
    code, out, _ = call("memory=400", "format=table", data=data)
    assert code == 1
    first, second = out.splitlines()
    assert first == "Does not fit: a cut at every layer needs 505 bytes of each worker, and memory=400."
    assert second.startswith("What would fit: min_round=2, ")
    assert call("memory=400", "min_round=2", data=data)[0] == 0


def test_a_model_that_each_worker_holds_runs_side_by_side(call: Any) -> None:
    """Six microbatches on three workers, of which nothing is recomputed: two whole ones on each, a backward apart."""
    found = json.loads(call("memory=10000", **SIZES)[1])
    assert found["side_by_side"] and found["plan"] == "forward none; fused 0-9; backward none; round 1"
    assert found["period_ms"] == pytest.approx(2 * (9 * 32.5 + 24) + 2 * 22.5)
    for given in ("memory=1500", "min_round=3", "max_fused=8"):
        arguments = {"memory": "memory=10000", given.partition("=")[0]: given}.values()
        assert not json.loads(call(*arguments, **SIZES)[1])["side_by_side"]
    assert (
        "\nThe 6 rounds of a step run side by side. Each is a whole" in call("memory=10000", "format=table", **SIZES)[1]
    )


def test_the_printed_plan_recomputes_ahead_as_it_was_simulated_where_memory_allows(call: Any) -> None:
    """Then a backward stage keeps the graphs of all its layers, here 3 x 1,000 bytes, and not only of one."""
    big = SIZES | {"activation_bytes": 1000, "head_forward_ms": 30, "head_backward_ms": 80}
    found = {}
    for memory in (100_000, 3000):
        out = call("partitioner=paper", f"memory={memory}", "workers=5", "max_fused=0", "format=table", **big)[1]
        [shown] = [line.removeprefix("plan=") for line in out.splitlines() if line.startswith("plan=")]
        [text] = shlex.split(shown)
        found[Plan.parse(text).recompute_ahead] = out[: out.index(", bubble")]
    assert found == {True: "Fits: 954.500 ms a step", False: "Fits: 1,044.500 ms a step"}


def test_table(call: Any) -> None:
    code, out, _ = call("format=table")
    assert code == 0
    assert " ms a step, bubble " in out.splitlines()[0] and "plan='forward" in out and "head" in out


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_is_cut(call: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Neither by long names of layers, nor by large figures; and a plan is one line, however long."""
    monkeypatch.setenv("COLUMNS", str(width))
    names = [f"model.base_model.model.model.layers.{number}.a_rather_long_name" for number in range(40)]
    calls = [call_of(name, 123456.7, 7 * 2**30) for name in names]
    code, out, _ = call(
        "format=table", "workers=20", "max_fused=0", data=json.dumps({"calls": calls, "microbatches": 40})
    )
    assert code == 0
    *table, last = out.splitlines()
    assert last.startswith("plan='forward ") and len(last) > width
    Plan.parse(shlex.split(last)[0].removeprefix("plan="))
    assert max(map(len, table)) <= width
    assert "…" not in out
    assert any(line.endswith(" 7,168.0") for line in table)


def call_of(layer: str, seconds: float, nbytes: int) -> dict[str, Any]:
    return asdict(CallCost(layer, seconds, 2 * seconds, nbytes, nbytes, 5, 5, needs_backward=True))


def test_cases_by_name(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no checkout
    there = call(f"costs={PAPER}", "case=llama3.1-8b", "partitioner=paper")[1]
    assert call("costs=paper", "case=llama3.1-8b", "partitioner=paper")[1] == there
    monkeypatch.setattr(sys, "argv", ["roundpipe-plan", "case=llama3.1-8b", "partitioner=paper", "format=json"])
    assert plan.main() == 0
    code, _, err = call("costs=papier")
    assert code == 2 and "There is no costs=papier. Did you mean paper?" in err
    code, _, err = call("costs=paper", "case=llama3-8b")
    assert code == 2 and "Did you mean llama3.1-8b?" in err


def test_a_case_of_a_list(call: Any) -> None:
    code, out, _ = call(f"costs={PAPER}", "case=gpt-oss-20b", "partitioner=paper")
    assert code == 0
    assert sum(json.loads(out)["backward"]) + json.loads(out)["fused"] == 24
    code, _, err = call(f"costs={PAPER}")
    assert code == 2 and "choose one by its model with case=NAME" in err
    code, _, err = call(f"costs={PAPER}", "case=gpt-5")
    assert code == 2 and "case=gpt-5" in err and "llama3.1-8b" in err


@pytest.mark.parametrize(
    ("arguments", "changes", "fragment"),
    [
        (["costs=nowhere.json"], {}, "nowhere.json"),
        ([], {"data": "{"}, "is not JSON"),
        ([], {"data": "[" * 100_000}, "nested too deeply"),
        ([], {"data": "[]"}, "must hold an object with layers"),
        ([], {"data": "[3]"}, "must hold an object with layers"),
        ([], {"layers": ...}, "lacks 'layers'"),
        ([], {"hop_ms": ..., "hop": 1}, "lacks 'hop_ms' ('hop' is not known)"),
        ([], {"layers": 0}, "layers=0 must be a whole number of at least 1"),
        ([], {"layers": 10**9}, "is more than the 1000"),
        ([], {"forward_ms": -1}, "forward_ms=-1 must be a number"),
        ([], {"forward_ms": float("nan")}, "forward_ms=nan must be"),
        ([], {"backward_ms": "1"}, "backward_ms='1' must be"),
        ([], {"weight_bytes": None}, "weight_bytes=None must be"),
        ([], {"workers": ...}, "workers= is missing: give it"),
        ([], {"workers": 1.5}, "workers=1.5 must be a whole number"),
        ([], {"microbatches": True}, "microbatches=True must be"),
        (["workers=0"], {}, "workers=0 must be a whole number of at least 1"),
        (["workers=1e3"], {}, "workers='1e3' must be a whole number"),
        (["workers=100000"], {}, "is more than the 1024"),
        (["staleness=2"], {}, "staleness=2 must be 0 or 1"),
        (["min_round=7"], {}, "min_round=7 must be at most microbatches=6"),
        (["min_round=4", "max_round=3"], {}, "max_round=3 must be at least min_round=4"),
        (["memory=1GB"], {}, "memory= needs sizes"),
        (["memory=much"], SIZES, "memory='much' is not a size"),
        (["search_seconds=-1"], {}, "search_seconds=-1 must be a number of at least 0"),
        (["layer=3"], {}, "There is no option 'layer'"),
        (["picture=plan.txt"], {}, "must be the name of a file that ends in .png"),
        (["trace=nowhere/trace.json"], {}, "there is no folder nowhere"),
    ],
)
def test_mistakes_are_one_line(call: Any, arguments: list[str], changes: dict[str, Any], fragment: str) -> None:
    code, out, err = call(*arguments, **changes)
    assert (code, out) == (2, "")
    assert fragment in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_pictures_and_traces(call: Any, tmp_path: Path, staleness: int) -> None:
    picture, trace = tmp_path / "plan.png", tmp_path / "plan.trace.json"
    code, out, err = call(f"picture={picture}", f"trace={trace}", f"staleness={staleness}")
    assert (code, err) == (0, "")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    plans = [json.loads(out), json.loads(call("partitioner=paper", f"staleness={staleness}")[1])]
    times = Times(9, 10, 22.5, 8, 16, 0.5)
    last = [step_ends(times, plan, 3, 6, 3 if staleness else 1)[-1] for plan in plans]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1e3 * max(last), rel=1e-6)


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("layers", [1, 2])
def test_smallest_models(call: Any, workers: int, layers: int) -> None:
    for staleness in (0, 1):
        code, out, _ = call(f"workers={workers}", "microbatches=1", f"staleness={staleness}", layers=layers)
        assert code == 0
        assert sum(json.loads(out)["forward"]) + json.loads(out)["fused"] == layers
    assert call(**{name: 0 for name in COSTS if name.endswith("_ms")})[0] == 0


def test_commands_in_the_documents_are_right() -> None:
    """They parse, and what they name without a path is in the package."""
    text = "\n".join(file.read_text() for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    lines = re.findall(r"^roundpipe-plan (.*)$|`roundpipe-plan ([^`]*=\w[^`]*)`", text, flags=re.MULTILINE)
    found = [one or other for one, other in lines if "..." not in one + other]
    assert len(found) >= 12
    for line in found:
        for options in (one.options for one in parse_all(plan.PlanOptions, shlex.split(line.replace("\n", " ")))):
            for text in (options.costs, options.case):
                if text is not None and not text.endswith(".json"):
                    find_cases(text, "costs")
            if options.gpu or not (options.hardware or "my-machine.yaml").endswith((".yaml", "auto")):
                choose_machine(options.hardware, options.gpu, options.gpus, options.workers, options.host_memory)


def test_the_documents_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "planning.md").read_text(), flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "docs/planning.md", "exec"), {})
    assert "transfer" in capsys.readouterr().out


def test_a_plan_of_ones_own_is_judged(call: Any) -> None:
    found = json.loads(call()[1])
    text = "forward 0-3 4-7; fused 8-9; backward 4-7 0-3; round 6"
    judged = json.loads(call(f"plan={text}")[1])
    assert (judged["forward"], judged["fused"], judged["backward"]) == ([4, 4], 1, [4, 4])
    assert judged["period_ms"] >= found["period_ms"]
    code, out, err = call(f"plan={text}", "memory=100", "format=table", **SIZES)
    assert (code, err) == (1, "")
    assert out == "Does not fit: this plan needs 810 bytes of each worker, and memory=100.\n"
    code, out, _ = call(f"plan={text}", "memory=720", **SIZES)
    [instead] = json.loads(out)["would_fit"]
    assert code == 1 and instead["settings"] == "without plan="
    assert instead["period_ms"] == json.loads(call("memory=720", "partitioner=paper", **SIZES)[1])["period_ms"]
    assert "plan" in call("plan=forward 0; fused 1; backward 0; round 6")[2]


def test_stages_of_a_given_length(call: Any) -> None:
    """Layers take 10 ms, and backward 32.5 with their recomputation."""
    found = json.loads(call("stage_seconds=0.066")[1])
    assert max(found["forward"]) == 6 and max(found["backward"]) == 2
    assert "stage_seconds=0.03 is shorter than one layer takes" in call("stage_seconds=0.03")[2]


def test_a_file_may_say_how_fast_each_worker_is(call: Any) -> None:
    code, out, _ = call(speeds=[1, 0.5, 0.5])
    assert code == 0
    found = json.loads(out)
    work = 6 * (9 * (2 * 10 + 22.5) + 8 + 16 - found["fused"] * 10)
    assert work / 2 <= found["period_ms"] < work / 1.5, "two workers of the first one's speed, and not of the slowest"
    for speeds, message in (
        ([1, 0], "speeds=[1, 0] must be a list of numbers of more than 0"),
        (2, "speeds=2 must be a list"),
        ([1, 0.5], "workers=3 must be 2: the costs have times for each of so many"),
    ):
        code, out, err = call(speeds=speeds)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_only_adapters_import_peft() -> None:
    """It imports bitsandbytes and more, which takes longer than many an answer."""
    code = (
        "import sys; from lightning_roundpipe.commands.plan import main\n"
        "sys.argv = ['roundpipe-plan', 'model=tiny_qwen3_1_7b', 'gpu=rtx4090', 'search_seconds=0']\n"
        "assert main() == 0 and not {'peft', 'bitsandbytes', 'lightning.pytorch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=PATIENCE_S)
