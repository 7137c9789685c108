"""Fig. 6 and 8: networks begin as torch makes them, and as the recorded runs began."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from joma.experiments.language import DEPTHS, SIZES, WATCHED, curves, training
from joma.experiments.language.training import start_as_torch, torch_seeds
from joma.models import LanguageConfig, LanguageModel

SHARED = Path(os.environ.get("JOMA_SHARED") or Path(__file__).parents[3] / "shared")


def test_seeds_of_a_request() -> None:
    assert torch_seeds(0, 3) == [3, 4, 5]
    assert torch_seeds(1, 3) == [6, 7, 8]


def test_members_are_what_a_script_has_after_its_seed() -> None:
    config = LanguageConfig(vocabulary=50, layers=2, width=16, hidden=24, length=9)
    model = LanguageModel(config, (0, 1, 2))
    before = torch.get_rng_state()
    start_as_torch(model, [7, 8, 7])
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    layer = nn.TransformerEncoderLayer(16, 1, 24, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    embedding, output = nn.Embedding(50, 16), nn.Linear(16, 50)
    for weight in (embedding.weight, output.weight):
        nn.init.uniform_(weight, -0.1, 0.1)
    nn.init.zeros_(output.bias)
    tokens = torch.randint(50, (4, 9))
    x = embedding(tokens) * math.sqrt(16) + model.sinusoids_TD
    expected = output(encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(9)))
    found = model(tokens)
    torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.skipif(
    not (SHARED / "reference").is_dir() or not (SHARED / "data" / "wikitext-2").is_dir(),
    reason="JOMA_SHARED names no folder with data/wikitext-2 and recorded curves in reference",
)
def test_they_begin_as_the_recorded_networks(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JOMA_SHARED", str(SHARED))
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path))
    text, size = training.load(SIZES["full"]), SIZES["full"]
    recorded = curves.read_recorded(SHARED / "reference")
    tokens, targets, weights = text.valid.at(WATCHED)
    one = slice(0, 1)  # the first stream
    for depth in DEPTHS:
        model = LanguageModel(LanguageConfig(text.setting.words, depth), range(size.seeds))
        start_as_torch(model, torch_seeds(0, size.seeds))
        _, sums_LE = model.evaluate(tokens[one], targets[one], weights[one])
        found_LE = sums_LE / weights[one].sum()
        begun_LE = recorded[depth, 1e-4].entropy[:, 0]
        np.testing.assert_allclose(found_LE.numpy(), begun_LE, atol=6e-5)  # four digits
