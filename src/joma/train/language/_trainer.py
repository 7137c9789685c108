"""A language model of transformers, its optimizer and its data, one step at a time."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.quiet import need_transformers, quietly
from joma.errors import JomaError
from joma.optim import Optimizer, registry
from joma.optim.state import check_tensors, load_state, split_state
from joma.train.language._compute import Compute, without_masks
from joma.train.language._config import Config, ModelSection
from joma.train.language._export import export, series_folder, weights_of
from joma.train.language._series import SeriesWriter
from joma.train.language._text import Feed, Text, first_windows, read_tokens
from joma.train.processes import Processes, shard_again, sharded_like, spread, summing, whole

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special tokens of a type's first model, which another tokenizer has elsewhere or not at all."""

_LONGEST = 240
"""Characters of an error of transformers that are passed on."""


class Trainer:
    """A language model that can make steps, be measured, be saved and be resumed.

    On several processes each has one, and all call the same methods in the same order.

    Args:
        config: What is trained, and how.
        processes: The processes that train together.
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
        self.settings = _make_config(config.model, self.text.tokenizer.size, config.data.window)
        model = _make_model(self.settings, config.training.seed)
        self._shell = _make_shell(self.settings)  # sharding changes the class of the model itself
        self.model = model.to(processes.device).train()
        without_masks(self.model, config.data.window)
        data, training = config.data, config.training
        self.feed = Feed(
            self.text.train, data.window, data.batch, training.seed, device=processes.device
        )
        self._validation: Tensor | None = None
        self._series_of: Path | None = None
        self.series = SeriesWriter(self._write_model)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._module = spread(self.model, processes, training.sharding)
        self.compute = Compute(self.model, self._module, config, processes)
        self.optimizer = _make_optimizer(self.model, self._module, config)
        # Sharded parameters are others while they are gathered.
        self._clipped = list(self.model.parameters()) if processes.size == 1 else None
        if self.compute.compiled:
            self.compute.prepare(self._pieces(self.feed.at(0))[0])

    def backward(self, step: int) -> Tensor:
        """Compute the gradients of a step; return its loss on this process's part of the batch.

        An optimizer with `per_layer` moves the weights here.
        """
        rate = self.config.optimizer.learning_rate_at(step, self.config.training.steps)
        for group in getattr(self.optimizer, "param_groups", ()):
            group["lr"] = rate
        accumulate = getattr(self.optimizer, "accumulate", lambda *, last: nullcontext())
        pieces = self._pieces(self.feed.at(step))
        losses = []
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            with summing(self._module, last=last), accumulate(last=last):
                losses.append(self.compute.backward(piece, step, number))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def update(self, step: int) -> float:
        """Move the weights by the gradients of a step; return the learning rate."""
        settings = self.config.optimizer
        if settings.clip and not hasattr(self.optimizer, "clip_norm"):
            parameters = self._clipped or self.model.parameters()
            nn.utils.clip_grad_norm_(parameters, settings.clip)
        self.optimizer.step()
        return settings.learning_rate_at(step, self.config.training.steps)

    def clear(self) -> None:
        """Drop the gradients of a step."""
        self.optimizer.zero_grad()
        self.compute.keep_gradients()

    def held_out(self, count: int) -> Tensor:
        """Return windows to measure the model on, the same at all times: (count, window)."""
        tokens = self.text.train if self.text.valid is None else self.text.valid
        windows = first_windows(tokens, self.config.data.window, count)
        return windows[:, :-1].to(self.processes.device)

    def validation_loss(self) -> float:
        """Return the mean loss over the validation windows, without dropout."""
        if self._validation is None:
            assert self.text.valid is not None, "refused when it was made"
            data, count = self.config.data, self.config.validation.windows
            windows = first_windows(self.text.valid, data.window, count)
            self._validation = windows.to(self.processes.device)
        try:
            # The same on all processes: sharded ones must call the model together anyway.
            return float(self.compute.validation_loss(self._validation))
        finally:
            shard_again(self.model)

    def export(self, run: Path | None, step: int) -> None:
        """Copy the model of this step and write it into the run's series while training continues.

        On several processes the training waits for it.

        Args:
            run: The run folder, on the first process.
            step: Number of updates made.

        Raises:
            OSError: This model, or one before, could not be written.
        """
        self._series_of = run
        if self.processes.size == 1:
            self.series.add(step, weights_of(self.model))
            return
        kept: dict[str, Tensor] = {}
        for name, tensor in weights_of(self.model):  # all must gather
            if self.processes.rank == 0:
                kept[name] = tensor.cpu().contiguous()
        self.processes.first(lambda: self._write_model(step, kept))

    def finish_exports(self) -> None:
        """Wait until all models are written; all processes must call it.

        Raises:
            OSError: One could not be written.
        """
        self.processes.first(self.series.finish)

    def _write_model(self, step: int, weights: dict[str, Tensor]) -> None:
        assert self._series_of is not None, "a model was exported"
        export(series_folder(self._series_of, step), self._shell, weights, self.text.tokenizer)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights and optimizer state by name, each whole; all processes go through them."""
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", whole(parameter)
        for name, tensor in self._optimizer_state()[0].items():
            yield f"optimizer.{name}", whole(tensor)

    def about(self) -> dict[str, Any]:
        """Return what a checkpoint keeps next to `state`, in JSON types."""
        return {"text": self.text.digest, "optimizer": self._optimizer_state()[1]}

    @torch.no_grad()
    def load(self, step: int, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Return to a checkpoint; all processes must call it.

        The order of the data and what dropout drops follow from seed and step.

        Args:
            step: Number of updates after which it was saved.
            state: What `state` yielded; read on the first process only.
            about: What `about` returned; read on the first process only.

        Raises:
            JomaError: It is of another model.
        """
        state, about = self.processes.tensors_from_first(state, about)
        parameters = dict(self.model.named_parameters())
        parts = {name: state.pop(name) for name in list(state) if name.startswith("optimizer.")}
        own: dict[str, Tensor] = {f"model.{name}": one for name, one in parameters.items()}
        check_tensors("arrays must be of this model", state, own, dtypes=False)
        for name, parameter in parameters.items():
            parameter.copy_(sharded_like(state[f"model.{name}"], parameter))
        tensors: dict[str, Tensor] = {}
        for name, tensor in parts.items():
            key = name.removeprefix("optimizer.")
            tensors[key] = sharded_like(tensor, parameters.get(key.partition(".")[2]))
        if "optimizer" in about:
            load_state(self.optimizer, tensors, about["optimizer"])
        else:
            self.optimizer.load_state_dict(self._old_state(step, tensors))

    def _optimizer_state(self) -> tuple[dict[str, Tensor], Any]:
        return split_state(self.optimizer, self.model.named_parameters())

    def _old_state(self, step: int, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the state of AdamW from a checkpoint of before 0.2, which has moments alone."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        groups = getattr(self.optimizer, "param_groups", ())
        ordered = [names[parameter] for group in groups for parameter in group["params"]]
        try:
            state = {
                number: {
                    "step": torch.tensor(float(step)),
                    **{key: parts[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")},
                }
                for number, name in enumerate(ordered)
            }
        except KeyError as error:
            raise JomaError(f"arrays must be of this model; {error} is missing") from error
        return {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def _pieces(self, batch: Tensor) -> list[Tensor]:
        """Return this process's part of a batch, cut into pieces that are computed one by one."""
        accumulate, own = self.config.training.accumulate, self.processes
        return list(batch.chunk(accumulate * own.size)[own.rank :: own.size])


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


def _make_optimizer(model: nn.Module, module: nn.Module, config: Config) -> Optimizer:
    """Return the optimizer; matrices decay, biases and the gains of norms do not.

    Args:
        model: The model.
        module: The model, or what averages its gradients over the processes.
        config: What is trained, and how.
    """
    section = config.optimizer
    known, settings = registry.defaults(section.name), section.given()
    parameters = list(model.parameters())
    given: Any = [{"params": parameters}]
    if "per_layer" in known:  # it chooses matrices, accumulates, averages and clips by itself
        given = module
        settings["groups"] = _decay_groups(model, settings.get("groups", ()))
        settings.setdefault("clip_norm", section.clip or None)
        if isinstance(settings.get("state_dtype"), str):
            settings["state_dtype"] = _dtype(settings["state_dtype"])
    elif "weight_decay" in known:
        given = [
            {"params": [one for one in parameters if one.ndim >= 2]},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ]
        given = [group for group in given if group["params"]]
    if "fused" in known and not settings.keys() & {"fused", "foreach", "differentiable"}:
        settings["fused"] = True
    optimizer = registry.make(section.name, given, section.learning_rate, **settings)
    if not hasattr(optimizer, "param_groups") and (
        section.warmup or section.schedule != "constant"
    ):
        raise JomaError(
            f"optimizer.schedule must be constant without warmup for {section.name}, which has no "
            f"parameter groups whose learning rate could change, got {section.schedule}"
        )
    return optimizer


def _decay_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups by regular expression in which biases and the gains of norms do not decay.

    Args:
        model: The model.
        groups: The groups of the user, of which the first that matches a name decides.

    Raises:
        JomaError: A group has no regular expression.
    """
    try:
        patterns = [re.compile(group["match"]) for group in groups]
    except (KeyError, TypeError, re.error) as error:
        raise JomaError(
            f"each of optimizer.groups must have a regular expression as match ({error!r})"
        ) from error
    matched: dict[int, list[tuple[str, bool]]] = {at: [] for at in range(len(groups) + 1)}
    for name, parameter in model.named_parameters():
        at = next((at for at, one in enumerate(patterns) if one.search(name)), len(groups))
        matched[at].append((name, parameter.ndim < 2))
    made: list[dict[str, Any]] = []
    for at, group in enumerate([*groups, {}]):
        flat = [name for name, is_flat in matched[at] if is_flat]
        if flat and "weight_decay" not in group:
            exact = rf"^({'|'.join(map(re.escape, flat))})$"
            made.append({**group, "match": exact, "weight_decay": 0.0})
        if group and (len(flat) < len(matched[at]) or not flat or "weight_decay" in group):
            made.append(dict(group))
    return made


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise JomaError(f"optimizer.state_dtype must be a type of torch, as bfloat16, got {name!r}")
    return found


def _make_config(model: ModelSection, vocabulary: int, window: int) -> Any:
    """Return the configuration of transformers for a section [model].

    Args:
        model: The section.
        vocabulary: How many tokens the tokenizer has.
        window: How many tokens a sequence has.

    Raises:
        JomaError: An entry is none of that type's, or does not fit the data.
    """
    need_transformers("joma train")
    from transformers import AutoConfig

    with quietly():
        default = AutoConfig.for_model(model.type)
        known = {*default.to_dict(), *default.attribute_map}
        for name in model.settings:
            if name not in known:
                closest = difflib.get_close_matches(name, known, 5, 0.0)
                raise JomaError(
                    f"model.{name} is no setting of {model.type}; the closest are "
                    f"{', '.join(closest)}"
                )
        settings = {"vocab_size": vocabulary, **dict.fromkeys(_TOKENS), **model.settings}
        try:
            config = AutoConfig.for_model(model.type, **settings)
        except Exception as error:  # checks of values differ from class to class
            raise JomaError(f"[model] cannot be used ({_short(error)})") from error
    if config.vocab_size < vocabulary:
        raise JomaError(
            f"model.vocab_size must be at least {vocabulary}, as many as the tokenizer has, got "
            f"{config.vocab_size}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < window:
        raise JomaError(
            f"data.window must be at most {positions}, as many positions as the model has, got "
            f"{window}"
        )
    return config


def _make_model(config: Any, seed: int) -> nn.Module:
    """Return the model of a configuration; its weights depend on the seed alone, on any device.

    The global random numbers continue as if nothing had been drawn.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # as above, of values that do not go together
            raise JomaError(f"[model] cannot be built ({_short(error)})") from error
    model.config.use_cache = False  # of no use where every position is computed at once
    return model


def _make_shell(config: Any) -> Any:
    """Return the model of a configuration without its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quietly():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _short(error: BaseException) -> str:
    """Return an error on one line: transformers says what is wrong on the second."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
