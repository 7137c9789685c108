"""What a monitor reads from the optimizer, and validation losses."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import joma
from joma.runs import Run
from tests.train._watched import batches, encoder, loss_of, of_run


def made_steps(model: nn.Module, optimizer: Any, monitor: joma.Monitor, steps: int) -> None:
    feed = batches()
    for _ in range(steps):
        tokens = next(feed)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        optimizer.zero_grad()


def test_rate_and_decay_of_a_loop_are_those_of_its_optimizer(tmp_path: Path) -> None:
    model = encoder()
    groups = [
        {"params": list(model.embedding.parameters()), "lr": 1e-4, "weight_decay": 0.0},
        {"params": list(model.encoder.parameters())},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3)
    heard: dict[int, float] = {}

    def logger(step: int, values: Any) -> None:
        heard[step] = values.get("learning_rate")

    options: dict[str, Any] = {"every": 1, "budget": None, "metrics": ["stable_rank"]}
    with joma.Monitor(
        model, optimizer, run=tmp_path / "run", inputs=next(batches()), loggers=[logger], **options
    ) as monitor:
        made_steps(model, optimizer, monitor, 2)
        optimizer.param_groups[1]["lr"] = torch.tensor(5e-3)  # as compiled optimizers have it
        made_steps(model, optimizer, monitor, 1)
        monitor.step(1.0, learning_rate=0.7)
    run = Run.open(tmp_path / "run")
    assert of_run(run, "learning_rate") == ([1, 2, 3, 4], pytest.approx([1e-2, 1e-2, 5e-3, 0.7]))
    assert of_run(run, "weight_decay") == ([1, 2, 3, 4], [0.3] * 4)
    assert heard == {0: None} | {step: pytest.approx(rate) for step, rate in heard.items() if step}
    assert of_run(run, "optimized", module="encoder.layers.1.linear1") == ([0], [1.0])


def test_without_an_optimizer_nothing_is_known_and_nothing_breaks(tmp_path: Path) -> None:
    model = encoder()
    with joma.Monitor(model, every=1, run=tmp_path / "run", budget=None) as monitor:
        made_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), monitor, 1)
    run = Run.open(tmp_path / "run")
    assert of_run(run, "learning_rate") == of_run(run, "weight_decay") == ([], [])
    assert of_run(run, "optimized") == ([], [])


def test_an_optimizer_is_not_kept_alive(tmp_path: Path) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = weakref.ref(optimizer)
    monitor = joma.Monitor(model, optimizer, every=1, run=tmp_path / "run", budget=None)
    made_steps(model, optimizer, monitor, 1)
    del optimizer
    gc.collect()
    assert gone() is None
    monitor.step(1.0)
    monitor.close()
    assert of_run(Run.open(tmp_path / "run"), "learning_rate") == ([1], [0.1])


@pytest.mark.parametrize(
    "given", [100, "adamw", torch.optim.AdamW, [3], SimpleNamespace(param_groups=3), {"lr": 0.1}]
)
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be a torch\.optim\.Optimizer, .* got"):
        joma.Monitor(encoder(), given)


def test_validation_losses_are_recorded(tmp_path: Path) -> None:
    heard: list[tuple[int, Any]] = []
    monitor = joma.Monitor(
        encoder(),
        every=100,
        run=tmp_path / "run",
        inputs=next(batches()),
        loggers=[lambda step, values: heard.append((step, dict(values)))],
    )
    monitor.record_validation(4.0)
    monitor.step(3.0)
    monitor.step(3.0)
    monitor.record_validation(torch.tensor(2.5))
    monitor.record_validation(3, step=1)
    recorded = of_run(Run.open(tmp_path / "run"), "validation_loss")  # flushed at once
    assert recorded == ([0, 1, 2], [4.0, 3.0, 2.5])
    assert (2, {"validation_loss": 2.5}) in heard
    for wrong in ("low", torch.zeros(3)):
        monitor.record_validation(wrong)  # type: ignore[arg-type]
    monitor.record_validation(1.0, step=-3)
    monitor.close()
    assert "the validation loss not recorded since step 2: loss must be one" in monitor.summary()
    monitor.record_validation(1.0)  # closed
    assert of_run(Run.open(tmp_path / "run"), "validation_loss") == recorded
