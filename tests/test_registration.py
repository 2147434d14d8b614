"""Lightning knows the name of the strategy in any order of imports, and torch works where the package is broken."""

import os
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from patience import PATIENCE_S

import lightning_roundpipe
from lightning_roundpipe import registration

PACKAGE = Path(lightning_roundpipe.__file__).parent

# A strategy module that needs nothing of ours, so that these tests are about the name only.
STUB_STRATEGY = """
import os
if "BROKEN" in os.environ:
    raise RuntimeError("broken on purpose")

from lightning.pytorch.strategies import SingleDeviceStrategy

class RoundPipeStrategy(SingleDeviceStrategy):
    def __init__(self, **kwargs):
        self.given = kwargs
        super().__init__(device="cpu")
"""


def run(code, cwd, **environment):
    """Output of ``code`` in a new interpreter. ``cwd`` is not the checkout, so the package is the installed one."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_package(place):
    """A copy of the package with another ``strategy.py``; with its parent first on the path it wins over ours."""
    shutil.copytree(PACKAGE, place / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "conf"))
    (place / PACKAGE.name / "strategy.py").write_text(STUB_STRATEGY)
    return place


@pytest.mark.slow
def test_name_resolves_lazily(tmp_path):
    """A package that is broken breaks nothing but itself."""
    place = copy_of_the_package(tmp_path)
    run(
        """
        import os, sys, torch
        assert not [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning")]
        from lightning.pytorch import Trainer
        import lightning.pytorch.strategies as strategies
        assert "lightning_roundpipe.strategy" not in sys.modules
        Trainer(strategy="auto", accelerator="cpu", logger=False)
        try:
            Trainer(strategy="roundpipe", accelerator="cpu", logger=False)
        except RuntimeError as error:
            assert "broken on purpose" in str(error)
        else:
            raise AssertionError("the broken copy was not used")
        del os.environ["BROKEN"]
        trainer = Trainer(strategy="roundpipe", accelerator="cpu", logger=False)
        assert type(trainer.strategy).__name__ == "RoundPipeStrategy"
        assert type(strategies.__loader__).__name__ == type(strategies.__spec__.loader).__name__ == "SourceFileLoader"
        assert strategies.StrategyRegistry["roundpipe"]["strategy"](staleness=1).given == {"staleness": 1}
        """,
        place,
        PYTHONPATH=str(place),
        BROKEN="1",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_flavour(tmp_path):
    """``pytorch_lightning`` has classes of its own: trains, steps apart, clips, saves and resumes with these."""
    run(
        """
        import sys
        import pytorch_lightning as pl
        import torch
        from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
        from torch import nn

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

            def training_step(self, batch, batch_idx):
                loss = self.layers(batch).square().mean()
                self.log("loss", loss, on_epoch=True)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

        def train(strategy, devices, steps=4, ckpt_path=None):
            keep = ModelCheckpoint(strategy, filename="{step}", every_n_train_steps=2, save_top_k=-1)
            trainer = pl.Trainer(
                accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, max_epochs=9, logger=False,
                enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.1, precision="bf16-mixed",
                callbacks=[keep],
            )
            batches = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0)).repeat(4, 1, 1)
            module = Module()
            trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
            return trainer, torch.cat([p.detach().flatten() for p in module.parameters()])

        _, plain = train("auto", 1)
        trainer, own = train("roundpipe", 2)
        assert isinstance(trainer.strategy, pl.strategies.Strategy)
        assert trainer.strategy.report()["workers"] == 2
        torch.testing.assert_close(own, plain, rtol=1e-2, atol=1e-4)
        _, resumed = train("roundpipe", 2, ckpt_path="roundpipe/step=2.ckpt")
        assert torch.equal(own, resumed)
        assert "lightning" not in sys.modules, "both flavours in one process"

        from lightning_roundpipe.pytorch_lightning import RoundPipeStrategy
        assert type(trainer.strategy) is RoundPipeStrategy
        try:
            RoundPipeStrategy(staleness=2)
        except ValueError as error:
            assert "staleness" in str(error)
        else:
            raise AssertionError
        """,
        tmp_path,
    )


def test_an_import_registers_where_torch_loads_no_entry_points(tmp_path):
    """With a Lightning that is nothing but the registry, which is imported much sooner."""
    flavour = tmp_path / "lightning" / "pytorch" / "strategies"
    flavour.mkdir(parents=True)
    for folder in (flavour.parent.parent, flavour.parent):
        (folder / "__init__.py").touch()
    (flavour / "__init__.py").write_text(
        """
class Registry(dict):
    def register(self, name, factory, description):
        self[name] = factory
StrategyRegistry = Registry()
"""
    )
    run(
        """
        import sys
        import lightning_roundpipe, lightning.pytorch.strategies
        assert "roundpipe" in lightning.pytorch.strategies.StrategyRegistry
        assert "torch" not in sys.modules, "which may not have loaded entry points"
        """,
        tmp_path,
    )


def test_importing_the_package_is_light(tmp_path):
    """torch imports it: anything heavy would be circular, and would slow down every program that uses torch."""
    output = run(
        """
        import sys
        import lightning_roundpipe
        print(*sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
        """,
        tmp_path,
    )
    allowed = {"lightning_roundpipe", "__main__", "_distutils_hack", "sitecustomize", "usercustomize"}
    assert {name for name in output.split() if not name.startswith("__editable__")} <= allowed


def test_the_entry_point_is_installed():
    mine = [entry for entry in entry_points(group="torch.backends") if entry.name == "lightning_roundpipe"]
    assert mine, "install the package: make install"
    assert mine[0].load() is registration.autoload
