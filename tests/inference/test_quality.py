"""Loss, tasks and the cost of one layer, on models so small that every number can be checked."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from joma.errors import JomaError
from joma.inference import Full, HeavyHitter, Streaming, Window
from joma.inference.quality import attention_profiles, layer_costs, text_loss
from tests.inference.models import tiny


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(scope="module")
def windows():
    return torch.randint(0, 97, (5, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "opt"])
@torch.no_grad()
def test_a_full_cache_has_the_loss_of_the_plain_model_in_any_chunks(kind: str, windows):
    model = tiny(kind)
    logits = model(input_ids=windows, use_cache=False).logits[:, :-1]
    plain = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    for policy, chunk in ((None, 40), (None, 7), (Full(), 40), (Full(), 7), (Full(), 1)):
        found = text_loss(model, windows, policy, chunk=chunk, batch=2)
        assert found.nll.shape == (5, 39)
        np.testing.assert_allclose(found.nll.ravel(), plain.numpy(), atol=1e-5)
    assert found.mean == pytest.approx(float(plain.mean()), abs=1e-6)
    assert found.perplexity == pytest.approx(np.exp(found.mean))
    assert found.tokens == 200
    assert found.tokens_per_second > 0


def test_windows_do_not_depend_on_the_chunk_and_heavy_hitters_do(llama, windows):
    def in_chunks(policy, chunk: int):
        return text_loss(llama, windows, policy, chunk=chunk).nll

    for policy in (Window(6), Streaming(window=4, sinks=2)):
        np.testing.assert_allclose(in_chunks(policy, 1), in_chunks(policy, 8), atol=1e-5)
    heavy = HeavyHitter(heavy=3, recent=3)
    assert np.abs(in_chunks(heavy, 1) - in_chunks(heavy, 8)).max() > 1e-3


def test_bytes_are_those_of_the_formula_for_one_window(llama, windows):
    full = text_loss(llama, windows, None, chunk=8, batch=2)
    assert full.cache_bytes == 3 * 2 * 40 * 2 * 8 * 4  # layers, keys and values, tokens, heads, …
    assert text_loss(llama, windows, Window(6), chunk=8, batch=2).cache_bytes < full.cache_bytes / 3


def test_differences_are_paired_by_window(llama, windows):
    full = text_loss(llama, windows, Full(), chunk=8)
    cut = text_loss(llama, windows, Window(2), chunk=8)
    found = cut.minus(full)
    by_hand = cut.nll.mean(1) - full.nll.mean(1)
    assert found.mean == pytest.approx(by_hand.mean(), abs=1e-6)
    assert found.error == pytest.approx(by_hand.std(ddof=1) / 5**0.5, rel=1e-4)
    with pytest.raises(JomaError, match="other must be the loss of the same windows"):
        cut.minus(text_loss(llama, windows[:, :20], Full(), chunk=8))


def test_a_layer_cut_to_more_keys_than_there_are_costs_nothing(llama, windows):
    found = layer_costs(llama, windows, Window(64), chunk=8)
    assert found.layers == (0, 1, 2)
    np.testing.assert_allclose(found.nll, np.broadcast_to(found.full, (3, 5)), atol=1e-6)
    cut = layer_costs(llama, windows, Window(2), chunk=8, layers=[2, 0])
    assert cut.layers == (2, 0)
    assert np.abs(cut.costs).min() > 1e-4
    # Cutting the last layer alone is what a list of policies for all layers does.
    alone = text_loss(llama, windows, [Full(), Full(), Window(2)], chunk=8).by_window
    np.testing.assert_allclose(cut.nll[0], alone, atol=1e-6)
    with pytest.raises(JomaError, match="layers must be from 0 to 2, got 3"):
        layer_costs(llama, windows, Window(2), layers=[3])


def test_profiles_are_those_of_the_attention_matrix(windows):
    with torch.no_grad():
        eager = tiny("llama", attention="eager")
        matrices = eager(input_ids=windows, output_attentions=True).attentions
    for profile, matrix in zip(attention_profiles(tiny("llama"), windows), matrices, strict=True):
        p = matrix.double()
        entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
        assert profile.entropy == pytest.approx(float(entropy.mean()), abs=1e-4)
        assert profile.first == pytest.approx(float(p[..., 0].mean()), abs=1e-5)
        received = p.sum(2).sort(-1, descending=True).values / 40
        held = received.cumsum(-1).mean((0, 1))
        np.testing.assert_allclose(profile.held, held.numpy(), atol=1e-5)
        assert profile.heavy(0.25) == pytest.approx(float(held[9]), abs=1e-5)
        assert profile.heavy(1) == pytest.approx(1)
        with pytest.raises(JomaError, match="share must be from 0 to 1"):
            profile.heavy(1.5)


def test_bad_windows_are_refused(llama, windows):
    with pytest.raises(JomaError, match="windows must be whole numbers"):
        text_loss(llama, windows.float())
    with pytest.raises(JomaError, match="windows must have at least 2 tokens"):
        text_loss(llama, windows[:, :1])
    with pytest.raises(JomaError, match="chunk must be a whole number"):
        text_loss(llama, windows, chunk=0)
