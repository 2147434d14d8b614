"""Real English that every Python has: the help topics of CPython, about 465,000 characters of technical text."""

from __future__ import annotations


def pydoc_topics() -> dict[str, str]:
    """Name and text of each topic that ``help("topics")`` lists, as this Python has them."""
    from pydoc_data.topics import topics

    return dict(topics)
