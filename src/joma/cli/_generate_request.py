"""What `joma generate` is asked for, and what that means for a model."""

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.analysis.generation import NamedCache, Sampling
    from joma.models import Loaded

_SHOWN = 80
"""Characters of a prompt that the configuration of a run shows."""


@dataclass(frozen=True)
class GenerateRequest:
    """What the user wants continued, and how.

    Attributes are the options of the command.
    """

    model: str
    prompt: str
    caches: tuple[str, ...]
    budget: str | None
    sweep: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    beams: int
    chat: bool
    chunk: int | None
    scored: int | None
    rounds: int
    tokenizer: str | None
    revision: str | None
    dtype: str
    seed: int

    @property
    def config(self) -> dict[str, Any]:
        """What decides the numbers; of the prompt its beginning and a SHA-256, for it may be long.

        The whole prompt is in `text.json` of the run folder.
        """
        digest = hashlib.sha256(self.prompt.encode(errors="surrogatepass")).hexdigest()
        begins = " ".join(self.prompt[:_SHOWN].split())
        return {**asdict(self), "prompt": begins, "prompt_sha256": digest}

    @property
    def is_limited(self) -> bool:
        """Whether the text is made with a limited cache; a sweep compares alone."""
        if self.sweep is not None or self.caches[:1] == ("full",):
            return False
        return bool(self.caches) or self.budget is not None

    @property
    def sampling(self) -> "Sampling":
        """How tokens are chosen."""
        from joma.analysis.generation import Sampling

        return Sampling(self.temperature, self.top_p, self.seed)


def prepared(
    asked: GenerateRequest, device: str
) -> "tuple[Loaded, list[int], list[NamedCache], str | None]":
    """Return the model, the prompt's tokens, the caches to compare, and what to note of them.

    Raises:
        JomaError: Something that was asked for is impossible.
    """
    from joma.analysis.generation import check_generates, check_length, encode_prompt
    from joma.analysis.probing import DTYPES
    from joma.inference import Full, cache
    from joma.models import load

    check_asked(asked)
    loaded = load(
        asked.model,
        revision=asked.revision,
        tokenizer=asked.tokenizer,
        device=device,
        dtype=DTYPES[asked.dtype],
    )
    check_generates(loaded.model, loaded.source)
    tokens = encode_prompt(loaded, asked.prompt, chat=asked.chat)
    notes = [check_length(loaded, len(tokens), asked.max_new_tokens)]
    caches = resolved(asked, loaded, tokens)
    for policy in (Full(), *(it.policy for it in caches)):
        assert policy is not None
        with cache(loaded.model, policy):  # raises where it cannot serve the model
            pass
    longest = len(tokens) + asked.max_new_tokens
    idle = [it.name for it in caches if it.keys >= longest]
    if idle:
        notes.append(f"{idle[0]} drops nothing: the text has {longest} tokens at most.")
    return loaded, tokens, caches, " ".join(it for it in notes if it) or None


def check_asked(asked: GenerateRequest) -> None:
    """Raise for what can be known to be impossible before the model is loaded."""
    from joma.analysis.generation import AskedCaches, check_caches

    assert asked.sampling is not None  # which checks itself
    check_caches(AskedCaches(asked.caches, asked.budget, asked.sweep))
    if not asked.prompt:
        raise JomaError("prompt must hold at least one token, got an empty text")


def resolved(asked: GenerateRequest, loaded: "Loaded", tokens: list[int]) -> "list[NamedCache]":
    """Return the caches that are asked for, for a prompt of these tokens."""
    from joma.analysis.generation import AskedCaches, auto_caches, parse_caches

    given = AskedCaches(asked.caches, asked.budget, asked.sweep)
    length = len(tokens) + asked.max_new_tokens
    return [*auto_caches(given, loaded.model, tokens, length), *parse_caches(given, length)]
