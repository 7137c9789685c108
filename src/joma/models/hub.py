"""The folder of a model on this machine: a folder as it is, a hub id downloaded."""

import re
from collections.abc import Iterable
from pathlib import Path

from joma.common.quiet import need_transformers
from joma.common.text import first_line
from joma.errors import JomaError, printable

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
    """Return the folder of a model: `source` itself, or that of a hub id, downloaded if needed.

    Raises:
        ValueError: neither a folder nor a hub id, or one that cannot be had.
    """
    here, wanted = _found(source, revision)
    return here if here is not None else _downloaded(str(source), revision, wanted)


def folder_if_here(source: str | Path, revision: str | None = None) -> Path | None:
    """Return the folder of a model without a download; None where it must be downloaded first.

    Raises:
        JomaError: Neither a folder nor a hub id, or the hub has no such model or revision.
    """
    return _found(source, revision)[0]


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file is one that tokenizers are kept in, by its name."""
    return _TOKENIZER.fullmatch(name) is not None


def _downloaded(name: str, revision: str | None, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the network broke, the disk is full
        return _downloaded_before(name, revision, error)


def _found(source: str | Path, revision: str | None) -> tuple[Path | None, list[str]]:
    """Return the folder of a model, or None and the files of the hub to download.

    Where the hub does not answer, an earlier download is its folder.
    """
    path, name = Path(source), str(source)
    if path.is_dir():
        if revision is not None:
            raise JomaError(f"revision goes with a hub id, got {revision!r} for the folder {path}")
        return path, []
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise JomaError(
            f"{printable(name)} is neither a folder nor a hub id such as EleutherAI/pythia-70m"
        )
    need_transformers(f"loading {source} from the Hugging Face hub")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # Asked once: listing the files as such would be tried for half a minute without a network.
        files = HfApi().model_info(name, revision=revision, timeout=20).siblings or ()
    except GatedRepoError as error:
        which = _which(name, revision)
        raise JomaError(f"{which} is gated: log in with `hf auth login` to use it") from error
    except RevisionNotFoundError as error:
        raise JomaError(f"{name} has no revision {revision!r} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise JomaError(
            f"no folder and no model on the Hugging Face hub is named {name}, or it is private"
        ) from error
    except Exception as error:  # offline, a proxy: what was downloaded before may do
        return _downloaded_before(name, revision, error), []
    return None, model_files(file.rfilename for file in files)


def _downloaded_before(name: str, revision: str | None, error: Exception) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        raise JomaError(
            f"{_which(name, revision)} is no folder here, was not downloaded before, and the "
            f"Hugging Face hub cannot be asked ({first_line(error)})"
        ) from error


def _which(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at revision {revision}"


def model_files(files: Iterable[str]) -> list[str]:
    """Return the files of a repository that make a model: configuration, tokenizer, weights once.

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
