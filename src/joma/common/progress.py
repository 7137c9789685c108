"""How work reports its progress."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def no_progress(what: str, done: int, total: int) -> None:
    """Default callback; does nothing. It has a name, so that other processes can import it."""
