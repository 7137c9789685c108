"""Every probe on every architecture, against what is computed without any of it.

The oracle is the same model in float64 with eager attention, whose attention matrices, hidden
activations and weights are taken by hand: none of the paths below come from the package's maps.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from joma.models import WeightFiles
from joma.probes.session import (
    DEFAULT_METRICS,
    METRICS,
    WEIGHT_METRICS,
    Measurement,
    probe,
    probe_weights,
)
from joma.probes.tap import AttentionMap

VOCABULARY, LENGTH, LAYERS = 97, 24, 2
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
DECODER = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}


def _gpt2_weights(model: nn.Module, layer: int) -> dict[str, Tensor]:
    name = f"transformer.h.{layer}"
    block: Any = model.get_submodule(name)
    fused = block.attn.c_attn.weight.T  # stored as (in, out)
    parts = zip(("query", "key", "value"), fused.split(32), strict=True)
    return {
        **{f"{name}.attn.c_attn[{role}]": part for role, part in parts},
        f"{name}.attn.c_proj": block.attn.c_proj.weight.T,
        f"{name}.mlp.c_proj": block.mlp.c_proj.weight.T,
        f"{name}.mlp.c_fc": block.mlp.c_fc.weight.T,
    }


def _llama_weights(model: nn.Module, layer: int) -> dict[str, Tensor]:
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    names = [f"{attention}.{name}_proj" for name in "qkvo"]
    names += [f"{mlp}.{name}_proj" for name in ("gate", "up", "down")]
    return {name: model.get_parameter(f"{name}.weight") for name in names}


@dataclass(frozen=True)
class Case:
    """One architecture, with its parts named by hand.

    Attributes:
        model: class of transformers.
        config: and that of its configuration.
        settings: of the configuration.
        layer: path of a block.
        attention: of its attention.
        down: of the MLP's second matrix.
        embedding: of the token embedding.
        weights: every matrix of a block, by the name a reader knows it by.
        implementations: of attention that compute what the model is.
    """

    model: str
    config: str
    settings: dict[str, Any]
    layer: str
    attention: str
    down: str
    embedding: str
    weights: Callable[[nn.Module, int], dict[str, Tensor]]
    implementations: tuple[str, ...] = ("sdpa", "eager")


def _llama_like(model: str, config: str, settings: dict[str, Any], **more: Any) -> Case:
    return Case(
        model,
        config,
        settings,
        "model.layers.{}",
        "model.layers.{}.self_attn",
        "model.layers.{}.mlp.down_proj",
        "model.embed_tokens",
        _llama_weights,
        **more,
    )


CASES = {
    "GPT-2": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": LAYERS, "n_head": 4},
        "transformer.h.{}",
        "transformer.h.{}.attn",
        "transformer.h.{}.mlp.c_proj",
        "transformer.wte",
        _gpt2_weights,
    ),
    "Llama": _llama_like("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Gemma 2": _llama_like(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GEMMA, "sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 4},
        implementations=("eager",),  # the others leave the cap out
    ),
}


@cache
def built(name: str) -> Any:
    """A model whose weights are large enough for attention to have a shape."""
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, case.config)(**case.settings)
        config._attn_implementation = case.implementations[0]
        model = getattr(transformers, case.model)(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.25)
    return model


@cache
def windows() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (3, LENGTH), generator=generator)


@dataclass(frozen=True, eq=False)
class Seen:
    """What the oracle saw of each layer: (B, H, T, T), (B·T, nodes) and (B·T, width)."""

    attention: list[Tensor]
    hidden: list[Tensor]
    stream: list[Tensor]


@cache
def oracle(name: str) -> Seen:
    import copy

    case, model = CASES[name], copy.deepcopy(built(name)).double().eval()
    model.set_attn_implementation("eager")
    hidden, stream = [], []
    for layer in range(LAYERS):
        down = model.get_submodule(case.down.format(layer))
        down.register_forward_pre_hook(lambda _, x: hidden.append(x[0].flatten(0, -2)))
        block = model.get_submodule(case.layer.format(layer))
        block.register_forward_hook(
            lambda _, __, y: stream.append((y[0] if isinstance(y, tuple) else y).flatten(0, -2))
        )
    with torch.no_grad():
        attention = model(windows(), output_attentions=True).attentions
    assert len(attention) == len(hidden) == len(stream) == LAYERS
    return Seen(list(attention), hidden, stream)


@cache
def probed(name: str, implementation: str) -> list[Measurement]:
    model = built(name)
    model.set_attn_implementation(implementation)
    return probe(model, windows(), metrics=tuple(METRICS), batch=2)


def value(name: str, implementation: str, metric: str, layer, head=None, module=None) -> float:
    (one,) = [
        it
        for it in probed(name, implementation)
        if (it.metric, it.layer, it.head) == (metric, layer, head)
        and (module is None or it.module == module)
    ]
    return one.value


def pairs(name: str) -> list[tuple[str, str]]:
    return [(name, implementation) for implementation in CASES[name].implementations]


def overlap(vectors: Tensor, tokens: Tensor | None = None) -> float:
    """Mean |cosine| over pairs of different tokens, pair by pair."""
    units = vectors / vectors.norm(dim=-1, keepdim=True)
    total, count = 0.0, 0
    for i in range(len(units)):
        for j in range(i):
            if tokens is None or tokens[i] != tokens[j]:
                total += float(abs(units[i] @ units[j]))
                count += 1
    return total / count


matrix = pytest.mark.parametrize(
    ("name", "implementation"), [pair for name in CASES for pair in pairs(name)]
)


@matrix
@pytest.mark.parametrize("layer", range(LAYERS))
class TestEveryArchitecture:
    def test_attention(self, name: str, implementation: str, layer: int):
        weights = oracle(name).attention[layer]
        entropy = torch.special.entr(weights).sum(-1)
        place = torch.arange(LENGTH)
        recent = (place[:, None] - place < 16) & (place[:, None] >= place)
        expected = {
            "attention_entropy": entropy,
            "attention_effective": entropy.exp(),
            "attention_first": weights[..., 0],
            "attention_last": (weights * recent).sum(-1),
        }
        for metric, rows_BHT in expected.items():
            got = value(name, implementation, metric, layer)
            assert got == pytest.approx(float(rows_BHT.mean()), abs=1e-4), metric
            for head, mean in enumerate(rows_BHT.mean((0, 2)).tolist()):
                got = value(name, implementation, metric, layer, head)
                assert got == pytest.approx(mean, abs=1e-4), (metric, head)
        # The oracle must have something to tell: not the same in every head, and not uniform.
        assert entropy.mean((0, 2)).std() > 1e-3
        assert value(name, implementation, "attention_entropy", layer) < math.log(LENGTH)

    def test_mlp(self, name: str, implementation: str, layer: int):
        hidden = oracle(name).hidden[layer]
        energy = hidden.square().sort(-1, descending=True).values
        near = hidden.abs() <= 0.01 * energy.mean(-1, keepdim=True).sqrt()
        nodes = hidden.shape[-1]
        shares = [
            energy[:, : math.ceil(share * nodes)].sum(-1) / energy.sum(-1) for share in (0.01, 0.1)
        ]
        centred = hidden - hidden.mean()
        expected = {
            "mlp_inactive": near.double().mean(),
            "mlp_zero": (hidden == 0).double().mean(),
            "mlp_dead": near.all(0).double().mean(),
            "mlp_top1": shares[0].mean(),
            "mlp_top10": shares[1].mean(),
            "mlp_kurtosis": centred.pow(4).mean() / centred.square().mean() ** 2,
        }
        for metric, mean in expected.items():
            got = value(name, implementation, metric, layer, module=CASES[name].down.format(layer))
            assert got == pytest.approx(float(mean), abs=2e-3, rel=1e-3), metric

    def test_residual_stream(self, name: str, implementation: str, layer: int):
        expected = overlap(oracle(name).stream[layer], windows().flatten())
        got = value(name, implementation, "residual_overlap", layer)
        assert got == pytest.approx(expected, abs=1e-5)

    def test_weights(self, name: str, implementation: str, layer: int):
        expected = CASES[name].weights(built(name), layer)
        for metric in ("stable_rank", "effective_rank"):
            found = {
                it.module: it
                for it in probed(name, implementation)
                if it.metric == metric and it.layer == layer
            }
            assert set(found) == set(expected)
            for module, weight in expected.items():
                values = torch.linalg.svdvals(weight.detach().double())
                shares = values / values.sum()
                true = {
                    "stable_rank": values.square().sum() / values[0] ** 2,
                    "effective_rank": torch.special.entr(shares).sum().exp(),
                }[metric]
                bound = found[module].bound
                assert bound is not None
                assert abs(found[module].value - float(true)) <= bound + 1e-12
                assert bound <= 1e-3 * float(true)


@matrix
class TestWholeModels:
    def test_embedding(self, name: str, implementation: str):
        module = CASES[name].embedding
        weight: Any = built(name).get_submodule(module).weight
        weight = weight.detach()[weight.detach().norm(dim=-1) > 0].double()  # padding is zero
        got = value(name, implementation, "embedding_overlap", None, module=module)
        assert got == pytest.approx(overlap(weight), abs=1e-5)
        values = torch.linalg.svdvals(weight)
        rank = value(name, implementation, "stable_rank", None, module=module)
        assert rank == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-3)

    def test_names(self, name: str, implementation: str):
        entropies = [it for it in probed(name, implementation) if it.metric == "attention_entropy"]
        assert [(it.layer, it.head) for it in entropies] == [
            (layer, head) for layer in range(LAYERS) for head in (None, *range(4))
        ]
        assert [it.module for it in entropies if it.head is None] == [
            CASES[name].attention.format(layer) for layer in range(LAYERS)
        ]
        for it in probed(name, implementation):
            record = json.loads(json.dumps(it.as_json()))
            assert list(record) == ["metric", "module", "layer", "head", "value", "bound", "kind"]


@pytest.mark.parametrize("name", CASES)
class TestFilesAndSettings:
    def test_from_files_as_from_the_model(self, name: str, tmp_path):
        model = built(name)
        model.save_pretrained(tmp_path)
        metrics = ("stable_rank", "embedding_overlap")
        from_files = probe_weights(WeightFiles(tmp_path), metrics=metrics)
        from_model = probe_weights(model, metrics=metrics)
        assert {it.module.rpartition(".")[2] for it in from_files} == {
            it.module.rpartition(".")[2] for it in from_model
        }
        assert [it.value for it in from_files] == pytest.approx([it.value for it in from_model])

    def test_the_model_is_left_as_it_was(self, name: str):
        model = built(name)
        model.train()
        model.get_submodule(CASES[name].down.format(0)).eval()
        modes = [module.training for module in model.modules()]
        try:
            probe(model, windows()[:1])
            assert [module.training for module in model.modules()] == modes
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        finally:
            model.eval()

    def test_batches_and_repeats(self, name: str):
        model = built(name)
        metrics = ("attention_entropy", "mlp_inactive", "residual_overlap")
        measured = [probe(model, windows(), metrics=metrics, batch=batch) for batch in (1, 3, 3)]
        assert measured[1] == measured[2]
        assert [it.value for it in measured[0]] == pytest.approx(
            [it.value for it in measured[1]], abs=1e-5
        )


class TestWhatIsAsked:
    def test_only_what_is_asked_for(self):
        model = built("Llama")
        assert {it.metric for it in probe(model, windows()[:1])} == set(DEFAULT_METRICS)
        found = probe(
            model, windows()[:1], metrics=["attention_first", "stable_rank"], roles=["key"]
        )
        assert list(dict.fromkeys(it.metric for it in found)) == ["attention_first", "stable_rank"]
        ranked = [it.module for it in found if it.metric == "stable_rank"]
        assert ranked == [f"model.layers.{layer}.self_attn.k_proj" for layer in range(LAYERS)]

    def test_the_embedding_of_other_roles(self):
        found = probe_weights(
            built("Llama"), metrics=["embedding_overlap", "stable_rank"], roles=["key"]
        )
        assert [it.metric for it in found] == ["embedding_overlap", "stable_rank", "stable_rank"]

    def test_progress(self):
        reported: list[tuple[str, int, int]] = []
        probe(built("Llama"), windows(), batch=1, progress=lambda *words: reported.append(words))
        assert [done for what, done, _ in reported if what == "read the text"] == [0, 1, 2]
        assert sum("weigh" in what for what, _, _ in reported) == 1 + 7 * LAYERS
        assert all(done < total for _, done, total in reported)

    def test_a_sample_of_the_tokens(self):
        model = built("Llama")
        metrics = ("mlp_inactive", "residual_overlap")
        every = probe(model, windows(), metrics=metrics)
        some = probe(model, windows(), metrics=metrics, sample=40)
        assert some != every
        assert some == probe(model, windows(), metrics=metrics, sample=40, batch=1)
        assert [it.value for it in some] == pytest.approx([it.value for it in every], abs=0.1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"metrics": ["entropy"]}, "metrics must be among attention_entropy"),
            ({"metrics": "attention_entropy"}, "metrics must be a list"),
            ({"metrics": []}, "metrics must be a list"),
            ({"batch": 0}, "batch must be"),
            ({"sample": 0}, "sample must be"),
            ({"roles": ["gate"]}, "roles must be among"),
        ],
    )
    def test_bad_arguments(self, options, message: str):
        with pytest.raises(ValueError, match=message):
            probe(built("Llama"), windows()[:1], **options)

    @pytest.mark.parametrize("given", [[], [[]], [[1, 2], [3]], [1, 2], [[0.5]]])
    def test_bad_windows(self, given):
        with pytest.raises(ValueError, match="windows must be"):
            probe(built("Llama"), given)

    def test_weights_need_no_text_metrics(self):
        with pytest.raises(ValueError, match="metrics must be among embedding_overlap"):
            probe_weights(built("Llama"), metrics=["attention_entropy"])
        assert set(WEIGHT_METRICS) < set(METRICS)

    def test_files_that_do_not_say_what_they_are(self, tmp_path):
        built("Llama").save_pretrained(tmp_path)
        (tmp_path / "config.json").unlink()
        with pytest.raises(ValueError, match=r"has no config\.json"):
            probe_weights(WeightFiles(tmp_path))

    def test_numbers_that_are_none(self):
        import copy

        model = copy.deepcopy(built("Llama"))
        with torch.no_grad():
            model.model.layers[0].mlp.gate_proj.weight[0, 0] = math.nan
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj.*finite"):
            probe_weights(model)
        with pytest.raises(ValueError, match="finite"):
            probe(model, windows()[:1], metrics=["attention_entropy"])
        with pytest.raises(ValueError, match="stable_rank of w came out with value nan"):
            Measurement("stable_rank", "w", 0, None, math.nan)


class _Own(nn.Module):
    """A module of one's own that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.query, self.key = (nn.ModuleList([nn.Linear(16, 16)]) for _ in range(2))

    def queries_and_keys(self, tokens: Tensor) -> list[Tensor]:
        x = self.embedding(tokens)
        made = (layers[0](x) for layers in (self.query, self.key))
        return [rows.unflatten(-1, (2, 8)).transpose(1, 2) for rows in made]

    def forward(self, tokens: Tensor) -> Tensor:
        q, k = self.queries_and_keys(tokens)
        return nn.functional.scaled_dot_product_attention(q, k, q, is_causal=True)


def test_a_module_of_ones_own():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _Own()
    names = AttentionMap(query="query.{layer}", key="key.{layer}", heads=2)
    found = probe(model, windows(), metrics=["attention_entropy"], attention=names)
    q, k = (rows.detach().double() for rows in model.queries_and_keys(windows()))
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / math.sqrt(8)).masked_fill(hidden, -math.inf).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    assert found[0].value == pytest.approx(float(entropy.mean()), abs=1e-5)
    assert [it.value for it in found[1:]] == pytest.approx(entropy.mean((0, 2)).tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="mlp_zero cannot be measured: no part of _Own"):
        probe(model, windows(), metrics=["attention_entropy", "mlp_zero"], attention=names)
