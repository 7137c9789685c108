"""Small run folders for the tests of pages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from joma.report.cache_cost import columns_of
from joma.runs import Run

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'
"""A name that would run if anything printed it as it is."""


def made_run(
    folder: Path,
    *,
    steps: int = 60,
    layers: int = 3,
    heads: int = 2,
    module: str = "encoder.layers",
    findings: list[dict[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    status: str = "done",
    seed: int = 0,
) -> Run:
    """Return a run of a monitored training, made of smooth curves and a little noise."""
    rng = np.random.default_rng(seed)
    run = Run.create("monitor", {"learning_rate": 1e-3, **(config or {})}, out=folder)
    log, all_steps = run.metrics, np.arange(1, steps + 1)
    times = 1.7e9 + all_steps.astype(float)
    loss = 2 + 3 * np.exp(-all_steps / 20) + 0.05 * rng.normal(size=steps)
    log.append_many(all_steps, "loss", loss[:, None], time=times)
    log.append_many(all_steps[::10], "validation_loss", loss[::10, None] + 0.1, time=times[::10])
    few = all_steps[::5]
    for layer in range(layers):
        attention = f"{module}.{layer}.self_attn"
        about = {"layer": layer, "time": times[::5]}
        entropy = 3 - layer / 4 - np.log1p(few) / 8
        log.append_many(
            few, "attention_entropy", entropy[:, None], module=attention, kind="self", **about
        )
        for head in range(heads):
            log.append_many(
                few,
                "attention_entropy",
                entropy[:, None] + 0.1 * head,
                module=attention,
                kind="self",
                head=head,
                **about,
            )
        for weight in ("linear1", "linear2"):
            place = {"module": f"{module}.{layer}.{weight}", **about}
            log.append_many(few, "stable_rank", entropy[:, None] * 4, bound=0.01, **place)
            log.append_many(few, "gradient_energy_8", entropy[:, None] / 4, **place)
            log.append(1, "matrix_rows", 64.0, module=place["module"], layer=layer)
            log.append(1, "matrix_columns", 256.0, module=place["module"], layer=layer)
    log.append(1, "vocabulary", 256.0)
    log.flush()
    run.write_json("findings", {"findings": findings or [], "not_judged": []})
    run.write_json("outcome", {"status": status})
    return run


def finding(**changes: Any) -> dict[str, Any]:
    """Return a finding as `findings.json` has it."""
    return {
        "kind": "attention_collapse",
        "severity": "warning",
        "step": 31,
        "sentence": "Attention of layer 1 has collapsed.",
        "advice": "Try a lower learning rate.",
        "evidence": {"end": 0.2},
        "module": "encoder.layers.1.self_attn",
        "layer": 1,
        "head": None,
        **changes,
    }


def cache_row(cache: str, **changes: Any) -> dict[str, Any]:
    """Return a row of the table of caches."""
    return {
        "cache": cache,
        "policy": cache.partition(":")[0],
        "keys": 64.0,
        "seen": 640,
        "bytes": 1_474_560,
        "share": 0.1,
        "text_tokens": 256,
        "text_nll": 2.95,
        "text_cost": 0.12,
        "text_error": 0.02,
        "reply_tokens": 64,
        "reply_nll": 0.9,
        "reply_cost": 0.04,
        "reply_error": 0.03,
        "agreement": 0.9,
        "agreement_error": 0.04,
        "timed": 96,
        "ms": 21.4,
        "speed": 1.02,
        "speed_low": 0.96,
        "speed_high": 1.07,
        **changes,
    }


def cache_run(folder: Path, rows: int = 9) -> Run:
    """Return a run of `joma generate` that compared up to nine caches."""
    full = {"keys": np.nan, "share": 1.0, "bytes": 14_745_600, "text_nll": 2.83, "speed": 1.0}
    free = {"text_cost": 0.0, "text_error": 0.0, "reply_cost": 0.0, "reply_error": 0.0}
    table = [cache_row("full", **full, **free, agreement=1.0, agreement_error=0.0)]
    for share in (0.05, 0.2, 0.5):
        about = {"share": share, "bytes": int(14_745_600 * share), "keys": 640 * share}
        table.append(cache_row(f"window:n={640 * share:.0f}", **about, text_cost=0.2 / share))
        cost = 0.01 / share - 0.02
        name = f"streaming:window={640 * share - 4:.0f},sinks=4,positions=auto"
        table.append(cache_row(name, **about, text_cost=cost, speed_low=1.01))
        name = f"heavy-hitter:heavy={320 * share:.0f},recent={320 * share:.0f},score=sum"
        table.append(
            cache_row(
                name, **about, text_cost=cost * 0.8, speed=0.8, speed_low=0.75, speed_high=0.9
            )
        )
    run = Run.create("generate", {"model": "tiny"}, out=folder)
    run.write_table("cache_cost", columns_of(table[: rows + 1]))
    run.write_json("outcome", {"status": "done"})
    return run
