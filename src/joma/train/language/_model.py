"""A language model of transformers with random weights, from its numbers alone."""

import difflib
from typing import Any

import torch
from torch import nn

from joma.common.quiet import need_transformers, quietly
from joma.errors import JomaError
from joma.train.language._config import Model

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special tokens of a type's first model, which another tokenizer has elsewhere or not at all."""

_LONGEST = 240
"""Characters of an error of transformers that are passed on."""


def make_config(model: Model, vocabulary: int, window: int) -> Any:
    """The configuration of transformers for a section [model].

    Args:
        model: the section.
        vocabulary: how many tokens the tokenizer has.
        window: how many tokens a sequence has.

    Raises:
        ValueError: an entry is none of that type's, or does not fit the data.
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
        settings = {
            "vocab_size": vocabulary,
            **dict.fromkeys(_TOKENS),
            **model.settings,
        }
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


def make_model(config: Any, seed: int) -> nn.Module:
    """The model of a configuration; its weights are drawn on the CPU and depend on the seed alone.

    The global random numbers go on as if nothing had been drawn.
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


def make_shell(config: Any) -> Any:
    """The model of a configuration without its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quietly():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _short(error: BaseException) -> str:
    """What an error says, on one line: transformers says what is wrong on the second."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
