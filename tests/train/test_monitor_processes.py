"""The monitor on two processes: the numbers of one, the losses of a training without it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import joma
from joma.runs import Run
from joma.train.findings import Finding, Judgement, RecordedSeries
from tests.train._watched import batches, encoder, loss_of
from tests.two_processes import run_in_two_processes

STEPS = 6


def whole() -> nn.Module:
    model = encoder(dropout=0.0)
    model.norm = nn.Identity()  # means over a batch are others over halves of it
    return model


def parallel(kind: str) -> nn.Module:
    model = whole()
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.get_submodule("encoder.layers").children():
        fully_shard(layer)
    fully_shard(model)
    return model


def train(model: nn.Module, monitor: Any, rank: int, ranks: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    feed, losses = batches(), []
    for step in range(STEPS):
        tokens = next(feed).chunk(ranks)[rank]
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss)
            if step == 4:
                monitor.measure()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def watched(model: nn.Module, folder: Path, rank: int, ranks: int, inputs: Tensor) -> list[float]:
    with joma.Monitor(
        model, every=2, run=folder, inputs=inputs, budget=None, theorem1=1
    ) as monitor:
        return train(model, monitor, rank, ranks)


FAULTS = ("model", "attention", "disk")


def faulty(fault: str, folder: Path, rank: int) -> tuple[list[float], str]:
    """A training in which something fails in one process alone."""
    model = parallel("fsdp2")

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError("of this process alone")

    def refuse(module: nn.Module, args: Any) -> None:
        if not module.training:
            raise KeyError("of this process alone")

    with (
        pytest.MonkeyPatch.context() as patch,
        joma.Monitor(model, every=1, run=folder, inputs=next(batches(9)), budget=None) as monitor,
    ):
        if fault == "model" and rank == 1:
            model.get_submodule("encoder.layers.0.linear1").register_forward_pre_hook(refuse)
        elif fault == "attention" and rank == 0:
            patch.setattr("joma.probes.AttentionAccumulator.update", fail)
        elif fault == "disk" and rank == 0:
            patch.setattr("os.fsync", fail)
        return train(model, monitor, rank, 2), monitor.summary()


def stopped(folder: Path, rank: int) -> list[int | str]:
    """Where a training of two processes ends in which the loss of one is NaN at step 2."""
    ends: list[int | str] = []
    for kind in ("ddp", "fsdp2"):
        model = parallel(kind)
        place = folder / f"stopped-{kind}"
        with joma.Monitor(model, run=place, inputs=next(batches(9)), stop_on=["nan"]) as monitor:
            for step in range(1, 22):
                if monitor.step(torch.nan if (rank, step) == (1, 2) else 1.0):
                    ends += [step, str(monitor.stop_reason)]
                    break
    return ends


def found(folder: Path, rank: int) -> list[int | str]:
    """Where a training of two processes ends in which the first, which judges, finds something."""
    ends: list[int | str] = []
    for kind in ("ddp", "fsdp2"):
        model = parallel(kind)
        with (
            pytest.MonkeyPatch.context() as patch,
            joma.Monitor(
                model,
                every=1,
                run=folder / f"found-{kind}",
                inputs=next(batches(9)),
                budget=None,
                stop_on={"collapse"},
            ) as monitor,
        ):
            patch.setattr("joma.train.findings.judge", _collapsed_from_step_4)
            for step in range(1, 22):
                if monitor.step(1.0):
                    ends += [step, str(monitor.stop_reason)]
                    break
    return ends


def _collapsed_from_step_4(series: list[RecordedSeries], *, ended: bool) -> Judgement:
    if max(one.steps[-1] for one in series) < 4:
        return Judgement()
    return Judgement((Finding("attention_collapse", "warning", 4, "It collapsed.", ""),))


def _work(rank: int, place: str) -> None:
    folder = Path(place)
    done: dict[str, Any] = {}
    for kind in ("ddp", "fsdp2"):
        alone = train(parallel(kind), None, rank, 2)
        # The inputs of the second process are another batch: that of the first counts.
        inputs = next(batches(9 + rank))
        done[kind] = (alone, watched(parallel(kind), folder / kind, rank, 2, inputs))
    model = parallel("fsdp2")  # on what it sees itself, at its own cadence
    with joma.Monitor(model, every=2, run=folder / "seen") as monitor:
        done["seen"] = (done["fsdp2"][0], train(model, monitor, rank, 2))
    for fault in FAULTS:
        losses, summary = faulty(fault, folder / fault, rank)
        done[fault] = (done["fsdp2"][0], losses)
        (folder / f"{fault}-{rank}.txt").write_text(summary)
    done["stopped"], done["found"] = stopped(folder, rank), found(folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(done))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    run_in_two_processes(_work, folder)
    watched(whole(), folder / "one", 0, 1, next(batches(9)))
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "seen"])
def test_losses_are_the_same_to_the_bit(kind: str, folder: Path) -> None:
    for rank in (0, 1):
        alone, with_monitor = json.loads((folder / f"{rank}.json").read_text())[kind]
        assert with_monitor == alone


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_numbers_are_those_of_one_process(kind: str, folder: Path) -> None:
    one, several = (Run.open(folder / name).metrics.read() for name in ("one", kind))
    kept = [table["name"] != "loss" for table in (one, several)]
    for column in ("step", "name", "module", "kind", "layer", "head"):
        assert one[column][kept[0]].tolist() == several[column][kept[1]].tolist(), column
    wider = {"mlp_dead", "update_relative", "frozen", "update_stable_rank"}
    assert {"attention_entropy", "gradient_energy_8", *wider} <= set(one["name"])
    assert len(set(one["module"][one["name"] == "stable_rank"])) == 10  # five for each layer
    values = one["value"][kept[0]], several["value"][kept[1]]
    slack = np.where(one["name"][kept[0]] == "theorem1_residual", 1e-2, 2e-3)
    assert (np.abs(values[0] - values[1]) <= slack * np.maximum(np.abs(values[0]), 1e-3)).all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_process_holds_up_no_other(fault: str, folder: Path) -> None:
    for rank in (0, 1):
        alone, with_monitor = json.loads((folder / f"{rank}.json").read_text())[fault]
        assert with_monitor == alone
    said = {
        "model": "attention not measured since step 1: the forward pass failed in another process",
        "attention": "attention of encoder.layers.0.self_attn and 1 more not measured",
        "disk": "writing to the run folder failed",
    }
    assert said[fault] in (folder / f"{fault}-0.txt").read_text()


def test_processes_stop_together(folder: Path) -> None:
    ends = [json.loads((folder / f"{rank}.json").read_text())["stopped"] for rank in (0, 1)]
    another = "Another process met a condition of stop_on."
    assert ends[0] == [10, another, 10, another]
    own = "The loss is NaN since step 2; all weights are finite."
    assert ends[1] == [10, own, 10, own]
    ends = [json.loads((folder / f"{rank}.json").read_text())["found"] for rank in (0, 1)]
    assert ends == [[10, "It collapsed."] * 2, [10, another] * 2]


def test_what_every_process_sees_itself_is_kept_as_the_first_has_it(folder: Path) -> None:
    columns = Run.open(folder / "seen").metrics.read("attention_entropy")
    assert 1 in columns["step"]
