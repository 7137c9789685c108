"""A small input for a Hugging Face model, so that one forward pass can be watched."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from joma.models.architectures import config_entry

_TOKENS = 7
_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")


def dummy_forward(model: nn.Module, *, numbers: bool = True) -> Callable[[], object] | None:
    """Return a function that runs a Hugging Face model on a small input; None without one.

    The model runs in evaluation mode without gradients and is left as it was, the global random
    numbers too. The input has seven tokens, one image or one sound, as the model takes them.

    Args:
        model: the model; for one that is not of transformers None is returned.
        numbers: False to run a model on the meta device as well, which computes shapes alone.
    """
    config = getattr(model, "config", None)
    first = next(model.parameters(), None)
    if config is None or first is None or config_entry(config, "model_type") is None:
        return None
    if first.is_meta and numbers:
        return None
    inputs = _inputs(model, config, first)
    if not inputs:
        return None

    def run() -> object:
        with torch.no_grad(), _as_it_was(model):
            return model(**inputs)

    return run


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; restore every part and the random numbers at the end."""
    training = [module for module in model.modules() if module.training]
    devices = list({it.device.index for it in model.parameters() if it.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for module in training:
                module.training = True


def _inputs(model: nn.Module, config: Any, like: Tensor) -> dict[str, Any]:
    taken = inspect.signature(_unwrapped(model).forward).parameters
    device, dtype = like.device, like.dtype
    inputs: dict[str, Any] = {}
    vocabulary = _entry(config, "vocab_size")
    if vocabulary and "input_ids" in taken:
        inputs["input_ids"] = _tokens(vocabulary, device)
    if vocabulary and "decoder_input_ids" in taken:
        inputs["decoder_input_ids"] = _tokens(vocabulary, device)
    if "pixel_values" in taken and (size := _entry(config, "image_size")):
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = _entry(config, "num_channels") or 3
        inputs["pixel_values"] = _noise((1, channels, height, width), device, dtype)
    if "input_features" in taken and (bins := _entry(config, "num_mel_bins")):
        length = 2 * (_entry(config, "max_source_positions") or 64)
        inputs["input_features"] = _noise((1, bins, length), device, dtype)
    if "input_values" in taken:
        inputs["input_values"] = _noise((1, 4000), device, dtype)
    if inputs and "use_cache" in taken:
        inputs["use_cache"] = False
    return inputs


def _unwrapped(model: nn.Module) -> nn.Module:
    get_base: Any = getattr(model, "get_base_model", None)  # peft passes any argument on
    return model if get_base is None else get_base()


def _tokens(vocabulary: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    low = min(5, vocabulary - 1)  # most special tokens are before
    return torch.randint(low, vocabulary, (1, _TOKENS), generator=generator).to(device)


def _noise(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _entry(config: Any, name: str) -> Any:
    """Return an entry of a configuration, or of one of its parts."""
    own = config_entry(config, name)
    if own is not None:
        return own
    for part in (config_entry(config, part) for part in _PARTS):
        inside = None if part is None or isinstance(part, str) else config_entry(part, name)
        if inside is not None:
            return inside
    return None
