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
from joma.inference.allocation import DEFAULT_RULE, Rule, allocate
from joma.inference.quality import attention_profiles
from joma.inference.support import layer_windows, text_config

SWEPT = ("window", "streaming", "heavy-hitter", "random")
"""Policies that are compared where none is named."""

DEFAULT_AUTO = "20%"
"""What `--budget auto` holds in all."""

_SINKS = 4
_ANY_LENGTH = 10**9
"""A text for which every share is a possible budget."""
_RULES = ("auto", "mass", "entropy")
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


def named(policy: Policy) -> NamedCache:
    """Return a cache of one policy, named without the arguments that have their defaults."""
    given = [
        f"{it.name}={getattr(policy, it.name)}"
        for it in fields(policy)
        if getattr(policy, it.name) != it.default
    ]
    return NamedCache(f"{policy.name}:{','.join(given)}", policy)


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

    @property
    def is_auto(self) -> bool:
        """Whether layers are to get budgets of their own."""
        return self.budget is not None and self.budget.partition(":")[0] in _RULES


def keys_of_budget(budget: str, tokens: int) -> int:
    """Return how many keys a budget such as "64" or "20%" is for a text.

    Raises:
        JomaError: It is no number of keys, or less than one.
    """
    text = budget.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else None
        keys = int(text) if share is None else math.floor(share * tokens + 0.5)
    except (ValueError, OverflowError):
        raise JomaError(
            f"budget must be a number of keys such as 64, or a share such as 20%, got {budget!r}"
        ) from None
    if share is not None and not 0 < share <= 1:
        raise JomaError(f"budget must be above 0% and at most 100%, got {budget!r}")
    if keys < 1:
        of = "" if share is None else f", which is {keys} of {tokens} tokens"
        raise JomaError(f"budget must leave each head one key or more, got {budget!r}{of}")
    return keys


def policy_of_budget(name: str, keys: int) -> Policy:
    """Return a policy that holds so many keys per head, with its usual shares.

    Streaming keeps four sinks, heavy-hitter and random half of the keys for the last tokens.

    Raises:
        JomaError: There is no such policy, or the budget is too small for it.
    """
    recent = keys // 2
    if name == "window":
        return Window(keys)
    if name == "streaming":
        if keys <= _SINKS:
            raise JomaError(
                f"budget must be {_SINKS + 1} keys or more for streaming, which keeps {_SINKS} "
                f"sinks, got {keys}"
            )
        return Streaming(sinks=_SINKS, window=keys - _SINKS)
    if name == "heavy-hitter":
        return HeavyHitter(heavy=keys - recent, recent=recent)
    if name == "random":
        return Random(keys, recent=recent)
    raise JomaError(f"cache must be one of {', '.join(SWEPT)} with a budget, got {name!r}")


def parse_caches(asked: AskedCaches, tokens: int) -> list[NamedCache]:
    """Return the caches that are compared with the full one, without repetitions.

    Budgets that each layer gets for itself (`AskedCaches.is_auto`) are not resolved here.

    Args:
        asked: What the command line asks for.
        tokens: Tokens of the whole text, which shares are of.

    Raises:
        JomaError: A cache is unknown or impossible, or the options contradict each other.
    """
    budgets = [] if asked.sweep is None else [("sweep", it) for it in _swept(asked.sweep)]
    if asked.budget is not None and not asked.is_auto:
        budgets.append(("budget", asked.budget))
    found: list[NamedCache] = []
    bare = [it for it in asked.caches if it in POLICIES and it != "full"]
    for given in asked.caches:
        if given == "full":
            continue
        if given not in bare:
            if budgets or asked.is_auto:
                option = "--sweep" if asked.sweep is not None else "--budget"
                raise JomaError(
                    f"cache must be a policy's name alone, such as heavy-hitter, with {option}, "
                    f"which says how many keys it holds, got {given!r}"
                )
            policy = parse_policy(given)
            found.append(named(policy))
        elif not budgets and not asked.is_auto:
            parse_policy(given)  # says what is missing
    names: Sequence[str] = bare or (SWEPT if asked.sweep is not None else ("heavy-hitter",))
    if asked.is_auto and asked.sweep is None:
        return found
    for option, budget in budgets:
        try:
            keys = keys_of_budget(budget, tokens)
            found += [named(policy_of_budget(name, keys)) for name in names]
        except JomaError as error:  # which names the budget, as the argument is called
            raise JomaError(f"{option}{str(error).removeprefix('budget')}") from error
    return list(dict.fromkeys(found))


def planned_caches(asked: AskedCaches, tokens: int) -> list[NamedCache]:
    """Return the caches that are compared, as far as they are known without the model.

    Layers with budgets of their own are taken to share the keys evenly, which are as many in all.

    Args:
        asked: What the command line asks for.
        tokens: Tokens of the whole text, which shares are of.

    Raises:
        JomaError: As `parse_caches` and `auto_caches`.
    """
    found = parse_caches(asked, tokens)
    if asked.is_auto:
        word, keys = _auto_budget(asked, tokens)
        rule = DEFAULT_RULE if word == "auto" else word
        even = policy_of_budget("heavy-hitter", keys)
        found.insert(0, NamedCache(f"heavy-hitter:{rule}={keys}", even))
    return found


def check_caches(asked: AskedCaches) -> None:
    """Raise unless what the command line asks for can be had for some text.

    It needs neither the model nor the text, so that a mistake is reported before they are read.

    Raises:
        JomaError: As `parse_caches` and `auto_caches`.
    """
    planned_caches(asked, _ANY_LENGTH)


def _auto_budget(asked: AskedCaches, tokens: int) -> tuple[str, int]:
    """Return the rule by which layers get their budgets, and the keys of an even one."""
    assert asked.budget is not None
    word, _, given = asked.budget.partition(":")
    for name in asked.caches:
        if name != "heavy-hitter":
            raise JomaError(f"cache must be heavy-hitter with --budget {word}, got {name!r}")
    return word, keys_of_budget(given or DEFAULT_AUTO, tokens)


def _swept(text: str) -> list[str]:
    parts = [it.strip() for it in text.split(",")]
    if not all(parts):
        raise JomaError(f"sweep must be budgets with commas, such as 5,10,20%, got {text!r}")
    if parts[-1].endswith("%"):  # one sign is enough for all
        parts = [it if it.endswith("%") else f"{it}%" for it in parts]
    return parts


def auto_caches(
    asked: AskedCaches, model: nn.Module, prompt: Sequence[int], tokens: int
) -> list[NamedCache]:
    """Return the heavy-hitter cache whose layers get budgets of their own, if that is asked for.

    Args:
        asked: What the command line asks for.
        model: The model, whose attention on the prompt says where keys matter.
        prompt: Tokens of the prompt.
        tokens: Tokens of the whole text, which shares are of.

    Raises:
        JomaError: The budget is impossible, or --cache names something else.
    """
    if not asked.is_auto:
        return []
    assert asked.budget is not None
    word, keys = _auto_budget(asked, tokens)
    if len(prompt) < _SHORTEST_PROFILE:
        raise JomaError(
            f"budget {asked.budget!r} needs a prompt of {_SHORTEST_PROFILE} tokens or more to "
            f"measure attention on, got {len(prompt)}"
        )
    rule: Rule = DEFAULT_RULE if word == "auto" else word  # type: ignore[assignment]
    profiles = attention_profiles(model, torch.tensor([list(prompt[:_LONGEST_PROFILE])]))
    windows = layer_windows(text_config(model))
    limits = [None if it is None else max(it - 1, 1) for it in windows]
    policies = tuple(
        allocate(keys * len(profiles), profiles, rule=rule, limits=limits, context=tokens)
    )
    return [NamedCache(f"heavy-hitter:{rule}={keys}", policies)]
