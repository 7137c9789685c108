"""What the numbers say: the two claims model by model, tables and sentences."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from joma.common.paired import Paired
from joma.experiments._experiment import Outcome, Verdict
from joma.experiments.sparse_inference.results import PREDICTORS, ModelResults, layer_rankings
from joma.experiments.sparse_inference.setting import POLICIES, POLICY_TITLES, TITLES

LEAST_PUBLISHED = 2.9e9
"""Parameters of the smallest model that the papers measured, a Pythia in StreamingLLM's."""
KEPT = 0.1
"""Nats per token up to which a rise of the loss keeps the quality: 10% of the perplexity."""
SHOWN, CONTRADICTED, OPEN = "shown", "contradicted", "not decided"
BY_CHANCE = "kept, but with random keys as well"
"""Of heavy hitters that are not clearly better than random keys with as many recent ones."""


def sinks_claim(model: ModelResults) -> str:
    """Return whether a window alone breaks on a long stream, and sinks keep the loss."""
    window, sinks = model.stream_rise("window"), model.stream_rise("streaming")
    if _is_above(window) and _is_below(sinks):
        return SHOWN
    return CONTRADICTED if _is_below(window) or _is_above(sinks) else OPEN


def heavy_claim(model: ModelResults) -> str:
    """Return whether heavy hitters and recent keys keep the loss at about 20%, token by token."""
    rise = model.rise_alone("heavy-hitter")
    if not _is_below(rise):
        return CONTRADICTED if _is_above(rise) else OPEN
    gain = model.rise_alone("heavy-hitter", "random-recent")
    return SHOWN if gain.is_clear and gain.mean < 0 else BY_CHANCE


def judge(models: Sequence[ModelResults], *, is_comparable: bool = True) -> Outcome:
    """Return the verdict over models as large as the published ones, with every sentence.

    Args:
        models: What was measured.
        is_comparable: Whether the scale can be compared with what was published.
    """
    if not models:
        return Outcome(Verdict.INCOMPLETE, "no model was measured.")
    real = [model for model in models if model.parameters >= LEAST_PUBLISHED]
    claims = [claim(model) for model in real for claim in (sinks_claim, heavy_claim)]
    verdict = Verdict.NOT_COMPARABLE
    if real and is_comparable:
        verdict = Verdict.INCOMPLETE
        if CONTRADICTED in claims:
            verdict = Verdict.DIFFERS
        elif set(claims) == {SHOWN}:
            verdict = Verdict.AGREES
    finding = (
        f"a window alone breaks and sinks keep the loss: {_by_status(models, sinks_claim)}; "
        f"heavy hitters keep it at {models[0].middle:.0%} of the keys: "
        f"{_by_status(models, heavy_claim)}. {_sizes(models)}"
    )
    return Outcome(verdict, finding, table(models), tuple(_paragraphs(models)))


def table(models: Sequence[ModelResults]) -> list[dict[str, Any]]:
    """Return loss, memory and speed of each policy at about 20%."""
    rows = []
    for model in models:
        for policy in ("full", *POLICIES):
            share = 1.0 if policy == "full" else model.middle
            row = model.row(policy, share)
            rise = None if policy == "full" else model.rise(policy, share)
            rows.append(
                {
                    "model": model.title,
                    "cache": POLICY_TITLES[policy],
                    "keys": row["keys"],
                    "perplexity": round(float(np.exp(np.mean(row["nll"]))), 2),
                    "rise, nats": "" if rise is None else _with_error(rise),
                    "cache, kB": round(row["cache_bytes"] / 1000, 1),
                    "tokens per CPU second": round(row["tokens_per_processor_second"]),
                }
            )
    return rows


def _paragraphs(models: Sequence[ModelResults]) -> Iterable[str]:
    for model in models:
        yield _stream_sentence(model)
        yield _heavy_sentence(model)
    yield from _layer_sentences(models)
    yield (
        f"Shown: two standard errors lie below a rise of {KEPT} nats where quality is kept, above "
        "it where a window breaks; contradicted: on the other side; else not decided. Heavy "
        "hitters must also be clearly better than random keys with as many recent ones."
    )


def _stream_sentence(model: ModelResults) -> str:
    found = model.parts["stream"]
    window, sinks, full = (model.stream_rise(one) for one in ("window", "streaming", "full"))
    context, rows = found["context"], found["rows"]
    beyond = context is not None and found["tokens"] > context
    return (
        f"{model.title}, {rows} stream{'' if rows == 1 else 's'} of {found['tokens']} tokens with "
        f"{found['keys']} keys, against windows that are computed anew: a window alone "
        f"{_with_error(window)}, with sinks {_with_error(sinks)}, the full cache "
        f"{_with_error(full)} nats"
        f"{f' (the model was trained on {context} tokens)' if beyond else ''}. StreamingLLM's "
        f"claim is {sinks_claim(model)}; {model.first_mass:.0%} of the attention is on the first "
        "token."
    )


def _heavy_sentence(model: ModelResults) -> str:
    share = model.middle
    against = [
        f"{POLICY_TITLES[other]} {_compared(model.rise_alone('heavy-hitter', other))}"
        for other in ("random-recent", "random", "window", "streaming")
    ]
    return (
        f"{model.title}, heavy hitters at {share:.0%} token by token: "
        f"{_with_error(model.rise_alone('heavy-hitter'))} nats above the full cache; H2O's claim "
        f"is {heavy_claim(model)}. Less other policies with as many keys: {', '.join(against)}."
    )


def _layer_sentences(models: Sequence[ModelResults]) -> Iterable[str]:
    for row in layer_rankings(models):
        single = ", ".join(f"{PREDICTORS[name]} {one}" for name, one in row.single.items())
        combined = ""
        if row.combined is not None:
            combined = f"; all three, fitted on the other models, {row.combined}"
        yield (
            f"{TITLES[row.model]}, cost of one layer cut to {POLICY_TITLES[row.policy]}, Spearman "
            f"with: {single}{combined}. Costs of one half of the windows with the other: "
            f"{row.reliability:+.2f}."
        )


def _by_status(models: Sequence[ModelResults], claim: Any) -> str:
    found: dict[str, list[str]] = {}
    for model in models:
        found.setdefault(claim(model), []).append(model.title)
    parts = [
        f"{status} on {', '.join(found[status])}"
        for status in (SHOWN, CONTRADICTED, BY_CHANCE, OPEN)
        if status in found
    ]
    return "; ".join(parts)


def _sizes(models: Sequence[ModelResults]) -> str:
    """Return how large the models are, and so how far the claims are from what was published."""
    found = [model.parameters / 1e6 for model in models]
    each = f"{min(found):.0f} to {max(found):.0f}" if len(found) > 1 else f"{found[0]:.0f}"
    return (
        f"These models have {each} million parameters, and the quality here is the loss: what "
        "holds of them may not hold of the models that the papers measured."
    )


def _is_above(rise: Paired) -> bool:
    return rise.mean - 2 * rise.error > KEPT


def _is_below(rise: Paired) -> bool:
    return rise.mean + 2 * rise.error < KEPT


def _with_error(rise: Paired) -> str:
    return f"{rise.mean:+.3f} ± {rise.error:.3f}"


def _compared(difference: Paired) -> str:
    words = "" if difference.is_clear else ", not distinguishable"
    return f"{_with_error(difference)}{words}"
