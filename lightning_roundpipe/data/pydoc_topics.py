"""English text that every Python has: CPython's help topics, about 465,000 characters of technical text."""

from __future__ import annotations


def pydoc_topics() -> dict[str, str]:
    """Return name and text of each topic that ``help("topics")`` lists in this Python."""
    from pydoc_data.topics import topics

    return dict(topics)
