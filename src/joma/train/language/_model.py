"""The model and the optimizer of a configuration."""

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from joma.common.quiet import need_transformers, quietly
from joma.errors import JomaError
from joma.optim import Optimizer, registry
from joma.train.language._config import ModelSection, OptimizerSection

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special tokens of a type's first model, which another tokenizer has elsewhere or not at all."""

_LONGEST = 240
"""Characters of an error of transformers that are passed on."""


def make_optimizer(model: nn.Module, module: nn.Module, section: OptimizerSection) -> Optimizer:
    """Return the optimizer; matrices decay, biases and the gains of norms do not.

    Args:
        model: The model.
        module: The model, or what averages its gradients over the processes.
        section: The section [optimizer].
    """
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


def make_config(model: ModelSection, vocabulary: int, window: int) -> Any:
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


def make_model(config: Any, seed: int | None) -> Any:
    """Return the model of a configuration; its weights depend on the seed alone, on any device.

    The global random numbers continue as if nothing had been drawn.

    Args:
        config: What `make_config` returned.
        seed: The seed; None for a model on the meta device, without weights.
    """
    from transformers import AutoModelForCausalLM

    place = torch.device("meta") if seed is None else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), quietly(), place:
        torch.manual_seed(seed or 0)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # as above, of values that do not go together
            raise JomaError(f"[model] cannot be built ({_short(error)})") from error
    if seed is not None:
        model.config.use_cache = False  # of no use where every position is computed at once
    return model


def _short(error: BaseException) -> str:
    """Return an error on one line: transformers says what is wrong on the second."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
