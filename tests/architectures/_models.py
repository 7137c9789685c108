"""Tiny random models of ninety-six architectures, and the inputs to call them with.

Each is built from its configuration alone, with seeded weights large enough that attention is far
from uniform: a wrong scale, mask, position or grouping of heads then shows in the third digit.
"""

import copy
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures._catalogue import ARCHITECTURES, Architecture

LENGTH = 16
SOURCE = 13
"""Tokens of the encoder in models that have one too: another number than the decoder's."""
PADDED = 5
"""How many places of the second sequence are padding where a batch is padded."""

BY_NAME = {architecture.model_type: architecture for architecture in ARCHITECTURES}
MEASURED = [architecture for architecture in ARCHITECTURES if not architecture.refused]
REFUSED = [architecture for architecture in ARCHITECTURES if architecture.refused]


def build(
    architecture: Architecture | str,
    *,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The tiny model in evaluation mode, the same weights whenever it is built.

    Args:
        architecture: which, or its model type.
        attention: implementation of attention; None for the library's choice.
        dtype: of weights and computation.
    """
    import transformers
    from transformers import AutoConfig

    architecture = BY_NAME[architecture] if isinstance(architecture, str) else architecture
    config = AutoConfig.for_model(architecture.model_type, **copy.deepcopy(architecture.config))
    chosen = {} if attention is None else {"attn_implementation": attention}
    cls = getattr(transformers, f"AutoModel{architecture.auto}")
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(config, **chosen)
    initialise(model, zlib.crc32(architecture.model_type.encode()))
    return model.to(dtype).eval()


def initialise(model: nn.Module, seed: int) -> None:
    """Draws all weights, matrices with gain 1.5 (so that attention is peaked)."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in tables:
                parameter.copy_(noise)
            elif parameter.ndim < 2 or min(parameter.shape) == 1:
                parameter.add_(0.1 * noise)
            else:
                inputs = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
                parameter.copy_(1.5 * noise / inputs**0.5)


def inputs_of(
    architecture: Architecture,
    padding: str = "",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Two examples to call the model with.

    Args:
        architecture: which.
        padding: "" for none, "right" or "left" for a second sequence that is shorter.
        seed: of the draw.
        dtype: of images and sounds.
    """
    inputs = _INPUTS[architecture.inputs](torch.Generator().manual_seed(seed), padding)
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }


def real_queries(inputs: Mapping[str, Any]) -> dict[int, Tensor]:
    """Which queries are real, (B, T), by T; lengths that are not there have real queries only."""
    masks = (inputs.get("attention_mask"), inputs.get("decoder_attention_mask"))
    return {mask.shape[1]: mask.bool() for mask in masks if mask is not None}


def _text(generator: torch.Generator, padding: str, length: int = LENGTH) -> dict[str, Tensor]:
    tokens = torch.randint(3, 90, (2, length), generator=generator)
    if not padding:
        return {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[1, slice(length - PADDED, None) if padding == "right" else slice(0, PADDED)] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _seq2seq_text(generator: torch.Generator, padding: str) -> dict[str, Tensor]:
    source = _text(generator, padding, SOURCE)
    target = _text(generator, padding)
    return source | {f"decoder_{name}": value for name, value in target.items()}


def _image(generator: torch.Generator, padding: str) -> dict[str, Tensor]:
    assert not padding
    return {"pixel_values": torch.randn(2, 3, 24, 24, generator=generator)}


def _image_and_text(generator: torch.Generator, padding: str) -> dict[str, Tensor]:
    return _image(generator, "") | _text(generator, padding)


def _patches_in_text(generator: torch.Generator, padding: str) -> dict[str, Tensor]:
    """An image of 3×3 patches in each text, a token for each patch."""
    text = _text(generator, padding, LENGTH + 10)
    text["input_ids"][:, 6:15] = 90
    return _image(generator, "") | text


def _image_in_text(generator: torch.Generator, padding: str) -> dict[str, Tensor]:
    """Two images of 4×4 patches, merged to 2×2 tokens each."""
    assert not padding
    tokens = _text(generator, "")["input_ids"]
    tokens[:, 2] = 92
    tokens[:, 3:7] = 90
    tokens[:, 7] = 93
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == 90).int(),
        "pixel_values": torch.randn(32, 3 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }


def _speech(generator: torch.Generator, padding: str) -> dict[str, Tensor]:
    assert not padding
    tokens = _text(generator, "")["input_ids"]
    return {
        "input_features": torch.randn(2, 8, 30, generator=generator),
        "decoder_input_ids": tokens,
    }


def _sound(generator: torch.Generator, padding: str) -> dict[str, Tensor]:
    assert not padding
    return {"input_values": torch.randn(2, 300, generator=generator)}


_INPUTS = {
    "text": _text,
    "seq2seq": _seq2seq_text,
    "image": _image,
    "image and text": _image_and_text,
    "patches in text": _patches_in_text,
    "image in text": _image_in_text,
    "speech": _speech,
    "sound": _sound,
}
