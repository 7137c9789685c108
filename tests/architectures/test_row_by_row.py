"""T5, BART, CLIP, Whisper and ALBERT: every attention by its name, every row against eager."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import joma
from joma.probes import AttentionCall, watch_attention
from joma.runs import Run
from tests.architectures._models import BY_NAME, LENGTH, SOURCE, build, inputs_of, real_queries
from tests.architectures._reference import attentions

TOLERANCE = 1e-5

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Expected = list[tuple[str, str, int, int, int, int]]
"""Name, kind, layer, heads, queries, keys of every attention, in the order computed."""

_ALBERT = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"


def _encoder_and_decoder(
    paths: tuple[str, str, str], layers: tuple[int, int], heads: tuple[int, int], source: int
) -> Expected:
    encoder, own, cross = paths
    rows = [
        (encoder.format(layer), "encoder self", layer, heads[0], source, source)
        for layer in range(layers[0])
    ]
    for layer in range(layers[1]):
        rows.append((own.format(layer), "decoder self", layer, heads[1], LENGTH, LENGTH))
        rows.append((cross.format(layer), "decoder cross", layer, heads[1], LENGTH, source))
    return rows


_BART = (
    "model.encoder.layers.{}.self_attn",
    "model.decoder.layers.{}.self_attn",
    "model.decoder.layers.{}.encoder_attn",
)
EXPECTED: dict[str, Expected] = {
    "t5": _encoder_and_decoder(
        (
            "encoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.1.EncDecAttention",
        ),
        (2, 3),
        (4, 4),
        SOURCE,
    ),
    "bart": _encoder_and_decoder(_BART, (2, 2), (4, 2), SOURCE),
    "whisper": _encoder_and_decoder(_BART, (2, 2), (4, 2), 15),
    "clip": [
        *((f"vision_model.encoder.layers.{i}.self_attn", "vision self", i, 3, 10, 10)
          for i in range(3)),
        *((f"text_model.encoder.layers.{i}.self_attn", "text self", i, 4, LENGTH, LENGTH)
          for i in range(2)),
    ],
    "albert": [
        (_ALBERT + again, "self", 0, 4, LENGTH, LENGTH) for again in ("", "#1", "#2")
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_every_row_is_that_of_eager_attention(name: str):
    architecture = BY_NAME[name]
    # T5's scores are not scaled: in float32 a single row is not known to 1e-5.
    dtype = torch.float64 if name == "t5" else torch.float32
    model = build(architecture, dtype=dtype)
    eager = build(architecture, attention="eager", dtype=dtype)
    for padding in ["", "right", "left"] if architecture.pads else [""]:
        inputs = inputs_of(architecture, padding, dtype=dtype)
        calls: list[AttentionCall] = []
        with torch.no_grad(), watch_attention(model, calls.append) as watch:
            model(**inputs)
        assert watch.calls == len(calls)
        found = [
            (it.name, it.kind, it.layer, it.query.shape[1], it.query.shape[2], it.key.shape[2])
            for it in calls
        ]
        assert sorted(found) == sorted(EXPECTED[name])
        reference = {it.key: it for it in attentions(eager, inputs)}
        assert reference.keys() == {row[0] for row in EXPECTED[name]}
        for call in calls:
            _compare(call, reference[call.name].entropy(), real_queries(inputs))


def _compare(call: AttentionCall, expected_BHT: Tensor, real: dict[int, Tensor]) -> None:
    """Each row of each head; rows of padding are marked as such and have no entropy."""
    statistics = call.statistics()
    rows = real.get(expected_BHT.shape[2])
    if rows is None:
        assert call.rows is None or bool(call.rows.all())
        rows = torch.ones_like(expected_BHT[:, 0], dtype=torch.bool)
    else:
        assert call.rows is not None
        assert torch.equal(call.rows, rows)
        assert float(statistics.entropy.transpose(1, 2)[~rows].abs().max()) == 0
    found = statistics.entropy.double().transpose(1, 2)[rows]
    assert float((found - expected_BHT.transpose(1, 2)[rows]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", EXPECTED)
def test_every_row_of_the_log_has_its_name(name: str, tmp_path: Path):
    architecture = BY_NAME[name]
    inputs = inputs_of(architecture)
    model = build(architecture)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with joma.Monitor(
        model, every=1, run=tmp_path / "run", budget=None, metrics=["attention_entropy"]
    ) as monitor:
        loss = model(**inputs)[0].square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    log = Run.open(tmp_path / "run").metrics.read("attention_entropy")
    found = {
        key: value
        for *key, value in zip(
            *(log[column].tolist() for column in ("module", "kind", "layer", "head", "value")),
            strict=True,
        )
        for key in [tuple(key)]
    }
    reference = {it.key: it for it in attentions(build(architecture, attention="eager"), inputs)}
    expected = {}
    for path, kind, layer, heads, *_ in EXPECTED[name]:
        means = reference[path].entropy().mean((0, 2))
        expected |= {(path, kind, layer, head): float(means[head]) for head in range(heads)}
        expected[path, kind, layer, -1] = float(means.mean())
    assert found == pytest.approx(expected, abs=TOLERANCE)
