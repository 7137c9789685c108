"""Small run folders for the tests of pages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
