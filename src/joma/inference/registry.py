"""Policies by name, and how they are written on the command line."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from joma.errors import JomaError
from joma.inference.full import Full
from joma.inference.heavy_hitter import HeavyHitter
from joma.inference.policy import Policy
from joma.inference.random import Random
from joma.inference.streaming import Streaming
from joma.inference.window import Window

POLICIES: Mapping[str, type[Policy]] = {
    it.name: it for it in (Full, Window, Streaming, HeavyHitter, Random)
}
"""Every policy, by its name on the command line."""


def parse_policy(text: str) -> Policy:
    """Return the policy that a text such as "heavy-hitter:heavy=64,recent=64" describes.

    Raises:
        JomaError: There is no such policy, or an argument is unknown, missing or impossible.
    """
    name, _, rest = text.strip().partition(":")
    kind = POLICIES.get(name)
    if kind is None:
        raise JomaError(f"cache must be one of {', '.join(map(usage, POLICIES))}, got {text!r}")
    known = {it.name: it for it in fields(kind)}
    given: dict[str, Any] = {}
    for part in filter(None, (it.strip() for it in rest.split(","))):
        key, equals, value = (it.strip() for it in part.partition("="))
        if not equals or key not in known:
            raise JomaError(f"cache must be written {usage(name)}, got {part!r} in {text!r}")
        if key in given:
            raise JomaError(f"cache must give {key} once, got {text!r}")
        given[key] = _value(value)
    missing = [it.name for it in known.values() if it.default is MISSING and it.name not in given]
    if missing:
        raise JomaError(f"cache must be written {usage(name)}, got {text!r} without {missing[0]}")
    try:
        return kind(**given)
    except JomaError as error:
        raise JomaError(f"cache {text!r} is impossible: {error}") from error


def usage(name: str) -> str:
    """Return how a policy is written: "streaming:window=N[,sinks=4][,positions=auto]"."""
    parts: list[str] = []
    for it in fields(POLICIES[name]):
        comma = "," if parts else ""
        needed = it.default is MISSING
        parts.append(f"{comma}{it.name}=N" if needed else f"[{comma}{it.name}={it.default}]")
    return f"{name}:{''.join(parts)}" if parts else name


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
