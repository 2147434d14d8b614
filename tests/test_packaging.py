"""What an index shows of the package, what it asks for, and how it does without what it does not ask for."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path

import pytest
import zoo
from harness import ours, run
from packaging.version import Version

import lightning_roundpipe
from lightning_roundpipe.callbacks import RunFolder
from lightning_roundpipe.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def copied_sources(folder):
    """What a wheel is built of, copied to ``folder``: a build leaves files behind."""
    for name in ("lightning_roundpipe", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    return folder


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """METADATA as a build makes it."""
    copy = copied_sources(tmp_path_factory.mktemp("copy"))
    make = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make('made')"
    (copy / "made").mkdir()
    done = subprocess.run([sys.executable, "-c", make], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [file] = (copy / "made").glob("*.dist-info/METADATA")
    return file.read_text()


def test_the_readme_on_an_index_has_no_relative_links(metadata):
    message = message_from_string(metadata)
    assert message["Description-Content-Type"] == "text/markdown"
    shown = LINK.findall(str(message.get_payload()))
    written = LINK.findall((ROOT / "README.md").read_text())
    assert len(shown) == len(written) > 20
    repository = PROJECT["urls"]["Repository"]
    for target, source in zip(shown, written, strict=True):
        assert re.match(r"https?://|#", target), target
        if not re.match(r"[a-z]+:|#", source):  # tests/test_docs.py says that these files are there
            kind = "raw" if source.endswith((".png", ".svg")) else "blob"
            assert target == f"{repository}/{kind}/main/{source}"


def test_the_metadata_are_complete(metadata):
    message = message_from_string(metadata)
    assert message["Version"] == lightning_roundpipe.__version__
    assert message["Author"] and message["Summary"] and message["License-Expression"] == "Apache-2.0"
    named = dict(value.split(", ") for value in message.get_all("Project-URL", []))
    assert named == PROJECT["urls"]
    extras = {"all", "docs", "plots", "quant", "tensorboard", "dev"}
    assert extras == set(message.get_all("Provides-Extra", []))
    assert all(url.startswith(named["Repository"]) for name, url in named.items() if name != "Paper")


def bounds(requirements):
    found = [re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement) for requirement in requirements]
    assert all(found), f"one of {requirements} has no lower bound"
    return {match[1]: match[2] for match in found if match}


def test_the_oldest_versions_are_the_lower_bounds():
    """`constraints-oldest.txt` is what CONTRIBUTING.md's run is made with."""
    wanted = bounds(PROJECT["dependencies"])
    for extra in ("plots", "quant", "tensorboard"):
        wanted |= bounds(PROJECT["optional-dependencies"][extra])
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {name: Version(pinned[name]) for name in wanted} == {name: Version(wanted[name]) for name in wanted}


def test_each_extra_brings_what_errors_say():
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert package in bounds(extras[extra])
        assert package not in bounds(PROJECT["dependencies"])
        assert extra in re.findall(r"\w+", extras["all"][0].partition("[")[2])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_installed_wheel_runs_the_main_job(tmp_path):
    """Two steps of it in a fresh environment, through the console command; `.ci/smoke.py` has the checks."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    subprocess.run(build, check=True, env=environment, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    done = subprocess.run([ROOT / ".ci" / "smoke", wheel], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("ok:") == 5, done.stdout


PLAIN = """
import importlib.metadata, sys

GONE = {"transformers", "peft", "hydra", "omegaconf", "matplotlib", "tensorboard", "datasets", "pyarrow"}

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, known=importlib.metadata.version):  # by which torchmetrics finds what it may import
    if name in GONE:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

sys.meta_path.insert(0, Gone())
importlib.metadata.version = version

import lightning_roundpipe
assert not {"torch", "lightning", "numpy", "rich", "yaml"} & sys.modules.keys()
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        loss = self.model(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="roundpipe", max_epochs=2, default_root_dir=sys.argv[1])
trainer.fit(Module(), loader, loader)
assert trainer.global_step == 8 and trainer.strategy.report()["plan"]
assert not GONE & {name.split(".")[0] for name in sys.modules}
"""


@pytest.mark.slow
def test_a_plain_script_needs_neither_hugging_face_nor_hydra_nor_matplotlib(tmp_path):
    """Imports of Lightning's own aside, which imports what it finds, none of them is loaded: they are not there."""
    done = subprocess.run([sys.executable, "-c", PLAIN, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def without(package, monkeypatch):
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_run_without_matplotlib_leaves_no_picture_and_says_so_once(tmp_path, monkeypatch):
    without("matplotlib", monkeypatch)
    with pytest.warns(UserWarning, match="^roundpipe: ") as caught:
        run(ours(), zoo.make_module("mlp"), zoo.make_batches("mlp", 2), callbacks=[RunFolder(tmp_path)])
    said = [str(warning.message) for warning in caught if "picture" in str(warning.message)]
    assert len(said) == 1 and said[0].endswith("pip install 'lightning-roundpipe[plots]'")
    assert {"plan.txt", "step.json"} <= {file.name for file in tmp_path.iterdir()}
    assert not list(tmp_path.glob("*.png"))
