"""The models of the experiment, where they are found, and what each of them reads."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from joma.analysis.probing import text_windows
from joma.common.progress import Progress
from joma.data import corpus
from joma.errors import JomaError
from joma.experiments._experiment import Request
from joma.experiments.sparse_inference.setting import FILES, RELU, STORIES, StudySize
from joma.inference.quality import text_loss
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


def load_model(name: str, run: Run, size: StudySize, request: Request) -> Loaded | None:
    """Return a model, None where it is not there; the ReLU model is trained where it is missing.

    Args:
        name: Name of the model.
        run: Run of the group, in which the ReLU model is kept.
        size: Size of the experiment.
        request: What was asked of the experiment.
    """
    if name == RELU:
        return load(trained_relu(run, size, request), device=request.device)
    path = path_of(name, request)
    if path is None:
        return None
    dtype = torch.float32 if name == STORIES else getattr(torch, size.dtype)
    return load(path, device=request.device, dtype=dtype)


def trained_relu(run: Run, size: StudySize, request: Request) -> Path:
    """Train the ReLU model unless it is there, and return its folder."""
    relu = size.relu
    sections = {
        "model": {
            "type": "opt",
            "hidden_size": relu.width,
            "word_embed_proj_dim": relu.width,
            "ffn_dim": 4 * relu.width,
            "num_hidden_layers": relu.layers,
            "num_attention_heads": relu.heads,
            "max_position_embeddings": relu.context,
            "dropout": 0.0,
        },
        "data": {
            "corpus": size.corpus,
            "tokenizer": "bpe",
            "vocabulary": relu.vocabulary,
            "window": relu.context - 1,
            "batch": relu.batch,
        },
        "optimizer": {
            "learning_rate": 2e-3,
            "warmup": min(50, relu.steps // 4),
            "schedule": "cosine",
            "final": 0.1,
        },
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
    window, longest = size.window, loaded.context or size.stream
    count = size.windows_of(name)
    if name == RELU:
        # Learned positions end with the context: no stream can be longer.
        window = min(window, longest)
        rows, stream = 4 * size.stream_rows, longest
    else:
        rows, stream = size.stream_rows, size.stream
    if name == STORIES:
        window = min(window, longest)
        parts = [count, size.probed, rows * -(-stream // window)]
        samples = sampled(loaded, sum(parts), window, seed, progress)
        judged, probed, rest = samples.split(parts)
        # A stream of many stories, each with the token for its beginning.
        streams = rest.reshape(rows, -1)[:, :stream]
        return Texts(judged, probed, streams, "samples of the model itself")
    source = corpus(size.corpus)
    test = source.read("test")
    judged, _ = text_windows(loaded, test, window, count)
    probed, _ = text_windows(loaded, source.read("valid"), window, size.probed)
    streams, _ = text_windows(loaded, test, stream, rows)
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
