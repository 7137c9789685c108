"""The text as networks read it, their training, and what is measured of them as they learn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joma.data import BasicEnglish, Corpus, corpus, encoded, streams
from joma.errors import JomaError
from joma.experiments import _frame
from joma.experiments._experiment import Request
from joma.experiments.language import (
    FIRST_SEED,
    GROUPS,
    LENGTH,
    WATCHED,
    LanguageSetting,
    LanguageSize,
    named,
)
from joma.models import LanguageConfig, LanguageModel
from joma.models.networks import FIRST_RANGE
from joma.optim import StackedAdam
from joma.probes import stable_ranks
from joma.runs import Run
from joma.train import Ensemble

CLIP = 0.5
"""The largest norm of a gradient."""

_NUMBERS = {"cpu": 2**24, "cuda": 2**31}
"""About how many numbers a part of the validation text may take at a time."""


@dataclass(frozen=True, eq=False)
class WindowedText:
    """A text for one size of the experiment.

    Attributes:
        setting: what it makes of that size.
        train: windows to learn from.
        valid: windows to measure on.
    """

    setting: LanguageSetting
    train: "Windows"
    valid: "Windows"

    def to(self, device: str) -> "WindowedText":
        """Return the same text on a device."""
        return replace(self, train=self.train.to(device), valid=self.valid.to(device))


def find(size: LanguageSize) -> Corpus:
    """Return the text of a size.

    Raises:
        ValueError: it is not there, or has no part to train or to measure on.
    """
    source = corpus(size.corpus)
    for split in ("train", "valid"):
        source.where(split)
    return source


def load(size: LanguageSize) -> WindowedText:
    """Read and encode the text of a size."""
    source = find(size)
    tokenizer = BasicEnglish.of(source)
    if size.vocabulary is not None:
        tokenizer = BasicEnglish(tokenizer.vocabulary[: size.vocabulary])

    def read(split: str, count: int, most: int | None) -> tuple[Windows, dict[str, Any]]:
        text = encoded(source, tokenizer, split)
        try:
            return Windows(streams(text.tokens[:most], count)), text.manifest
        except ValueError as error:
            raise JomaError(f"{split} of text {size.corpus} is too short: {error}") from None

    train, made_of = read("train", size.streams, size.train_tokens)
    valid, valid_made_of = read("valid", size.valid_streams, size.valid_tokens)
    digests = {"train": made_of["text"], "valid": valid_made_of["text"]}
    digests["tokenizer"] = made_of["tokenizer"]
    words, stream = made_of["vocabulary"], train.streams_SN.shape[1]
    return WindowedText(LanguageSetting(size, words, stream, digests), train, valid)


class Windows:
    """Windows of 35 words, one after the other along all streams, each with the words that follow.

    The last one may be short: all have the same shape, and weights say which words are there.

    Args:
        streams_SN: the streams, (S, words).

    Attributes:
        count: windows there are, the short one included.
        whole: those that are whole.
    """

    def __init__(self, streams_SN: Tensor) -> None:
        if streams_SN.shape[1] < 2:
            raise JomaError(f"streams must have at least 2 words each, got {streams_SN.shape[1]}")
        self.streams_SN = streams_SN
        self._last = streams_SN.shape[1] - 1  # the last word is only predicted
        self.whole = self._last // LENGTH
        self.count = -(-self._last // LENGTH)
        self._places_T = torch.arange(LENGTH, device=streams_SN.device)

    def to(self, device: str) -> "Windows":
        """Return the same windows on a device."""
        return Windows(self.streams_SN.to(device))

    def at(self, step: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the window of a step, epoch after epoch.

        There is nothing in it that a CUDA graph could not capture, where `step` is a tensor.

        Returns:
            Words, the words that follow, both (S, 35), and how much each of them counts, (S, 35)
            and together 1; 0 for what is not there.
        """
        index_T = step % self.count * LENGTH + self._places_T
        inside_T = (index_T < self._last).double()
        index_T = index_T.clamp(max=self._last - 1)
        tokens, targets = (self.streams_SN.index_select(1, index_T + ahead) for ahead in (0, 1))
        weights_T = inside_T / (inside_T.sum() * len(tokens))
        return tokens, targets, weights_T.expand_as(tokens)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all windows, window w of stream s in row w·S + s; weights are together 1."""
        parts = [self.at(window) for window in range(self.count)]
        tokens, targets, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        inside = (weights > 0).double()
        return tokens, targets, inside / inside.sum()


def train_groups(
    run: Run, names: Sequence[str], text: WindowedText, request: Request, others: Sequence[str]
) -> None:
    """Train groups, each in a run folder of its own, unless they are done already.

    Their metrics have each member's loss at every update and, at each measurement, under the number
    of updates before it: `validation_loss`; by layer `attention_entropy` of one validation window,
    `attention_entropy_mean` of all, and `stable_rank` of the lower layer of the MLP.

    Args:
        run: Run of the experiment.
        names: Names of the groups.
        text: Text to train on.
        request: What was asked of the experiment.
        others: Experiments with the same groups; what a run of theirs in a folder next to this one
            has done is not done again.
    """
    text = text.to(request.device)
    setting = text.setting

    def group(name: str) -> _frame.NetworkGroup:
        depth = GROUPS[name]
        networks = networks_of(setting.size, depth, request.seed)
        return _frame.NetworkGroup(
            name,
            [(f"lr {named(rate)}", seed) for rate, seed in networks],
            lambda own: LanguageNetworks(own, name, text, request),
        )

    groups = [group(name) for name in names]
    _frame.train_groups(run, groups, setting, setting.measure_at, request, others)


def networks_of(size: LanguageSize, depth: int, seed: int) -> list[tuple[float, int]]:
    """Return learning rate and seed of each network of a depth.

    The seeds are the same at every learning rate, so that all drop the same.
    """
    seeds = _frame.member_seeds(f"language/{depth}", seed, size.seeds)
    return [(rate, own) for rate in size.rates(depth) for own in seeds]


class LanguageNetworks:
    """The networks of a depth, the text, and what is measured."""

    def __init__(self, run: Run, name: str, text: WindowedText, request: Request) -> None:
        depth, device, size = GROUPS[name], request.device, text.setting.size
        rates, seeds = zip(*networks_of(size, depth, request.seed), strict=True)
        self.run = run
        self.tokens, self.targets, self.weights = text.valid.all()
        self.watched = min(WATCHED, max(text.valid.whole, 1) - 1) * size.valid_streams
        self.numbers = _NUMBERS[device]
        model = LanguageModel(
            LanguageConfig(
                vocabulary=text.setting.words, layers=depth, width=size.width, hidden=size.hidden
            ),
            seeds,
            device=device,
        )
        start_as_torch(model, torch_seeds(request.seed, size.seeds) * (len(seeds) // size.seeds))
        self.ensemble = Ensemble(
            model,
            StackedAdam(model.named_parameters(), rates, clip=CLIP),
            text.train.at,
            loss=training_loss,
            precision="bfloat16" if device == "cuda" else "float32",
            restart_every=text.train.count,
        )

    def measure(self, step: int) -> None:
        """Measure all networks after `step` updates."""
        with self.ensemble.evaluating() as model:
            # About as many rows of words at a time as fit into memory.
            rows = max(self.numbers // (len(model.seeds) * LENGTH * model.config.vocabulary), 1)
            loss_E, mean_LE = self._evaluate(model, slice(None), rows)
            one = slice(self.watched, self.watched + 1)
            _, sum_LE = self._evaluate(model, one, 1)
            watched_LE = sum_LE / self.weights[one].double().sum()
            ranks_LE2 = _stable_ranks(model)
        log = self.run.metrics.append
        log(step, "validation_loss", loss_E.cpu().numpy())
        for layer, ranks_E2 in enumerate(ranks_LE2):
            log(step, "stable_rank", ranks_E2[:, 0], layer=layer, bound=ranks_E2[:, 1])
            log(step, "attention_entropy", watched_LE[layer].cpu().numpy(), layer=layer)
            log(step, "attention_entropy_mean", mean_LE[layer].cpu().numpy(), layer=layer)

    def _evaluate(self, model: LanguageModel, part: slice, rows: int) -> tuple[Tensor, Tensor]:
        """Return sums over some of the validation text: loss (E,) and entropies (layers, E)."""
        parts = (whole[part].split(rows) for whole in (self.tokens, self.targets, self.weights))
        found = [model.evaluate(*part) for part in zip(*parts, strict=True)]
        losses, entropies = zip(*found, strict=True)
        return torch.stack(losses).double().sum(0), torch.stack(entropies).sum(0)


def _stable_ranks(model: LanguageModel) -> np.ndarray:
    """Return stable rank and bound of each lower layer, (layers, E, 2); NaN where it diverged."""
    weights_LE = [list(block.get_parameter("lower.weight")) for block in model.blocks]
    flat = [matrix for members in weights_LE for matrix in members]
    finite = [bool(matrix.isfinite().all()) for matrix in flat]
    measured = stable_ranks([m for m, whole in zip(flat, finite, strict=True) if whole])
    pairs = np.full((len(flat), 2), np.nan)
    pairs[finite] = np.reshape([(rank.value, rank.bound) for rank in measured], (-1, 2))
    return pairs.reshape(len(weights_LE), -1, 2)


Window = tuple[Tensor, Tensor, Tensor]
"""Tokens, the words after them, and the weight of each, all (B, T)."""


def training_loss(model: LanguageModel, window: Window, step: Tensor) -> Tensor:
    """Return the cross-entropy of each member on a window, (E,)."""
    tokens_BT, targets_BT, weights_BT = window
    return model.losses(tokens_BT, targets_BT, weights_BT=weights_BT, step=step)


def torch_seeds(seed: int, count: int) -> list[int]:
    """Return torch's seeds of the networks of each cell; seed 0 has the recorded ones."""
    return [(FIRST_SEED + seed * count + number) % 2**63 for number in range(count)]


@torch.no_grad()
def start_as_torch(model: LanguageModel, seeds: Sequence[int]) -> None:
    """Give each member the parameters of a network that torch makes from a seed.

    The recorded runs began so: with what torch draws after `torch.manual_seed`. Torch draws on
    the CPU, whatever the device of the model.

    Args:
        model: Networks whose parameters are written to.
        seeds: One for each member.
    """
    drawn = {seed: _drawn(model, seed) for seed in set(seeds)}
    for member, seed in enumerate(seeds):
        for name, parameter in model.named_parameters():
            parameter[member].copy_(drawn[seed][name])


def _drawn(model: LanguageModel, seed: int) -> dict[str, Tensor]:
    """Return the parameters of one network by name, drawn in the order of the usual script.

    Embeddings and output weights are drawn twice, the second time as they stay.
    """
    config = model.config
    kind = {"device": "cpu", "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # that of the CPU alone, as manual_seed does it
        layer = nn.TransformerEncoderLayer(config.width, config.heads, config.hidden, **kind)
        embedding = nn.Embedding(config.vocabulary, config.width, **kind)
        output = nn.Linear(config.width, config.vocabulary, **kind)
        embedding.weight.uniform_(-FIRST_RANGE, FIRST_RANGE)
        output.weight.uniform_(-FIRST_RANGE, FIRST_RANGE)
    weight = torch.zeros(model.output.weight.shape[1:], **kind)
    weight[:, : config.vocabulary] = output.weight.T
    drawn = {
        "embedding.weight": embedding.weight,
        "output.weight": weight,
        "output.bias": torch.zeros(1, weight.shape[-1], **kind),
    }
    attention = layer.self_attn
    linear = {
        "queries_keys_values": (attention.in_proj_weight, attention.in_proj_bias),
        "projection": (attention.out_proj.weight, attention.out_proj.bias),
        "lower": (layer.linear1.weight, layer.linear1.bias),
        "upper": (layer.linear2.weight, layer.linear2.bias),
    }
    for number in range(config.layers):  # all begin alike, with matrices that are (in, out)
        for name, (matrix, bias) in linear.items():
            drawn[f"blocks.{number}.{name}.weight"] = matrix.T
            drawn[f"blocks.{number}.{name}.bias"] = bias.view(1, -1)
        for name, norm in (("norm_attention", layer.norm1), ("norm_mlp", layer.norm2)):
            drawn[f"blocks.{number}.{name}.weight"] = norm.weight
            drawn[f"blocks.{number}.{name}.bias"] = norm.bias
    return drawn
