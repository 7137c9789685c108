"""GGUF files, dequantised: the format of llama.cpp."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from joma.common.quiet import quietly, reading
from joma.models._gguf_header import GgufHeader
from joma.models._size_checks import check_config, check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_gguf(path: Path, header: GgufHeader) -> tuple["PreTrainedConfig", dict[str, Tensor]]:
    """The configuration and weights of a GGUF file, under the names transformers gives them.

    Args:
        path: The file.
        header: What `read_header` gave of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with (
        reading(
            lambda said: (
                f"{path} is cut short, damaged or not a GGUF file transformers reads ({said})"
            )
        ),
        quietly(),
        _no_bar(),
    ):
        config = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
        check_config(config.to_dict(), str(path))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # Names are llama.cpp's: sizes alone can be compared before the numbers are read.
        check_sizes(config, type(model), {}, str(path), numbers=header.elements)
        contents = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=_Named(model))
    config.architectures = [type(model).__name__]
    return config, contents["tensors"]


class _Named:
    """A model of which only the parameters' names are asked.

    Given a model, transformers asks it and every module in it anew, which takes longer than all
    the rest and adds nothing: every name is known to the whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without the one progress bar that does not listen to transformers' own switch."""
    module: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = module.tqdm

    def silent(items: Any, **_: Any) -> Any:
        return items

    module.tqdm = silent
    try:
        yield
    finally:
        module.tqdm = bar
