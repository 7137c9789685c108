"""Models people bring: from a folder, the hub, a GGUF or a llama2.c file, ready to be measured.

Nothing of a checkpoint is executed, and no weight is made up: one that a file does not hold is an
error, not a random number.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from joma.common.quiet import need_transformers, quietly, reading
from joma.errors import JomaError, printable
from joma.models import llama2c, tokenizers
from joma.models._size_checks import check_config, check_sizes, counted, lacking, mismatch
from joma.models._special_tokens import NO_SPECIAL_TOKENS, SpecialTokens
from joma.models.checksums import check_checksums
from joma.models.discovery import find_weights
from joma.models.gguf import one_reader, read_gguf, read_header
from joma.models.hub import folder_if_here, local_folder
from joma.models.tokenizers import Tokenizer, load_tokenizer
from joma.models.weight_files import WeightFiles, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to be measured: in evaluation mode, asking for no gradients.

    Args:
        model: The model.
        tokenizer: Its tokenizer, None where none was found.
        source: Where it came from, as the caller named it.
        context: The most positions it takes, None where there is no limit.
    """

    model: nn.Module
    tokenizer: Tokenizer | None
    source: str
    context: int | None = None

    @property
    def special_tokens(self) -> SpecialTokens:
        """The tokens the model was trained to find around each text; none without a tokenizer."""
        return NO_SPECIAL_TOKENS if self.tokenizer is None else self.tokenizer.special_tokens

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, all of which the model knows.

        Args:
            text: The text.
            special: Whether the special tokens are put around it.

        Raises:
            ValueError: there is no tokenizer, or it is another model's.
        """
        if self.tokenizer is None:
            raise _without_tokenizer(self.source)
        tokens = self.tokenizer.encode(text, special=special)
        check_tokens(tokens, self.vocabulary, source=self.source)
        return tokens

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has embeddings for.

        Raises:
            JomaError: It has none, as a model of images.
        """
        try:
            embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        except (NotImplementedError, AttributeError):
            embedding = None
        if not isinstance(embedding, nn.Embedding):
            raise JomaError(
                f"{self.source} has no embeddings of tokens: it does not read text alone"
            )
        return embedding.num_embeddings


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Load a model.

    Args:
        source: A folder in Hugging Face layout, a hub id, a .gguf file, or a llama2.c checkpoint
            (its tokenizer after it in the same file, or in a tokenizer.bin next to it).
        revision: A hub id's branch, tag or commit.
        tokenizer: Another tokenizer than the model's: what `load_tokenizer` takes.
        device: The device the model is put on.
        dtype: The type of its weights; float32 unless given.

    Raises:
        ValueError: in one sentence, whatever is wrong with the source.
    """
    path = Path(source)
    need_transformers(f"loading {source}")
    if path.is_file() and revision is not None:
        raise JomaError(f"revision goes with a hub id, got {revision!r} for the file {path}")
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    kind = _kind(path)
    if kind == "folder":
        path = local_folder(source, revision)
    if kind == "weights":
        raise _weights_alone(path)
    config, weights, own = _READERS[kind](path, given is None)
    model = _made(config, weights, str(path), dtype)
    nn.Module.to(model, device)
    tokens = given if given is not None else own
    return Loaded(model, tokens, str(source), _context(config))


def untrained(loaded: Loaded, seed: int) -> Loaded:
    """Return the same model with fresh random weights, as at the beginning of training.

    The weights are drawn on the CPU, so that they depend on the seed alone; the global random
    numbers continue as if nothing had been drawn.
    """
    weight = next(loaded.model.parameters())
    config: Any = loaded.model.config
    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        model = type(loaded.model)(copy.deepcopy(config))
    model = model.to(weight.device, weight.dtype).eval().requires_grad_(False)
    return replace(loaded, model=model, source=f"{loaded.source}, untrained")


def check_tokens(tokens: list[int], vocabulary: int, *, source: str = "the model") -> None:
    """Raise JomaError if a model with embeddings for `vocabulary` tokens lacks one of `tokens`."""
    if tokens and max(tokens) >= vocabulary:
        raise JomaError(
            f"the tokenizer is not that of {source}: it gave token {max(tokens)}, and the model "
            f"has embeddings for {vocabulary}"
        )


def check_source(
    source: str | Path,
    *,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    reads_text: bool = True,
) -> None:
    """Raise what `load` would, as far as headers show: no weight is read and nothing downloaded.

    Args:
        source: What `load` takes.
        revision: A hub id's branch, tag or commit.
        tokenizer: Another tokenizer than the model's.
        reads_text: Whether the model is to read text, and so needs a tokenizer.
    """
    path = Path(source)
    need_transformers(f"loading {source}")
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    kind = _kind(path)
    if kind == "gguf":
        read_header(path)
    elif kind == "llama2c":
        llama2c.read_tokenizer(path, llama2c.read_header(path))
    elif kind == "weights" and reads_text:
        raise _weights_alone(path)
    if kind != "folder":
        return
    folder = folder_if_here(source, revision)
    if folder is None:
        return
    config, files = folder_config(folder), WeightFiles(folder)
    model_class = class_of(config)
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    with _making(model_class, str(folder)):
        check_sizes(config, model_class, shapes, str(folder))
    if reads_text and tokenizer is None and tokenizers.from_folder(folder) is None:
        raise _without_tokenizer(str(source))


def outlined(
    source: str | Path, *, revision: str | None = None, tokenizer: str | Path | None = None
) -> Loaded | None:
    """Return a folder's model without numbers (on the meta device); None for other sources.

    Args:
        source: What `load` takes.
        revision: A hub id's branch, tag or commit.
        tokenizer: Another tokenizer than the model's.

    Raises:
        JomaError: The folder holds no model that can be made.
    """
    folder = None if Path(source).is_file() else folder_if_here(source, revision)
    if folder is None:
        return None
    config = folder_config(folder)
    WeightFiles(folder)
    model = on_meta(config, class_of(config), str(folder)).eval().requires_grad_(False)
    own = tokenizers.from_folder(folder) if tokenizer is None else load_tokenizer(tokenizer)
    return Loaded(model, own, str(source), _context(config))


def folder_config(folder: Path) -> "PreTrainedConfig":
    """Return the configuration of a model's folder, whose numbers are those of a model.

    Raises:
        JomaError: There is none that the installed transformers knows.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if not (folder / "config.json").is_file():
        raise JomaError(f"{folder} is not a model's folder: it has no config.json")
    contents = read_config(folder)
    check_config(contents, f"{folder}/config.json")
    if contents["model_type"] not in CONFIG_MAPPING:
        raise JomaError(
            f"{folder}/config.json must have a model_type that the installed transformers knows, "
            f"got {printable(contents['model_type'], 60)!r}"
        )
    with reading(lambda said: f"{folder}/config.json cannot be used ({said})"), quietly():
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )


_Contents = tuple["PreTrainedConfig", dict[str, Tensor], Tokenizer | None]
"""Configuration, weights and tokenizer."""


def _from_folder(folder: Path, with_tokenizer: bool) -> _Contents:
    config, files = folder_config(folder), WeightFiles(folder)
    check_checksums(folder)
    own = tokenizers.from_folder(folder) if with_tokenizer else None
    return config, files.mapped(), own


def _from_gguf(path: Path, with_tokenizer: bool) -> _Contents:
    with one_reader():
        header = read_header(path)
        config, weights = read_gguf(path, header)
        own = tokenizers.from_gguf(path, header) if with_tokenizer else None
    return config, weights, own


def _from_llama2c(path: Path, with_tokenizer: bool) -> _Contents:
    header = llama2c.read_header(path)
    own = llama2c.read_tokenizer(path, header)
    with quietly():
        config = llama2c.llama_config(header)
    return config, llama2c.read_weights(path, header), own


_READERS = {"folder": _from_folder, "gguf": _from_gguf, "llama2c": _from_llama2c}


def _kind(path: Path) -> str:
    """Return what a source is: "gguf", "llama2c", "weights" without a configuration, or "folder".

    What is no file is a folder here or on the hub.
    """
    if not path.is_file():
        return "folder"
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        return "gguf"
    weights = path.suffix == ".safetensors" or magic[:2] == b"PK"
    return "weights" if weights else "llama2c"


@contextmanager
def _making(model_class: Any, what: str) -> Iterator[None]:
    message = f"{what} cannot be made a {model_class.__name__}"
    with reading(lambda said: f"{message} ({said})"), quietly():
        yield


def on_meta(config: "PreTrainedConfig", model_class: Any, what: str) -> nn.Module:
    """Return a model without numbers, on the meta device; `what` is its name in errors."""
    config._attn_implementation = None  # not a checkpoint's to say
    with _making(model_class, what), torch.device("meta"):
        return model_class(config)


def _made(
    config: "PreTrainedConfig", weights: dict[str, Tensor], what: str, dtype: torch.dtype | None
) -> "PreTrainedModel":
    """Return the model of a configuration with these weights in it, all of them."""
    model_class = class_of(config)
    # Which attention runs is not a checkpoint's to say: it may name code on the hub.
    config._attn_implementation = None

    def filled(**options: Any) -> tuple["PreTrainedModel", dict[str, Any]]:
        # No path: the files have been read, by readers that execute nothing.
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=torch.float32 if dtype is None else dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )

    with _making(model_class, what):
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        check_sizes(config, model_class, shapes, what, numbers=_different_numbers(weights))
        model, info = filled()
        if info["missing_keys"] and all("pooler." in name for name in info["missing_keys"]):
            # An encoder saved without the layer that sums a sentence up is complete without it.
            model, info = filled(add_pooling_layer=False)
    _check_complete(info, model, what)
    _check_finite(model, what)
    return model.eval().requires_grad_(False)


def _different_numbers(weights: dict[str, Tensor]) -> int:
    """Return how many numbers are stored: tensors of one PyTorch file may share them."""
    sizes: dict[int, int] = {}
    for weight in weights.values():
        storage = weight.untyped_storage()
        own = storage.nbytes() // weight.element_size()
        sizes[storage.data_ptr()] = max(own, sizes.get(storage.data_ptr(), 0))
    return min(sum(sizes.values()), sum(weight.numel() for weight in weights.values()))


def class_of(config: "PreTrainedConfig") -> Any:
    """Return the class of model that a configuration names; the base model's where it names none.

    Raises:
        JomaError: transformers has no model for the configuration.
    """
    import transformers

    named = config.architectures
    for name in named if isinstance(named, list | tuple) else ():
        found = _class_named(name)
        if getattr(found, "config_class", None) is type(config):
            return found
    try:
        base = transformers.MODEL_MAPPING[type(config)]
    except KeyError:
        raise JomaError(
            f"transformers has no model for the model_type {printable(config.model_type, 60)!r}"
        ) from None
    return base[0] if isinstance(base, list | tuple) else base


def _class_named(name: object) -> type | None:
    import transformers

    try:
        found = getattr(transformers, name) if isinstance(name, str) else None
    except Exception:  # there is no such name, or it needs another library
        return None
    return found if isinstance(found, type) else None


def _check_complete(info: dict[str, Any], model: nn.Module, what: str) -> None:
    if mismatched := sorted(info["mismatched_keys"], key=str):
        raise mismatch(what, *mismatched[0])
    if missing := sorted(info["missing_keys"]):
        raise lacking(what, missing, type(model).__name__)
    # Heads for other tasks do no harm; a matrix in a block says that the model is another one.
    extra = [name for name in sorted(info["unexpected_keys"]) if name.endswith(".weight")]
    extra = [name for name in extra if _in_a_block(name, model)]
    if extra:
        raise JomaError(f"{what} has weights its configuration does not mention: {counted(extra)}")


def _in_a_block(name: str, model: nn.Module) -> bool:
    """Return whether a weight is of a block of the model, or of one more block of its kind."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    paths = {block.module.removeprefix(base) for block in find_weights(model).blocks}
    blocks = {re.sub("[0-9]+", "[0-9]+", re.escape(path)) for path in paths if path}
    return any(re.search(rf"(^|\.){block}\.", name) for block in blocks)


def _check_finite(model: nn.Module, what: str) -> None:
    """Raise JomaError for a weight that holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not torch.isfinite(
            torch.linalg.vector_norm(parameter.detach(), torch.inf)
        ):
            raise JomaError(f"{what} holds NaN or infinity in {printable(name, 100)}")


def _context(config: "PreTrainedConfig") -> int | None:
    for part in (config, config.get_text_config()):
        for name in ("max_position_embeddings", "max_target_positions"):
            limit = getattr(part, name, None)
            if isinstance(limit, int) and limit > 0:
                return limit
    return None


def _without_tokenizer(source: str) -> JomaError:
    return JomaError(
        f"{source} has no tokenizer: give one with --tokenizer PATH, or --tokenizer bytes to take "
        "every byte as a token"
    )


def _weights_alone(path: Path) -> JomaError:
    return JomaError(f"{path} holds weights alone: give the folder it is in with a config.json")
