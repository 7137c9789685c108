"""Deprecated name of `joma.probes.tap`."""

import warnings
from typing import Any

from joma.probes import tap


def __getattr__(name: str) -> Any:
    target = getattr(tap, "Tap" if name == "Watch" else name)
    message = "joma.probes.watching is deprecated, use joma.probes.tap"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return target
