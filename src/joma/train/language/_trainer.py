"""A model, its optimizer and its data, and what is done with them one step at a time."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.errors import JomaError
from joma.train.language._config import Config
from joma.train.language._export import export, gathered, series_folder
from joma.train.language._model import make_config, make_model, make_shell
from joma.train.language._processes import Processes, shard_again, spread, summing
from joma.train.language._state import load_arrays, state_tensors
from joma.train.language._text import Feed, Text, first_windows, read_tokens

EVALUATED_AT_ONCE = 16
"""Validation windows in one forward pass."""


class Trainer:
    """A language model that can make steps, be measured, be saved and go on.

    On several processes each holds one, and all call the same methods in the same order.

    Args:
        config: what is trained, and how.
        processes: that train together.
    """

    def __init__(self, config: Config, processes: Processes) -> None:
        _check(config, processes)
        self.config, self.processes = config, processes
        self.text: Text = read_tokens(config.data)
        _check_same(self.text, processes)
        if self.text.valid is None and config.validation.every:
            raise JomaError(
                f"validation.every must be 0 where the corpus has no valid split, as "
                f"{config.data.corpus} has none, got {config.validation.every}"
            )
        self.settings = make_config(config.model, self.text.tokenizer.size, config.data.window)
        model = make_model(self.settings, config.training.seed)
        self._shell = make_shell(self.settings)  # sharding changes the class of the model itself
        self.model = model.to(processes.device).train()
        self.feed = Feed(
            self.text.train, config.data.window, config.data.batch, config.training.seed
        )
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._module = spread(self.model, processes, config.training.sharding)
        self._called: Any = torch.compile(self._module) if config.training.compile else self._module
        self.optimizer = _adamw(self.model, config)

    def backward(self, step: int) -> Tensor:
        """The gradients of a step and its loss on this process's part of the batch."""
        pieces = self._pieces(self.feed.at(step))
        losses = []
        for number, piece in enumerate(pieces):
            with summing(self._module, last=number == len(pieces) - 1):
                torch.manual_seed(self._dropout_seed(step, number))
                loss = self._loss(self._called, piece)
                (loss / len(pieces)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def update(self, step: int) -> float:
        """Moves the weights by the gradients there are; gives the learning rate."""
        settings = self.config.optimizer
        if settings.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        rate = settings.learning_rate_at(step, self.config.training.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return rate

    def held(self, count: int) -> Tensor:
        """Windows to measure the model on, the same at all times: (count, window)."""
        tokens = self.text.train if self.text.valid is None else self.text.valid
        windows = first_windows(tokens, self.config.data.window, count)
        return windows[:, :-1].to(self.processes.device)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The mean loss over the validation windows, without dropout."""
        assert self.text.valid is not None, "refused when it was made"
        windows = first_windows(
            self.text.valid, self.config.data.window, self.config.validation.windows
        )
        with _evaluating(self.model):
            # The same on all processes: sharded ones must call the model together anyway.
            losses = [
                self._loss(self.model, part.to(self.processes.device)).double() * len(part)
                for part in windows.split(EVALUATED_AT_ONCE)
            ]
        return float(torch.stack(losses).sum() / len(windows))

    def export(self, run: Path | None, step: int) -> None:
        """Writes the model of this step into the run's series; `run` is the first process's."""
        weights = gathered(self.model, self.processes)

        def write() -> None:
            assert run is not None, "the first process has one"
            folder = series_folder(run, step)
            export(folder, self._shell, weights, self.text.tokenizer)

        self.processes.first(write)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of what `load` takes; all processes must go through them."""
        return state_tensors(self.model, self.optimizer)

    def load(self, arrays: dict[str, Any], step: int) -> None:
        """Goes on from where `state` was called after that many steps."""
        load_arrays(arrays, self.model, self.optimizer, step, self.processes)

    def _pieces(self, batch: Tensor) -> list[Tensor]:
        """This process's part of a batch, cut into the pieces that are computed one by one."""
        accumulate, own = self.config.training.accumulate, self.processes
        parts = batch.chunk(accumulate * own.size)[own.rank :: own.size]
        if own.device.type != "cuda":
            return list(parts)
        return [part.pin_memory().to(own.device, non_blocking=True) for part in parts]

    def _loss(self, module: Any, windows: Tensor) -> Tensor:
        half = self.config.training.precision == "bfloat16"
        with torch.autocast(self.processes.device.type, torch.bfloat16, enabled=half):
            logits = module(input_ids=windows[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def _dropout_seed(self, step: int, piece: int) -> int:
        """What dropout draws from, so that a training that goes on at a step drops the same."""
        place = f"{self.config.training.seed} {step} {piece} {self.processes.rank}"
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _check(config: Config, processes: Processes) -> None:
    training = config.training
    if training.precision == "bfloat16" and processes.device.type != "cuda":
        raise JomaError(
            f"training.precision bfloat16 is for a CUDA device, not {processes.device}; float32 "
            "goes with both"
        )
    parts = training.accumulate * processes.size
    if config.data.batch % parts:
        raise JomaError(
            f"data.batch must be a multiple of {parts}, the pieces of a step times the processes, "
            f"got {config.data.batch}"
        )


def _check_same(text: Text, processes: Processes) -> None:
    number = int(text.digest[:15], 16)
    largest, smallest = processes.most(number, -number)
    if largest != -smallest:
        raise JomaError(
            "data.corpus and data.tokenizer must be the same for all processes, but their tokens "
            "differ"
        )


def _adamw(model: nn.Module, config: Config) -> torch.optim.AdamW:
    settings = config.optimizer
    parameters = list(model.parameters())
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()
        shard_again(model)
