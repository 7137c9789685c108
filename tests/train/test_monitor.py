"""What the monitor writes: numbers that are right, reasons where there are none, findings."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import joma
from joma.probes import AttentionMap, attention_entropy, effective_rank, embedding_overlap
from joma.runs import Run
from tests.train._watched import LENGTH, batches, encoder, hugging_face, of_run, train


def hugging_face_call(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def test_numbers_are_those_of_the_probes(tmp_path: Path) -> None:
    model = hugging_face("llama", num_key_value_heads=1)
    inputs = next(batches(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = joma.Monitor(model, run=tmp_path / "run", inputs={"input_ids": inputs})
    hugging_face_call(model, next(batches())).backward()
    optimizer.step()
    monitor.step()
    monitor.close()
    run = Run.open(tmp_path / "run")

    layer = model.get_submodule("model.layers.1")
    query, key, gate = (
        layer.get_parameter(f"{name}_proj.weight")
        for name in ("self_attn.q", "self_attn.k", "mlp.gate")
    )
    table = model.get_parameter("model.embed_tokens.weight")
    for head in (0, 1):
        product = query[8 * head : 8 * head + 8].T @ key
        values = torch.linalg.svdvals(product.detach().double())
        stable = float(values.square().sum() / values[0] ** 2)
        where = {"layer": 1, "head": head}
        assert of_run(run, "stable_rank", **where)[1] == [pytest.approx(stable, rel=1e-5)]
        effective = effective_rank(product.detach()).value
        assert of_run(run, "effective_rank", **where)[1] == [pytest.approx(effective, rel=1e-3)]
    module = "model.layers.1.mlp.gate_proj"
    values = torch.linalg.svdvals(gate.detach().double())
    stable = float(values.square().sum() / values[0] ** 2)
    assert of_run(run, "stable_rank", module=module)[1] == [pytest.approx(stable, rel=1e-2)]
    assert of_run(run, "embedding_overlap")[1] == [
        pytest.approx(embedding_overlap(table).mean, rel=1e-5)
    ]
    assert gate.grad is not None
    shares = torch.linalg.svdvals(gate.grad.double()).square()
    norm = float(shares.sum().sqrt())
    assert of_run(run, "gradient_norm", module=module)[1] == [pytest.approx(norm, rel=1e-5)]
    assert of_run(run, "gradient_stable_rank", module=module)[1] == [
        pytest.approx(float(shares.sum() / shares[0]), rel=1e-2)
    ]
    energy = float(shares[:8].sum() / shares.sum())
    assert of_run(run, "gradient_energy_8", module=module)[1] == [pytest.approx(energy, rel=1e-2)]
    with torch.no_grad():
        seen = model(input_ids=inputs, output_attentions=False, output_hidden_states=True)
        before = layer.get_submodule("input_layernorm")(seen.hidden_states[1])
        positions = torch.arange(LENGTH).unsqueeze(0)
        cos, sin = model.get_submodule("model.rotary_emb")(before, positions)
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q = (before @ query.T).unflatten(-1, (2, 8)).transpose(1, 2)
        k = (before @ key.T).unflatten(-1, (1, 8)).transpose(1, 2)
        entropy = attention_entropy(*apply_rotary_pos_emb(q, k, cos, sin)).mean((0, 2))
    for head in (0, 1):
        assert of_run(run, "attention_entropy", layer=1, head=head)[1] == [
            pytest.approx(float(entropy[head]), rel=1e-4)
        ]


def test_updates_are_measured_since_the_last_measurement(tmp_path: Path) -> None:
    model = encoder()
    matrix = model.get_parameter("encoder.layers.0.linear1.weight")
    with joma.Monitor(model, run=tmp_path / "run", inputs=next(batches()), budget=None) as monitor:
        monitor.step()  # which measures everything for the first time
        before = matrix.detach().clone()
        with torch.no_grad():
            matrix += torch.outer(torch.arange(32.0), torch.ones(16)) / 100
        monitor.step()
        moved = float((matrix.detach() - before).norm() / before.norm())
        with torch.no_grad():
            matrix += 3
        monitor.measure()
    module = "encoder.layers.0.linear1"
    assert of_run(monitor.run, "update_relative", module=module) == (  # type: ignore[arg-type]
        [1, 2],
        [0, pytest.approx(moved)],
    )
    run = Run.open(tmp_path / "run")
    change = matrix.detach() - before
    values = torch.linalg.svdvals(change.double()).square()
    steps, ranks = of_run(run, "update_stable_rank", module=module)
    assert ranks == [pytest.approx(float(values.sum() / values[0]), rel=1e-2)]
    assert steps == [2]


def test_a_collapse_is_said_in_plain_words(tmp_path: Path) -> None:
    model = encoder()
    with joma.Monitor(
        model, every=1, run=tmp_path / "run", inputs=next(batches()), budget=None
    ) as monitor:
        for _ in range(4):
            with torch.no_grad():
                model.get_parameter("encoder.layers.1.self_attn.in_proj_weight")[:32] *= 6
            monitor.step(float("nan"), learning_rate=0.5)
    kinds = {(one.kind, one.layer) for one in monitor.findings}
    assert {("attention_collapse", 1), ("not_finite", None)} <= kinds
    assert ("attention_collapse", 0) not in kinds
    assert "Attention of layer 1 has collapsed" in monitor.summary()
    assert "The loss is NaN since step 1" in monitor.summary()
    written = Run.open(tmp_path / "run").read_json("findings")
    assert {one["kind"] for one in written["findings"]} == {kind for kind, _ in kinds}


class Own(nn.Module):
    """Attention of one's own, of which no map knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(16, 16), "k": nn.Linear(16, 16), "o": nn.Linear(16, 16)})
            for _ in range(2)
        )
        self.output = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            scores = block["q"](x) @ block["k"](x).mT / 4  # type: ignore[index]
            hidden = torch.ones_like(scores[0]).triu(1).bool()
            x = x + block["o"](scores.masked_fill(hidden, -torch.inf).softmax(-1) @ x)  # type: ignore[index]
        return self.output(x)


def test_a_model_without_a_map_is_watched_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "joma.monitor"):
        names = AttentionMap(query="blocks.{layer}.q", key="blocks.{layer}.k", heads=1)
        model = Own()
        with joma.Monitor(
            model, every=2, run=tmp_path / "a", attention=names, budget=None
        ) as monitor:
            train(model, 5, after_step=monitor.step)
    run = Run.open(tmp_path / "a")
    assert of_run(run, "attention_entropy", layer=1, head=-1)[0] == [1, 2, 4]
    assert of_run(run, "gradient_stable_rank", layer=1, module="blocks.1.o")[0] == [1]
    assert of_run(run, "stable_rank", layer=1, module="blocks.1.o")[0] == [1, 2, 4]
    said = [record.getMessage() for record in caplog.records]
    assert sum("stable_rank of value is not measured: no part of Own" in one for one in said) == 1
    assert "stable_rank of value and 4 more not measured" in monitor.summary()

    model = Own()
    with joma.Monitor(model, every=2, run=tmp_path / "b", budget=None) as monitor:
        train(model, 5, after_step=monitor.step)  # training goes on without attention, too
    assert "attention not measured since step 1: no attention of Own was seen" in monitor.summary()


def test_gradients_that_are_gone_are_reported(tmp_path: Path) -> None:
    model = encoder()
    with joma.Monitor(model, run=tmp_path / "run", inputs=next(batches())) as monitor:
        monitor.step()
    assert "call step() before zero_grad()" in monitor.summary()


@pytest.mark.parametrize("begun", [0, 20])
def test_gradients_are_not_missed_before_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begun: int
) -> None:
    model, inputs = encoder(), next(batches())
    with (
        caplog.at_level(logging.WARNING, "joma.monitor"),
        joma.Monitor(model, run=tmp_path / "run", inputs=inputs, step=begun) as monitor,
    ):
        monitor.measure()  # at everything
        assert not caplog.records
        assert "is not measured" not in monitor.summary()
        train(model, 1, after_step=monitor.step)
        monitor.measure()  # after zero_grad
    (said,) = [record.getMessage() for record in caplog.records]
    assert "call step() before zero_grad()" in said
    run = Run.open(tmp_path / "run")
    module = "encoder.layers.0.linear1"
    assert of_run(run, "stable_rank", module=module)[0][0] == begun
    assert begun not in of_run(run, "gradient_norm", module=module)[0]


def test_a_measurement_before_any_input_turns_nothing_off(tmp_path: Path) -> None:
    model = encoder()
    with joma.Monitor(model, run=tmp_path / "run", step=20) as monitor:
        monitor.measure()
        train(model, 1, after_step=lambda loss: (monitor.step(loss), monitor.measure())[0])
    assert of_run(Run.open(tmp_path / "run"), "attention_entropy", layer=0, head=-1)[0] == [21]


def test_what_is_kept_is_the_first_training_batch_cut(tmp_path: Path) -> None:
    model = encoder()
    with torch.no_grad():
        model.eval()
        monitor = joma.Monitor(model, run=tmp_path / "run")
        model(torch.zeros(2, 5, dtype=torch.long))  # a validation
    tokens = torch.randint(50, (300, LENGTH))
    model.train()
    model(tokens)
    seen: list[Tensor] = []
    model.embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    monitor.step()
    monitor.close()
    assert torch.equal(seen[0], tokens[: 2048 // LENGTH])


def test_loggers_are_called_and_an_error_in_the_loop_loses_nothing(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    model = encoder()
    monitor = joma.Monitor(
        model,
        every=2,
        run=tmp_path / "run",
        budget=None,
        loggers=[lambda step, values: logged.append((step, dict(values)))],
    )

    def tell(loss: Tensor) -> None:
        monitor.step(loss, learning_rate=0.1)
        if len(logged) == 5:  # with the moves after steps 1 and 2
            raise RuntimeError("of one's own")

    with pytest.raises(RuntimeError, match="of one's own"), monitor:
        train(model, 9, after_step=tell)
    steps = [step for step, values in logged if "loss" in values]
    assert steps == [1, 2, 4]
    assert {"learning_rate", "attention_entropy/layer0/head1"} <= logged[0][1].keys()
    assert of_run(Run.open(tmp_path / "run"), "loss")[0] == [1, 2, 3, 4]
    monitor.close()  # again
    monitor.step()
    assert "step not recorded since step 4: the monitor is closed" in monitor.summary()


def test_a_training_that_goes_on_counts_on(tmp_path: Path) -> None:
    run = Run.create("mine", {}, out=tmp_path / "run")
    model = encoder()
    with joma.Monitor(model, every=10, run=run, step=20, budget=None) as monitor:
        train(model, 11, after_step=monitor.step)
    assert of_run(run, "attention_uniform", layer=0)[0] == [30]
    assert of_run(run, "loss")[0] == list(range(21, 32))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every must be a whole number from 1 on, got 0"),
        ({"metrics": ["entropy"]}, "metrics must be among attention_entropy"),
        ({"metrics": []}, "metrics must be a list"),
        ({"metrics": ["theorem1_residual"]}, "theorem1 must be the layer"),
        ({"budget": 0}, "budget must be a share above 0"),
        ({"inputs": 3}, "inputs must be tensors, tuples or dicts"),
        ({"inputs": []}, "inputs must be one batch at least"),
        ({"step": -1}, "step must be a whole number from 0 on"),
        ({"theorem1": 2}, "theorem1 must be a layer of the model, 0 to 1, got 2"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model = encoder()
    with pytest.raises(ValueError, match=says):
        joma.Monitor(model, run=tmp_path / "run", **options)
    with pytest.raises(ValueError, match="model must be a torch"):
        joma.Monitor(None, run=tmp_path / "run")  # type: ignore[arg-type]
