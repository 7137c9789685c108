"""Fig. 6 and 8: counted steps, windows of the text, training and measuring on them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from joma.experiments import Request
from joma.experiments.language import LENGTH, LanguageSetting, training
from joma.experiments.language.training import Windows
from joma.runs import Run
from tests.experiments._language import FULL, SIZE


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


class TestSetting:
    def test_wikitext_2_has_the_known_epochs_and_measurements(self):
        assert (FULL.windows_per_epoch, FULL.updates_per_epoch) == (2928, 2929)
        assert len(FULL.published_steps) == 59
        assert FULL.published_steps[-1] == 58_000
        # Nineteen epochs have passed, each with a short window that is trained on and not counted.
        assert FULL.measure_at[-1] == 58_000 + 58_000 // 2928
        assert FULL.measure_at[:4] == (0, 1000, 2000, 3001)

    @settings(max_examples=50, deadline=None)
    @given(stream=st.integers(36, 500), steps=st.integers(0, 60))
    def test_the_counted_step_is_that_of_a_counting_loop(self, stream: int, steps: int):
        setting = LanguageSetting(SIZE, 40, stream, {})
        counted = updates = 0
        while counted < steps:
            updates += 1
            window = (updates - 1) % setting.updates_per_epoch
            counted += (window + 1) * LENGTH <= stream - 1  # a short one does not count
        # The short window that ends an epoch is trained on before the next one's first is counted.
        while setting.updates_at(steps) > updates:
            assert (
                updates % setting.updates_per_epoch
                == setting.windows_per_epoch
                < setting.updates_per_epoch
            )
            updates += 1
        assert setting.updates_at(steps) == updates


class TestWindows:
    @settings(max_examples=40, deadline=None)
    @given(streams=st.integers(1, 4), words=st.integers(2, 200))
    def test_all_words_but_the_first_are_predicted_once(self, streams: int, words: int):
        text = torch.arange(streams * words).view(streams, words)
        windows = Windows(text)
        predicted = []
        for step in range(windows.count):
            tokens, targets, weights = windows.at(torch.tensor(step))
            inside = weights > 0
            assert float(weights.sum()) == pytest.approx(1)
            assert len(torch.unique(weights[inside])) == 1
            assert torch.equal(targets[inside], tokens[inside] + 1)
            predicted.append(targets[inside])
        found = torch.cat(predicted).sort().values
        assert torch.equal(found, text[:, 1:].flatten().sort().values)


def watched_by(model, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the attention of each layer."""
    seen: list[torch.Tensor] = []

    def watch(name: str, _: int, x: torch.Tensor) -> None:
        if name == "attention":
            seen.append(x)

    with torch.no_grad():
        return model(tokens, watch=watch), seen


class TestLanguageNetworks:
    @pytest.fixture
    def work(self, tmp_path) -> training.LanguageNetworks:
        text = training.load(SIZE)
        return training.LanguageNetworks(
            Run.create("x", {}, out=tmp_path / "x"), "depth-5", text, Request()
        )

    def test_every_rate_has_the_same_seeds(self, work):
        rates = work.ensemble.optimizer.learning_rates.tolist()
        assert rates == pytest.approx([1e-3, 1e-3, 1e-2, 1e-2])
        seeds = work.ensemble.model.seeds
        assert seeds[:2] == seeds[2:]
        assert seeds[0] != seeds[1]
        assert work.ensemble.restart_every == 3

    def test_a_short_window_is_trained_on_by_its_own_words(self, work):
        text = training.load(SIZE)
        tokens, targets, weights = text.train.at(2)
        there = int((weights[0] > 0).sum())
        assert there == 89 - 2 * LENGTH
        model, step = work.ensemble.model, torch.tensor(2)
        model.config = dataclasses.replace(model.config, dropout=0.0)
        found = training.training_loss(model, (tokens, targets, weights), step).detach()
        with torch.no_grad():
            logits = model(tokens[:, :there])
        for member, expected in enumerate(found):
            own = functional.cross_entropy(
                logits[member].flatten(0, 1), targets[:, :there].flatten()
            )
            assert float(own) == pytest.approx(float(expected), rel=1e-5)

    @pytest.mark.parametrize("at_once", [1, 10**9])
    def test_measurements_against_a_plain_loop(self, work, at_once: int):
        work.numbers = at_once
        work.ensemble.advance(3)
        work.measure(3)
        work.run.metrics.flush()
        model, windows = work.ensemble.model, training.load(SIZE).valid
        stream_SN = windows.streams_SN
        loss, entropies, watched, count = torch.zeros(4), torch.zeros(5, 4), torch.zeros(5, 4), 0
        for start in range(0, stream_SN.shape[1] - 1, LENGTH):
            tokens = stream_SN[:, start : start + LENGTH][:, : stream_SN.shape[1] - 1 - start]
            targets = stream_SN[:, start + 1 : start + 1 + tokens.shape[1]]
            logits, seen = watched_by(model, tokens)
            each = functional.cross_entropy(
                logits.flatten(0, 2), targets.expand(4, -1, -1).flatten(), reduction="none"
            )
            loss += each.view(4, -1).sum(-1)
            entropies += torch.stack([torch.special.entr(x).sum(-1).sum((1, 2, 3)) for x in seen])
            if start == LENGTH:  # the last whole one, as there is no 101st
                watched = torch.stack(
                    [torch.special.entr(x[:, 0]).sum(-1).mean((1, 2)) for x in seen]
                )
            count += targets.numel()
        read = work.run.metrics.read
        np.testing.assert_allclose(read("validation_loss")["value"], loss / count, rtol=1e-5)
        for name, expected in (
            ("attention_entropy", watched),
            ("attention_entropy_mean", entropies / count),
        ):
            np.testing.assert_allclose(read(name)["value"], expected.flatten(), rtol=1e-4)
        log = read("stable_rank")
        lower = model.blocks[2].lower.weight[1].detach().double()
        expected = float((lower**2).sum() / torch.linalg.matrix_norm(lower, 2) ** 2)
        at = (log["layer"] == 2) & (log["member"] == 1)
        assert log["value"][at] == pytest.approx([expected], rel=1e-3)

    def test_a_network_that_diverged_does_not_end_the_others(self, work):
        with torch.no_grad():
            work.ensemble.model.blocks[3].lower.weight[1] = math.nan
        work.measure(0)
        with torch.no_grad():
            for block in work.ensemble.model.blocks:
                block.lower.weight[:] = math.nan
        work.measure(1)  # nor does it matter when none is left
        work.run.metrics.flush()
        log = work.run.metrics.read("stable_rank")
        assert np.isnan(log["value"][log["step"] == 1]).all()
        log = {name: column[log["step"] == 0] for name, column in log.items()}
        missing = np.isnan(log["value"])
        assert [(log["layer"][i], log["member"][i]) for i in np.flatnonzero(missing)] == [(3, 1)]
