"""GaLore in a real Lightning Trainer: accumulation, clipping, resume."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from joma.errors import JomaError
from joma.optim import GaLoreAdamW
from tests.train._watched import batches, encoder, loss_of

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
from joma.integrations.lightning import PerLayerCallback  # noqa: E402  # needs it

STEPS, BATCHES, ACCUMULATED = 5, 10, 4
GALORE: dict[str, Any] = {"lr": 1e-2, "rank": 4, "gap": 2, "verbose": False}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # of Lightning, on workers and loggers
        warnings.simplefilter("ignore")
        yield


class Module(lightning.LightningModule):
    """Trains an encoder without dropout by GaLore."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.model = encoder(dropout=0.0)
        self.settings = GALORE | settings

    def training_step(self, tokens: Tensor, place: int) -> Tensor:
        return loss_of(self.model(tokens), tokens)

    def configure_optimizers(self) -> Any:
        optimizer = GaLoreAdamW(self.parameters(), **self.settings)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def data() -> list[Tensor]:
    feed = batches()
    return [next(feed) for _ in range(BATCHES)]


def fit(
    folder: Path,
    module: Module,
    *,
    callback: bool = True,
    steps: int = STEPS,
    resume: Path | None = None,
    feed: list[Tensor] | None = None,
    **options: Any,
) -> Any:
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PerLayerCallback()] if callback else [],
        **{"accumulate_grad_batches": ACCUMULATED} | options,
    )
    loader = DataLoader(feed or data(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 0.02])
def test_passes_of_a_step_are_those_of_accumulate(tmp_path: Path, clip: float | None) -> None:
    """Ten batches make two steps of four and one of two; a loop by hand does the same."""
    module = Module(per_layer=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(tmp_path, module, gradient_clip_val=clip)
    clipping = [one for one in caught if "is applied as clip_norm" in str(one.message)]
    assert len(clipping) == (clip is not None)

    by_hand = Module(per_layer=True, clip_norm=clip)
    (optimizer,), ((scheduler),) = by_hand.configure_optimizers()
    names = {one.name for one in optimizer.projected}
    assert "model.encoder.layers.0.linear1.weight" in names
    assert not names & {"model.embedding.weight"}
    feed, last = data() + data(), (3, 7, 9, 13, 17)
    for number, tokens in enumerate(feed[:18]):
        with optimizer.accumulate(last=number in last):
            (by_hand.training_step(tokens, number) / ACCUMULATED).backward()
        if number in last:
            optimizer.step()
            scheduler["scheduler"].step()
    for one, other in zip(module.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    (inside,) = trainer.optimizers
    assert {int(state["step"]) for state in inside.state.values()} == {STEPS}
    assert inside._last  # the last pass has ended


def test_without_the_callback_a_second_pass_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JomaError, match=r"a second backward pass.*optimizer\.accumulate"):
        fit(tmp_path, Module(per_layer=True), callback=False)


def test_clipping_by_value_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    with pytest.raises(JomaError, match="gradient_clip_algorithm"):
        fit(tmp_path, Module(per_layer=True), **options)


def test_a_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_layer": True, "bits": 8, "projector_bits": 8}
    straight, resumed = Module(**settings), Module(**settings)
    feed = data()[:1] * BATCHES  # in the middle of an epoch Lightning begins it anew
    first = fit(tmp_path, straight, feed=feed)
    broken = fit(tmp_path, Module(**settings), feed=feed, steps=2)
    broken.save_checkpoint(tmp_path / "checkpoint")
    second = fit(tmp_path, resumed, feed=feed, resume=tmp_path / "checkpoint")
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (first, second)]
    for number, state in states[0].items():
        for key, value in state.items():
            assert states[1][number][key].dtype == value.dtype
            assert torch.equal(states[1][number][key], value)
