"""Which caches are compared: what --cache, --budget and --sweep mean for one text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from joma.errors import JomaError
from joma.inference import (
    POLICIES,
    HeavyHitter,
    Policy,
    Random,
    Streaming,
    Window,
    parse_policy,
)
from joma.inference.allocation import DEFAULT_RULE, allocate
from joma.inference.quality import attention_profiles
from joma.inference.support import layer_windows, text_config

_SWEPT = ("window", "streaming", "heavy-hitter", "random")
"""Policies that are compared where none is named."""
_RULES = ("auto", "mass", "entropy")
_DEFAULT_SHARE = "20%"
"""What `--budget auto` holds in all."""
_SINKS = 4
_SHORTEST_PROFILE, _LONGEST_PROFILE = 16, 1024
"""Tokens of a prompt on which attention is measured."""


@dataclass(frozen=True)
class NamedCache:
    """A cache and what it is called in tables.

    Attributes:
        name: As --cache takes it; "heavy-hitter:mass=64" where layers have budgets of their own.
        policy: What all layers keep, or what each of them keeps; None for the full cache.
    """

    name: str
    policy: Policy | tuple[Policy, ...] | None

    @property
    def kind(self) -> str:
        """Name of its policy."""
        return self.name.partition(":")[0]

    @property
    def keys(self) -> float:
        """Keys that a head holds, averaged over layers; NaN without a limit."""
        given = self.policy if isinstance(self.policy, tuple) else (self.policy,)
        budgets = [it.budget for it in given if it is not None and it.budget is not None]
        return sum(budgets) / len(budgets) if len(budgets) == len(given) else math.nan


FULL = NamedCache("full", None)


@dataclass(frozen=True)
class AskedCaches:
    """What the command line asks for.

    Attributes:
        caches: Values of --cache: policies with their arguments, or bare names with a budget.
        budget: Value of --budget: keys per head, a share such as "20%", or a rule by which layers
            get budgets of their own, such as "auto" or "mass:20%".
        sweep: Value of --sweep: budgets with commas.
    """

    caches: tuple[str, ...] = ()
    budget: str | None = None
    sweep: str | None = None

    def of_text(
        self, tokens: int, model: nn.Module | None = None, prompt: Sequence[int] = ()
    ) -> list[NamedCache]:
        """Return the caches that are compared with the full one, without repetitions.

        Args:
            tokens: Tokens of the whole text, which shares are of.
            model: The model, whose attention on the prompt says where keys matter. Without it,
                layers with budgets of their own are taken to share the keys evenly, which are as
                many in all.
            prompt: Tokens of the prompt.

        Raises:
            JomaError: A cache is unknown or impossible, or the options contradict each other.
        """
        rule, _, share = (self.budget or "").partition(":")
        if rule in _RULES:
            if any(name != "heavy-hitter" for name in self.caches):
                raise JomaError(f"cache must be heavy-hitter with --budget {rule}")
            keys = _keys("budget", share or _DEFAULT_SHARE, tokens)
            rule = DEFAULT_RULE if rule == "auto" else rule
            return [_by_layer(rule, keys, tokens, model, prompt)]
        option, budgets = "budget", [] if self.budget is None else [self.budget]
        if self.sweep is not None:
            option, budgets = "sweep", [*_swept(self.sweep), *budgets]
        bare = [it for it in self.caches if it in POLICIES and it != "full"]
        found: list[NamedCache] = []
        for given in self.caches:
            if given in (*bare, "full"):
                continue
            if budgets:
                raise JomaError(
                    f"cache must be a policy's name alone, such as heavy-hitter, with --{option}, "
                    f"which says how many keys it holds, got {given!r}"
                )
            found.append(_named(parse_policy(given)))
        if bare and not budgets:
            parse_policy(bare[0])  # says what is missing
        names = bare or (_SWEPT if self.sweep is not None else ("heavy-hitter",))
        for budget in budgets:
            keys = _keys(option, budget, tokens)
            found += [_named(_policy(name, keys, option)) for name in names]
        return list(dict.fromkeys(found))


def _named(policy: Policy) -> NamedCache:
    """Return a cache of one policy, named without the arguments that have their defaults."""
    given = [
        f"{it.name}={getattr(policy, it.name)}"
        for it in fields(policy)
        if getattr(policy, it.name) != it.default
    ]
    return NamedCache(f"{policy.name}:{','.join(given)}", policy)


def _keys(option: str, budget: str, tokens: int) -> int:
    """Return how many keys a budget such as "64" or "20%" is for a text."""
    text = budget.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else None
        keys = int(text) if share is None else math.floor(share * tokens + 0.5)
    except (ValueError, OverflowError):
        raise JomaError(
            f"{option} must be a number of keys such as 64, or a share such as 20%, got {budget!r}"
        ) from None
    if share is not None and not 0 < share <= 1:
        raise JomaError(f"{option} must be above 0% and at most 100%, got {budget!r}")
    if keys < 1:
        raise JomaError(f"{option} must leave each head one key or more, got {budget!r}")
    return keys


def _policy(name: str, keys: int, option: str = "budget") -> Policy:
    """Return a policy of this budget; heavy-hitter and random keep half for the last tokens."""
    recent = keys // 2
    if name == "window":
        return Window(keys)
    if name == "heavy-hitter":
        return HeavyHitter(heavy=keys - recent, recent=recent)
    if name == "random":
        return Random(keys, recent=recent)
    if keys <= _SINKS:
        raise JomaError(
            f"{option} must be {_SINKS + 1} keys or more for streaming, which keeps {_SINKS} "
            f"sinks, got {keys}"
        )
    return Streaming(sinks=_SINKS, window=keys - _SINKS)


def _swept(text: str) -> list[str]:
    budgets = [it.strip() for it in text.split(",")]
    if not all(budgets):
        raise JomaError(f"sweep must be budgets with commas, such as 5,10,20%, got {text!r}")
    if budgets[-1].endswith("%"):  # one sign is enough for all
        budgets = [it if it.endswith("%") else f"{it}%" for it in budgets]
    return budgets


def _by_layer(
    rule: str, keys: int, tokens: int, model: nn.Module | None, prompt: Sequence[int]
) -> NamedCache:
    """Return a heavy-hitter cache whose layers get budgets of their own by a rule."""
    name = f"heavy-hitter:{rule}={keys}"
    if model is None:
        return NamedCache(name, _policy("heavy-hitter", keys))
    if len(prompt) < _SHORTEST_PROFILE:
        raise JomaError(
            f"budget {rule!r} needs a prompt of {_SHORTEST_PROFILE} tokens or more to measure "
            f"attention on, got {len(prompt)}"
        )
    profiles = attention_profiles(model, torch.tensor([list(prompt[:_LONGEST_PROFILE])]))
    windows = layer_windows(text_config(model))
    limits = [None if it is None else max(it - 1, 1) for it in windows]
    policies = allocate(keys * len(profiles), profiles, rule=rule, limits=limits, context=tokens)  # type: ignore[arg-type]
    return NamedCache(name, tuple(policies))
