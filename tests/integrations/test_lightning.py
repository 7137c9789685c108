"""The monitor in a real Lightning Trainer."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from joma.runs import Run
from joma.train.findings import Finding, Judgement, RecordedSeries
from tests.train._watched import batches, encoder, loss_of, of_run

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
from joma.integrations.lightning import MonitorCallback  # noqa: E402  # needs it

STEPS, ACCUMULATED, WEIGHT = 5, 2, "encoder.layers.1.linear1"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # of Lightning, on workers and loggers
        warnings.simplefilter("ignore")
        yield


class Module(lightning.LightningModule):
    """Trains an encoder; notes losses, and the norm of one gradient as the optimizer sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = encoder()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, tokens: Tensor, place: int) -> Tensor:
        loss = loss_of(self.model(tokens), tokens)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, tokens: Tensor, place: int) -> None:
        self.log("val_loss", loss_of(self.model(tokens), tokens))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.model.get_submodule(WEIGHT).weight.grad
        assert isinstance(gradient, Tensor)
        self.norms.append(float(gradient.double().norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByHand(Module):
    """Steps by itself, at every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, place: int) -> Tensor:
        loss = super().training_step(tokens, place)
        optimizer = self.optimizers()
        if place % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(loss)
        if place % 2 == 1:
            optimizer.step()
        return loss


def fit(
    folder: Path,
    callbacks: list[Any],
    *,
    module: Module | None = None,
    steps: int = STEPS,
    resume: Path | None = None,
    kind: Any = lightning,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses of batches, the last weights, and what the global generator says next."""
    module = Module() if module is None else module
    trainer = kind.Trainer(
        max_steps=steps,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **{"accumulate_grad_batches": ACCUMULATED} | options,
    )
    feed = batches()
    data = [next(feed) for _ in range(12)]
    torch.manual_seed(7)
    loaders = (DataLoader(part, batch_size=None) for part in (data, data[:1]))  # type: ignore[arg-type]
    trainer.fit(module, *loaders, ckpt_path=resume)
    if steps < STEPS:
        trainer.save_checkpoint(folder / "checkpoint")
    return module.losses, {k: v.clone() for k, v in module.state_dict().items()}, torch.rand(3)


def test_a_trainer_does_not_notice_and_everything_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = fit(tmp_path / "a", [])
    module = Module()
    watching = MonitorCallback(every=2, budget=None, run=tmp_path / "run")
    watched = fit(tmp_path / "b", [watching], module=module)
    assert len(set(alone[0])) == STEPS * ACCUMULATED
    assert alone[0] == watched[0]
    assert all(torch.equal(value, watched[1][name]) for name, value in alone[1].items())
    assert torch.equal(alone[2], watched[2])

    run = Run.open(tmp_path / "run")
    pairs = torch.tensor(alone[0]).view(STEPS, ACCUMULATED).mean(1).tolist()
    assert of_run(run, "loss") == (list(range(1, STEPS + 1)), pytest.approx(pairs, rel=1e-6))
    assert of_run(run, "learning_rate") == ([1, 2, 4], [1e-3] * 3)
    assert of_run(run, "attention_entropy", layer=1, head=1)[0] == [1, 2, 4]
    norms = [pytest.approx(module.norms[step - 1], rel=1e-5) for step in (1, 2, 4)]
    assert of_run(run, "gradient_norm", module=WEIGHT) == ([1, 2, 4], norms)
    assert run.read_json("findings") == watching.monitor.judgement.as_json()
    assert f"{STEPS} steps watched" in capsys.readouterr().out


def test_validation_losses_and_the_optimizer_are_read(tmp_path: Path) -> None:
    watching = MonitorCallback(every=1, budget=None, run=tmp_path / "run", metrics=["stable_rank"])
    seen: list[tuple[int, float]] = []

    class Validated(lightning.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                seen.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    fit(tmp_path, [watching, Validated()], val_check_interval=4)
    run = Run.open(tmp_path / "run")
    assert [step for step, _ in seen] == [2, 4]
    assert list(zip(*of_run(run, "validation_loss"), strict=True)) == seen
    assert of_run(run, "weight_decay") == (list(range(1, STEPS + 1)), [1e-2] * STEPS)


def test_a_training_that_goes_on_is_watched_from_its_step_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where runs/ is made
    options: dict[str, Any] = {"every": 2, "budget": None, "inputs": next(batches(9))}
    stopped, again = MonitorCallback(**options), MonitorCallback(**options)
    before = fit(tmp_path, [stopped], steps=3)
    after = fit(tmp_path, [again], resume=tmp_path / "checkpoint")
    run = again.monitor.run
    assert stopped.monitor.run is not None
    assert run is not None
    assert [one.name for one in (tmp_path / "runs").iterdir()] == [run.path.name]
    pairs = torch.tensor(before[0] + after[0]).view(STEPS, ACCUMULATED).mean(1).tolist()
    assert of_run(run, "loss") == (list(range(1, STEPS + 1)), pytest.approx(pairs, rel=1e-6))
    assert of_run(run, "attention_entropy", layer=0, head=-1)[0] == [0, 1, 2, 4]


def test_steps_made_by_hand_are_reported(tmp_path: Path) -> None:
    watching = MonitorCallback(every=1, budget=None, run=tmp_path / "run")
    module = ByHand()
    fit(tmp_path, [watching], module=module, accumulate_grad_batches=1)
    run = Run.open(tmp_path / "run")
    pairs = torch.tensor(module.losses).view(STEPS, 2).mean(1).tolist()
    assert of_run(run, "loss") == (list(range(1, STEPS + 1)), pytest.approx(pairs, rel=1e-6))
    assert of_run(run, "gradient_norm", module=WEIGHT)[0] == [1, 2, 3, 4, 5]


def test_a_training_that_breaks_off_leaves_what_there_is(tmp_path: Path) -> None:
    class Stopping(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("a fault")

    watching = MonitorCallback(every=100, run=tmp_path / "run")
    with pytest.raises(RuntimeError, match="a fault"):
        fit(tmp_path, [watching, Stopping()])
    run = Run.open(tmp_path / "run")
    assert of_run(run, "loss")[0] == [1, 2, 3]
    assert run.read_json("findings")["findings"] == []


def test_the_older_package_will_do(tmp_path: Path) -> None:
    older = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Older(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = encoder(), []

        training_step = Module.training_step
        configure_optimizers = Module.configure_optimizers

    watching = MonitorCallback(every=2, run=tmp_path / "run")
    fit(tmp_path, [watching], module=Older(), kind=older)  # type: ignore[arg-type]
    assert of_run(Run.open(tmp_path / "run"), "loss")[0] == list(range(1, STEPS + 1))


def test_what_is_watched_can_be_chosen(tmp_path: Path) -> None:
    module = Module()
    fit(tmp_path, [one := MonitorCallback(run=tmp_path / "a", module="model.encoder")])
    layers = {"layers.0.linear1", "layers.1.linear1"}
    assert one.monitor.run is not None
    assert layers <= set(one.monitor.run.metrics.read("stable_rank")["module"])
    module.more = nn.Linear(2, 2)  # now no submodule has all parameters
    callback = MonitorCallback(run=tmp_path / "b", metrics=["stable_rank"])
    fit(tmp_path, [callback], module=module, accumulate_grad_batches=1)
    assert callback.monitor.run is not None
    assert "model.encoder.layers.0.linear1" in callback.monitor.run.metrics.read()["module"]
    with pytest.raises(ValueError, match="module must be the name of a submodule, one of model"):
        fit(tmp_path, [MonitorCallback(module="net")])


def test_a_whole_module_that_ddp_calls_needs_inputs_to_measure() -> None:
    module = Module()
    module.more = nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(global_step=0, model=nn.Identity(), is_global_zero=True)
    with pytest.raises(ValueError, match=r"inputs must be .* since Identity calls it here"):
        MonitorCallback().on_train_start(trainer, module)


def test_where_lightning_is_missing_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if "light" in name else find(name)
    )
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, "joma.integrations.lightning")
    with pytest.raises(
        ImportError, match=r"needs lightning: pip install -c constraints.txt -e '\.\[lightning\]'"
    ):
        importlib.import_module("joma.integrations.lightning")


def test_a_finding_ends_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(series: list[RecordedSeries], *, ended: bool) -> Judgement:
        collapsed = Finding("attention_collapse", "warning", 2, "It collapsed.", "Try less.")
        return Judgement((collapsed,) if max(one.steps[-1] for one in series) >= 3 else ())

    monkeypatch.setattr("joma.train.findings.judge", judge)
    options: dict[str, Any] = {"every": 1, "budget": None, "metrics": ["stable_rank"]}
    fit(tmp_path, [MonitorCallback(run=tmp_path / "run", stop_on=["collapse"], **options)])
    assert of_run(Run.open(tmp_path / "run"), "loss")[0] == [1, 2, 3]
    said = capsys.readouterr().out
    assert said.count("Training stops: It collapsed.") == 1
    assert "- warning, step 2: It collapsed.\n    Try less." in said


def test_stop_on_nan_ends_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Module):
        def on_train_batch_start(self, batch: Any, place: int) -> None:
            if place == 2 * ACCUMULATED:
                with torch.no_grad():
                    next(self.parameters())[:] = torch.nan

    watching = MonitorCallback(every=1, run=tmp_path / "run", stop_on=["nan"])
    fit(tmp_path, [watching], module=Broken())
    assert of_run(Run.open(tmp_path / "run"), "loss")[0] == [1, 2, 3]
    assert "Training stops: The loss is NaN since step 3" in capsys.readouterr().out
