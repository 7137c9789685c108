"""The models and their texts, and what is measured of each; a part is kept when it is done."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.analysis.probing import text_windows
from joma.common.progress import Progress
from joma.data import corpus
from joma.errors import JomaError
from joma.experiments._experiment import Request
from joma.experiments.sparse_inference import (
    BLOCKS,
    CHUNKED,
    CUT_POLICIES,
    FILES,
    PARTS,
    POLICIES,
    RELU,
    SMALL_MODELS,
    STORIES,
    StudySize,
    keys_of,
    policy_of,
)
from joma.inference.quality import attention_profiles, layer_costs, text_loss
from joma.models import Loaded, load
from joma.runs import Run
from joma.train import language

MODELS = "JOMA_MODELS"
"""The environment variable with the folder in which models are looked for."""
_SAMPLED_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Texts:
    """What a model reads; every row begins with the model's special tokens.

    Attributes:
        judged: Windows whose loss is measured, (windows, tokens).
        probed: Windows of other text that attention is probed on.
        streams: Long rows, (rows, tokens).
        source: What the text is.
    """

    judged: Tensor
    probed: Tensor
    streams: Tensor
    source: str


def path_of(name: str, request: Request) -> Path | None:
    """Return where a model is that was given or is found; None where it is left out.

    Raises:
        JomaError: The path that was given does not exist.
    """
    given = str(request.options.get(name, "none"))
    if given == "none":
        return None
    if given != "found":
        if not Path(given).exists():
            raise JomaError(
                f"{name} must be a model's file or folder, 'found' or 'none', got {given!r}"
            )
        return Path(given)
    folder = os.environ.get(MODELS)
    places = [Path(folder) / file for file in FILES[name]] if folder else []
    return next((place for place in places if place.exists()), None)


def trained_relu(run: Run, size: StudySize, request: Request) -> Path:
    """Train the ReLU model unless it is there, and return its folder."""
    relu, width = size.relu, size.relu.width
    model = {"type": "opt", "hidden_size": width, "word_embed_proj_dim": width, "dropout": 0.0}
    model |= {"ffn_dim": 4 * width, "max_position_embeddings": relu.context}
    model |= {"num_hidden_layers": relu.layers, "num_attention_heads": relu.heads}
    text = {"corpus": size.corpus, "tokenizer": "bpe", "vocabulary": relu.vocabulary}
    rate = {"learning_rate": 2e-3, "warmup": min(50, relu.steps // 4)}
    sections = {
        "model": model,
        "data": {**text, "window": relu.context - 1, "batch": relu.batch},
        "optimizer": {**rate, "schedule": "cosine", "final": 0.1},
        "training": {"steps": relu.steps, "seed": request.seed},
        "checkpoints": {"schedule": [relu.steps]},
        "validation": {"every": 0},
        "monitor": {"off": True},
    }
    config = language.Config.of(sections)
    own = Run.resume("train", config.sections(), out=run.path / "relu", device=request.device)
    folder = language.series_folder(own.path, relu.steps)
    if not folder.is_dir():
        language.train(config, own, progress=request.progress)
    return folder


def texts_of(name: str, loaded: Loaded, size: StudySize, seed: int, progress: Progress) -> Texts:
    """Return what a model reads: the test text of the corpus, stories15M its own samples."""
    window, rows, stream = size.window, size.stream_rows, size.stream
    longest, count = loaded.context or stream, size.windows_of(name)
    if name == RELU:  # learned positions end with the context: no stream can be longer
        rows, stream = 4 * rows, longest
    if name in (RELU, STORIES):
        window = min(window, longest)
    if name == STORIES:
        parts = [count, size.probed, rows * -(-stream // window)]
        samples = sampled(loaded, sum(parts), window, seed, progress)
        judged, probed, rest = samples.split(parts)
        # A stream of many stories, each with the token for its beginning.
        streams = rest.reshape(rows, -1)[:, :stream]
        return Texts(judged, probed, streams, "samples of the model itself")
    source = corpus(size.corpus)
    judged, probed, streams = (
        text_windows(loaded, source.read(split), length, number)[0]
        for split, length, number in (
            ("test", window, count),
            ("valid", window, size.probed),
            ("test", stream, rows),
        )
    )
    return Texts(judged, probed, streams, f"{size.corpus}, test")


@torch.no_grad()
def sampled(loaded: Loaded, count: int, length: int, seed: int, progress: Progress) -> Tensor:
    """Return texts that a model writes itself at temperature 1, (count, length)."""
    from transformers import DynamicCache

    random = torch.Generator().manual_seed(seed)
    found = []
    for some in torch.arange(count).split(_SAMPLED_AT_ONCE):
        start = torch.tensor(loaded.special_tokens.before or (0,)).expand(len(some), -1)
        device = next(loaded.model.parameters()).device
        tokens, kv, read = start, DynamicCache(config=loaded.model.config), 0  # type: ignore[arg-type]
        while tokens.shape[1] < length:
            logits = loaded.model(
                input_ids=tokens[:, read:].to(device), past_key_values=kv, use_cache=True
            ).logits
            read = tokens.shape[1]
            chances = logits[:, -1].float().softmax(-1).cpu()
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], 1)
        found.append(tokens)
        progress("sample stories", sum(map(len, found)), count)
    return torch.cat(found)


def recomputed_loss(loaded: Loaded, streams: Tensor, keys: int, chunk: int) -> Tensor:
    """Return the loss of the last tokens of streams without any cache from before, (rows, tokens).

    Windows of `keys` tokens overlap by half; of each, the second half counts, so that every token
    is predicted from half a window to a whole one. The model's special tokens begin each window.
    The result is of the tokens from `keys` on, without a rest at the end.

    Args:
        loaded: The model.
        streams: Tokens, (rows, tokens).
        keys: Tokens of a window.
        chunk: Tokens read at once.
    """
    half = keys // 2
    special = torch.tensor(loaded.special_tokens.before, dtype=streams.dtype)
    starts = range(keys, streams.shape[1] - half + 1, half)
    rows = []
    for stream in streams:
        windows = torch.stack([stream[start - half : start + half] for start in starts])
        begun = torch.cat([special.expand(len(windows), -1), windows], 1)
        loss = text_loss(loaded.model, begun, None, chunk=chunk)
        rows.append(torch.from_numpy(loss.nll[:, -half:]).flatten())
    return torch.stack(rows)


LONG_CHUNK = 64
"""Tokens read at once where the chunk changes nothing: full caches, windows and sinks."""


def measure_model(run: Run, name: str, size: StudySize, request: Request) -> None:
    """Measure what is missing of a model that is there, in `groups/NAME` of the run."""
    path = path_of(name, request)
    if name != RELU and path is None:
        return
    config = {**asdict(size), "model": name, "seed": request.seed}
    folder = run.path / "groups" / name
    own = Run.resume(f"{run.name}-group", config, out=folder, device=request.device)
    missing = [part for part in PARTS if not (own.path / f"{part}.json").exists()]
    if missing:
        dtype = torch.float32 if name in SMALL_MODELS else getattr(torch, size.dtype)
        path = path or trained_relu(own, size, request)
        loaded = load(path, device=request.device, dtype=dtype)
        texts = texts_of(name, loaded, size, request.seed, request.progress)
        study = ModelStudy(name, loaded, texts, size, request)
        for part in missing:
            own.write_json(part, getattr(study, part)())


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
        rows = [self._row("plain", 1.0, LONG_CHUNK)]
        for done, (policy, share) in enumerate(cells, 1):
            rows.append(self._row(policy, share, self.size.chunk))
            report(done)
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
        report, rows = self._report("token by token", len(CHUNKED)), []
        for policy in CHUNKED:
            rows.append(self._row(policy, self.middle, 1))
            report(len(rows))
        return {"rows": rows}

    def _row(self, policy: str, share: float, chunk: int) -> dict[str, Any]:
        keys = keys_of(share, self.length)
        made = None if policy == "plain" else policy_of(policy, keys)
        loss = text_loss(self.model, self.texts.judged, made, chunk=chunk)
        return {
            "policy": policy,
            "share": share,
            "keys": keys,
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
