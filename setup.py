"""What pyproject.toml cannot say: README.md with links that work on a package index.

In the repository they are relative, which an index cannot follow. The build makes them absolute, by the repository's
address in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def readme() -> str:
    """README.md with absolute links: pictures to the files themselves, all else to their pages."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository}/{kind}/main/{link['target']})"

    link = r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s]+)\)"
    return re.sub(link, absolute, (ROOT / "README.md").read_text("utf-8"))


if __name__ == "__main__":
    setup(long_description=readme(), long_description_content_type="text/markdown")
