"""Sparse inference at its smallest, and what its numbers are made to say."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from joma.errors import JomaError
from joma.experiments import EXPERIMENTS, Verdict
from joma.experiments.sparse_inference import findings
from joma.experiments.sparse_inference.bridge import held_out, spearman
from joma.experiments.sparse_inference.networks import path_of, recomputed_loss, sampled
from joma.experiments.sparse_inference.results import (
    ModelResults,
    bridge_rows,
    chosen_rule,
    collect,
    spent_budgets,
)
from joma.experiments.sparse_inference.setting import (
    FILES,
    GEMMA,
    POLICIES,
    SIZES,
    SMOLLM,
    keys_of,
    policy_of,
)
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
    assert run.tables == ["allocation", "layers", "losses", "streams", "tasks"]
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


def test_what_is_done_is_not_done_again(made, monkeypatch):
    run, outcome = made
    monkeypatch.setattr(
        "joma.experiments.sparse_inference.study.load_model", lambda *_: pytest.fail("again")
    )
    again = EXPERIMENT.reproduce(run, EXPERIMENT.request(scale="tiny"))
    assert again.paragraphs == outcome.paragraphs


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
        {"policy": policy, "share": share, "chunk": chunk, "nll": nll(rise), **shared}
        for share in (0.2, 0.5)
        for chunk in (8, 16)
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
        "tasks": {
            "tasks": {
                "needle": {
                    "full": [True] * 9 + [False],
                    "why": "",
                    "rows": [{"policy": "window", "share": 0.2, "correct": [False] * 10}],
                },
                "frequent": {"full": [True] * 7 + [False] * 3, "why": "", "rows": []},
            },
            "length": 256,
        },
        "layers": {
            "entropy": layers.tolist(),
            "first": (-layers).tolist(),
            "heavy": random.permutation(layers).tolist(),
            "costs": {
                policy: [(one + random.normal(0, 0.01, 4)).tolist() for one in layers**2]
                for policy in ("heavy-hitter", "window")
            },
        },
        "allocation": {
            "rows": [
                {"share": 0.2, "rule": rule, "floor": floor, "nll": nll(rise)}
                for rule, floor, rise in (
                    ("even", 1.0, 0.1),
                    ("mass", 0.5, 0.05),
                    ("entropy", 0.5, 0.2),
                )
            ]
        },
    }
    return ModelResults(name, parts, 8)


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


def test_sentences_have_the_numbers_and_the_tasks_left_out():
    text = " ".join(findings.judge([planted(), planted(GEMMA)]).paragraphs)
    assert "needle, 10 examples of 256 tokens: full cache 90%; at 20% window (recency) 0%" in text
    assert "Left out, as the full cache is below 80%: frequent (full cache 70%)" in text
    assert "a window alone +2.00" in text
    assert "mass with a floor of 0.5 is best on half of the windows" in text
    assert "Clearly better in 2, clearly worse in 0 of 2 cases" in text


def test_rules_are_chosen_on_one_half_and_judged_on_the_other():
    model = planted()
    rows = copy.deepcopy(model.parts["allocation"]["rows"])
    for row in rows:
        if row["rule"] == "entropy":  # good on the half it is chosen on, and bad on the other
            row["nll"] = [
                one + (1.0 if index % 2 else -1.0) for index, one in enumerate(row["nll"])
            ]
    turned = ModelResults(SMOLLM, {**model.parts, "allocation": {"rows": rows}}, 8)
    spent = spent_budgets([turned])
    assert chosen_rule(spent) == ("entropy", 0.5)
    assert next(one for one in spent if one.rule == "entropy").judged_on.mean > 0.9
    text = " ".join(findings.judge([turned]).paragraphs)
    assert "Clearly better in 0, clearly worse in 1 of 1 cases" in text


def test_correlations_are_those_of_ranks_and_have_intervals():
    random = np.random.default_rng(0)
    layers = random.normal(size=30)
    found = spearman(list(layers), list(np.exp(layers)))
    assert found.value == pytest.approx(1)
    assert found.low == pytest.approx(1)
    noise = spearman(list(layers), list(random.normal(size=30)))
    assert noise.low < 0 < noise.high
    assert not noise.is_clear
    assert np.isnan(spearman([1, 2], [1, 2]).value)
    assert np.isnan(spearman([1, 1, 1, 1], [1, 2, 3, 4]).value)


def test_a_model_held_out_is_ranked_by_the_others_alone():
    random = np.random.default_rng(1)
    features = {name: random.normal(size=(20, 3)) for name in "abc"}
    costs = {name: own[:, 0] - 2 * own[:, 1] for name, own in features.items()}
    assert min(one.value for one in held_out(features, costs).values()) > 0.9
    costs["c"] = -costs["c"]  # the opposite of what the others teach
    assert held_out(features, costs)["c"].value < -0.9
    assert held_out({"a": features["a"]}, {"a": costs["a"]}) == {}
    row = bridge_rows([planted(), planted(GEMMA)])[0]
    assert row.single["entropy"].value > 0.95
    assert row.single["first"].value < -0.95
    assert row.combined is not None
    assert row.combined.value > 0.8
    assert row.reliability > 0.9


def test_policies_hold_as_many_keys_as_the_budget_says():
    for name in POLICIES:
        for keys in (2, 3, 9, 51):
            assert policy_of(name, keys).budget == keys
    assert policy_of("full", 0).budget is None
    assert keys_of(0.05, 256) == 13
    assert keys_of(0.05, 10) == 2


def test_windows_computed_anew_have_the_loss_of_their_own_text():
    model = tiny("llama")
    loaded = Loaded(model, None, None, "tiny")
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


def test_a_folder_without_measurements_has_no_models(tmp_path):
    request = EXPERIMENT.request(scale="tiny")
    run = Run.resume("sparse-inference", request.config, out=tmp_path / "run")
    assert collect(run, SIZES["tiny"]) == []
