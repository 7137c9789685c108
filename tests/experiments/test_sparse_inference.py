"""Sparse inference at its smallest, and what its numbers are made to say."""

from typing import Any

import numpy as np
import pytest
import torch

from joma.errors import JomaError
from joma.experiments import EXPERIMENTS, Verdict
from joma.experiments.sparse_inference import (
    FILES,
    GEMMA,
    POLICIES,
    SMOLLM,
    findings,
)
from joma.experiments.sparse_inference.findings import (
    ModelResults,
    collect,
    held_out,
    layer_rankings,
    spearman,
)
from joma.experiments.sparse_inference.study import path_of, recomputed_loss, sampled
from joma.inference.quality import text_loss
from joma.models import Loaded, SpecialTokens
from joma.runs import Run
from tests.inference.models import tiny

EXPERIMENT = EXPERIMENTS["sparse-inference"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Run, Any]:
    """All of it, once, at the smallest scale."""
    request = EXPERIMENT.request(scale="tiny")
    run = Run.resume("sparse-inference", request.config, out=tmp_path_factory.mktemp("sparse"))
    return run, EXPERIMENT.reproduce(run, request)


def test_everything_is_measured_and_drawn(made):
    run, outcome = made
    assert outcome.verdict is Verdict.NOT_COMPARABLE  # a model trained here alone
    assert run.tables == ["layers", "losses", "rankings", "streams"]
    assert [path.name for path in run.figures if path.suffix == ".png"] == [
        "sparse-inference-bridge.png",
        "sparse-inference.png",
    ]
    losses = run.read_table("losses")
    assert set(losses["policy"]) == {"plain", "full", *POLICIES}
    assert np.isfinite(losses["nll"]).all()
    full, plain = (losses["nll"][losses["policy"] == name] for name in ("full", "plain"))
    np.testing.assert_allclose(full, plain, atol=1e-5)
    assert [row["cache"] for row in outcome.table][:2] == ["full cache", "window (recency)"]
    progress: list[object] = []
    again = EXPERIMENT.request(scale="tiny", progress=lambda *given: progress.append(given))
    assert EXPERIMENT.reproduce(run, again).paragraphs == outcome.paragraphs
    assert not progress  # what is done is not done again


def test_a_model_that_was_stopped_resumes_to_the_same_numbers(made, tmp_path):
    def stop(what: str, *_: object) -> None:
        if "stream" in what:
            raise KeyboardInterrupt

    whole, _ = made
    run = Run.create("sparse-inference", whole.config, out=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        EXPERIMENT.reproduce(run, EXPERIMENT.request(scale="tiny", progress=stop))
    assert collect(run) == []
    EXPERIMENT.reproduce(run, EXPERIMENT.request(scale="tiny"))
    for name in ("losses", "streams"):
        one, two = (own.read_table(name)["nll"] for own in (run, whole))
        np.testing.assert_array_equal(one, two)


def planted(
    name: str = SMOLLM,
    *,
    window: float = 2.0,
    sinks: float = 0.01,
    heavy: float = 0.03,
    chance: float = 0.3,
    noise: float = 0.002,
    parameters: float = 7e9,
) -> ModelResults:
    """Return a model whose losses rise as given, with a little noise."""
    random = np.random.default_rng(0)
    base = 3 + random.normal(0, 0.3, 8)

    def nll(rise: float) -> list[float]:
        return (base + rise + random.normal(0, noise, 8)).tolist()

    rises = {
        "window": 0.5,
        "streaming": 0.1,
        "heavy-hitter": heavy,
        "random": 1.0,
        "random-recent": chance,
    }
    shared = {"keys": 51, "cache_bytes": 1e5, "tokens_per_processor_second": 100.0}
    rows = [
        {"policy": policy, "share": share, "chunk": 8, "nll": nll(rise), **shared}
        for share in (0.2, 0.5)
        for policy, rise in rises.items()
    ]
    for row in rows:  # in chunks all is well: what counts is token by token
        if row["policy"] == "heavy-hitter":
            row["nll"] = nll(-0.01)
    rows.append({"policy": "full", "share": 1.0, "chunk": 8, "nll": nll(0), **shared})
    found = {"window": window, "streaming": sinks, "full": 0.0, "recomputed": 0.0}
    policies = {policy: {"nll": nll(rise), "curve": nll(rise)} for policy, rise in found.items()}
    layers = np.linspace(0, 1, 10)
    parts = {
        "text": {"rows": rows, "middle": 0.2, "window": 256, "parameters": parameters},
        "alone": {
            "rows": [
                {"policy": policy, "nll": nll(rises[policy])}
                for policy in ("heavy-hitter", "random", "random-recent")
            ]
        },
        "stream": {"policies": policies, "tokens": 1536, "rows": 1, "keys": 256, "context": 8192},
        "layers": {
            "entropy": layers.tolist(),
            "first": (-layers).tolist(),
            "heavy": random.permutation(layers).tolist(),
            "costs": {
                policy: [(one + random.normal(0, 0.01, 4)).tolist() for one in layers**2]
                for policy in ("heavy-hitter", "window")
            },
        },
    }
    return ModelResults(name, parts)


@pytest.mark.parametrize(
    ("changed", "sinks", "heavy", "verdict"),
    [
        ({}, findings.SHOWN, findings.SHOWN, Verdict.AGREES),
        ({"window": 0.02}, findings.CONTRADICTED, findings.SHOWN, Verdict.DIFFERS),
        ({"sinks": 0.6}, findings.CONTRADICTED, findings.SHOWN, Verdict.DIFFERS),
        ({"heavy": 0.2}, findings.SHOWN, findings.CONTRADICTED, Verdict.DIFFERS),
        ({"heavy": 0.1, "noise": 0.05}, findings.SHOWN, findings.OPEN, Verdict.INCOMPLETE),
        ({"chance": 0.03}, findings.SHOWN, findings.BY_CHANCE, Verdict.INCOMPLETE),
    ],
)
def test_the_verdict_turns_with_the_numbers(changed, sinks, heavy, verdict):
    model = planted(**changed)
    assert findings.sinks_claim(model) == sinks
    assert findings.heavy_claim(model) == heavy
    outcome = findings.judge([model])
    assert outcome.verdict is verdict
    assert f"{sinks} on SmolLM2-135M" in outcome.finding
    # One model that contradicts is enough, and the model trained here decides nothing.
    both = findings.judge([planted(GEMMA), model])
    assert both.verdict is verdict
    small = findings.judge([planted(**changed, parameters=1.35e8)])
    assert small.verdict is Verdict.NOT_COMPARABLE  # the papers measured far larger models
    assert "These models have 135 million parameters" in small.finding
    assert findings.judge([]).verdict is Verdict.INCOMPLETE


def test_correlations_are_those_of_ranks_and_have_intervals():
    random = np.random.default_rng(0)
    layers = random.normal(size=30)
    found = spearman(layers, np.exp(layers))
    assert (found.value, found.low) == pytest.approx((1, 1))
    noise = spearman(layers, random.normal(size=30))
    assert noise.low < 0 < noise.high
    assert np.isnan(spearman(np.arange(2.0), np.arange(2.0)).value)
    assert np.isnan(spearman(np.ones(4), np.arange(4.0)).value)


def test_a_model_held_out_is_ranked_by_the_others_alone():
    random = np.random.default_rng(1)
    features = {name: random.normal(size=(20, 3)) for name in "abc"}
    costs = {name: own[:, 0] - 2 * own[:, 1] for name, own in features.items()}
    assert min(one.value for one in held_out(features, costs).values()) > 0.9
    costs["c"] = -costs["c"]  # the opposite of what the others teach
    assert held_out(features, costs)["c"].value < -0.9
    assert held_out({"a": features["a"]}, {"a": costs["a"]}) == {}
    row = layer_rankings([planted(), planted(GEMMA)])[0]
    assert row.single["entropy"].value > 0.95
    assert row.single["first"].value < -0.95
    assert row.combined is not None
    assert row.combined.value > 0.8
    assert row.halves.value > 0.9


def test_windows_computed_anew_have_the_loss_of_their_own_text():
    model = tiny("llama")
    loaded = Loaded(model, None, "tiny")
    streams = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(0))
    found = recomputed_loss(loaded, streams, 8, 64)
    assert found.shape == (2, 24)
    # Tokens 12 to 15 are predicted from token 8 on.
    alone = text_loss(model, streams[:, 8:16], chunk=8).nll[:, -4:]
    np.testing.assert_allclose(found[:, 4:8].numpy(), alone, atol=1e-5)


def test_samples_are_the_models_own():
    model = tiny("llama")

    class Beginning:
        size = 97
        special_tokens = SpecialTokens((5,), (), ("<s>",))

    loaded = Loaded(model, Beginning(), None, "tiny")  # type: ignore[arg-type]
    first, again, other = (sampled(loaded, 3, 12, seed, lambda *_: None) for seed in (0, 0, 1))
    assert first.shape == (3, 12)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first[:, 0].tolist()) == {5}
    random = torch.randint(0, 97, (3, 12), generator=torch.Generator().manual_seed(0))
    random[:, 0] = 5
    assert text_loss(model, first, chunk=12).mean < text_loss(model, random, chunk=12).mean


def test_models_are_those_given_or_found(tmp_path, monkeypatch):
    monkeypatch.delenv("JOMA_MODELS", raising=False)
    found = EXPERIMENT.request(scale="small")
    assert path_of(SMOLLM, found) is None
    (tmp_path / FILES[SMOLLM][0]).touch()
    monkeypatch.setenv("JOMA_MODELS", str(tmp_path))
    assert path_of(SMOLLM, found) == tmp_path / FILES[SMOLLM][0]
    assert path_of(GEMMA, found) is None
    assert path_of(SMOLLM, EXPERIMENT.request(scale="small", options={SMOLLM: "none"})) is None
    given = EXPERIMENT.request(scale="small", options={GEMMA: str(tmp_path / "no")})
    with pytest.raises(JomaError, match="gemma-3-270m must be a model's file or folder"):
        path_of(GEMMA, given)
