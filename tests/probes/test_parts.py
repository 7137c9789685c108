"""Activity of MLPs and experts, and shared blocks, against what the modules are given."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from joma.common.quiet import quietly
from joma.models import find_weights
from joma.probes import probe
from joma.probes.session import probe_weights, unmeasured

transformers = pytest.importorskip("transformers")

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWS = torch.arange(40).reshape(4, 10) + 5


def _built(model_type: str, **settings: Any) -> nn.Module:
    with torch.random.fork_rng(), quietly():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **settings)
        model = transformers.AutoModel.from_config(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


class _Hidden(TorchFunctionMode):
    """What is multiplied with each expert's second matrix, where experts run one by one."""

    def __init__(self, stacks: dict[str, Tensor]) -> None:
        super().__init__()
        self.stacks = stacks
        self.seen: dict[str, list[Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("linear", "matmul", "__matmul__"):
            hidden, matrix = args[:2]
            for name, stack in self.stacks.items():
                if matrix.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr():
                    expert = matrix.storage_offset() // stack[0].numel()
                    self.seen.setdefault(f"{name}[{expert}]", []).append(hidden.detach())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_moe", {"num_experts": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("gpt_oss", {"num_local_experts": 4}),
    ],
)
@pytest.mark.parametrize("implementation", ["eager", None])
def test_activity_of_stacked_experts(model_type: str, settings: Any, implementation: str | None):
    model: Any = _built(model_type, **_SMALL, **settings)
    stacks = {n: p for n, p in model.named_parameters() if n.endswith("experts.down_proj")}
    model.set_experts_implementation("eager")
    with torch.no_grad(), _Hidden(stacks) as hidden:
        model(WINDOWS)
    if implementation is None:
        model.set_experts_implementation("grouped_mm")
    found = probe(model, WINDOWS, metrics=["mlp_inactive", "mlp_dead"])
    values = {(it.metric, it.module): it.value for it in found}
    assert {module for _, module in values} == hidden.seen.keys()
    assert len(hidden.seen) > 4
    for module, parts in hidden.seen.items():
        nodes = torch.cat(parts).double()
        near = nodes.abs() <= 0.01 * nodes.square().mean(-1, keepdim=True).sqrt()
        expected = float(near.double().mean())
        assert values["mlp_inactive", module] == pytest.approx(expected, abs=2e-3)
        assert values["mlp_dead", module] == pytest.approx(float(near.all(0).double().mean()))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class _Own(nn.Module):
    """Tokens through two MLPs, the second of which runs twice and has dead nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.blocks = nn.ModuleList(_Mlp() for _ in range(2))
        with torch.no_grad():
            self.blocks[1].get_submodule("fc1").bias[:3] = -100.0  # type: ignore[index]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        return self.blocks[1](self.blocks[1](x))


def test_dead_nodes_and_a_module_that_runs_twice():
    torch.manual_seed(0)
    found = probe(_Own(), WINDOWS, metrics=["mlp_dead", "residual_overlap"])
    dead = {it.module: it.value for it in found if it.metric == "mlp_dead"}
    assert list(dead) == ["blocks.0.fc2", "blocks.1.fc2", "blocks.1.fc2#1"]
    assert dead["blocks.1.fc2"] >= 3 / 12
    assert dead["blocks.0.fc2"] < 3 / 12
    layers = [(it.module, it.layer) for it in found if it.metric == "residual_overlap"]
    assert layers == [("blocks.0", 0), ("blocks.1", 1), ("blocks.1#1", 1)]


def test_metrics_without_their_parts():
    model = nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 8))
    why = unmeasured(find_weights(model), ["stable_rank", "mlp_dead", "embedding_overlap"])
    assert why.keys() == {"mlp_dead"}
    found = probe(model, WINDOWS, metrics=["stable_rank"])  # the embedding's
    assert [it.module for it in found] == ["0"]
    with pytest.raises(ValueError, match="mlp_dead cannot be measured: no part of Sequential"):
        probe(model, WINDOWS, metrics=["stable_rank", "mlp_dead"])
    with pytest.raises(ValueError, match="stable_rank cannot be measured"):
        probe_weights(model, roles=["query"])


def test_ranks_of_a_model_on_the_meta_device_are_refused_by_name():
    with pytest.raises(ValueError, match="0 cannot be measured: it is on the meta device"):
        probe_weights(nn.Sequential(nn.Embedding(9, 4)).to("meta"))
