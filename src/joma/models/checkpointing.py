"""Activation checkpointing of Hugging Face models, under the names that their versions have."""

from typing import Any

from torch import nn

from joma.errors import JomaError


def enable_checkpointing(model: nn.Module, settings: dict[str, Any] | None = None) -> None:
    """Let a model compute activations again in the backward pass instead of keeping them.

    transformers 5.23 renamed `gradient_checkpointing_enable` to `activation_checkpointing_enable`;
    the old name warns.

    Args:
        model: A Hugging Face model.
        settings: Arguments of `torch.utils.checkpoint.checkpoint`; not reentrant unless given.

    Raises:
        JomaError: The model has no activation checkpointing.
    """
    settings = {"use_reentrant": False} if settings is None else settings
    if getattr(model, "supports_gradient_checkpointing", False):
        for word in ("activation", "gradient"):
            enable: Any = getattr(model, f"{word}_checkpointing_enable", None)
            if enable is not None:
                enable(**{f"{word}_checkpointing_kwargs": settings})
                return
    raise JomaError(f"{type(model).__name__} has no activation checkpointing")
