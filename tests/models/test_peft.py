"""Models wrapped by peft: the effective weights, by feeding each layer the identity."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.common.quiet import quietly
from joma.models import find_weights
from tests.models.tiny import tiny

peft = pytest.importorskip("peft")


def _wrapped(name: str, targets: list[str], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, **settings)
    with quietly():
        model = peft.get_peft_model(tiny(name), config)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def _computed(module: nn.Module, width: int) -> Tensor:
    with torch.no_grad():
        return (module(torch.eye(width)) - module(torch.zeros(1, width))).T


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}], ids=["plain", "rank-stabilised"])
def test_llama(settings: dict[str, Any]):
    model = _wrapped("llama", ["q_proj", "down_proj"], **settings)
    found = find_weights(model)
    assert not found.missing
    plain = find_weights(tiny("llama"))
    assert [it.module for it in found.weights] == [
        f"base_model.model.{it.module}" for it in plain.weights
    ]
    for weight in found.weights[1:]:
        layer = model.get_submodule(weight.module)
        expected = _computed(layer, weight.of(model).shape[1])
        torch.testing.assert_close(weight.of(model).detach(), expected, atol=1e-5, rtol=1e-5)
        assert bool(weight.updates) == weight.module.endswith(("q_proj", "down_proj"))


def test_a_fused_and_transposed_matrix():
    model = _wrapped("gpt2", ["c_attn"], fan_in_fan_out=True)
    found = find_weights(model)
    attention = found.attentions[0]
    layer = model.get_submodule(f"{attention.module}.c_attn")
    whole = _computed(layer, 24)
    for weight, rows in zip(attention.weights[:3], whole.chunk(3), strict=True):
        torch.testing.assert_close(weight.of(model).detach(), rows, atol=1e-5, rtol=1e-5)


def test_copies_that_are_trained_and_embeddings():
    model = _wrapped("llama", ["embed_tokens"], modules_to_save=["up_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(1)
    found = find_weights(model)
    up = next(weight for weight in found.weights if weight.role == "mlp_up")
    assert up.name.endswith("up_proj.modules_to_save.default.weight")
    assert up.module.endswith("mlp.up_proj")
    table = found.embeddings[0]
    layer: Any = model.get_submodule(table.module)
    tokens = torch.arange(layer.base_layer.num_embeddings)
    torch.testing.assert_close(table.of(model), layer(tokens), atol=1e-5, rtol=1e-5)
    assert len([weight for weight in found.weights if weight.role == "mlp_up"]) == 3


def test_what_is_not_lora_is_left_out_by_name():
    model = _wrapped("llama", ["q_proj"], use_dora=True)
    found = find_weights(model)
    assert "DoRA" in found.missing["base_model.model.model.layers.0.self_attn.q_proj"]
    assert not any(weight.role == "query" for weight in found.weights)


@pytest.mark.parametrize("active", [["first"], ["second"], ["first", "second"], []])
@pytest.mark.parametrize("merged", [False, True])
def test_only_what_is_active_and_not_merged_is_added(active: list[str], merged: bool):
    torch.manual_seed(0)
    given = {"lora_alpha": 6, "target_modules": ["q_proj"], "init_lora_weights": False}
    with quietly():
        model: Any = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, **given), "first")
        model.add_adapter("second", peft.LoraConfig(r=3, **given))
        model.base_model.set_adapter(active)
        if not active:
            model.base_model.disable_adapter_layers()
        elif merged:
            model.base_model.merge_adapter()
    weight = next(it for it in find_weights(model).weights if it.role == "query")
    layer = model.get_submodule(weight.module)
    expected = _computed(layer, layer.in_features)
    torch.testing.assert_close(weight.of(model).detach(), expected, atol=1e-5, rtol=1e-5)
    assert len(weight.updates) == (0 if merged else len(active))


def test_small_updates_survive_sixteen_bits():
    model: Any = _wrapped("llama", ["q_proj"])
    weight = next(it for it in find_weights(model).weights if it.role == "query")
    layer = model.get_submodule(weight.module)
    layer.base_layer.to(torch.bfloat16)
    down, up = layer.lora_A.default.weight, layer.lora_B.default.weight
    with torch.no_grad():
        up.mul_(1e-4)
    weight = next(it for it in find_weights(model).weights if it.role == "query")
    change = weight.of(model) - layer.base_layer.weight.float()
    torch.testing.assert_close(change, 3.0 * up @ down, atol=1e-7, rtol=1e-2)
