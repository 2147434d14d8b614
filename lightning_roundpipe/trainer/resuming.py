"""Warns if a run that is resumed within an epoch cannot continue as it was.

Weights, optimizer and dropout continue bit for bit, but the data are the loader's. Lightning saves a loader's
``state_dict()`` in its checkpoints if it has one. Otherwise the resumed epoch starts at the loader's first batch,
perhaps shuffled anew, and ends after as many batches as remained: some samples come twice, others not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer

from lightning_roundpipe.messages import PREFIX, warn


def holds_place(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint has the position of the data loader in its epoch."""
    node: Any = checkpoint
    for key in ("loops", "fit_loop", "state_dict", "combined_loader"):
        node = node.get(key) or {}
    return bool(node)


def warn_of_lost_place(trainer: Trainer, held: bool) -> None:
    """Warn, before the first batch, if the run resumes within an epoch with other batches than the remaining ones.

    Args:
        trainer: its loops and loaders must be set up.
        held: the result of ``holds_place`` for the loaded checkpoint.
    """
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.batch_progress.current
    done, all_ = progress.processed, trainer.num_training_batches
    if not loop.restarting or not 0 < done < all_:
        return
    loader = trainer.fit_loop._combined_loader
    assert loader is not None
    stateless = [type(one).__name__ for one in loader.flattened if not isinstance(one, _Stateful)]
    if stateless:
        why = f"the training data loader ({', '.join(dict.fromkeys(stateless))}) cannot say which batches are left"
    elif not held:
        why = "it does not hold which batches are left, as the data loader had no state_dict() then"
    else:
        return
    of = f" of {all_:,}" if all_ != float("inf") else ""
    warn(
        f"{PREFIX}the checkpoint was written after batch {done:,}{of} of an epoch, and {why}: the epoch goes on with "
        "the first batches that the loader gives now. Samples come twice or not at all, and the run does not continue "
        "bit for bit. Use a loader with state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader, or "
        "resume from a checkpoint that was written at the end of an epoch."
    )
