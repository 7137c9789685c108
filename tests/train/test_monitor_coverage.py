"""What the monitor covers: every attention by its name, every matrix, dead nodes, frozen layers."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import joma
from joma.probes import AttentionCall, attention_entropy, watch_attention
from joma.runs import Run
from tests.train._watched import batches, encoder, hugging_face, loss_of, of_run, train


def of_module(run: Run | None, name: str, **where: Any) -> dict[str, list[float]]:
    """Values of a metric by module, heads left out."""
    assert run is not None
    columns = run.metrics.read(name)
    found: dict[str, list[float]] = {}
    for row in range(len(columns["step"])):
        if columns["head"][row] == -1 and all(columns[key][row] == v for key, v in where.items()):
            found.setdefault(str(columns["module"][row]), []).append(float(columns["value"][row]))
    return found


def measured(model: nn.Module, folder: Path, **options: Any) -> joma.Monitor:
    """One measurement of everything."""
    monitor = joma.Monitor(model, run=folder / "run", **options)
    monitor.measure()
    monitor.close()
    return monitor


CROSS = "decoder.layers.0.multihead_attn"


class Translator(nn.Module):
    """An encoder and a decoder of one layer each, with different numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(2 * x, self.encoder(x))


def test_attentions_of_one_layer_number_are_measured_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Translator(), torch.randn(2, 9, 16)
    seen: dict[str, float] = {}

    def see(call: AttentionCall) -> None:
        seen[call.name] = float(attention_entropy(call.query, call.key, causal=False).mean())

    model.eval()
    with torch.no_grad(), watch_attention(model, see):
        model(x)
    assert len(seen) == 3
    monitor = measured(model, tmp_path, inputs=x)
    found = of_module(monitor.run, "attention_entropy")
    assert found == {name: [pytest.approx(value, rel=1e-5)] for name, value in seen.items()}
    columns = monitor.run.metrics.read("attention_entropy")  # type: ignore[union-attr]
    assert set(columns["kind"]) == {"encoder self", "decoder self", "decoder cross"}


def test_passes_of_a_shared_block_are_measured_one_by_one(tmp_path: Path) -> None:
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": 16, "embedding_size": 8, "intermediate_size": 32}
    config = AlbertConfig(
        vocab_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        **sizes,
    )
    model = AlbertForMaskedLM(config)
    heard: dict[str, float] = {}
    monitor = measured(
        model,
        tmp_path,
        inputs={"input_ids": next(batches())},
        loggers=[lambda step, values: heard.update(values)],
    )
    found = of_module(monitor.run, "attention_entropy")
    first, second = found
    assert second == f"{first}#1"
    assert found[first] != found[second]
    keys = [name for name in heard if name.startswith("attention_entropy") and "head" not in name]
    assert sorted(keys) == ["attention_entropy/layer0", "attention_entropy/layer0/pass1"]


def test_a_finding_names_its_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Translator(), torch.randn(2, 9, 16)
    with joma.Monitor(model, run=tmp_path / "run", inputs=x) as monitor:
        for _ in range(4):
            with torch.no_grad():
                model.get_parameter(f"{CROSS}.in_proj_weight")[:32] *= 6
            monitor.step()
            monitor.measure()
    found = [one for one in monitor.findings if one.kind == "attention_collapse"]
    assert [one.module for one in found] == [CROSS]
    assert "layer 0 (decoder cross) has collapsed" in found[0].sentence
    written = Run.open(tmp_path / "run").read_json("findings")
    assert CROSS in {one["module"] for one in written["findings"]}


def stable(matrix: Tensor) -> float:
    values = torch.linalg.svdvals(matrix.detach().double())
    return float(values.square().sum() / values[0] ** 2)


def test_every_matrix_of_a_layer_has_its_stable_rank(tmp_path: Path) -> None:
    model = hugging_face("llama", num_key_value_heads=1)
    monitor = measured(model, tmp_path, inputs={"input_ids": next(batches())})
    found = of_module(monitor.run, "stable_rank", layer=1)
    names = ("self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    for name in names:
        path = f"model.layers.1.{name}_proj"
        true = stable(model.get_parameter(f"{path}.weight"))
        assert found[path] == [pytest.approx(true, rel=1e-2)]
    assert len(found) == len(names) + 1  # query·key


def test_experts_are_measured_one_by_one_up_to_eight(tmp_path: Path) -> None:
    options = {"num_key_value_heads": 1, "num_local_experts": 3}
    model = hugging_face("mixtral", **options)
    tokens = next(batches())
    monitor = joma.Monitor(model, run=tmp_path / "run", inputs={"input_ids": tokens})
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    monitor.step()
    monitor.close()
    ranks = of_module(monitor.run, "stable_rank", layer=0)
    norms = of_module(monitor.run, "gradient_norm", layer=0)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    for expert in range(3):
        down = experts.get_parameter("down_proj")
        name = f"model.layers.0.mlp.experts.down_proj[{expert}]"
        assert ranks[name] == [pytest.approx(stable(down[expert]), rel=1e-2)]
        assert down.grad is not None
        assert norms[name] == [pytest.approx(float(down.grad[expert].norm()), rel=1e-5)]


class LoRA(nn.Module):
    """A linear map with a low-rank update, in the layout of peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]
        self.merged = False
        self.disable_adapters = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


def test_a_low_rank_update_counts_in_its_weight(tmp_path: Path) -> None:
    model = hugging_face("llama")
    model.requires_grad_(False)
    mlp: Any = model.get_submodule("model.layers.0.mlp")
    mlp.down_proj = LoRA(mlp.down_proj)
    tokens = next(batches())
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.5)
    with joma.Monitor(
        model, every=1, run=tmp_path / "run", inputs={"input_ids": tokens}, budget=None
    ) as monitor:
        for _ in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            monitor.step()
            optimizer.zero_grad()
    lora: Any = mlp.down_proj
    effective = lora.base_layer.weight + 2 * lora.lora_B.default.weight @ lora.lora_A.default.weight
    found = of_module(monitor.run, "stable_rank", layer=0)
    path = "model.layers.0.mlp.down_proj"
    (name,) = [name for name in found if name.startswith(path)]
    assert found[name][-1] == pytest.approx(stable(effective), rel=1e-2)
    assert found[name][-1] != pytest.approx(stable(lora.base_layer.weight), rel=1e-6)
    frozen = of_module(monitor.run, "frozen")
    assert frozen.pop(f"{path}.lora_A.default") == [0.0] * 3
    assert frozen.pop(f"{path}.lora_B.default") == [0.0] * 3
    assert set(map(tuple, frozen.values())) == {(1.0, 1.0, 1.0)}


def test_layers_that_do_not_move_are_recorded_as_frozen(tmp_path: Path) -> None:
    model = encoder(layers=3)
    model.get_submodule("encoder.layers.0").requires_grad_(False)
    left_out = set(model.get_submodule("encoder.layers.1").parameters())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p not in left_out], 0.1)
    feed = batches()
    with joma.Monitor(model, run=tmp_path / "run") as monitor:
        for _ in range(2):
            tokens = next(feed)
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
            monitor.step()
            optimizer.zero_grad()
    for layer, frozen in ((0, 1.0), (1, 1.0), (2, 0.0)):
        for name, moves in of_module(monitor.run, "update_relative", layer=layer).items():
            assert (not any(moves)) == bool(frozen), name
        values = of_module(monitor.run, "frozen", layer=layer)
        assert set(map(tuple, values.values())) == {(frozen,)}
        assert len(values) == 4


def test_dead_nodes_of_an_mlp_are_counted(tmp_path: Path) -> None:
    model = encoder()
    with torch.no_grad():
        model.get_parameter("encoder.layers.1.linear1.bias")[:24] = -100
    monitor = measured(model, tmp_path, inputs=next(batches()))
    found = of_module(monitor.run, "mlp_dead")
    assert found["encoder.layers.1.linear2"][0] >= 0.75
    assert found["encoder.layers.0.linear2"][0] < 0.25


@pytest.mark.parametrize("mask", ["float", "bool"])
def test_a_mask_as_large_as_the_batch_is_not_cut(tmp_path: Path, mask: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

        def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
            return self.layer(self.table(tokens), seen)

    model = Masked()
    causal = nn.Transformer.generate_square_subsequent_mask(64)
    causal = causal if mask == "float" else causal < 0
    tokens = torch.randint(50, (64, 64))
    shapes: list[tuple[int, ...]] = []
    with joma.Monitor(model, run=tmp_path / "run") as monitor:
        model(tokens, causal).sum().backward()
        model.table.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
        monitor.step()
    assert "attention not measured" not in monitor.summary()
    assert shapes == [(32, 64)]
    even = of_module(monitor.run, "attention_uniform")["layer.self_attn"]
    assert even == [pytest.approx(float(torch.arange(1, 65).log().mean()), rel=1e-4)]


def test_a_matrix_that_is_not_finite_stops_no_other(tmp_path: Path) -> None:
    model = hugging_face("llama")
    inputs = {"input_ids": next(batches())}
    broken = model.get_parameter("model.layers.0.mlp.gate_proj.weight")
    query = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    with joma.Monitor(model, every=1, run=tmp_path / "run", inputs=inputs, budget=None) as monitor:
        for step in range(1, 4):
            with torch.no_grad():
                for weight in (broken, query):
                    weight[0, 0] = torch.nan if step == 2 else 0.1
            monitor.step()
    columns = monitor.run.metrics.read("stable_rank")  # type: ignore[union-attr]

    def steps(module: str) -> list[int]:
        chosen = (columns["module"] == module) & (columns["head"] == -1)
        return columns["step"][chosen].tolist()

    assert steps("model.layers.0.mlp.gate_proj") == [0, 1, 3]
    assert steps("model.layers.0.self_attn[query·key]") == [0, 1, 3]
    assert steps("model.layers.1.mlp.gate_proj") == [0, 1, 2, 3]
    assert steps("model.layers.1.self_attn[query·key]") == [0, 1, 2, 3]
    assert np.isfinite(columns["value"]).all()
    summary = monitor.summary()
    assert "not finite is model.layers.0.self_attn.q_proj.weight and 1 more, seen after step 2" in (
        summary
    )
    assert "rank" not in summary
    assert "converge" not in summary
    assert of_run(Run.open(tmp_path / "run"), "not_finite")[1] == [2.0, 2.0]


def test_stop_on_nan_ends_the_training_at_once(tmp_path: Path) -> None:
    model = encoder()
    said = "The loss is NaN since step 3; all weights are finite."
    monitor = joma.Monitor(model, run=tmp_path / "a", inputs=next(batches()), stop_on=["nan"])
    assert not monitor.step(1.0)
    assert not monitor.step(torch.tensor(2.0))
    assert monitor.stop_reason is None
    assert monitor.step(torch.tensor(torch.nan))
    assert monitor.stop_reason == said
    assert monitor.step(1.0)  # for a loop that goes on
    monitor.close()
    assert f"- critical: {said}" in monitor.summary()

    monitor = joma.Monitor(model, run=tmp_path / "b", inputs=next(batches()), stop_on=("nan",))
    monitor.step(1.0)
    with torch.no_grad():
        model.get_parameter("encoder.layers.1.norm1.bias")[2] = torch.inf
    assert monitor.step(1.0)
    assert "is encoder.layers.1.norm1.bias, seen after step 2" in str(monitor.stop_reason)
    monitor.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attention": 5}, "attention must be an AttentionMap or None, got 5"),
        ({"loggers": 5}, "loggers must be a list of functions or None, got 5"),
        ({"loggers": [5]}, "loggers must be a list of functions or None"),
        ({"run": 5}, "run must be a Run, the path of a folder or None, got 5"),
        ({"stop_on": "nan"}, "stop_on must be a set of names, .* got 'nan'"),
        ({"stop_on": ["loss"]}, "stop_on must be among critical, nan, diverged, .* got 'loss'"),
        ({"on_finding": 5}, "on_finding must be a function or None, got 5"),
        ({"metrics": 5}, "metrics must be a list of names, got 5"),
        ({"metrics": [5]}, "metrics must be among attention_entropy.*, got 5"),
        ({"budget": "1%"}, "budget must be a share"),
        ({"budget": float("nan")}, "budget must be a share"),
        ({"every": 2**70}, "every must be a whole number below"),
        ({"step": 1.5}, "step must be a whole number"),
        ({"theorem1": "0"}, "theorem1 must be a whole number"),
    ],
)
def test_options_of_another_kind_are_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(joma.errors.JomaError, match=says):
        joma.Monitor(encoder(), **{"run": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("called", [False, True])
def test_a_monitor_that_is_forgotten_holds_no_model_and_no_folder(
    tmp_path: Path, called: bool
) -> None:
    model = encoder()
    monitor = joma.Monitor(model, run=tmp_path / "run", theorem1=0)
    if called:
        train(model, 1, after_step=monitor.step)
    alive, watching = weakref.ref(model), weakref.ref(monitor)
    del model
    gc.collect()
    assert alive() is None  # though the monitor was not closed
    monitor.step(1.0)
    monitor.measure()
    monitor.close()
    model = encoder()
    monitor = joma.Monitor(model, run=tmp_path / "run")
    watching = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert watching() is None
    assert "_compiled_call_impl" not in vars(model)


def test_attention_of_a_monitored_model_can_be_watched_before_its_first_call(
    tmp_path: Path,
) -> None:
    model = encoder()
    seen: list[str] = []
    with joma.Monitor(model, run=tmp_path / "run") as monitor:
        with watch_attention(model, lambda call: seen.append(call.name)):
            model(next(batches()))
        monitor.step(1.0)
    assert len(seen) == 2
    assert of_module(monitor.run, "attention_entropy").keys() == set(seen)


def test_a_model_compiled_in_place_after_the_monitor_was_made_is_measured(tmp_path: Path) -> None:
    model = encoder()
    with joma.Monitor(model, every=1, run=tmp_path / "run", budget=None) as monitor:
        model.compile(backend="eager")
        train(model, 3, after_step=monitor.step)
    steps = of_run(Run.open(tmp_path / "run"), "attention_entropy", layer=0, head=-1)[0]
    assert steps == [2, 3]
    assert vars(model)["_compiled_call_impl"] is not None
