"""What the processes of ``several_machines`` run: each job is a function of its arguments and a folder."""

import functools
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import MemoryLogger, callback, loader, ours, quiet, trainer_of
from large_runs import watched
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

RANK = int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", os.environ.get("SLURM_PROCID", 0))))
MACHINES = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))


def main(job, folder, arguments):
    torch.set_num_threads(1)
    result = globals()[job](Path(folder), **json.loads(arguments))
    torch.save(result, Path(folder) / f"result-{RANK}.pt")


def global_batches(name, count, samples):
    """Batches whose targets are spread unevenly over their samples."""
    import zoo

    batches = zoo.make_batches(name, count, samples)
    for batch in batches:
        if "labels" in batch and batch["labels"].dim() == 2:
            batch["labels"][0, 1:] = -100
            batch["labels"][-1, ::2] = -100
    return batches


def part(batch, rank, machines):
    """The samples of one machine."""
    return {key: torch.tensor_split(value, machines)[rank] for key, value in batch.items()}


def mean_of_targets(module, batch, batch_idx):
    logits = module.model(input_ids=batch["input_ids"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), reduction="none")
    kept = (targets != -100).float()
    return (each * kept).sum() / kept.sum()


def with_optimizer(module, name):
    makes = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-3),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    module.configure_optimizers = lambda: makes[name]([p for p in module.parameters() if p.requires_grad])
    return module


class Late(pl.Callback):
    """Sleeps in the backward of the second batch's second microbatch, when all losses are known."""

    roundpipe_passive_hooks = True

    def __init__(self, seconds, module):
        self.seconds, self.batch, self.calls = seconds, 0, 0
        layer = next(inner for inner in module.modules() if isinstance(inner, torch.nn.Linear))
        layer.register_full_backward_hook(self.sleep)

    def sleep(self, *_):
        self.calls += self.batch == 1
        if self.calls == 2:
            time.sleep(self.seconds)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch = batch_idx


def train(
    *,
    rank=RANK,
    machines=MACHINES,
    strategy=None,
    model="llama",
    lora=False,
    optimizer="adamw",
    steps=3,
    samples=8,
    microbatches=4,
    devices=2,
    blocking=False,
    looks_after=None,
    dropout=0.0,
    even=False,
    options=None,
    resume=None,
    save=None,
    nothing_on=None,
    late=0.0,
    scaled=False,
    own_mean=False,
    more=(),
    **trainer,
):
    """Train on one machine's part of each batch; with ``machines=1``, on all of it.

    Args:
        strategy: another strategy than ours.
        microbatches: of all machines together; None: batches are not cut.
        devices: of each machine; a number, if all have as many.
        blocking: whether a callback looks at gradients.
        looks_after: a batch after which a callback of the first machine looks at weights.
        even: whether each sample has the same number of targets, so that samples weigh as in plain training.
        resume: a checkpoint to go on from.
        save: where to write a checkpoint when training has ended.
        nothing_on: a machine whose samples have no targets.
        late: seconds for which the last machine sleeps in a backward.
        own_mean: whether training_step itself computes the mean over the targets.
        more: other callbacks.
        scaled: whether to compute in fp16 with a loss scale, which ``precision=`` refuses on the CPU.
    """
    import zoo

    module = with_optimizer(zoo.make_module(model, lora), optimizer)
    if own_mean:
        module.training_step = functools.partial(mean_of_targets, module)
    drawn = set[float]()

    def drops(layer, args, out):
        drawn.add(float(torch.rand((), dtype=torch.float64)))
        return torch.nn.functional.dropout(out, dropout)

    for inner in module.modules():
        if dropout and isinstance(inner, torch.nn.Linear):
            inner.register_forward_hook(drops)
    batches = global_batches(model, steps, samples)
    for batch in batches if even else ():
        batch["labels"] = batch["input_ids"].clone()
    for batch in batches if nothing_on is not None else ():
        part(batch, nothing_on, 2)["labels"][:] = -100
    if scaled:
        trainer["plugins"] = [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10))]
    parts = {} if microbatches is None else {"num_microbatches": microbatches // machines}
    parts["loss_weight"] = module.targets if own_mean else None if even else module.weighs
    losses, more = [], list(more)

    def note(trainer, pl_module, outputs, *_):
        losses.append(torch.as_tensor(outputs["loss"] if isinstance(outputs, dict) else outputs).detach().clone())

    def look(trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx == looks_after:
            pl_module.state_dict()

    if looks_after is not None:
        more.append(callback(passive=True, on_train_batch_end=look))
    if late and rank == machines - 1 > 0:
        more.append(Late(late, module))
    if blocking:
        more.append(callback(on_before_optimizer_step=lambda *_: None))
    if save:
        more.append(callback(on_train_end=lambda trainer, *_: trainer.save_checkpoint(save)))
    made = trainer_of(
        ours(**(parts | (options or {}))) if strategy is None else strategy,
        devices=devices if isinstance(devices, int) else devices[rank],
        num_nodes=trainer.pop("num_nodes", machines if strategy is None else 1),
        use_distributed_sampler=False,
        callbacks=[callback(passive=True, on_train_batch_end=note), *more],
        **trainer,
    )
    torch.manual_seed(1)
    with quiet():
        made.fit(module, loader([part(batch, rank, machines) for batch in batches]), ckpt_path=resume)
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    held = sum(bool(made.optimizers[0].state.get(p)) for p in module.parameters())
    return {"losses": losses, "state": state, "steps": made.global_step, "held": held, "drawn": drawn}


def cases(folder, cases):
    return [train(**case) for case in cases]


class Broad(pl.LightningModule):
    """Much to save, and little to compute: 64 MiB of weights, and 128 MiB of optimizer state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def saves_much(folder, resume=False):
    """What a checkpoint of a broad model, or going on from it, takes of memory beyond what training takes."""
    path, loading, saving = folder.parent / "broad.ckpt", ExitStack(), {"peak": 0}

    class SavesAtTheEnd(pl.Callback):
        roundpipe_passive_hooks = ("on_train_batch_end",)

        def on_train_start(self, trainer, pl_module):
            loading.close()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if resume:
                trainer.strategy._running()[1].settle()  # the first update copies the state
                assert path.name not in Path("/proc/self/maps").read_text(), "the file is still in use"
            elif batch_idx == 2:
                trainer.strategy._running()[1].settle()
                with watched() as found:
                    trainer.save_checkpoint(path)
                saving.update(found)

    module, data = Broad(), torch.randn(16, 1024, generator=torch.Generator().manual_seed(RANK))
    trainer = trainer_of(
        ours(num_microbatches=2), num_nodes=MACHINES, max_epochs=1 + resume, use_distributed_sampler=False,
        callbacks=[SavesAtTheEnd()], default_root_dir=folder,
    )  # fmt: skip
    loaded = loading.enter_context(watched())
    with quiet():
        trainer.fit(module, DataLoader(data, 4), ckpt_path=path if resume else None)
    held = sum(value.nbytes for state in trainer.optimizers[0].state.values() for value in state.values())
    return {"grew": saving["peak"], "held": held, "loaded": loaded["peak"], "state": module.state_dict()}


class Counting(pl.LightningModule):
    """A linear model whose batches are numbers, and which logs what Lightning exchanges between machines."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3 + RANK)  # other weights on each machine: those of the first one count
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.seen = []
        self.validated = []
        self.mean, self.said = MeanMetric(), dict[str, Any]()

    def training_step(self, batch, batch_idx):
        self.log("mine", batch[:, 0].mean(), on_step=True, on_epoch=True)
        self.log("everyones", batch[:, 0].mean(), on_epoch=True, sync_dist=True)
        self.mean(batch[:, 0])
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return self.model(batch).square().mean()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        (self.seen if self.training else self.validated).extend(batch[:, 0].tolist())
        return batch

    def validation_step(self, batch, batch_idx):
        self.log("val", batch[:, 0].mean() + (10 * self.current_epoch if RANK else 0), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        self.model(batch)
        return self.all_gather(batch[:, 0])  # each batch with the other machine's of the same number

    def on_train_start(self):
        strategy = self.trainer.strategy
        self.said = {
            "gathered": self.all_gather(torch.tensor([RANK, 5])),
            "sum": strategy.reduce(torch.tensor(float(RANK + 1)), reduce_op="sum"),
            "mean": strategy.reduce(torch.tensor(float(RANK + 1))),
            "text": strategy.broadcast({"from": RANK, "list": [1, None]}),
            "path": strategy.broadcast(Path(f"/of/{RANK}")),
            "any": strategy.reduce_boolean_decision(RANK == 1, all=False),
            "all": strategy.reduce_boolean_decision(RANK == 1),
        }

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightning(folder):
    """All that Lightning does around training."""
    data = torch.arange(24.0).repeat(4, 1).T.contiguous()
    module, logger = Counting(), MemoryLogger()
    stopping = EarlyStopping("val", patience=1)
    saving = ModelCheckpoint(folder / "checkpoints", monitor="val", save_last=True)
    trainer = trainer_of(
        ours(num_microbatches=2), devices=2, num_nodes=MACHINES, callbacks=[stopping, saving], max_epochs=9,
        logger=logger, enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True,
    )  # fmt: skip
    start = {name: value.clone() for name, value in module.state_dict().items()}
    with quiet():
        trainer.fit(module, DataLoader(data, 4), DataLoader(data[:8], 2))
        after = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(module, DataLoader(data[:10], 2))
        validated = trainer.validate(module, DataLoader(data[:8], 2), verbose=False)
    assert predicted is not None
    return {
        "world": (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.num_nodes),
        "start": start, "state": module.state_dict(), "seen": module.seen, "validated": module.validated,
        "said": module.said, "lines": logger.lines, "metrics": after, "epochs": trainer.current_epoch,
        "best": saving.best_model_path, "predicted": torch.cat(predicted, 1).tolist(), "then": validated,
    }  # fmt: skip


def dies_once(folder, epochs):
    """A run that goes on from its last checkpoint, one at the end of each epoch."""

    def die(trainer, pl_module, batch, batch_idx):
        """In the second epoch, on the second machine, unless torchrun has started it again."""
        if (RANK, trainer.current_epoch, batch_idx) == (1, 1, 1) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    saving = ModelCheckpoint(folder / "checkpoints", save_last=True)
    options = {"options": {"machine_timeout": 30}, "more": [callback(passive=True, on_train_batch_start=die), saving]}
    return train(**options, enable_checkpointing=True, max_epochs=epochs, resume="last")


class Stopped(Counting):
    """Its second machine sets ``should_stop`` in a hook."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def stop_in(self, hook, now):
        if RANK == MACHINES - 1 and hook == self.hook and now:
            self.trainer.should_stop = True

    def training_step(self, batch, batch_idx):
        self.stop_in("training_step", batch_idx == 2)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.stop_in("on_train_batch_end", batch_idx == 1)

    def on_validation_epoch_end(self):
        self.stop_in("on_validation_epoch_end", self.trainer.global_step == 4)

    def on_train_epoch_end(self):
        self.stop_in("on_train_epoch_end", True)

    def on_train_start(self):
        pass


def stops(folder, hooks):
    """For each hook: steps, validations and epochs of a run that only the last machine wants to stop there."""
    data, found = torch.arange(48.0).repeat(4, 1).T.contiguous(), []
    for hook in hooks:
        module = Stopped(hook)
        trainer = trainer_of(
            ours(num_microbatches=2), devices=2, num_nodes=MACHINES, max_epochs=2, val_check_interval=4
        )
        with quiet():
            trainer.fit(module, DataLoader(data, 4), DataLoader(data[:4], 2))
        found.append((trainer.global_step, len(module.validated), trainer.current_epoch))
    return found


class Faulty(Counting):
    """What one machine does in its fourth batch."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "another model" and RANK == 1:
            self.more = torch.nn.Linear(2, 2)
        if kind == "another activation" and RANK == 1:
            self.model[1] = torch.nn.ReLU()
        if kind == "another dropout":
            self.drop = torch.nn.Dropout(0.2 if RANK else 0.1)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.kind == "another learning rate" and RANK == 1:
            optimizer.param_groups[0]["lr"] = 0.02
        if self.kind == "own plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        else:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

    def training_step(self, batch, batch_idx):
        if (0 if "the first" in self.kind else 1) == RANK and self.trainer.global_step == 3:
            if self.kind == "raises":
                raise ValueError("the data is spilled")
            if self.kind == "is asked to end":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.kind.endswith(("killed", "stopped")):
                os.kill(os.getpid(), signal.SIGKILL if self.kind.endswith("killed") else signal.SIGSTOP)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.kind == "raises in a hook" and RANK == 1:
            raise ValueError("the validation is spilled")
        if self.kind == "another exchange" and self.trainer.global_step == 8:
            self.trainer.strategy.barrier() if RANK else self.trainer.strategy.reduce(torch.tensor(1.0))
        if self.kind == "is slow" and RANK == 1 and not batch_idx:
            time.sleep(22)
        if self.kind == "own plateau":
            self.log("val", float(self.current_epoch * (1 - 2 * RANK)), sync_dist=False)
            return
        super().validation_step(batch, batch_idx)

    def on_train_start(self):
        pass


class Numbers(IterableDataset[Tensor]):
    """Rows without a known number."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.arange(4.0 * self.count).repeat(4, 1).T.contiguous())


def fault(folder, kind):
    """A run in which one machine fails. The timeout is long, unless the run waits for its end."""
    rows = 16 if kind == "fewer batches" and RANK == 1 else 32
    data = torch.arange(float(rows)).repeat(4, 1).T.contiguous()
    training = DataLoader(data, 4)
    if kind == "fewer batches that nobody counts":
        training = DataLoader(Numbers(8 if RANK == 0 else 5), 4)
    options = {"staleness": 1} if kind == "another setting" and RANK == 1 else {}

    def hasten(trainer, *_):
        """Shorten the timeout when the machines have met, which a busy processor may delay."""
        if kind in ("stopped", "is slow"):
            trainer.strategy._peers.liveness._timeout = 20.0

    hasty = callback(passive=True, on_train_start=hasten)
    module = Faulty(kind)
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_of(
        ours(num_microbatches=2, **options), devices=2, num_nodes=MACHINES, callbacks=[saving, hasty],
        max_epochs=4 if kind == "own plateau" else 2, enable_checkpointing=True,
        use_distributed_sampler=False, check_val_every_n_epoch=1,
    )  # fmt: skip
    with quiet():
        trainer.fit(module, training, DataLoader(data[:8], 4))
    return {"steps": trainer.global_step}


if __name__ == "__main__":
    main(*sys.argv[1:])
