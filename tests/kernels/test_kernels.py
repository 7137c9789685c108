"""Which GPUs run kernels, with stand-ins for GPU and trial; and ways that do not fit."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from joma.kernels import choice as kernels
from joma.kernels.choice import DoesNotFitError, Fitting, has_kernels

GPU = torch.device("cuda", 0)


class Machine:
    """What torch says of a GPU, and what a trial on it does."""

    def __init__(self) -> None:
        self.capability, self.capturing, self.mode = (9, 0), False, 0
        self.trials = list[int]()  # whether waiting was forbidden in each
        self.outcome: bool | Exception = True

    def doubles_numbers(self, device: torch.device) -> bool:
        assert device == GPU
        self.trials.append(self.mode)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def set_mode(self, mode: int | str) -> None:
        self.mode = 0 if mode == "default" else int(mode)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(kernels, "_has_kernels", {})
    monkeypatch.setattr(kernels, "_said", set())
    monkeypatch.setattr(torch.version, "hip", None)
    stands: dict[str, Any] = {
        "is_current_stream_capturing": lambda: found.capturing,
        "get_device_capability": lambda device: found.capability,
        "get_device_name": lambda device: "Some GPU",
        "get_sync_debug_mode": lambda: found.mode,
        "set_sync_debug_mode": found.set_mode,
    }
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    trial = SimpleNamespace(doubles_numbers=found.doubles_numbers)
    monkeypatch.setitem(sys.modules, "joma.kernels._trial", trial)
    return found


def _old(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    machine.capability = (7, 5)


def _of_amd(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "hip", "6.4")


def _without_triton(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.delitem(sys.modules, "joma.kernels._trial")
    patch.setitem(sys.modules, "triton", None)


def _ending(outcome: Any) -> Any:
    return lambda machine, patch: setattr(machine, "outcome", outcome)


@pytest.mark.parametrize(
    ("change", "trials", "said"),
    [
        (_ending(False), 1, "one gave wrong numbers"),
        (_ending(RuntimeError("no C compiler.\nSet CC")), 1, "no C compiler."),
        (_old, 0, "Some GPU has compute capability 7.5, Triton needs 8.0"),
        (_of_amd, 0, "NVIDIA"),
        (_without_triton, 0, "Triton is not installed"),
    ],
)
def test_why_there_are_none_is_said_once(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    trials: int,
    said: str,
):
    assert not has_kernels(torch.device("cpu"))
    assert caplog.text == ""
    change(machine, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert not has_kernels(GPU)
        assert not has_kernels(GPU)
    assert len(machine.trials) == trials
    assert len(caplog.messages) == 1
    assert said in caplog.text
    assert "Set CC" not in caplog.text


@pytest.mark.parametrize("memory", [torch.OutOfMemoryError, RuntimeError])
def test_a_gpu_is_tried_once_it_has_memory_and_captures_no_graph(
    machine: Machine, memory: type[Exception], caplog: pytest.LogCaptureFixture
):
    machine.capturing = True
    assert not has_kernels(GPU)
    assert machine.trials == []
    machine.capturing, machine.outcome = False, memory("CUDA: out of memory")
    assert not has_kernels(GPU)
    machine.outcome = True
    assert has_kernels(GPU)
    machine.capturing = True
    assert has_kernels(GPU)
    assert len(machine.trials) == 2
    assert caplog.text == ""


def test_an_error_of_what_ran_before_is_raised(machine: Machine):
    machine.outcome = torch.AcceleratorError("an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        has_kernels(GPU)


@pytest.mark.parametrize("outcome", [True, RuntimeError("broken")])
def test_a_trial_may_wait_where_waiting_is_an_error(machine: Machine, outcome: Any):
    """`torch.cuda.set_sync_debug_mode("error")` would make it fail, and kernels with it."""
    machine.mode, machine.outcome = 2, outcome
    assert has_kernels(GPU) is (outcome is True)
    assert machine.trials == [0]
    assert machine.mode == 2


class OutOfResources(Exception):  # noqa: N818 - as Triton has it
    """Stands for Triton's."""

    __module__ = "triton.runtime.errors"


class CompilationError(Exception):
    """Stands for Triton's, of a mistake in a kernel."""

    __module__ = "triton.compiler.errors"


class Work:
    """Launches in those ways that fit, and keeps those that were tried."""

    def __init__(self, *fit: int, error: Exception | None = None) -> None:
        self.fit, self.tried = fit, list[int]()
        self.error = error if error else OutOfResources("out of resource: shared memory\nsmaller")

    def __call__(self, way: int) -> None:
        self.tried.append(way)
        if way not in self.fit:
            raise self.error


WAYS = (4, 3, 2)


@pytest.mark.parametrize(
    "error", [None, RuntimeError("PassManager::run failed")], ids=["resources", "compiler"]
)
def test_the_first_way_that_fits_is_remembered(error: Exception | None):
    fitting = Fitting()
    work = Work(3, 2, error=error)
    fitting.launch("bfloat16", WAYS, work)
    fitting.launch("bfloat16", WAYS, work)
    assert work.tried == [4, 3, 3]
    fitting.launch("float32", WAYS, work)
    assert work.tried == [4, 3, 3, 4, 3]


def test_what_fits_in_no_way_is_not_tried_again():
    fitting = Fitting()
    work = Work()
    for _ in range(2):
        with pytest.raises(DoesNotFitError) as raised:
            fitting.launch("bfloat16", WAYS, work)
        assert str(raised.value) == "OutOfResources: out of resource: shared memory"
    assert work.tried == [4, 3, 2]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("called a synchronizing CUDA operation"),
        ValueError("wrong"),
        CompilationError("at 7:22"),
    ],
)
def test_other_errors_are_raised(error: Exception):
    fitting = Fitting()
    work = Work(error=error)
    with pytest.raises(type(error)):
        fitting.launch("bfloat16", WAYS, work)
    assert work.tried == [4]
    work.fit = (4,)
    fitting.launch("bfloat16", WAYS, work)
    assert work.tried == [4, 4]
