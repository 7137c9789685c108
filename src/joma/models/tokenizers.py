"""Text to tokens and back, whatever tokenizer a model came with."""

import base64
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from joma.common import json_files
from joma.common.quiet import need_transformers, quietly, reading
from joma.errors import JomaError, printable
from joma.models._special_tokens import NO_SPECIAL_TOKENS, SpecialTokens
from joma.models.gguf import GgufContents, read_header
from joma.models.hub import is_tokenizer_file, local_folder
from joma.models.llama2c import Llama2cTokenizer

_SAMPLES = ("x", "the", "a b", "1", ".", "é")
"""Texts of which at least one should give tokens, whatever the vocabulary."""

_LARGEST_FILE = 2**28
_MOST_TOKENS = 2**24
_WITHOUT = "trained_without_special_tokens"
_GGUF_ENTRIES = (
    *("add_bos_token", "add_eos_token", "add_sep_token"),
    *("bos_token_id", "eos_token_id", "sep_token_id"),
)


@runtime_checkable
class Tokenizer(Protocol):
    """What turns text into a model's tokens."""

    @property
    def size(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def special_tokens(self) -> SpecialTokens:
        """What the model was trained to find around a text."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the special tokens around it if `special`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


class ByteTokenizer:
    """Every byte of the text is a token: for a model trained so, or where no tokenizer is known."""

    size = 256
    special_tokens = NO_SPECIAL_TOKENS

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the bytes of the text in UTF-8; no special tokens are known."""
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of transformers.

    Args:
        tokenizer: what `AutoTokenizer` made.
        special_tokens: What is put around a text; unless given, what the tokenizer itself adds.
    """

    def __init__(self, tokenizer: Any, special_tokens: SpecialTokens | None = None) -> None:
        self.tokenizer = tokenizer
        self._given = special_tokens

    @property
    def size(self) -> int:
        """How many tokens there are, those added later included."""
        return len(self.tokenizer)

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens put around a text."""
        return self._own if self._given is None else self._given

    @cached_property
    def _own(self) -> SpecialTokens:
        """What the tokenizer puts around a text, found by encoding one with and without.

        None are known where it does more than that.
        """
        for sample in _SAMPLES:
            plain, whole = self._encoded(sample, False), self._encoded(sample, True)
            if whole == plain and plain:
                break
            starts = [
                start
                for start in range(len(whole) - len(plain) + 1)
                if whole[start : start + len(plain)] == plain
            ]
            if plain and len(starts) == 1:
                return self.special(whole[: starts[0]], whole[starts[0] + len(plain) :])
        return NO_SPECIAL_TOKENS

    def special(self, before: Sequence[int], after: Sequence[int]) -> SpecialTokens:
        """Return tokens before and after a text with their names."""
        names = map(self.tokenizer.convert_ids_to_tokens, (*before, *after))
        return SpecialTokens(tuple(before), tuple(after), tuple(map(str, names)))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text of any length."""
        if special and self._given is None:
            return self._encoded(text, True)
        tokens = self._encoded(text, False)
        return self.special_tokens.around(tokens) if special else tokens

    def _encoded(self, text: str, special: bool) -> list[int]:
        text = text.encode(errors="replace").decode()  # lone surrogates cannot be encoded
        with reading(lambda said: f"the tokenizer cannot encode the text ({said})"), quietly():
            return list(self.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)


def load_tokenizer(source: str | Path, *, revision: str | None = None) -> Tokenizer:
    """Return the tokenizer of a source.

    Args:
        source: A folder, a hub id, a tokenizer.json, a .gguf, a tokenizer.bin, or "bytes".
        revision: A hub id's branch, tag or commit.

    Raises:
        JomaError: There is none.
    """
    if source == "bytes":
        return ByteTokenizer()
    path = Path(source)
    need_transformers(f"the tokenizer {source}")
    if path.is_file() and path.suffix not in (".json", ".gguf"):
        return Llama2cTokenizer.from_bytes(path.read_bytes(), str(path))
    if path.is_file():
        return _from_json(path) if path.suffix == ".json" else from_gguf(path)
    folder = local_folder(source, revision)
    tokenizer = from_folder(folder)
    if tokenizer is None:
        raise JomaError(f"{folder} has no tokenizer: no tokenizer.json or the like is in it")
    return tokenizer


def from_folder(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder in Hugging Face layout, None where it has none."""
    files = [path for path in folder.iterdir() if is_tokenizer_file(path.name)]
    if not files:  # transformers makes an empty tokenizer up for some models
        return None
    for path in files:
        check_size(path)
    settings = _settings(folder / "tokenizer_config.json")
    tokenizer = _wrapped(str(folder), str(folder))
    given = _special_by_settings(settings, HuggingFaceTokenizer(tokenizer))
    return HuggingFaceTokenizer(tokenizer, given)


def check_size(path: Path) -> None:
    """Raise JomaError for a tokenizer's file that is larger than any real one."""
    size = path.stat().st_size
    if size > _LARGEST_FILE:
        raise JomaError(
            f"{path} has {size} bytes, more than the {_LARGEST_FILE} that a tokenizer's file may"
        )


def _settings(path: Path) -> dict[str, Any]:
    """Return the contents of a tokenizer_config.json, empty where there is none.

    Raises:
        JomaError: It asks for more tokens than any model has.
    """
    if not path.is_file():
        return {}
    settings = json_files.read(path, largest=json_files.LARGEST_JSON)
    if not isinstance(settings, dict):
        raise JomaError(f"{path} must hold settings by name, got a {type(settings).__name__}")
    for name, value in settings.items():
        counts = isinstance(value, int | float) and "length" not in name
        if counts and not abs(value) <= _MOST_TOKENS:
            raise JomaError(
                f"{path} must not ask for {printable(name, 60)} = {printable(str(value), 30)}"
            )
    return settings


def note_no_special_tokens(folder: Path) -> None:
    """Note in a folder's tokenizer_config.json that its model was trained without special tokens.

    The tokenizer may add some all the same, as that of another model.
    """
    path = folder / "tokenizer_config.json"
    settings = {**_settings(path), _WITHOUT: True}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_by_settings(
    settings: dict[str, Any], tokenizer: HuggingFaceTokenizer
) -> SpecialTokens | None:
    """Return the special tokens if tokenizer_config.json asks for more than are added."""
    if settings.get(_WITHOUT) is True:
        return NO_SPECIAL_TOKENS
    own = tokenizer.special_tokens
    before, after = own.before, own.after
    if settings.get("add_bos_token") is True and not before:
        before = _ids(tokenizer.tokenizer.bos_token_id, tokenizer)
    if settings.get("add_eos_token") is True and not after:
        after = _ids(tokenizer.tokenizer.eos_token_id, tokenizer)
    same = (before, after) == (own.before, own.after)
    return None if same else tokenizer.special(before, after)


def from_gguf(path: Path, header: GgufContents | None = None) -> Tokenizer:
    """Return the tokenizer inside a GGUF file, and the special tokens that the file tells of.

    Args:
        path: The file.
        header: What `read_header` gave of it; read again unless given.
    """
    header = read_header(path) if header is None else header
    tokenizer = _wrapped(str(path), str(path.parent), gguf_file=path.name)
    given = _special_by_gguf(header, HuggingFaceTokenizer(tokenizer))
    return HuggingFaceTokenizer(tokenizer, given)


def _special_by_gguf(header: GgufContents, tokenizer: HuggingFaceTokenizer) -> SpecialTokens | None:
    """Return the special tokens a GGUF file asks for; None where it leaves them to the tokenizer.

    transformers ignores these entries for some models. Where one is missing, what the tokenizer of
    transformers adds holds.
    """
    entries = {name: header.values.get(f"tokenizer.ggml.{name}") for name in _GGUF_ENTRIES}
    if all(entries[name] is None for name in ("add_bos_token", "add_eos_token", "add_sep_token")):
        if header.values.get("tokenizer.ggml.model") != "llama" or tokenizer.special_tokens.count:
            return None
        entries["add_bos_token"] = True  # what llama.cpp does for this kind of vocabulary
    own = tokenizer.special_tokens
    before, after = own.before, own.after
    if entries["add_bos_token"] is not None:
        before = _ids(entries["bos_token_id"], tokenizer) if entries["add_bos_token"] else ()
    ends = [
        _ids(entries[f"{end}_token_id"], tokenizer)
        for end in ("sep", "eos")
        if entries[f"add_{end}_token"]
    ]
    if ends:
        after = next((end for end in ends if end), own.after)
    elif entries["add_eos_token"] is not None:
        after = ()
    return tokenizer.special(before, after)


def _ids(token: object, tokenizer: HuggingFaceTokenizer) -> tuple[int, ...]:
    return (token,) if isinstance(token, int) and 0 <= token < tokenizer.size else ()


def _from_json(path: Path) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    check_size(path)
    with reading(lambda said: f"{path} is no tokenizer ({said})"), quietly():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    return HuggingFaceTokenizer(_check_growth(tokenizer, str(path)))


def _wrapped(what: str, folder: str, **options: str) -> Any:
    """Return what `AutoTokenizer` makes of a folder's files or of a GGUF file."""
    from transformers import AutoTokenizer

    other = "give another with --tokenizer PATH or --tokenizer bytes"
    with (
        reading(lambda said: f"the tokenizer of {what} cannot be read ({said}); {other}"),
        quietly(),
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    if not tokenizer.vocab_size:
        raise JomaError(f"the tokenizer of {what} is empty: files of it are missing; {other}")
    return _check_growth(tokenizer, f"the tokenizer of {what}")


_MOST_GROWTH = 200
"""Letters that normalizers may make of one; those of known tokenizers make 36 at most."""


def _check_growth(tokenizer: Any, what: str) -> Any:
    """Return a tokenizer of transformers whose normalizers cannot make a text far longer."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    state = None if normalizer is None else json.loads(normalizer.__getstate__())
    growth = 1.0 if state is None else max(_lengths(state, {_OTHERS: 1.0}).values())
    if growth > _MOST_GROWTH:
        raise JomaError(f"{what} has normalizers that may make {growth:.3g} letters of one")
    return tokenizer


_OTHERS = ""


def _lengths(state: dict[str, Any], after: dict[str, float]) -> dict[str, float]:
    """Return how many letters at most each letter becomes, where that is its file's to say.

    Args:
        state: A normalizer.
        after: What each letter becomes by the normalizers after it; `_OTHERS` for all others.
    """

    def length(text: str) -> float:
        return sum(after.get(letter, after[_OTHERS]) for letter in text)

    kind, longest = state["type"], max(after.values())
    if kind == "Sequence":
        for one in reversed(state["normalizers"]):
            after = _lengths(one, after)
        return after
    if kind == "Replace" and (replaced := state["pattern"].get("String")):
        made = length(state["content"])
        least = 0.0 if len(replaced) == 1 else 1.0  # letters outside the pattern are kept
        return after | {letter: max(made, least * length(letter)) for letter in replaced}
    if kind in ("Replace", "Prepend"):  # a regular expression may match between any two letters
        added = length(state["content" if kind == "Replace" else "prepend"])
        return {letter: added + own for letter, own in after.items()}
    if kind == "Precompiled":
        table = base64.b64decode(state.get("precompiled_charsmap") or "")
        start = 4 + int.from_bytes(table[:4], "little")
        return {_OTHERS: longest * max(1, *map(len, table[start:].split(b"\0")))}
    return {_OTHERS: longest}  # it may make any letter of another
