"""The pictures in README.md and in the documents, each as the command beside it draws it.

The first two are one step of the main job: as it ran on emulated devices that share this machine's cores, and replayed
as if each of them computed alone. Both come from one run, which this starts unless it is given the folder of one.

    .venv/bin/python docs/make_pictures.py                                  about five minutes on two idle cores
    .venv/bin/python docs/make_pictures.py --run runs/smollm2_lora-…        seconds, from a run that there is
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_main_job(folder: Path) -> None:
    """`make train`, into ``folder``."""
    command = [sys.executable, "-m", "lightning_roundpipe.train", "experiment=smollm2_lora", f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True)


def draw_steps(run: Path, out: Path) -> None:
    """The main job's last step, and the figures that the captions quote."""
    summary = json.loads((run / "summary.json").read_text())
    for name, step, bubble in (
        ("timeline", json.loads((run / "step.json").read_text())["step_time_s"], summary["bubble_pct"]),
        ("replay", summary["replay_step_time_s"], summary["replay_bubble_pct"]),
    ):
        shutil.copyfile(run / f"{name}.png", out / f"{name}.png")
        print(f"{out / name}.png  step {step:.2f} s, bubble {bubble:.1f} %")
    print(f"plan: {summary['plan']}")


def draw_plans(out: Path) -> None:
    """Simulated steps of the paper's Llama."""
    for staleness in (0, 1):
        picture = out / f"plan-staleness-{staleness}.png"
        facts = ["model=llama3_1_8b", "hardware=rtx4090x8", "microbatches=16", f"staleness={staleness}"]
        _command("plan", *facts, f"picture={picture}")


def _command(name: str, *arguments: str) -> None:
    code = f"import sys; from lightning_roundpipe.commands.{name} import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print(arguments[-1].removeprefix("picture="))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder of the pictures")
    parser.add_argument("--run", type=Path, help="folder that a run of the main job has left")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or Path(folder) / "run"
        if options.run is None:
            run_main_job(run)
        draw_steps(run, options.out.resolve())
    draw_plans(options.out.resolve())


if __name__ == "__main__":
    main()
