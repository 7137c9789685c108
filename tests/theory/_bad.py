"""Bad input, and how a function must answer it."""

from collections.abc import Callable
from typing import Any

import pytest


def rejects(argument: str, call: Callable[[], Any]) -> None:
    """The call raises a ValueError whose message names the argument."""
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        call()
