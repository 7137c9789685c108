"""Sparse inference on seven architectures: equal where it must be, undone, and refused."""

import functools
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from joma.common.quiet import quietly
from joma.errors import JomaError
from joma.inference import Full, Streaming, cache
from joma.inference.sparsify import (
    SELECTIONS,
    FitSettings,
    Predictors,
    fit,
    rows_times,
    sparse,
    sparse_layers,
    times_rows,
)
from tests.inference.models import CONFIGS
from tests.inference.sparsify.models import LAYERS, NEURONS, VOCABULARY, WIDTH, tiny, tokens

QUICK = FitSettings(epochs=1, rank_ratio=0.25, heads_sparsity=0.5, batch=32)
every = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def fitted(name: str) -> Predictors:
    return fit(tiny(name), tokens(6, 24, seed=3), QUICK)


def logits(model, ids: torch.Tensor, **settings) -> torch.Tensor:
    with torch.no_grad(), sparse(model, fitted(model.config.model_type), **settings):
        return model(ids).logits


@every
def test_leaving_nothing_out_is_the_dense_model(name: str) -> None:
    model, ids = tiny(name), tokens(2, 7)
    with torch.no_grad():
        dense = model(ids).logits
    for selection in SELECTIONS:
        if selection != "magnitude":  # zeros are left out, and nothing else
            heads = None if selection == "static" else 0.0
            found = logits(model, ids, mlp=0, heads=heads, selection=selection)
            torch.testing.assert_close(found, dense, atol=2e-5, rtol=1e-5)


@every
def test_gathered_products_equal_masked_ones(name: str) -> None:
    """With gradients nothing is gathered; without, where few enough neurons are read."""
    model, ids = tiny(name), tokens(1, 4)
    found = []
    for graded in (False, True):
        with torch.set_grad_enabled(graded), sparse(model, fitted(name), mlp=0.8, heads=0.5) as run:
            found.append(model(ids).logits)
        assert run.gathered == (0 if graded else 4 * LAYERS)
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        assert (found[0] - model(ids).logits).abs().max() > 1e-3  # something was left out


@every
def test_the_oracle_loses_less_than_the_fixed_set_and_random(name: str) -> None:
    """In what one MLP makes of the same input; later layers would get other inputs."""
    model, ids = tiny(name), tokens(4, 16, seed=5)
    layer = sparse_layers(model)[0]
    made: list[torch.Tensor] = []
    with layer.down.register_forward_hook(lambda *seen: made.append(seen[2].clone())):
        with torch.no_grad():
            model(ids)
        for selection in ("oracle", "static", "random"):
            logits(model, ids, mlp=0.5, selection=selection)
    dense, *others = made
    oracle, static, random = ((other - dense).norm() for other in others)
    assert oracle < 0.9 * static
    assert oracle < 0.7 * random


@every
def test_generation_and_rows_of_a_batch(name: str) -> None:
    """Greedy, with a cache and left padding: each row is what it is alone."""
    model, predictors = tiny(name), fitted(name)
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    ids[0, :2], mask[0, :2] = 0, 0
    options = {"max_new_tokens": 6, "do_sample": False}
    with quietly(), sparse(model, predictors, mlp=0.5, heads=0.25) as run:
        together = model.generate(input_ids=ids, attention_mask=mask, **options)
        assert run.gathered == 0  # two tokens × half of the neurons: as many bytes as dense
        alone = [
            model.generate(input_ids=ids[:1, 2:], **options)[0, 4:],
            model.generate(input_ids=ids[1:], **options)[0, 6:],
        ]
        assert run.gathered == 2 * 5 * LAYERS  # one token at a time after the prompt
    assert together[:, 6:].tolist() == [row.tolist() for row in alone]
    assert run.kept == pytest.approx(0.5)


@every
def test_undone_at_the_end_also_after_an_error(name: str) -> None:
    model, ids = tiny(name), tokens(2, 7)
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    with torch.no_grad():
        dense = model(ids).logits
        for selection in SELECTIONS:
            heads = 0.5 if selection in ("predicted", "oracle", "random") else None
            with sparse(model, fitted(name), heads=heads, selection=selection):
                assert not torch.equal(model(ids).logits, dense)
            assert torch.equal(model(ids).logits, dense)
            with (
                pytest.raises(IndexError),
                sparse(model, fitted(name), heads=heads, selection=selection),
            ):
                model(ids + 1000)  # no such token
            assert torch.equal(model(ids).logits, dense)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_magnitude_leaves_out_about_the_share_asked_for() -> None:
    model, predictors = tiny("llama"), fitted("llama")
    with torch.no_grad():
        for share in (0.3, 0.7):
            with sparse(model, predictors, mlp=share, selection="magnitude") as run:
                model(tokens(6, 24, seed=3))
            assert run.kept == pytest.approx(1 - share, abs=0.05)


def test_gradients_flow_through_the_masked_product() -> None:
    model = tiny("llama").requires_grad_(True)
    with sparse(model, fitted("llama"), mlp=0.9) as run:
        model(tokens(1, 3)).logits.sum().backward()
    assert run.gathered == 0
    assert model.model.layers[0].mlp.gate_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gathered_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(150, 30, generator=generator).to(dtype)[:, :24]
    index = torch.rand(3, 150, generator=generator).topk(100).indices
    given = torch.randn(3, 24, generator=generator).to(dtype)
    exact = rows.double()[index]
    close: dict[str, Any] = {"atol": 0.2 if dtype == torch.bfloat16 else 1e-5, "rtol": 1e-2}
    found = rows_times(rows, given, index)
    assert found.dtype == dtype
    expected = (exact @ given.double()[..., None])[..., 0]
    torch.testing.assert_close(found.double(), expected, **close)
    weights = torch.randn(3, 100, generator=generator).to(dtype)
    summed = (weights.double()[:, None] @ exact)[:, 0]
    found = times_rows(weights, rows, index)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), summed, **close)


def test_bad_arguments_are_refused() -> None:
    model, predictors = tiny("llama"), fitted("llama")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"mlp": 1.0}, "mlp must be a share"),
        ({"mlp": -0.1}, "mlp must be a share"),
        ({"mlp": float("nan")}, "mlp must be a share"),
        ({"heads": 2}, "heads must be a share"),
        ({"selection": "best"}, "selection must be one of"),
        ({"selection": "static", "heads": 0.5}, "heads must be None"),
        ({"seed": -1}, "seed must be"),
    )
    for settings, said in cases:
        with pytest.raises(JomaError, match=said), sparse(model, predictors, **settings):
            pass
    with pytest.raises(JomaError, match="predictors must be given"), sparse(model):
        pass
    with (
        sparse(model, selection="oracle"),
        pytest.raises(JomaError, match="nested"),
        sparse(model, selection="oracle"),
    ):
        pass
    alone = fit(model, tokens(6, 24), FitSettings(epochs=1))
    with pytest.raises(JomaError, match="heads must be None"), sparse(model, alone, heads=0.5):
        pass


def test_predictors_of_another_model_are_refused() -> None:
    predictors = fitted("llama")
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    for other, said in (
        (model, "fitted on other weights"),
        (tiny("llama", seed=1), "fitted on other weights"),
        (tiny("mistral"), "fitted on other weights"),
        (tiny("llama").to(torch.bfloat16), "fitted in float32"),
    ):
        with pytest.raises(JomaError, match=said), sparse(other, predictors):
            pass
    config = CONFIGS["llama"]()
    config.intermediate_size = 56
    wide = transformers.LlamaForCausalLM(config)
    with pytest.raises(JomaError, match="56 neurons, but are of"), sparse(wide, predictors):
        pass


def test_mlps_that_cannot_be_sparse_are_refused() -> None:
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": NEURONS,
    }
    with quietly():
        mixture = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**shared, **heads, num_local_experts=4)
        )
        fused = transformers.Phi3ForCausalLM(
            transformers.Phi3Config(**shared, **heads, pad_token_id=0)
        )
    for model, why in ((mixture, "experts"), (fused, "fused")):
        with pytest.raises(JomaError, match=f"does not support .*{why}"):
            sparse_layers(model)
    with pytest.raises(JomaError, match="does not support Linear"):
        sparse_layers(torch.nn.Linear(3, 3))

    class Odd(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return functional.silu(given).cumsum(-1)

    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn, layer.mlp.forward = Odd(), lambda given: given
    with pytest.raises(JomaError, match="something else"):
        sparse_layers(model)


def test_together_with_a_smaller_cache() -> None:
    """Both change the model's modules; neither undoes what the other did."""
    model, ids = tiny("llama"), tokens(1, 12)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with sparse(model, fitted("llama"), mlp=0.5, heads=0.25):
        alone = model.generate(ids, **options)
        with cache(model, Full()) as kept:
            assert model.generate(ids, past_key_values=kept, **options).equal(alone)
        with cache(model, Streaming(sinks=1, window=6)) as kept:
            model.generate(ids, past_key_values=kept, **options)
        assert model.generate(ids, **options).equal(alone)
    with cache(model, Full()) as kept:
        dense = model.generate(ids, past_key_values=kept, **options)
    assert model.generate(ids, **options).equal(dense)
