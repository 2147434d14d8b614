"""What users get wrong, in one table, with the ways to get it wrong: the rows of the page of ``docs/errors.md``."""

from mistakes.commands import COMMANDS
from mistakes.data import DATA
from mistakes.files import CHECKPOINTS, MODELS
from mistakes.modules import BATCHES, MODULES
from mistakes.settings import MEMORY, MICROBATCHES, OTHERS, PLANS, TRAINER
from mistakes.user import CommandError, Mistake, User

MISTAKES: list[Mistake] = [
    *MICROBATCHES, *PLANS, *MEMORY, *OTHERS, *TRAINER, *MODULES, *BATCHES, *CHECKPOINTS, *MODELS, *DATA, *COMMANDS,
]  # fmt: skip

__all__ = ["MISTAKES", "CommandError", "Mistake", "User"]
