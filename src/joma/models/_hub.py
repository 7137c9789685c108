"""From what a person names to a folder on this machine: a folder as it is, a hub id downloaded."""

import re
from collections.abc import Iterable
from pathlib import Path

from joma.errors import JomaError
from joma.models._quiet import first_line, need_transformers

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The files a model's weights begin with; an earlier one is preferred."""

_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|spiece|sentencepiece)[^/]*"
    r"\.(json|txt|model|bpe)"
)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: `source` where it is one, or that of a hub id, downloaded if needed.

    Raises:
        ValueError: neither a folder nor a hub id, or one that cannot be had.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise JomaError(f"revision goes with a hub id, got {revision!r} for the folder {path}")
        return path
    name = str(source)
    check_hub_id(name)
    need_transformers(f"loading {name} from the Hugging Face hub")
    return _downloaded(name, revision)


def check_hub_id(name: str) -> None:
    """Raise JomaError for what is no folder and cannot be the name of a model on the hub."""
    if Path(name).exists() or not _HUB_ID.fullmatch(name):
        raise JomaError(f"{name} is neither a folder nor a hub id such as EleutherAI/pythia-70m")


def is_tokenizer_file(name: str) -> bool:
    """Whether a file is one that tokenizers are kept in, by its name."""
    return _TOKENIZER.fullmatch(name) is not None


def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    which = name if revision is None else f"{name} at revision {revision}"
    try:
        # Asked once: listing the files as such would be tried for half a minute without a network.
        files = HfApi().model_info(name, revision=revision, timeout=20).siblings or ()
        wanted = _wanted(file.rfilename for file in files)
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except GatedRepoError as error:
        raise JomaError(f"{which} is gated: log in with `hf auth login` to use it") from error
    except RevisionNotFoundError as error:
        raise JomaError(f"{name} has no revision {revision!r} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise JomaError(
            f"no folder and no model on the Hugging Face hub is named {name}, or it is private"
        ) from error
    except Exception as error:  # offline, a proxy, a full disk: what was downloaded before may do
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:
            raise JomaError(
                f"{which} is no folder here, was not downloaded before, and the Hugging Face hub "
                f"cannot be asked ({first_line(error)})"
            ) from error


def _wanted(files: Iterable[str]) -> list[str]:
    """The files of a repository that make a model: its configuration, tokenizer and weights once.

    Many repositories hold the same weights in several formats, each as large as the other.
    """
    files = list(files)
    small = [name for name in files if name == "config.json" or is_tokenizer_file(name)]
    first = next((name for name in WEIGHTS if name in files), None)
    if first is None:
        return small
    shards = re.compile(re.escape(first.split(".")[0]) + r"-\d+-of-\d+\." + first.split(".")[1])
    if first.endswith(".index.json"):
        return [*small, first, *(name for name in files if shards.fullmatch(name))]
    return [*small, first]
