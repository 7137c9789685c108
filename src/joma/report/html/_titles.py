"""What runs are called: the ends of their paths, as long as needed to tell them apart."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

_COMMON = re.compile(r"monitor(-\d+)?")
"""Names that integrations give: the folder around one says which training it is."""


def run_titles(paths: Sequence[Path]) -> list[str]:
    """Return a title for each run folder: its name, after the folders above it where needed.

    >>> run_titles([Path("a/run"), Path("b/run"), Path("c"), Path("mine/monitor")])
    ['a/run', 'b/run', 'c', 'mine/monitor']

    Args:
        paths: The folders.
    """
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    lengths = [2 if _COMMON.fullmatch(parts[-1]) else 1 for parts in whole]
    while True:
        titles = ["/".join(parts[-length:]) for parts, length in zip(whole, lengths, strict=True)]
        several = {title for title in titles if titles.count(title) > 1}
        longer = [
            length + (title in several and length < len(parts))
            for title, length, parts in zip(titles, lengths, whole, strict=True)
        ]
        if longer == lengths:
            return titles
        lengths = longer
