"""What must work after ``pip install`` of the wheel alone, away from the checkout. Run by .ci/smoke."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

COMMAND = Path(sys.executable).parent / "roundpipe-train"


def check_strategy_is_known_without_importing_the_package() -> None:
    from lightning import Trainer

    trainer = Trainer(strategy="roundpipe", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy).__name__ == "RoundPipeStrategy", trainer.strategy
    module = sys.modules["lightning_roundpipe"]
    assert Path(str(module.__file__)).is_relative_to(sys.prefix), f"not the installed package: {module.__file__}"


def check_configuration_is_in_the_wheel() -> None:
    conf = files("lightning_roundpipe.conf")
    found = sorted(path.relative_to(str(conf)) for path in Path(str(conf)).rglob("*.yaml"))
    assert Path("experiment/smollm2_lora.yaml") in found, f"only {found}"


def check_command_answers() -> None:
    text = run("--help")
    assert "experiment" in text, text
    text = run("--cfg", "job", "experiment=smollm2_lora")
    assert "roundpipe" in text.lower(), text


def check_the_plan_command_plans() -> None:
    """The command is installed, with the models and machines that it knows."""
    chosen = ["model=llama3_1_8b", "gpu=rtx4090", "gpus=8", "host_memory=256GiB", "search_seconds=0", "format=json"]
    command = [COMMAND.with_name("roundpipe-plan"), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True


def check_main_job_runs_two_steps() -> None:
    """The main job as it is shipped, only shorter: real weights, four emulated devices, the run folder."""
    folder = Path(run("experiment=smollm2_lora", "trainer.max_steps=2").splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2, summary
    assert summary["workers"] == 4 and summary["microbatches"] == 8, summary
    assert summary["val_loss_before"] > summary["val_loss_after"] > 0, summary
    assert (folder / "timeline.png").stat().st_size > 10_000


def run(*arguments: str) -> str:
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"roundpipe-train {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    for check in (
        check_strategy_is_known_without_importing_the_package,
        check_configuration_is_in_the_wheel,
        check_command_answers,
        check_the_plan_command_plans,
        check_main_job_runs_two_steps,
    ):
        check()
        print("ok:", check.__name__.replace("_", " "))
