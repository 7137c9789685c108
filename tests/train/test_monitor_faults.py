"""Bad days: whatever fails around the monitor, the training ends and its losses are the same."""

import copy
import errno
import gc
import io
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import joma
from joma.runs import Run
from tests.train._watched import VOCABULARY, batches, encoder, loss_of, of_run

STEPS = 5

Model = Callable[[], nn.Module]
At = Callable[[int, nn.Module], None]


def nothing(step: int, model: nn.Module) -> None:
    pass


def small() -> nn.Module:
    return encoder(layers=2, dropout=0.1)


def train(
    make: Model,
    *,
    at: At = nothing,
    after_step: Callable[[nn.Module, Tensor], Any] | None = None,
    watch: Callable[[nn.Module], None] = lambda model: None,
) -> list[float]:
    """Losses of a training; `at` changes the model after a step, `after_step` is the monitor."""
    torch.manual_seed(3)
    model = make()
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    feed, losses = batches(), []
    for step in range(1, STEPS + 1):
        tokens = next(feed)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        if after_step is not None:
            after_step(model, loss)
        at(step, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@dataclass
class Case:
    """A fault, and what the summary says of it.

    Attributes:
        says: Words in the summary.
        make: Makes the model.
        at: Changes the model after a step, with and without a monitor.
        options: Options of the monitor.
        loss: What the monitor is given in place of the loss.
        meanwhile: Breaks something of the monitor's after a step.
    """

    says: str = ""
    make: Model = small
    at: At = nothing
    options: dict[str, Any] = field(default_factory=dict)
    loss: Any = None
    meanwhile: Callable[[int, joma.Monitor], None] | None = None


def watched(case: Case, folder: Path, **more: Any) -> tuple[list[float], joma.Monitor]:
    monitors: list[joma.Monitor] = []
    options = {"every": 1, "run": folder / "run", "budget": None} | case.options | more

    def watch(model: nn.Module) -> None:
        monitors.append(joma.Monitor(model, **options))

    steps = count(1)

    def after_step(model: nn.Module, loss: Tensor) -> None:
        monitor, step = monitors[0], next(steps)
        monitor.step(loss if case.loss is None else case.loss)
        if step in (2, 4):
            monitor.measure()
        if case.meanwhile is not None:
            case.meanwhile(step, monitor)

    losses = train(case.make, at=case.at, after_step=after_step, watch=watch)
    monitors[0].close()
    return losses, monitors[0]


@cache
def alone(make: Model, at: At) -> list[float]:
    return train(make, at=at)


def check(case: Case, folder: Path, **more: Any) -> joma.Monitor:
    losses, monitor = watched(case, folder, **more)
    same = [
        a == b or (a != a and b != b)
        for a, b in zip(losses, alone(case.make, case.at), strict=True)
    ]
    assert all(same), (losses, alone(case.make, case.at))
    assert case.says in monitor.summary()
    return monitor


# Models with odd modules.


def reparametrised(change: Callable[[nn.Module], Any]) -> Model:
    def make() -> nn.Module:
        model = small()
        for layer in model.get_submodule("encoder.layers").children():
            change(layer.get_submodule("linear1"))
        return model

    return cache_of(make, change)


_made: dict[Any, Model] = {}


def cache_of(make: Model, key: Any) -> Model:
    return _made.setdefault(key, make)


def old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(module)


def old_spectral_norm(module: nn.Module) -> None:
    torch.nn.utils.spectral_norm(module)


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.5)


class Wrapped(nn.Module):
    """Has a weight that is no parameter of its own."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        return 2 * self.inner.weight

    @property
    def bias(self) -> Tensor:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def wrapped() -> nn.Module:
    model = small()
    for layer in model.get_submodule("encoder.layers").children():
        layer.linear1 = Wrapped(layer.linear1)  # type: ignore[arg-type]
    return model


class Table(nn.Embedding):
    """An embedding alone."""


def table() -> nn.Module:
    return Table(VOCABULARY, VOCABULARY)


class With(nn.Module):
    """An encoder with something odd next to it."""

    def __init__(self, odd: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.inner = small()
        self.odd = odd

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def with_complex() -> nn.Module:
    return With(nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64)))


def with_meta() -> nn.Module:
    model = With(nn.Linear(3, 3, device="meta"))
    model.odd.register_buffer("there", torch.zeros(2, device="meta"))  # type: ignore[union-attr]
    return model


def with_lazy() -> nn.Module:
    return With(nn.LazyLinear(3))


def with_integers() -> nn.Module:
    return With(nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False))


def with_nothing() -> nn.Module:
    return With(nn.Parameter(torch.zeros(0, 3)))


def with_float8() -> nn.Module:
    return With(nn.Parameter(torch.zeros(3, 3).to(torch.float8_e4m3fn), requires_grad=False))


class Complex(nn.Module):
    """Has complex parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, dtype=torch.complex64) / 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].abs()


class Lazy(nn.Module):
    """Learns its shapes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.output = nn.LazyLinear(VOCABULARY)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self(torch.zeros(1, 2, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.table(tokens))


class Failing(With):
    """Cannot be called in evaluation mode."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.training:
            raise KeyError("self")
        return self.inner(tokens)


def failing() -> nn.Module:
    return Failing(nn.Identity())


class Counting(With):
    """Lets calls it has counted, and a cache, decide what it computes."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.last = getattr(self, "last", 0.0) + 0.1
        return self.inner(tokens) * (1 + self.calls + self.last)


def counting() -> nn.Module:
    return Counting(nn.Identity())


class Rude(nn.Module):
    """Refuses to be asked for attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        raise RuntimeError("ask nothing")

    def forward(self, x: Tensor) -> Tensor:
        return x


def rude() -> nn.Module:
    model = With(nn.Identity())
    model.odd = Rude()
    return model


def frozen() -> nn.Module:
    model = small()
    model.get_submodule("encoder").requires_grad_(False)
    return model


class Sparse(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def half() -> nn.Module:
    return small().to(torch.bfloat16)


def tied() -> nn.Module:
    model = encoder(width=16)
    layers = model.get_submodule("encoder.layers")
    layers[1] = layers[0]  # type: ignore[index]
    return model


# What happens to a model while it is trained.


def from_step(step: int, change: Callable[[nn.Module], Any]) -> At:
    def at(now: int, model: nn.Module) -> None:
        if now == step:
            change(model)

    return _ats.setdefault((step, change), at)


_ats: dict[Any, At] = {}


def reparametrise(model: nn.Module) -> None:
    parametrizations.weight_norm(model.get_submodule("encoder.layers.0.linear1"))


def prune_some(model: nn.Module) -> None:
    pruned(model.get_submodule("encoder.layers.1.linear2"))


def remove_layer(model: nn.Module) -> None:
    layers = model.get_submodule("encoder.layers")
    del layers[1]  # type: ignore[attr-defined]


def add_layer(model: nn.Module) -> None:
    layers = model.get_submodule("encoder.layers")
    layers.append(copy.deepcopy(layers[0]))  # type: ignore[operator,index]


def other_shape(model: nn.Module) -> None:
    layer = model.get_submodule("encoder.layers.0")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layer.linear1, layer.linear2 = nn.Linear(16, 24), nn.Linear(24, 16)


def broken_gradient() -> nn.Module:
    model = small()
    calls = []

    def break_third(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient * torch.nan if len(calls) == 3 else gradient

    model.get_parameter("encoder.layers.1.linear1.weight").register_hook(break_third)
    return model


def break_all(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


# What happens to the folder.


def replace_by_file(step: int, monitor: joma.Monitor) -> None:
    if step == 2:
        assert monitor.run is not None
        shutil.rmtree(monitor.run.path)
        monitor.run.path.write_text("a file")


def remove_folder(step: int, monitor: joma.Monitor) -> None:
    if step == 2:
        assert monitor.run is not None
        shutil.rmtree(monitor.run.path)


def damage_part(step: int, monitor: joma.Monitor) -> None:
    if step == 3:
        assert monitor.run is not None
        part = sorted((monitor.run.path / "metrics").glob("part-*.parquet"))[0]
        part.write_bytes(part.read_bytes()[:100])


def raise_error(step: int, values: Any) -> None:
    raise ConnectionError("the dashboard is down")


class Unprintable:
    def __float__(self) -> float:
        raise ArithmeticError

    def __repr__(self) -> str:
        raise ArithmeticError


CASES: dict[str, Case] = {
    "weight norm": Case(make=reparametrised(parametrizations.weight_norm)),
    "spectral norm": Case(make=reparametrised(parametrizations.spectral_norm)),
    "orthogonal": Case(make=reparametrised(parametrizations.orthogonal)),
    "older weight norm": Case(make=reparametrised(old_weight_norm)),
    "older spectral norm": Case(make=reparametrised(old_spectral_norm)),
    "pruned": Case(make=reparametrised(pruned)),
    "wrapper with a weight property": Case(make=wrapped),
    "weight norm added": Case("the model changed since step", at=from_step(3, reparametrise)),
    "pruned meanwhile": Case("the model changed since step", at=from_step(3, prune_some)),
    "layer removed": Case("the model changed since step 4", at=from_step(3, remove_layer)),
    "layer added": Case("the model changed since step 4", at=from_step(3, add_layer)),
    "shapes changed": Case("the model changed since step 4", at=from_step(3, other_shape)),
    "embedding alone": Case("attention not measured", make=table),
    "complex parameter": Case(make=with_complex),
    "complex parameters only": Case("attention not measured", make=Complex),
    "meta parameter": Case(make=with_meta),
    "lazy parameter": Case(make=with_lazy),
    "lazy model": Case("attention not measured", make=Lazy),
    "integer parameter": Case(make=with_integers),
    "empty parameter": Case(make=with_nothing),
    "float8 parameter": Case(make=with_float8),
    "bfloat16": Case(make=half),
    "tied layers": Case(make=tied),
    "frozen layers": Case(make=frozen),
    "sparse gradients": Case(make=Sparse),
    "forward fails": Case("attention not measured since step 1: KeyError: 'self'", make=failing),
    "forward counts": Case(make=counting),
    "rude module": Case(make=rude),
    "one NaN gradient": Case(
        "The loss is NaN since step 4; the first weight that is not finite is "
        "encoder.layers.1.linear1.weight, seen after step 3; the gradient of "
        "encoder.layers.1.linear1.weight is not finite.",
        make=broken_gradient,
    ),
    "all weights NaN": Case(
        "The loss is NaN since step 4; the first weight that is not finite is embedding.weight and",
        at=from_step(3, break_all),
    ),
    "meta loss": Case(
        "the loss not recorded since step 1: loss must be one real number",
        loss=torch.zeros((), device="meta"),
    ),
    "huge loss": Case("The loss is infinite", loss=10**400),
    "complex loss": Case("loss must be one real number, got 1j", loss=1j),
    "complex tensor as loss": Case(
        "must be one real number, got torch.complex64", loss=torch.tensor(1j)
    ),
    "text as loss": Case("must be one real number, got 'low'", loss="low"),
    "several losses": Case("loss must be one number, got shape (2,)", loss=torch.zeros(2)),
    "losses of nothing": Case("loss must be one number, got shape (0,)", loss=torch.zeros(0)),
    "loss that cannot be asked": Case("the loss not recorded", loss=Unprintable()),
    "folder replaced by a file": Case("writing to the run folder", meanwhile=replace_by_file),
    "folder removed": Case(meanwhile=remove_folder),
    "part damaged": Case("merging the metrics log failed since step 5", meanwhile=damage_part),
    "logger fails": Case(
        "logger raise_error dropped since step 1: the dashboard is down",
        options={"loggers": [raise_error]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_training_does_not_notice(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)


# Faults of the system, of this package, and of how the monitor is used.


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing can be written in the block."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", refuse)
        yield


def test_a_disk_that_is_full_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk(monkeypatch):
        monitor = check(Case("numbers in memory"), tmp_path)
        assert "No space left on device" in monitor.summary()
        assert monitor.run is None


def test_a_disk_that_fills_up_and_is_emptied_again_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = full_disk(monkeypatch)

    def fill(step: int, monitor: joma.Monitor) -> None:
        if step == 2:
            full.__enter__()
        if step == 4:
            full.__exit__(None, None, None)

    monitor = check(Case("writing to the run folder failed", meanwhile=fill), tmp_path)
    assert "since step 3" in monitor.summary()
    run = Run.open(tmp_path / "run")
    assert of_run(run, "loss")[0] == list(range(1, STEPS + 1))
    assert set(of_run(run, "attention_entropy")[0]) == set(range(1, STEPS + 1))


def test_a_disk_that_stays_full_keeps_numbers_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create("monitor", {}, out=tmp_path / "made")
    with full_disk(monkeypatch):
        says = "writing to the run folder failed"
        monitor = check(Case(says, loss=torch.tensor(torch.nan)), tmp_path, run=run)
        assert f"The loss is NaN since step 1 ({STEPS} of {STEPS} steps)" in str(monitor.findings)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("probes.spectrum.stable_rank", "stable_rank of encoder.layers.0.self_attn"),
        ("probes.embedding.embedding_overlap", "embedding_overlap of embedding"),
        ("probes.spectrum.effective_rank", "effective_rank of encoder.layers.0.self_attn"),
        ("probes.AttentionAccumulator.update", "attention of encoder.layers.0.self_attn"),
        ("runs.Metrics.append", "writing to the run folder failed"),
        ("train.findings.judge", "findings not made"),
    ],
)
def test_our_own_defects_are_noted(
    where: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("a lot")

    monkeypatch.setattr(f"joma.{where}", fail)
    check(Case(says), tmp_path)


def test_ctrl_c_in_a_measurement_is_not_caught(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, SystemExit):

        def stop(step: int, values: Any, error: type[BaseException] = error) -> None:
            raise error

        model = small()
        monitor = joma.Monitor(model, run=tmp_path / error.__name__, loggers=[stop])
        with pytest.raises(error):
            monitor.step(1.0)
        assert all(module.training for module in model.modules())
        monitor.close()


def test_a_logger_that_fails_later_is_dropped_alone(tmp_path: Path) -> None:
    heard: dict[str, list[int]] = {"good": [], "bad": []}

    def good(step: int, values: Any) -> None:
        heard["good"].append(step)

    def bad(step: int, values: Any) -> None:
        heard["bad"].append(step)
        if step == 3:
            raise TypeError

    case = Case("dropped since step 3: TypeError", options={"loggers": [bad, good]})
    check(case, tmp_path)
    assert set(heard["good"]) == set(range(1, STEPS + 1))
    assert set(heard["bad"]) == {1, 2, 3}


def test_a_lazy_model_draws_its_weights_itself(tmp_path: Path) -> None:
    tokens = next(batches())
    drawn = []
    for watched in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LazyLinear(VOCABULARY))
        if watched:
            with joma.Monitor(model, run=tmp_path / "run", inputs=tokens) as monitor:
                monitor.measure()
                model(tokens)
                monitor.step(1.0)
        else:
            model(tokens)
        drawn.append(model[1].weight)
    assert torch.equal(*drawn)
    assert of_run(Run.open(tmp_path / "run"), "loss")[0] == [1]


def test_a_forgotten_monitor_is_closed_in_the_midst_of_another_ones_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sync = small(), os.fsync
    gc.disable()
    forgotten = joma.Monitor(model, run=tmp_path / "a")
    forgotten.itself = forgotten  # type: ignore[attr-defined]
    del forgotten
    with joma.Monitor(model, run=tmp_path / "b") as monitor:
        monkeypatch.setattr("os.fsync", lambda file: (gc.collect(), sync(file))[1])
        monitor.step(1.0)
    gc.enable()
    assert Run.open(tmp_path / "a").read_json("outcome") == {"status": "unclosed"}


def test_steps_from_several_threads(tmp_path: Path) -> None:
    model = small()
    monitor = joma.Monitor(
        model, every=10, run=tmp_path / "run", inputs=next(batches()), budget=None
    )
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                monitor.step(1.0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.close()
    assert not failed
    assert of_run(Run.open(tmp_path / "run"), "loss")[0] == list(range(1, 41))


def test_a_monitored_model_is_copied_saved_and_pickled_without_a_trace(tmp_path: Path) -> None:
    model = small()
    monitor = joma.Monitor(model, run=tmp_path / "run")
    plain = small()
    for kind in ("deepcopy", "pickle", "save"):
        if kind == "deepcopy":
            other = copy.deepcopy(model)
        elif kind == "pickle":
            data = pickle.dumps(model)
            assert b"joma" not in data
            other = pickle.loads(data)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            assert b"joma" not in file.getvalue()
            file.seek(0)
            other = torch.load(file, weights_only=False)  # what was just written
        for module, same in zip(other.modules(), plain.modules(), strict=True):
            assert module._forward_pre_hooks == same._forward_pre_hooks
            assert module.__dict__.keys() == same.__dict__.keys() | (
                {"_compiled_call_impl"} & module.__dict__.keys()
            )
            assert module.__dict__.get("_compiled_call_impl") is None
        other(next(batches()))
    monitor.measure()
    assert not of_run(Run.open(tmp_path / "run"), "mlp_dead")[0]  # a copy's call is not the model's
    model(next(batches()))
    monitor.step(1.0)
    assert of_run(Run.open(tmp_path / "run"), "mlp_dead")[0]
    assert "_compiled_call_impl" not in vars(model)
    monitor.close()
