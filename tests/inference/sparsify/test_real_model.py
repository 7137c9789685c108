"""What predictors reach on a model that was trained; random weights have little to predict."""

import os
from pathlib import Path

import pytest
import torch

from joma.inference.sparsify import FitSettings, fit, layer_quality, perplexity_cost
from joma.models import load

MODELS = os.environ.get("JOMA_MODELS")


@pytest.mark.slow
@pytest.mark.skipif(not MODELS, reason="JOMA_MODELS names no folder with stories/stories15M.bin")
def test_predictors_of_stories15m_beat_a_fixed_set_on_its_own_text() -> None:
    model = load(Path(MODELS or "") / "stories" / "stories15M.bin").model
    start = torch.ones(48, 1, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = model.generate(  # type: ignore[operator]
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            min_new_tokens=127,
            max_new_tokens=127,
        )
    predictors = fit(model, text[:40], FitSettings(epochs=8))
    for one in layer_quality(model, predictors, text[40:]):
        assert one.recall > one.static_recall
        assert one.static_energy < one.energy < one.oracle_energy
    costs = {it.selection: it for it in perplexity_cost(model, predictors, text[40:])}
    order = [costs[name].cost for name in ("oracle", "magnitude", "predicted", "static", "random")]
    assert order == sorted(order)
