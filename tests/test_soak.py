"""A thousand steps leave no more behind than forty."""

import ctypes
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import harness
import psutil
import pytest
import torch
import zoo
from lightning.pytorch.callbacks import ModelCheckpoint

STEPS = 1000
EARLY = 40
EVERY = 10
"""Steps between validations, and between checkpoints: by step 40 all that Lightning keeps of them is there."""

MEMORY_TOLERANCE = 16 * 2**20
"""Bytes of host memory that the allocators of Python and C may keep without anybody holding them."""


@dataclass
class Held:
    """What the process and the workers hold between two steps."""

    threads: list[str]
    files: int
    tensors: int
    tensor_bytes: int
    device: list[dict[str, int]]
    resident: int

    @classmethod
    def now(cls, trainer):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free already is no leak
        tensors = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) in (torch.Tensor, torch.nn.Parameter)
        }
        engine = trainer.strategy._engine
        return cls(
            threads=sorted(thread.name for thread in threading.enumerate()),
            files=len(os.listdir("/proc/self/fd")),
            tensors=len(tensors),
            tensor_bytes=sum(tensors.values()),
            device=[device.resident_by_purpose() for device in engine.context.pool.devices],
            resident=psutil.Process().memory_info().rss,
        )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux shows in /proc")
def test_a_thousand_steps(tmp_path):
    held = {}

    def watch(trainer, *_):
        if trainer.global_step in (EARLY, STEPS):
            held[trainer.global_step] = Held.now(trainer)

    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=EVERY, save_top_k=1, monitor="train/loss_step")
    trainer = harness.trainer_of(
        harness.ours(num_microbatches=3),
        devices=2,
        max_epochs=-1,
        max_steps=STEPS,
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=[harness.callback(on_train_batch_end=watch), checkpoints],
    )
    batches = zoo.make_batches("llama", 8)
    trainer.fit(zoo.make_module("llama"), harness.loader(batches), harness.loader(batches[:2]))
    early, last = held[EARLY], held[STEPS]
    assert last.threads == early.threads
    assert last.files == early.files
    assert last.device == early.device
    assert (last.tensors, last.tensor_bytes) == (early.tensors, early.tensor_bytes)
    assert last.resident - early.resident < MEMORY_TOLERANCE
    assert harness.roundpipe_threads() == []
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
