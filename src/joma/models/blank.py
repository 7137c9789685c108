"""Models to plan a training with: built from a configuration alone, on the meta device."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from joma.common.quiet import need_transformers, reading
from joma.errors import JomaError
from joma.models.hub import folder_if_here
from joma.models.loading import class_of, folder_config, on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCABULARY = 32000
"""Number of tokens of the presets."""


@dataclass(frozen=True)
class Preset:
    """A Llama of the GaLore paper (Zhao et al., 2024, Table 5).

    Attributes:
        hidden: Width.
        intermediate: Width of the MLP.
        layers: Number of blocks.
        heads: Number of attention heads.
        rank: Rank that the paper trains it with.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    rank: int


PRESETS = {
    "llama-60m": Preset(512, 1376, 8, 8, 128),
    "llama-130m": Preset(768, 2048, 12, 12, 256),
    "llama-350m": Preset(1024, 2736, 24, 16, 256),
    "llama-1b": Preset(2048, 5461, 24, 32, 512),
    "llama-7b": Preset(4096, 11008, 32, 32, 1024),
}
"""Models by name, whose output layer is not tied to the embeddings."""


def blank_model(source: str | Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model on the meta device, in training mode; nothing is allocated.

    Args:
        source: The name of a preset, a folder with a config.json, that file, or a hub id.
        dtype: Type of the weights.

    Raises:
        JomaError: There is no such model, or transformers cannot build it.
    """
    need_transformers(f"building {source}")
    config = (
        preset_config(str(source)) if str(source) in PRESETS else folder_config(_folder(source))
    )
    model = on_meta(config, _training_class(config), str(source))
    return nn.Module.to(model, dtype).train()


def preset_config(name: str) -> "PreTrainedConfig":
    """Return the configuration of a preset.

    Args:
        name: One of `PRESETS`.
    """
    from transformers import LlamaConfig

    preset = PRESETS[name]
    return LlamaConfig(
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=2**20,  # rotary: no parameter depends on it
        tie_word_embeddings=False,
    )


def _folder(source: str | Path) -> Path:
    path = Path(source)
    if path.name == "config.json" and path.is_file():
        return path.parent
    try:
        found = folder_if_here(source)
    except JomaError as error:
        raise JomaError(f"{error}; joma itself has {', '.join(PRESETS)}") from error
    if found is not None:
        return found
    from huggingface_hub import hf_hub_download

    refusal = f"the config.json of {source} cannot be had from the Hugging Face hub"
    with reading(lambda said: f"{refusal} ({said})"):
        return Path(hf_hub_download(str(source), "config.json")).parent


def _training_class(config: "PreTrainedConfig") -> Any:
    """Return the class a model is trained as: with an output layer where transformers has one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.architectures:
        return class_of(config)
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        return class_of(config)


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
