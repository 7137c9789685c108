"""Optimizers by name: torch's own and one with a state of another shape, killed and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from joma.data import LatentHierarchy
from joma.models import Transformer, TransformerConfig
from joma.optim import StackedAdam, registry
from joma.runs import Run
from joma.train import Ensemble, fit
from tests.train._language import STEPS, Stop, begin, make, stop_after, write_text
from tests.train._small import SEEDS


class Factored(torch.optim.Optimizer):
    """Gradient descent with the row and column means of g² in place of all of them."""

    def __init__(self, params: Any, lr: float, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                rows, columns = p.grad.square().mean(-1), p.grad.square().mean(-2)
                if not state:
                    state.update(rows=torch.zeros_like(rows), columns=torch.zeros_like(columns))
                    state.update(half=torch.zeros(3, dtype=torch.bfloat16), made=0, name="p")
                state["made"] += 1
                state["half"] = state["half"] + 0.1
                for key, mean in (("rows", rows), ("columns", columns)):
                    state[key].lerp_(mean, 1 - group["decay"])
                scale = state["rows"].unsqueeze(-1) * state["columns"].unsqueeze(-2)
                scale = scale.sqrt().sqrt() * state["half"][0].to(p.dtype) + 1e-8
                p.sub_(group["lr"] * p.grad / (scale * state["made"] ** 0.5))


class Vectors(Factored):
    """The same for biases too, which have one axis."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        flat = [p for group in self.param_groups for p in group["params"] if p.ndim < 2]
        for p in flat:
            p.data, p.grad = p.data.unsqueeze(0), p.grad.unsqueeze(0)
        super().step()
        for p in flat:
            p.grad, p.data = None, p.data.squeeze(0)


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("factored", Vectors)


NAMES = {
    "factored": {"decay": 0.8},
    "adam": {"eps": 1e-7},
    "sgd": {"momentum": 0.9, "weight_decay": 0.01},
    "adafactor": {},
    "nadam": {},
}


def ensemble(name: str, seeds: tuple[int, ...] = SEEDS) -> Ensemble:
    config = TransformerConfig(vocabulary=21, outputs=8, layers=1, width=8, hidden=8)
    model = Transformer(config, seeds, dtype=torch.float64)
    data = LatentHierarchy(8, 2, (6, 8), tokens=20, length=12, seeds=seeds)
    settings = {key: value for key, value in NAMES[name].items() if key != "weight_decay"}
    optimizer = registry.make(name, model.named_parameters(), 1e-2, **settings)
    return Ensemble(
        model,
        optimizer,
        lambda step: data.distinct(32, step),
        precision="float64",
        restart_every=13,
    )


def trained(name: str, folder: Path, stop: int = 10**9) -> dict[str, Any]:
    """What is left of a training of 20 steps, if it is not stopped before."""
    run = Run.resume("small", {}, out=folder)

    def progress(done: int, total: int) -> None:
        if done >= stop:
            raise Stop

    try:
        fit(ensemble(name), run, 20, checkpoint_seconds=0.0, keep_last=True, progress=progress)
    except Stop:
        return {}
    return left(folder)


def left(folder: Path) -> dict[str, Any]:
    """Losses, and the weights and the optimizer's state of the last checkpoint."""
    run = Run.open(folder)
    found = run.checkpoints.latest().checkpoint
    assert found is not None
    losses = run.metrics.read("loss")["value"].tolist()
    arrays = {key: (one.shape, one.tobytes()) for key, one in found.arrays.items()}
    return {"losses": losses, "arrays": arrays}


@pytest.mark.parametrize("name", NAMES)
def test_an_ensemble_resumes_with_any_optimizer(tmp_path: Path, name: str):
    straight = trained(name, tmp_path / "straight")
    for stop in (7, 15):
        trained(name, tmp_path / str(stop), stop)
        assert trained(name, tmp_path / str(stop)) == straight
    assert straight["losses"][-1] != straight["losses"][0]
    if name == "factored":
        key = "optimizer.rows.blocks.0.mlp.lower.weight"
        assert straight["arrays"][key][0] == (len(SEEDS), 8)


@pytest.mark.parametrize("name", NAMES)
def test_a_language_model_resumes_with_any_optimizer(tmp_path: Path, name: str):
    text = write_text(tmp_path / "text")
    config = make(text, optimizer={"name": name, **NAMES[name]})
    assert config.sections()["optimizer"].items() >= NAMES[name].items()
    begin(config, tmp_path / "straight")
    for step in (1, 7):
        with pytest.raises(Stop):
            begin(config, tmp_path / str(step), progress=stop_after(step))
        assert step <= begin(config, tmp_path / str(step)).begun_at < STEPS
        assert left(tmp_path / str(step)) == left(tmp_path / "straight")


def test_the_same_optimizer_with_other_settings_is_another(tmp_path: Path):
    trained("adam", tmp_path / "run", 5)
    for other, words in (("sgd", "optimizer Adam"), ("nadam", "optimizer Adam")):
        with pytest.raises(ValueError, match=f"ensemble must have {words}"):
            trained(other, tmp_path / "run")


def test_what_is_not_there_is_refused_with_what_is():
    parameters = [("weight", torch.nn.Parameter(torch.zeros(2, 3)))]
    with pytest.raises(ValueError, match=r"there is no optimizer 'adamv'; available: adam"):
        registry.make("adamv", parameters, 1e-3)
    with pytest.raises(ValueError, match=r"^optimizer sgd has no setting 'betas'; it has momentum"):
        registry.make("sgd", parameters, 1e-3, betas=(0.9, 0.99))
    with pytest.raises(ValueError, match=r"^optimizer sgd cannot be used .*Invalid momentum"):
        registry.make("sgd", parameters, 1e-3, momentum=-1.0)


def test_those_of_ensembles_are_not_for_language_models():
    assert "stacked_adam" not in registry.factories()
    parameters = [("weight", torch.nn.Parameter(torch.zeros(2, 3)))]
    made = registry.make("stacked_adam", parameters, [1e-3, 1e-2], clip=0.5)
    assert isinstance(made, StackedAdam)
    assert made.clip == 0.5


def test_a_state_that_cannot_be_saved_is_named():
    class Odd(Factored):
        def state_dict(self) -> Any:
            return {"state": {0: {"function": print}}, "param_groups": []}

    model = Transformer(TransformerConfig(21, 8, layers=1, width=8, hidden=8), SEEDS)
    odd: Any = Odd(model.named_parameters(), 1e-3)
    networks = Ensemble(model, odd, lambda step: Tensor())
    with pytest.raises(
        ValueError, match=r"tensors, numbers, texts.* got builtin_function_or_method"
    ):
        dict(networks.state())
