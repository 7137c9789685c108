"""Spend a budget of keys over the layers of a model, evenly or by what the probes say of them."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from joma.common.checks import check_number, check_one_of, whole_number
from joma.errors import JomaError
from joma.inference.policies import HeavyHitter, Policy
from joma.inference.quality import LayerProfile

Rule = Literal["even", "mass", "entropy"]
"""How a budget is spent.

- "even": every layer holds as many keys.
- "mass": each further key goes to the layer in which it holds most of the mass that keys receive.
- "entropy": as the number of keys to which a query attends, the exponential of its entropy.
"""

RULES: tuple[Rule, ...] = get_args(Rule)

DEFAULT_RULE: Rule = "even"
"""What `--budget auto` uses.

On SmolLM2-135M and Gemma-3-270m both other rules raised the loss of held-out text by 0.07 to 0.13
nats at 10 and 20% of the keys; on two smaller models they changed it by at most 0.012 either way.
`joma reproduce sparse-inference` measures it.
"""
DEFAULT_FLOOR = 0.5
"""What each layer holds at least, as a share of an even budget."""


def allocate(
    keys: int,
    profiles: Sequence[LayerProfile],
    *,
    rule: Rule = DEFAULT_RULE,
    floor: float = DEFAULT_FLOOR,
    recent: float = 0.5,
    context: int | None = None,
    limits: Sequence[int | None] | None = None,
) -> list[Policy]:
    """Return a heavy-hitter policy for each layer that together hold a number of keys.

    Args:
        keys: Keys that each head holds, over all layers together.
        profiles: What was measured of each layer, in order.
        rule: How the budget is spent, one of `Rule`.
        floor: What each layer holds at least, as a share of an even budget, 0 to 1.
        recent: Share of a layer's keys that are the last ones, whatever attention they received.
        context: Tokens of the text that the cache will read, the length of the probed windows
            unless given. No layer holds more, and the mass on a share of the keys is taken to be
            that on the same share of the window.
        limits: Keys that each layer can use at most, as those of a sliding window; None for no
            limit. What a layer cannot use goes to the others.

    Raises:
        JomaError: There are no profiles, or less than two keys for each layer.
    """
    budgets = layer_budgets(keys, profiles, rule=rule, floor=floor, context=context, limits=limits)
    check_number("recent", recent)
    if recent > 1:
        raise JomaError(f"recent must be from 0 to 1, got {recent!r}")
    policies: list[Policy] = []
    for budget in budgets:
        last = min(round(recent * budget), budget - 1)
        policies.append(HeavyHitter(heavy=budget - last, recent=last))
    return policies


def layer_budgets(
    keys: int,
    profiles: Sequence[LayerProfile],
    *,
    rule: Rule = DEFAULT_RULE,
    floor: float = DEFAULT_FLOOR,
    context: int | None = None,
    limits: Sequence[int | None] | None = None,
) -> list[int]:
    """Return how many keys each layer holds; arguments and errors as of `allocate`."""
    check_one_of("rule", rule, RULES)
    check_number("floor", floor)
    if floor > 1:
        raise JomaError(f"floor must be from 0 to 1, got {floor!r}")
    count = len(profiles)
    if not count:
        raise JomaError("profiles must hold one for each layer, got none")
    whole_number("keys", keys, 2 * count)
    if limits is not None and len(limits) != count:
        raise JomaError(f"limits must be one for each of {count} layers, got {len(limits)}")
    context = len(profiles[0].held) if context is None else whole_number("context", context, 2)
    most = np.array(
        [context if one is None else min(one, context) for one in limits or [None] * count]
    )
    least = np.minimum(max(2, int(floor * (keys // count))), most)
    least = np.minimum(least, keys // count)
    if rule == "even":
        return _filled(keys, np.ones(count), np.minimum(keys // count, most), most)
    if rule == "entropy":
        return _filled(keys, np.array([one.effective for one in profiles]), least, most)
    shares = np.arange(1, context + 1) / context
    masses = [one.heavy_of(shares) for one in profiles]
    return _by_mass(keys, np.diff(masses, axis=1), least, most)


def budget_for_bytes(
    limit: int,
    allocated: Callable[[int], Sequence[Policy]],
    size: Callable[[Sequence[Policy]], int],
    least: int,
    most: int,
) -> int:
    """Return the most keys whose policies fit into a number of bytes.

    Args:
        limit: Bytes that the cache may hold.
        allocated: Returns the policies of a number of keys.
        size: Returns the bytes of policies, such as `joma.inference.cache_bytes`.
        least: The smallest number of keys that may be answered.
        most: The largest.

    Raises:
        JomaError: Even the smallest number of keys does not fit.
    """
    if (needed := size(allocated(least))) > limit:
        raise JomaError(
            f"budget must be at least {needed} bytes, which {least} keys take, got {limit}"
        )
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(allocated(middle)) <= limit else (low, middle - 1)
    return low


def _filled(
    keys: int, weights: NDArray[np.float64], least: NDArray[np.int_], most: NDArray[np.int_]
) -> list[int]:
    """Return whole budgets in proportion to weights, each between its least and its most."""
    total = min(keys, int(most.sum()))
    low, high = 0.0, float(keys) / float(weights.min())
    for _ in range(80):  # the sum rises with the scale, so that bisection finds it
        scale = (low + high) / 2
        found = np.clip(scale * weights, least, most).sum()
        low, high = (scale, high) if found < total else (low, scale)
    exact = np.clip(high * weights, least, most)
    budgets = np.floor(exact + 1e-9).astype(int)
    for index in np.argsort(budgets - exact, kind="stable"):  # the largest remainders first
        if budgets.sum() < total and budgets[index] < most[index]:
            budgets[index] += 1
    return budgets.tolist()


def _by_mass(
    keys: int, further: NDArray[np.float64], least: NDArray[np.int_], most: NDArray[np.int_]
) -> list[int]:
    """Return the budgets that hold most mass, summed over layers, each at least its least.

    The mass of a further key falls with each key, so that taking the largest ones is the optimum.

    Args:
        keys: Keys of all layers together.
        further: Mass of each key after the first, (layers, keys − 1).
        least: Keys of each layer at least.
        most: Keys of each layer at most.
    """
    gains = [own[low - 1 : high - 1] for own, low, high in zip(further, least, most, strict=True)]
    owners = np.repeat(np.arange(len(gains)), [len(own) for own in gains])
    left = max(keys - int(least.sum()), 0)
    order = np.argsort(-np.concatenate(gains), kind="stable")[:left]
    return (least + np.bincount(owners[order], minlength=len(gains))).tolist()
