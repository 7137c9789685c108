"""Predictors: fitted to what can be predicted, judged on other text, kept in a file."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from joma.errors import JomaError
from joma.inference.sparsify import (
    FitSettings,
    fit,
    fit_predictor,
    layer_quality,
    load_predictors,
    model_fingerprint,
    perplexity_cost,
    sparse,
)
from tests.inference.sparsify.models import LAYERS, tiny, tokens

SETTINGS = FitSettings(epochs=2, rank_ratio=0.25, heads_sparsity=0.5, batch=32)


@pytest.fixture(scope="module")
def predictors():
    return fit(tiny("llama"), tokens(12, 24, seed=3), SETTINGS, source="tiny", corpus="random")


def test_a_predictor_learns_what_is_of_its_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2000, 16, generator=generator)
    states /= states.square().mean(-1, keepdim=True).sqrt()
    mix = torch.randn(30, 4, generator=generator) @ torch.randn(4, 16, generator=generator)
    scores = (states @ mix.T).exp()
    settings = FitSettings(epochs=12, batch=30, learning_rate=0.01)
    made = fit_predictor(states[:1500], scores[:1500], 15, 4, settings, seed=0)
    best = scores[1500:].topk(15).indices
    member = torch.zeros(500, 30).scatter_(1, best, 1.0)
    recall = float(member.gather(1, made(states[1500:]).topk(15).indices).mean())
    assert recall > 0.93
    assert made.rank == 4


def test_same_seed_same_predictors(predictors) -> None:
    again = fit(tiny("llama"), tokens(12, 24, seed=3), SETTINGS)
    for one, other in zip(predictors.mlp, again.mlp, strict=True):
        assert torch.equal(one.second, other.second)


def test_observing_in_groups_changes_nothing(predictors) -> None:
    small = FitSettings(**{**vars(SETTINGS), "memory": 1})
    again = fit(tiny("llama"), tokens(12, 24, seed=3), small)
    for one, other in zip(predictors.mlp, again.mlp, strict=True):
        torch.testing.assert_close(one.second, other.second)


def test_judged_against_a_count_by_hand(predictors) -> None:
    model, text = tiny("llama"), tokens(3, 20, seed=9)
    found = layer_quality(model, predictors, text)
    assert [one.layer for one in found] == list(range(LAYERS))
    states, hidden = [], []
    layer = model.model.layers[1]
    with (
        torch.no_grad(),
        layer.register_forward_pre_hook(
            lambda _, given, named: states.append(given[0] if given else named["hidden_states"]),
            with_kwargs=True,
        ),
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, given: hidden.append(given[0])),
    ):
        model(text)
    scores = hidden[0].abs() * layer.mlp.down_proj.weight.norm(dim=0)
    chosen = predictors.mlp[1](states[0]).topk(24).indices
    best = scores.topk(24).indices
    recall = energy = 0.0
    for row in range(3):
        for place in range(20):
            picked = set(chosen[row, place].tolist())
            recall += len(picked & set(best[row, place].tolist())) / 24
            squares = scores[row, place].square()
            energy += float(squares[list(picked)].sum() / squares.sum())
    assert found[1].recall == pytest.approx(recall / 60, abs=0.01)
    assert found[1].energy == pytest.approx(energy / 60, abs=0.01)
    assert found[1].energy <= found[1].oracle_energy <= 1
    assert found[1].oracle_energy == pytest.approx(found[1].top_energy[2])
    assert found[1].heads_recall is not None
    assert found[0].heads_recall is None


def test_perplexity_cost_is_paired(predictors) -> None:
    model, text = tiny("llama"), tokens(4, 20, seed=9)
    dense, *others = perplexity_cost(model, predictors, text, mlp=0.5)
    assert dense.selection == "dense"
    assert dense.cost == dense.standard_error == 0
    by_hand = torch.stack(
        [model(text[row : row + 1], labels=text[row : row + 1]).loss for row in range(4)]
    )
    assert dense.loss == pytest.approx(float(by_hand.mean()), rel=1e-5)
    for one in others:
        assert one.cost == pytest.approx(one.loss - dense.loss, abs=1e-9)
        assert one.standard_error > 0
    with pytest.raises(JomaError, match="at least two"):
        perplexity_cost(model, predictors, text[:1])


def test_saved_and_loaded(predictors, tmp_path) -> None:
    path = predictors.save(tmp_path / "p.safetensors")
    again = load_predictors(path)
    assert again.facts == predictors.facts
    model, text = tiny("llama"), tokens(2, 9)
    for selection in ("predicted", "static", "magnitude"):
        made = []
        for one in (predictors, again):
            heads = 0.5 if selection == "predicted" else None
            with torch.no_grad(), sparse(model, one, heads=heads, selection=selection):
                made.append(model(text).logits)
        assert torch.equal(*made)


def test_files_that_cannot_be_used(predictors, tmp_path) -> None:
    path = predictors.save(tmp_path / "p.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors, facts = load_file(path), json.loads(metadata["facts"])

    def written(change=None, more=None, **other) -> str:
        kept = {**metadata, "facts": json.dumps({**facts, **other}), **(more or {})}
        save_file({**tensors, **(change or {})}, tmp_path / "bad.safetensors", metadata=kept)
        with pytest.raises(JomaError) as caught:
            load_predictors(tmp_path / "bad.safetensors")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    first = tensors["mlp.0.first"]
    assert "must be" in written({"mlp.0.first": first[:, 1:].contiguous()})
    assert "missing or unknown" in written({"extra": first.clone()})
    assert "NaN" in written({"mlp.0.first": first * torch.nan})
    assert "must be" in written({"mlp.0.first": first.half()})
    assert "joma sparsify fit" in written(more={"format": "other"})
    assert "cannot be read" in written(layers=10**9)
    assert "cannot be read" in written(neurons="many")
    assert "cannot be read" in written(rank_ratio=float("nan"))
    assert "cannot be read" in written(more={"facts": "[" * 100_000})
    assert "cannot be read" in written(more={"facts": "7"})
    whole = path.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for contents in (whole[: len(whole) // 2], b"", b"\xff" * 64, b"\x80\x04pickle"):
        bad.write_bytes(contents)
        with pytest.raises(JomaError, match="no safetensors file"):
            load_predictors(bad)
    with pytest.raises(JomaError, match="no such file"):
        load_predictors(tmp_path / "none.safetensors")


def test_settings_are_checked() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"mlp_sparsity": 0}, "mlp_sparsity"),
        ({"mlp_sparsity": 1}, "mlp_sparsity"),
        ({"mlp_sparsity": None}, "mlp_sparsity"),
        ({"heads_sparsity": 1.5}, "heads_sparsity"),
        ({"rank_ratio": 0}, "rank_ratio"),
        ({"rank_ratio": float("nan")}, "rank_ratio"),
        ({"epochs": 0}, "epochs"),
        ({"learning_rate": -1.0}, "learning_rate"),
    )
    for settings, said in cases:
        with pytest.raises(JomaError, match=said):
            FitSettings(**settings)
    with pytest.raises(JomaError, match="at least 64 tokens"):
        fit(tiny("llama"), tokens(1, 20))
    with pytest.raises(JomaError, match="windows must be tokens"):
        fit(tiny("llama"), torch.zeros(10, 20))


def test_every_weight_counts_in_the_fingerprint() -> None:
    model = tiny("opt")
    seen = {model_fingerprint(model)}
    for parameter in model.parameters():
        parameter.view(-1)[-1] += 1e-3
        seen.add(model_fingerprint(model))
    assert len(seen) == 1 + len(list(model.parameters()))
    weight = next(model.parameters())
    swapped = weight.clone()
    swapped[[0, 1]] = weight[[1, 0]]  # the sum of all stays the same
    weight.copy_(swapped)
    assert model_fingerprint(model) not in seen
