"""Texts to train and measure on, each in splits: by name, from a folder, or from the hub.

`corpus` finds one. A corpus knows its text's SHA-256, which identifies whatever is made of
the text. `pieces` cuts a long text into parts that can be encoded one by one.
"""

import hashlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joma.common import json_files
from joma.common.files import replacing
from joma.common.text import first_line
from joma.errors import JomaError

SPLITS = ("train", "valid", "test")
"""What a corpus may be split into."""

CACHE = "JOMA_CACHE"
"""The environment variable that moves the cache."""

SHARED = "JOMA_SHARED"
"""The environment variable with the folder that has data/wikitext-2 in it."""

NAMED = {
    "wikitext-2": "hub:Salesforce/wikitext:wikitext-2-v1",
    "wikitext-103": "hub:Salesforce/wikitext:wikitext-103-v1",
}
"""The corpora known by name, and where each can be had."""

PIECE = 1 << 24
"""Default characters of a piece: a tokenizer takes far more memory than its text."""

_BETWEEN = re.compile(r"(?<=\S) *\n")
_HUB_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
_MANIFEST = "manifest.json"
_ROWS = 1000


@dataclass(frozen=True)
class Corpus:
    """A text in splits.

    Attributes:
        name: what it is called; of a folder, its path.
        parts: for each split its file, or the bytes themselves; UTF-8.
    """

    name: str
    parts: Mapping[str, Path | bytes] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.parts:
            raise JomaError(f"parts must hold at least one of {', '.join(SPLITS)}, got none")
        for split in self.parts:
            if split not in SPLITS:
                raise JomaError(f"parts must be of {', '.join(SPLITS)}, got {split!r}")

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits it has."""
        return tuple(split for split in SPLITS if split in self.parts)

    def read(self, split: str) -> str:
        """Return the text of a split.

        Raises:
            ValueError: there is no such split, or its text is empty or not UTF-8.
        """
        return decoded(self.read_bytes(split), self.where(split))

    def read_bytes(self, split: str) -> bytes:
        """Return the bytes of a split's text."""
        part = self._part(split)
        if isinstance(part, bytes):
            return part
        try:
            return part.read_bytes()
        except OSError as error:
            raise JomaError(f"text {part} cannot be read: {error.strerror}") from error

    def digest(self, split: str) -> str:
        """Return the SHA-256 of a split's bytes, in hexadecimal."""
        return hashlib.sha256(self.read_bytes(split)).hexdigest()

    def where(self, split: str) -> str:
        """Return what messages call a split's text: its file, or the corpus's name."""
        part = self._part(split)
        return f"{self.name}:{split}" if isinstance(part, bytes) else str(part)

    def _part(self, split: str) -> Path | bytes:
        part = self.parts.get(split)
        if part is not None:
            return part
        if split not in SPLITS:
            raise JomaError(f"split must be one of {', '.join(self.splits)}, got {split!r}")
        first = self.parts[self.splits[0]]
        if isinstance(first, Path):
            raise JomaError(f"text {first.parent} has no {split}.txt in it")
        raise JomaError(f"text {self.name} has no split {split}, only {', '.join(self.splits)}")


def corpus(source: str | Path) -> Corpus:
    """Return a corpus by its name or its place.

    Args:
        source: one of

            - "embedded", the prose of Python's own documentation, the same on every machine with
              that version of Python. Its topics are dealt to the splits by the hash of their
              names, and a paragraph that came in an earlier split is left out of a later one:
              topics quote each other;
            - "wikitext-2" or "wikitext-103", from data/NAME in the folder the environment variable
              JOMA_SHARED names, or corpora/NAME in the cache folder;
            - a folder with train.txt, valid.txt and test.txt, or some of them, in UTF-8;
            - "hub:NAME" or "hub:NAME:CONFIG", the column `text` of a dataset on the Hugging Face
              hub; downloaded once with the `datasets` package, kept in the cache folder.

    Raises:
        ValueError: there is no such corpus.
    """
    name = str(source)
    if name == "embedded":
        return Corpus(name, {split: text.encode() for split, text in _embedded_splits().items()})
    if name in NAMED:
        return _named(name)
    if name.startswith("hub:"):
        folder = _downloaded(name, cache_folder() / "corpora")
        return Corpus(name, _files(folder))
    folder = Path(name)
    if not folder.is_dir():
        raise JomaError(
            f"corpus must be a folder with train.txt, 'embedded', {_listed(NAMED)} or "
            f"'hub:NAME', got {name!r}, which is none of them"
        )
    files = _files(folder)
    if not files:
        raise JomaError(f"text {folder} has no train.txt, no valid.txt and no test.txt in it")
    return Corpus(name, files)


def cache_folder() -> Path:
    """Return the cache folder: JOMA_CACHE, else `joma` in the user's cache folder.

    The user's cache folder is what XDG_CACHE_HOME names, or ~/.cache. Nothing is made here.
    """
    own = os.environ.get(CACHE)
    if own:
        return Path(own).expanduser()
    users = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The standard says that a relative path there counts as none.
    return (users if users.is_absolute() else Path("~/.cache").expanduser()) / "joma"


def decoded(data: bytes, what: str) -> str:
    """Return UTF-8 bytes as text.

    Args:
        data: the bytes; a byte order mark is left out.
        what: whose bytes they are, in a sentence.

    Raises:
        ValueError: they are not UTF-8, or nothing but white space.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise JomaError(
            f"text must be UTF-8, but {what} has the byte 0x{byte:02x} at {error.start}"
        ) from error
    if not text.strip():
        raise JomaError(f"text must not be empty: there is none in {what}")
    return text


def pieces(text: str, length: int | None = None) -> Iterator[str]:
    """Yield a text in pieces of at least `length` characters except the last, cut at line ends.

    Each cut is behind a line's last word, before any spaces. Words, bytes and GPT-2's rules for
    byte pairs never reach across it, so that the tokens of the pieces are those of the whole text.
    """
    length = PIECE if length is None else length
    assert length > 0
    start = 0
    while start < len(text):
        cut = _BETWEEN.search(text, start + length)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def embedded_text() -> str:
    """Return the whole embedded corpus, including what is quoted twice."""
    topics = _topics()
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def _named(name: str) -> Corpus:
    shared = os.environ.get(SHARED)
    cached = cache_folder() / "corpora" / name
    places = [Path(shared) / "data" / name] if shared else []
    for folder in (*places, cached, Path(name)):
        files = _files(folder)
        if files:
            return Corpus(name, files)
    given = f"{shared!r}" if shared else "not set"
    raise JomaError(
        f"text {name} needs the environment variable {SHARED} ({given}), the folder with "
        f"data/{name} in it, as there is no valid.txt in {cached}; or give a folder with "
        f"train.txt, valid.txt and test.txt, or {NAMED[name]}"
    )


def _files(folder: Path) -> dict[str, Path | bytes]:
    paths = {split: folder / f"{split}.txt" for split in SPLITS}
    return {split: path for split, path in paths.items() if path.is_file()}


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return topics


def _embedded_splits() -> dict[str, str]:
    topics = _topics()
    # About 85% of the text is for training; by hash, a topic more in another version of Python
    # moves no other.
    dealt = {name: int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 for name in topics}
    seen: set[str] = set()
    splits = {}
    for split, numbers in (("train", range(2, 10)), ("valid", (0,)), ("test", (1,))):
        own: list[str] = []
        for name in sorted(topics):
            if dealt[name] in numbers:
                own += re.split(r"\n\s*\n", topics[name].strip("\n"))
        kept = [paragraph for paragraph in own if paragraph.strip() not in seen]
        seen.update(paragraph.strip() for paragraph in own)
        splits[split] = "\n\n".join(kept) + "\n"
    return splits


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _downloaded(source: str, folder: Path) -> Path:
    """Return the folder of a dataset of the Hugging Face hub, downloaded where it is not yet there.

    Args:
        source: "hub:NAME" or "hub:NAME:CONFIG".
        folder: The folder that has one for each dataset.
    """
    if not re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        raise JomaError(
            f"corpus must be 'hub:NAME' or 'hub:NAME:CONFIG', such as "
            f"hub:Salesforce/wikitext:wikitext-103-v1, got {source!r}"
        )
    _, name, *config = source.split(":")
    own = folder / source.replace("/", "+").replace(":", "@")
    # The manifest is written last: where a download was cut short, there is none.
    if not (own / _MANIFEST).is_file():
        written = _write(_load(source, name, config), own, source)
        json_files.write(own / _MANIFEST, {"source": source, "splits": written})
    return own


def _load(source: str, name: str, config: list[str]) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise JomaError(f"corpus {source} needs datasets: pip install datasets") from error
    try:
        return datasets.load_dataset(name, *config)
    except Exception as error:  # no network, no such name, no such config: each in its own way
        reason = first_line(error).rstrip(".")
        raise JomaError(f"corpus {source} cannot be had from the hub ({reason})") from error


def _write(dataset: Any, folder: Path, source: str) -> list[str]:
    """Write the splits that are known, one line or more a row, and return their names."""
    found = [split for split in _HUB_SPLITS if split in dataset]
    if not found:
        raise JomaError(
            f"corpus {source} must have a split train, validation or test, it has "
            f"{', '.join(dataset) or 'none'}"
        )
    for split in found:
        if "text" not in dataset[split].column_names:
            raise JomaError(
                f"corpus {source} must have a column text, it has "
                f"{', '.join(dataset[split].column_names)}"
            )
    for split in found:
        with replacing(folder / f"{_HUB_SPLITS[split]}.txt") as file:
            for rows in dataset[split].iter(batch_size=_ROWS):
                # A row may end its line itself, as WikiText's do.
                file.write("".join(row.removesuffix("\n") + "\n" for row in rows["text"]).encode())
    return [_HUB_SPLITS[split] for split in found]
