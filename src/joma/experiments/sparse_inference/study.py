"""What is measured of one model, part by part; each part is kept when it is done."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments._experiment import Request
from joma.experiments.sparse_inference.networks import (
    Texts,
    load_model,
    path_of,
    recomputed_loss,
    texts_of,
)
from joma.experiments.sparse_inference.setting import (
    BLOCKS,
    CHUNKED,
    CUT_POLICIES,
    LEAST_RECALL,
    PARTS,
    POLICIES,
    RELU,
    StudySize,
    keys_of,
    policy_of,
)
from joma.inference.allocation import Rule, allocate
from joma.inference.quality import (
    TASKS,
    TextLoss,
    attention_profiles,
    layer_costs,
    make_examples,
    task_score,
    text_loss,
)
from joma.models import Loaded
from joma.runs import Run

LONG_CHUNK = 64
"""Tokens read at once where the chunk changes nothing: full caches, windows and sinks."""
RULES: tuple[Rule, ...] = ("mass", "entropy")


def measure_model(run: Run, name: str, size: StudySize, request: Request) -> bool:
    """Measure what is missing of a model, in `groups/NAME` of the run; return if it is there."""
    if name != RELU and path_of(name, request) is None:
        return False
    config = {**asdict(size), "model": name, "seed": request.seed}
    folder = run.path / "groups" / name
    own = Run.resume(f"{run.name}-group", config, out=folder, device=request.device)
    missing = [part for part in PARTS if read_part(own, part) is None]
    if not missing:
        return True
    loaded = load_model(name, own, size, request)
    assert loaded is not None
    texts = texts_of(name, loaded, size, request.seed, request.progress)
    study = ModelStudy(name, loaded, texts, size, request)
    for part in missing:
        own.write_json(part, getattr(study, part)())
    return True


def read_part(run: Run, part: str) -> Any:
    """Return what was measured, None where it was not."""
    with suppress(JomaError):
        return run.read_json(part)
    return None


class ModelStudy:
    """Measures one model; each method returns what `PARTS` calls by its name, as JSON has it.

    Args:
        name: Name of the model.
        loaded: The model.
        texts: What it reads.
        size: Size of the experiment.
        request: What was asked of the experiment.
    """

    def __init__(
        self, name: str, loaded: Loaded, texts: Texts, size: StudySize, request: Request
    ) -> None:
        self.name, self.loaded, self.model = name, loaded, loaded.model
        self.texts, self.size, self.request = texts, size, request
        self.length = texts.judged.shape[1]

    def _report(self, part: str, total: int) -> Callable[[int], None]:
        return lambda done: self.request.progress(f"{self.name}, {part}", done, total)

    def _more(self, windows: int) -> int:
        return windows * len(self.texts.judged) // self.size.windows

    def text(self) -> dict[str, Any]:
        """Loss, bytes and time of every policy and budget; a part of it in other chunks."""
        size, judged = self.size, self.texts.judged
        cells = [("full", 1.0), *((one, share) for share in size.shares for one in POLICIES)]
        middle = middle_share(size.shares)
        report = self._report("loss", len(cells) + len(CHUNKED))
        rows = [
            self._row("plain", 1.0, LONG_CHUNK, text_loss(self.model, judged, chunk=LONG_CHUNK))
        ]
        for done, (policy, share) in enumerate(cells, 1):
            rows.append(self._measured(policy, share, size.chunk))
            report(done)
        for done, policy in enumerate(CHUNKED, 1):
            rows.append(self._measured(policy, middle, size.long_chunk, self._more(size.alone)))
            report(len(cells) + done)
        weights = sum(one.numel() for one in self.model.parameters())
        return {
            "rows": rows,
            "source": self.texts.source,
            "window": self.length,
            "parameters": weights,
            "special_tokens": self.loaded.special_tokens.describe() or "none",
            "middle": middle,
        }

    def alone(self) -> dict[str, Any]:
        """Loss token by token of the policies that depend on the chunk, at about 20%.

        Nothing else shows them exactly as many keys as a window has.
        """
        middle = middle_share(self.size.shares)
        rows = []
        for policy in CHUNKED:
            rows.append(self._measured(policy, middle, 1))
            self._report("token by token", len(CHUNKED))(len(rows))
        return {"rows": rows}

    def _measured(
        self, policy: str, share: float, chunk: int, windows: int | None = None
    ) -> dict[str, Any]:
        made = policy_of(policy, keys_of(share, self.length))
        loss = text_loss(self.model, self.texts.judged[:windows], made, chunk=chunk)
        return self._row(policy, share, chunk, loss)

    def _row(self, policy: str, share: float, chunk: int, loss: TextLoss) -> dict[str, Any]:
        return {
            "policy": policy,
            "share": share,
            "keys": keys_of(share, self.length),
            "chunk": chunk,
            "nll": loss.by_window.tolist(),
            "cache_bytes": loss.cache_bytes,
            "tokens_per_second": loss.tokens_per_second,
            "tokens_per_processor_second": loss.tokens / max(loss.processor_seconds, 1e-9),
        }

    def stream(self) -> dict[str, Any]:
        """Loss of a text that is longer than the cache, from the token on that it has no room for.

        Means over blocks of the stream, so that the rows of all policies can be paired.
        """
        streams, longest = self.texts.streams, self.loaded.context or 10**9
        keys = self.size.stream_keys
        keys = min(keys, longest // 4 if self.name == RELU else longest // 2)
        recomputed = recomputed_loss(self.loaded, streams, keys, LONG_CHUNK).numpy()
        end = recomputed.shape[1]
        found: dict[str, Any] = {}
        for done, policy in enumerate(("full", "window", "streaming"), 1):
            made = policy_of(policy, keys)
            loss = text_loss(self.model, streams, made, chunk=LONG_CHUNK, batch=len(streams))
            found[policy] = {
                "nll": _blocks(loss.nll[:, keys - 1 : keys - 1 + end]),
                "cache_bytes": loss.cache_bytes,
                "curve": _blocks(loss.nll.mean(0, keepdims=True), 4 * BLOCKS),
            }
            self._report("stream", 3)(done)
        found["recomputed"] = {"nll": _blocks(recomputed)}
        return {
            "policies": found,
            "tokens": streams.shape[1],
            "rows": len(streams),
            "keys": keys,
            "context": self.loaded.context,
        }

    def tasks(self) -> dict[str, Any]:
        """Recall of every task that the full cache can do."""
        size = self.size
        longest = (self.loaded.context or 10**9) - 16
        length = min(size.task_length, longest)
        found: dict[str, Any] = {}
        for done, (name, task) in enumerate(TASKS.items(), 1):
            try:
                examples = make_examples(
                    task, self.loaded, length=length, count=size.examples, seed=self.request.seed
                )
            except JomaError as error:
                found[name] = {"full": None, "why": str(error), "rows": []}
                continue
            full = task_score(self.model, examples, policy_of("full", 0), chunk=LONG_CHUNK)
            rows = []
            if full.recall >= LEAST_RECALL:
                rows = [
                    self._scored(examples, policy, share)
                    for share in size.task_shares
                    for policy in POLICIES
                ]
            found[name] = {"full": full.correct.tolist(), "why": "", "rows": rows}
            self._report("tasks", len(TASKS))(done)
        return {"tasks": found, "length": length}

    def _scored(self, examples: Any, policy: str, share: float) -> dict[str, Any]:
        keys = keys_of(share, len(examples[0].prompt))
        made = policy_of(policy, keys)
        score = task_score(self.model, examples, made, chunk=self.size.chunk)
        return {"policy": policy, "share": share, "keys": keys, "correct": score.correct.tolist()}

    def layers(self) -> dict[str, Any]:
        """What the probes say of each layer on other text, and what it costs to cut it alone."""
        size, chunk = self.size, self.size.long_chunk
        windows, keys = (
            self.texts.judged[: self._more(size.cut_windows)],
            keys_of(size.cut_share, self.length),
        )
        profiles = attention_profiles(self.model, self.texts.probed)
        full = text_loss(self.model, windows, policy_of("full", 0), chunk=chunk)
        costs = {}
        for policy in CUT_POLICIES:
            report = self._report(f"layers cut to {policy}", len(profiles))
            found = layer_costs(
                self.model, windows, policy_of(policy, keys), chunk=chunk, full=full, report=report
            )
            costs[policy] = (found.nll - found.full).tolist()
        return {
            "entropy": [one.entropy for one in profiles],
            "effective": [one.effective for one in profiles],
            "first": [one.first for one in profiles],
            "heavy": [one.heavy(keys / self.length) for one in profiles],
            "costs": costs,
            "keys": keys,
        }

    def allocation(self) -> dict[str, Any]:
        """Loss where a budget is spent evenly over the layers, and by what the probes say."""
        size, judged = self.size, self.texts.judged
        profiles = attention_profiles(self.model, self.texts.probed)
        choices: list[tuple[Rule, float]] = [
            (rule, floor) for rule in RULES for floor in size.floors
        ]
        choices.insert(0, ("even", 1.0))
        report = self._report("budgets by layer", len(size.spent_shares) * len(choices))
        rows = []
        for share in size.spent_shares:
            keys = keys_of(share, self.length) * len(profiles)
            for rule, floor in choices:
                policies = allocate(keys, profiles, rule=rule, floor=floor)
                loss = text_loss(self.model, judged, policies, chunk=size.long_chunk)
                budgets = [one.budget for one in policies]
                rows.append(
                    {
                        "share": share,
                        "rule": rule,
                        "floor": floor,
                        "budgets": budgets,
                        "nll": loss.by_window.tolist(),
                        "cache_bytes": loss.cache_bytes,
                    }
                )
                report(len(rows))
        return {"rows": rows}


def middle_share(shares: Sequence[float]) -> float:
    """Return the budget nearest to the published 20%."""
    return min(shares, key=lambda share: abs(share - 0.2))


def _blocks(nll: Any, count: int = BLOCKS) -> list[float]:
    """Return means over `count` consecutive parts of every row, one row after the other."""
    count = min(count, nll.shape[1])
    return [float(part.mean()) for row in nll for part in np.array_split(row, count)]
