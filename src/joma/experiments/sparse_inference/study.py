"""What is measured of one model, part by part; each part is kept when it is done."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments._experiment import Request
from joma.experiments.sparse_inference.models import (
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
    PARTS,
    POLICIES,
    RELU,
    StudySize,
    keys_of,
    policy_of,
)
from joma.inference.quality import TextLoss, attention_profiles, layer_costs, text_loss
from joma.models import Loaded
from joma.runs import Run

LONG_CHUNK = 64
"""Tokens read at once where the chunk changes nothing: full caches, windows and sinks."""


def measure_model(run: Run, name: str, size: StudySize, request: Request) -> None:
    """Measure what is missing of a model that is there, in `groups/NAME` of the run."""
    if name != RELU and path_of(name, request) is None:
        return
    config = {**asdict(size), "model": name, "seed": request.seed}
    folder = run.path / "groups" / name
    own = Run.resume(f"{run.name}-group", config, out=folder, device=request.device)
    missing = [part for part in PARTS if read_part(own, part) is None]
    if missing:
        loaded = load_model(name, own, size, request)
        assert loaded is not None
        texts = texts_of(name, loaded, size, request.seed, request.progress)
        study = ModelStudy(name, loaded, texts, size, request)
        for part in missing:
            own.write_json(part, getattr(study, part)())


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
        self.middle = min(size.shares, key=lambda share: abs(share - 0.2))

    def _report(self, part: str, total: int) -> Callable[[int], None]:
        return lambda done: self.request.progress(f"{self.name}, {part}", done, total)

    def text(self) -> dict[str, Any]:
        """Loss, bytes and time of every policy and budget."""
        cells = [("full", 1.0), *((one, s) for s in self.size.shares for one in POLICIES)]
        report = self._report("loss", len(cells))
        loss = text_loss(self.model, self.texts.judged, chunk=LONG_CHUNK)
        rows = [self._row("plain", 1.0, LONG_CHUNK, loss)]
        for policy, share in cells:
            rows.append(self._measured(policy, share, self.size.chunk))
            report(len(rows) - 1)
        return {
            "rows": rows,
            "source": self.texts.source,
            "window": self.length,
            "parameters": sum(one.numel() for one in self.model.parameters()),
            "special_tokens": self.loaded.special_tokens.describe() or "none",
            "middle": self.middle,
        }

    def alone(self) -> dict[str, Any]:
        """Loss token by token of the policies that depend on the chunk, at about 20%.

        Nothing else shows them exactly as many keys as a window has.
        """
        report = self._report("token by token", len(CHUNKED))
        rows = []
        for policy in CHUNKED:
            rows.append(self._measured(policy, self.middle, 1))
            report(len(rows))
        return {"rows": rows}

    def _measured(self, policy: str, share: float, chunk: int) -> dict[str, Any]:
        made = policy_of(policy, keys_of(share, self.length))
        loss = text_loss(self.model, self.texts.judged, made, chunk=chunk)
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
        keys = min(self.size.stream_keys, longest // 4 if self.name == RELU else longest // 2)
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

    def layers(self) -> dict[str, Any]:
        """What the probes say of each layer on other text, and what it costs to cut it alone."""
        size, chunk = self.size, self.size.long_chunk
        windows = self.texts.judged[: size.cut_windows * len(self.texts.judged) // size.windows]
        keys = keys_of(size.cut_share, self.length)
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


def _blocks(nll: Any, count: int = BLOCKS) -> list[float]:
    """Return means over `count` consecutive parts of every row, one row after the other."""
    count = min(count, nll.shape[1])
    return [float(part.mean()) for row in nll for part in np.array_split(row, count)]
