"""What a configuration asks for, compared with the files before anything is allocated.

A configuration of a hundred bytes can ask for a model of any size. Its numbers are bounded before
transformers sees them, and the model is built without memory (on the meta device) to compare names,
shapes and sizes with what the headers of the weight files tell.
"""

import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from joma.errors import JomaError, printable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_LAYERS = 2048
"""Layers of a model; the deepest known have a few hundred."""

_MOST_OTHERS = 2**20
_LAYERS = re.compile(r"layer|block|depth|stage")
_COUNTS = re.compile(r"layer|block|depth|stage|head|expert|label|groups|towers|codebooks")
_MODULES, _MODULES_PER_TENSOR = 50_000, 20
_MOST_TENSORS, _MORE_TENSORS = 200_000, 5_000
_UNSTORED = 2**26
"""Numbers that a model may have beyond those in its files, as a head of another task that is
reported by its name later on."""

_LARGEST_BUFFERS = 2**30


def check_config(config: Any, what: str) -> None:
    """Raise JomaError where a number in a configuration is none that a model can have.

    Args:
        config: The contents of a config.json.
        what: What the configuration is called in the message.
    """
    if isinstance(config, Mapping):
        for name, value in config.items():
            counts = isinstance(value, int | float) and not isinstance(value, bool)
            if counts and _COUNTS.search(str(name)):
                most = MOST_LAYERS if _LAYERS.search(name) and "size" not in name else _MOST_OTHERS
                if value > most:
                    raise JomaError(
                        f"{what} must not have {printable(name, 60)} above {most}, got "
                        f"{printable(str(value), 30)}"
                    )
            if name not in ("id2label", "label2id"):  # names of classes are no settings
                check_config(value, what)
    elif isinstance(config, list):
        for value in config:
            check_config(value, what)


def check_sizes(
    config: "PreTrainedConfig",
    model_class: Any,
    shapes: Mapping[str, tuple[int, ...]],
    what: str,
    *,
    numbers: int | None = None,
) -> None:
    """Raise JomaError where a model of this configuration cannot be made of these tensors.

    Args:
        config: The configuration.
        model_class: The class of the model.
        shapes: Names and shapes of the stored tensors.
        what: What the model is called in the message.
        numbers: How many different numbers are stored; those of the shapes unless given.
    """
    if numbers is None:
        numbers = sum(map(math.prod, shapes.values()))
    with torch.device("meta"), bounded(_MODULES + _MODULES_PER_TENSOR * len(shapes)):
        model = model_class(config)
    parameters = dict(model.named_parameters())
    converts = _converts(config)  # experts, for example, from a tensor each into one for all
    most = _MOST_TENSORS if converts else _MORE_TENSORS + 4 * len(parameters)
    if len(shapes) > most:
        raise JomaError(
            f"{what} does not fit its configuration: it holds {len(shapes)} tensors, and a "
            f"{model_class.__name__} of it has {len(parameters)}"
        )
    if not converts:
        for name, parameter in parameters.items():
            if name in shapes and shapes[name] != tuple(parameter.shape):
                raise mismatch(what, name, shapes[name], parameter.shape)
    needed = sum(parameter.numel() for parameter in parameters.values())
    if needed > numbers + _UNSTORED:
        prefix = f"{model.base_model_prefix}."
        missing = sorted(
            name
            for name in parameters
            if not {name, prefix + name, name.removeprefix(prefix)} & shapes.keys()
        )
        if missing:
            raise lacking(what, missing, model_class.__name__)
        raise JomaError(
            f"{what} does not fit its configuration: it holds {numbers} numbers, and a "
            f"{model_class.__name__} of it has {needed}"
        )
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if buffers > _LARGEST_BUFFERS + 16 * numbers:
        raise JomaError(
            f"{what} holds {numbers} numbers, and its configuration asks for tables of {buffers} "
            "bytes that are not stored"
        )


def mismatch(what: str, name: str, stored: Any, expected: Any) -> JomaError:
    """Return the error for a tensor of another shape than the configuration asks for."""
    shown, asked = (printable(str(tuple(shape)), 80) for shape in (stored, expected))
    return JomaError(
        f"{what} does not fit its configuration: {printable(name, 100)} has shape {shown} and "
        f"should have {asked}"
    )


def lacking(what: str, names: list[str], class_name: str) -> JomaError:
    """Return the error for tensors that a model has and its files do not."""
    return JomaError(
        f"{what} lacks {counted(names)} of a {class_name}: random numbers would have been measured"
    )


def counted(names: list[str]) -> str:
    """Return the first of several names, and how many more there are."""
    first = printable(names[0], 100)
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more weights"


def _converts(config: "PreTrainedConfig") -> bool:
    """Return whether transformers stores weights of such a model in other shapes."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        return bool(get_checkpoint_conversion_mapping(config.model_type))
    except Exception:  # of another version of transformers
        return True


@contextmanager
def bounded(most: int) -> Iterator[None]:
    """Raise JomaError once more modules than these are put together by this thread."""
    thread, count = threading.get_ident(), 0

    def registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        if threading.get_ident() != thread:
            return
        count += 1
        if count > most:
            raise JomaError(
                f"the configuration asks for more than {most} modules, far more than weights are "
                "stored for"
            )

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()
