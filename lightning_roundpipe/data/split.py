"""Divides named texts into training and validation, without overlap.

Texts are divided whole: the end of a text whose beginning was trained on is not held out. That is not enough where
texts quote each other, as Python's help topics do (whole sections of one are in another), so texts that share a
paragraph stay together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

SHARED_PARAGRAPH = 120
"""Least characters of a paragraph that ties the texts it occurs in. Shorter ones are headings and phrases."""


def split_texts(texts: Mapping[str, str], fraction: float, seed: int = 0) -> tuple[list[str], list[str]]:
    """Return the names for training and for validation. They depend only on the texts and ``seed``, no random state.

    Groups of texts are added to validation as long as they fit into its ``fraction`` of all characters.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"data.validation_fraction={fraction!r} must lie between 0 and 1.")
    allowed = fraction * sum(map(len, texts.values()))
    training: list[str] = []
    validation: list[str] = []
    used = 0
    for group in sorted(_related(texts), key=lambda names: hashlib.sha256(f"{seed} {names[0]}".encode()).digest()):
        size = sum(len(texts[name]) for name in group)
        if used + size <= allowed:
            validation += group
            used += size
        else:
            training += group
    if not validation or not training:
        raise ValueError(
            f"data.validation_fraction={fraction!r} leaves no text for {'training' if validation else 'validation'}: "
            f"texts that share paragraphs stay together, and there are too few ({len(texts)}). Choose another fraction."
        )
    return training, validation


def _related(texts: Mapping[str, str]) -> list[list[str]]:
    """Return the names in groups of texts that share paragraphs, directly or through others. Names are sorted."""
    groups: list[tuple[list[str], set[str]]] = []
    for name in texts:
        blocks = (" ".join(block.split()) for block in texts[name].split("\n\n"))
        names, paragraphs = [name], {block for block in blocks if len(block) >= SHARED_PARAGRAPH}
        for group in [group for group in groups if not paragraphs.isdisjoint(group[1])]:
            groups.remove(group)
            names, paragraphs = names + group[0], paragraphs | group[1]
        groups.append((names, paragraphs))
    return [sorted(names) for names, _ in groups]
