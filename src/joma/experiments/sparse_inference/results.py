"""What was measured of all models, read from the run folders of their groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.common.paired import Paired, paired
from joma.errors import JomaError
from joma.experiments.sparse_inference.bridge import PREDICTORS, Correlation, held_out, spearman
from joma.experiments.sparse_inference.setting import (
    CHUNKED,
    CUT_POLICIES,
    LEAST_RECALL,
    PARTS,
    TITLES,
    StudySize,
)
from joma.runs import Run


@dataclass(frozen=True, eq=False)
class ModelResults:
    """What was measured of one model; each part as `study.ModelStudy` returns it.

    Attributes:
        name: Name of the model.
        parts: The parts by name.
        chunk: Tokens read at once where policies are compared.
    """

    name: str
    parts: Mapping[str, Any]
    chunk: int

    @property
    def title(self) -> str:
        """What figures and sentences call the model."""
        return TITLES[self.name]

    def row(self, policy: str, share: float = 1.0, chunk: int | None = None) -> Mapping[str, Any]:
        """Return the loss of a policy at a budget."""
        chunk = self.chunk if chunk is None else chunk
        return next(
            one
            for one in self.parts["text"]["rows"]
            if (one["policy"], one["share"], one["chunk"]) == (policy, share, chunk)
        )

    @property
    def shares(self) -> list[float]:
        """The budgets, as shares of the window."""
        rows = self.parts["text"]["rows"]
        return sorted({one["share"] for one in rows if one["policy"] not in ("full", "plain")})

    @property
    def middle(self) -> float:
        """The budget nearest to the published 20%."""
        return self.parts["text"]["middle"]

    def rise(self, policy: str, share: float, than: str = "full") -> Paired:
        """Return how much higher a policy's loss is than another one's at the same budget."""
        other = self.row(than, 1.0 if than == "full" else share)
        return paired(self.row(policy, share)["nll"], other["nll"], "windows")

    def alone(self, policy: str) -> list[float]:
        """Return the loss of each window token by token, at about 20% of the keys.

        A full cache, a window and sinks have the same loss in any chunks.
        """
        if policy not in CHUNKED:
            return self.row(policy, 1.0 if policy == "full" else self.middle)["nll"]
        return next(one for one in self.parts["alone"]["rows"] if one["policy"] == policy)["nll"]

    def rise_alone(self, policy: str, than: str = "full") -> Paired:
        """Return how much higher a policy's loss is than another one's, both token by token."""
        return paired(self.alone(policy), self.alone(than), "windows")

    def by_chunk(self, policy: str, chunk: int) -> Paired:
        """Return how much higher the loss is in chunks than token by token."""
        chunks = self.row(policy, self.middle, chunk)["nll"]
        return paired(chunks, self.alone(policy)[: len(chunks)], "windows")

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.parts["text"]["parameters"]

    @property
    def first_mass(self) -> float:
        """Attention on the first token, mean over layers."""
        return float(np.mean(self.parts["layers"]["first"]))

    def stream_rise(self, policy: str) -> Paired:
        """Return how much higher the loss of a long stream is than with recomputed windows."""
        found = self.parts["stream"]["policies"]
        return paired(found[policy]["nll"], found["recomputed"]["nll"], "blocks")

    @property
    def tasks(self) -> dict[str, Any]:
        """The tasks that the full cache can do."""
        found = self.parts["tasks"]["tasks"]
        return {name: one for name, one in found.items() if _recall(one) >= LEAST_RECALL}

    @property
    def dropped(self) -> dict[str, str]:
        """The tasks that it cannot do, and why they do not count."""
        found = self.parts["tasks"]["tasks"]
        return {
            name: one["why"] or f"full cache {_recall(one):.0%}"
            for name, one in found.items()
            if not _recall(one) >= LEAST_RECALL
        }

    @property
    def features(self) -> NDArray[np.float64]:
        """What the probes say of each layer, (layers, predictors)."""
        return np.array([self.parts["layers"][name] for name in PREDICTORS], float).T

    def costs(self, policy: str) -> NDArray[np.float64]:
        """Return what it costs to cut each layer alone, (layers, windows)."""
        return np.array(self.parts["layers"]["costs"][policy], float)


@dataclass(frozen=True)
class SpentBudget:
    """A budget spent unevenly over the layers, next to one spent evenly.

    Attributes:
        model: Name of the model.
        share: The budget as a share of the window.
        rule: How it was spent.
        floor: What a layer holds at least.
        chosen_on: Difference of the loss on the windows that the rule was chosen on.
        judged_on: Difference on the others.
    """

    model: str
    share: float
    rule: str
    floor: float
    chosen_on: Paired
    judged_on: Paired


def collect(run: Run, size: StudySize) -> list[ModelResults]:
    """Read the models of which everything was measured."""
    found = []
    for name in TITLES:
        try:
            own = Run.open(run.path / "groups" / name)
            parts = {part: own.read_json(part) for part in PARTS}
        except JomaError:
            continue
        found.append(ModelResults(name, parts, size.chunk))
    return found


def spent_budgets(models: Sequence[ModelResults]) -> list[SpentBudget]:
    """Return every rule next to an even budget, on either half of the windows."""
    found = []
    for model in models:
        rows = model.parts["allocation"]["rows"]
        even = {one["share"]: np.array(one["nll"]) for one in rows if one["rule"] == "even"}
        for one in rows:
            if one["rule"] == "even":
                continue
            ours, others = np.array(one["nll"]), even[one["share"]]
            halves = [paired(ours[half::2], others[half::2], "windows") for half in (0, 1)]
            found.append(SpentBudget(model.name, one["share"], one["rule"], one["floor"], *halves))
    return found


def chosen_rule(spent: Sequence[SpentBudget]) -> tuple[str, float] | None:
    """Return the rule with the lowest loss over models and budgets on the first halves."""
    choices = {(one.rule, one.floor) for one in spent}
    if not choices:
        return None

    def mean(choice: tuple[str, float]) -> float:
        own = [one.chosen_on.mean for one in spent if (one.rule, one.floor) == choice]
        return float(np.mean(own))

    return min(sorted(choices), key=mean)


@dataclass(frozen=True)
class BridgeRow:
    """How the layers of one model can be ranked by what the probes say.

    Attributes:
        model: Name of the model.
        policy: What one layer alone was cut to.
        single: Correlation of each predictor with the cost.
        combined: Of their combination, fitted on the other models; None with one model.
        reliability: Of the costs on half of the windows with those on the other half: what a
            perfect predictor of the costs could reach about.
    """

    model: str
    policy: str
    single: Mapping[str, Correlation]
    combined: Correlation | None
    reliability: float


def bridge_rows(models: Sequence[ModelResults]) -> list[BridgeRow]:
    """Return the correlations of every model and policy."""
    found = []
    for policy in CUT_POLICIES:
        costs = {model.name: model.costs(policy).mean(1) for model in models}
        combined = held_out({model.name: model.features for model in models}, costs)
        for model in models:
            own = costs[model.name]
            single = {
                name: spearman(list(model.features[:, index]), list(own))
                for index, name in enumerate(PREDICTORS)
            }
            windows = model.costs(policy)
            halves = [list(windows[:, half::2].mean(1)) for half in (0, 1)]
            reliability = (
                spearman(halves[0], halves[1]).value if windows.shape[1] > 1 else float("nan")
            )
            found.append(
                BridgeRow(model.name, policy, single, combined.get(model.name), reliability)
            )
    return found


def _recall(task: Mapping[str, Any]) -> float:
    return float("nan") if task["full"] is None else float(np.mean(task["full"]))
