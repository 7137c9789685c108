"""Models people bring: from a folder, the hub, a GGUF or a llama2.c file, ready to be measured.

Nothing of a checkpoint is executed, and no weight is made up: one that a file does not hold is an
error, not a random number.
"""

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models import _llama2c, tokenizers
from joma.models._hub import local_folder
from joma.models._quiet import first_line, need_transformers, quietly
from joma.models.architectures import LAYER, Architecture, architecture_of
from joma.models.tokenizers import Tokenizer, load_tokenizer
from joma.models.weight_files import WeightFiles, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to be measured: in evaluation mode, asking for no gradients.

    Args:
        model: the model.
        tokenizer: its tokenizer, None where none was found.
        architecture: where its parts are.
        source: where it came from, as the reader named it.
        context: the most positions it takes, None where there is no limit.
    """

    model: nn.Module
    tokenizer: Tokenizer | None
    architecture: Architecture
    source: str
    context: int | None = None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, all of which the model knows.

        Raises:
            ValueError: there is no tokenizer, or it is another model's.
        """
        if self.tokenizer is None:
            raise JomaError(
                f"{self.source} has no tokenizer: give one with --tokenizer PATH, or "
                "--tokenizer bytes to take every byte as a token"
            )
        tokens = self.tokenizer.encode(text)
        check_tokens(tokens, self.vocabulary, source=self.source)
        return tokens

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has embeddings for."""
        return _embedding(self.model).num_embeddings


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Loads a model.

    Args:
        source: a folder in Hugging Face layout, a hub id, a .gguf file, or a llama2.c checkpoint
            (its tokenizer behind it in the same file, or in a tokenizer.bin beside it).
        revision: a hub id's branch, tag or commit.
        tokenizer: another tokenizer than the model's: what `load_tokenizer` takes.
        device: where the model is put.
        dtype: of its weights; float32 unless given.

    Raises:
        ValueError: in one sentence, whatever is wrong with the source; for an architecture without
            a map, with the module tree and how to write one.
    """
    path = Path(source)
    need_transformers(f"loading {source}")
    if path.is_file() and revision is not None:
        raise JomaError(f"revision goes with a hub id, got {revision!r} for the file {path}")
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if not path.is_file():
        loaded = _from_folder(local_folder(source, revision), given, dtype)
    elif _starts_with(path, b"GGUF") or path.suffix == ".gguf":
        loaded = _from_gguf(path, given, dtype)
    elif path.suffix == ".safetensors" or _starts_with(path, b"PK"):
        raise JomaError(f"{path} holds weights alone: give the folder it is in with a config.json")
    else:
        loaded = _from_llama2c(path, given, dtype)
    loaded.model.to(device)
    return replace(loaded, source=str(source))


def untrained(loaded: Loaded, seed: int) -> Loaded:
    """The same model with fresh random weights, as its training began.

    The weights are drawn on the CPU, so that they depend on the seed alone; the global random
    numbers go on as if nothing had been drawn.
    """
    weight = next(loaded.model.parameters())
    config: Any = loaded.model.config
    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        model = type(loaded.model)(copy.deepcopy(config))
    model = model.to(weight.device, weight.dtype).eval().requires_grad_(False)
    return replace(loaded, model=model, source=f"{loaded.source}, untrained")


def check_tokens(tokens: list[int], vocabulary: int, *, source: str = "the model") -> None:
    """Sees that a model with embeddings for `vocabulary` tokens knows all of `tokens`.

    Raises:
        ValueError: it does not: the tokenizer is another model's.
    """
    if tokens and max(tokens) >= vocabulary:
        raise JomaError(
            f"the tokenizer is not that of {source}: it gave token {max(tokens)}, and the model "
            f"has embeddings for {vocabulary}"
        )


def _from_folder(folder: Path, given: Tokenizer | None, dtype: torch.dtype | None) -> Loaded:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise JomaError(f"{folder} is not a model's folder: it has no config.json")
    contents = read_config(folder)
    architecture = architecture_of(contents)
    try:
        with quietly():
            config = AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # checks of values differ from class to class
        raise JomaError(f"{folder}/config.json cannot be used ({first_line(error)})") from error
    files = WeightFiles(folder)
    tokenizer = given if given is not None else tokenizers.from_folder(folder)
    model = _made(config, files.mapped(), architecture, str(folder), dtype)
    return Loaded(model, tokenizer, architecture, str(folder), _context(config))


def _from_gguf(path: Path, given: Tokenizer | None, dtype: torch.dtype | None) -> Loaded:
    from joma.models._gguf import read_gguf

    config, weights = read_gguf(path)
    architecture = architecture_of(config)
    tokenizer = given if given is not None else tokenizers.from_gguf(path)
    model = _made(config, weights, architecture, str(path), dtype)
    return Loaded(model, tokenizer, architecture, str(path), _context(config))


def _from_llama2c(path: Path, given: Tokenizer | None, dtype: torch.dtype | None) -> Loaded:
    header = _llama2c.read_header(path)
    own = _llama2c.read_tokenizer(path, header)
    with quietly():
        config = _llama2c.llama_config(header)
    architecture = architecture_of(config)
    weights = _llama2c.read_weights(path, header)
    model = _made(config, weights, architecture, str(path), dtype)
    tokenizer = given if given is not None else own
    return Loaded(model, tokenizer, architecture, str(path), _context(config))


def _made(
    config: "PreTrainedConfig",
    weights: dict[str, Tensor],
    architecture: Architecture,
    what: str,
    dtype: torch.dtype | None,
) -> "PreTrainedModel":
    """The model of a configuration with these weights in it, all of them."""
    model_class = class_of(config)
    # Which attention runs is not a checkpoint's to say: it may name code on the hub.
    config._attn_implementation = None
    options: dict[str, Any] = {"dtype": dtype if dtype is not None else torch.float32}
    try:
        model, info = _filled(model_class, config, weights, options)
        if info["missing_keys"] and all("pooler." in name for name in info["missing_keys"]):
            # An encoder saved without the layer that sums a sentence up is complete without it.
            options["add_pooling_layer"] = False
            model, info = _filled(model_class, config, weights, options)
    except Exception as error:  # what a model's class says to values it cannot be made of
        raise JomaError(
            f"{what} cannot be made a {model_class.__name__} ({first_line(error)})"
        ) from error
    _check_complete(info, architecture, what, model_class.__name__)
    return model.eval().requires_grad_(False)


def _filled(
    model_class: Any, config: "PreTrainedConfig", weights: dict[str, Tensor], options: dict
) -> tuple["PreTrainedModel", dict[str, Any]]:
    with quietly():
        # No path: the files have been read, by readers that execute nothing.
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )


def class_of(config: "PreTrainedConfig") -> Any:
    """The class a configuration says its model is of; the base model's where it says none."""
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and getattr(named, "config_class", None) is type(config):
            return named
    return transformers.MODEL_MAPPING[type(config)]


def _check_complete(info: dict[str, Any], architecture: Architecture, what: str, name: str) -> None:
    if mismatched := sorted(info["mismatched_keys"], key=str):
        weight, stored, expected = mismatched[0]
        raise JomaError(
            f"{what} does not fit its configuration: {weight} has shape {tuple(stored)} and should "
            f"have {tuple(expected)}"
        )
    if missing := sorted(info["missing_keys"]):
        raise JomaError(
            f"{what} lacks {_counted(missing)} of a {name}: random numbers would have been measured"
        )
    # Heads for other tasks do no harm; a matrix in a block says that the model is another one.
    block = re.compile(re.escape(architecture.layer).replace(re.escape(LAYER), "[0-9]+"))
    if extra := sorted(
        weight
        for weight in info["unexpected_keys"]
        if weight.endswith(".weight") and block.search(weight)
    ):
        raise JomaError(f"{what} has weights its configuration does not tell of: {_counted(extra)}")


def _counted(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more weights"


def _context(config: "PreTrainedConfig") -> int | None:
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _embedding(model: nn.Module) -> nn.Embedding:
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    assert isinstance(embedding, nn.Embedding)
    return embedding


def _starts_with(path: Path, magic: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic
