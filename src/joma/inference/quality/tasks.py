"""Tasks whose answer stands in one place of a long prompt, generated from a seed.

They follow the ideas of needle in a haystack and RULER, with sentences of our own. A prompt has
exactly as many tokens as asked for, so that a batch needs no padding. An answer counts where greedy
decoding continues the prompt with it, token for token.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.inference.quality.loss import Policies, bytes_held, logits_of, opened
from joma.models import Loaded

_CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Vienna", "Athens", "Madrid", "Paris", "Rome",
    "Berlin", "Prague", "Tokyo", "Delhi", "Sydney", "Boston", "Denver", "Seattle", "London",
    "Warsaw", "Zurich", "Geneva", "Milan", "Naples", "Moscow", "Havana", "Quebec", "Kyoto",
)  # fmt: skip
_WORDS = (
    "river", "garden", "window", "table", "bread", "horse", "cloud", "mountain", "paper", "music",
    "summer", "winter", "market", "bridge", "flower", "stone", "forest", "letter", "island",
    "castle", "candle", "mirror", "ladder", "basket", "pencil", "button", "carpet", "engine",
)  # fmt: skip
_PLACES = ("The {} is near the {}.", "A {} stood by the {}.", "They saw the {} and the {}.")


@dataclass(frozen=True)
class Prompt:
    """One prompt before it is cut to a length.

    Attributes:
        head: What the prompt begins with.
        facts: What must not be left out, each with its depth: 0 at the beginning, 1 at the end.
        filler: Returns one more sentence of what surrounds the facts.
        question: What the prompt ends with.
        opening: Beginning of the answer that is given with the question.
        answer: What comes next.
    """

    head: str
    facts: tuple[tuple[float, str], ...]
    filler: Callable[[], str]
    question: str
    opening: str
    answer: str


Task = Callable[[np.random.Generator], Prompt]
"""A kind of prompt: makes one of random numbers."""


@dataclass(frozen=True)
class Example:
    """A prompt in tokens.

    Attributes:
        prompt: Tokens of the prompt, special ones among them.
        answer: Tokens of the answer.
        text: The answer as text.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    text: str


@dataclass(frozen=True, eq=False)
class TaskScore:
    """How many answers were right.

    Attributes:
        correct: Whether greedy decoding gives the answer, of each example.
        cache_bytes: Bytes of the cache for one example, when it has been read.
    """

    correct: NDArray[np.bool_]
    cache_bytes: float

    @property
    def recall(self) -> float:
        """Share of right answers."""
        return float(self.correct.mean())


def _sentence(random: np.random.Generator) -> str:
    first, second = random.choice(_WORDS, 2, replace=False)
    return f" {random.choice(_PLACES).format(first, second)}"


def _number(random: np.random.Generator) -> str:
    return str(random.integers(1000, 10000))


def needle(random: np.random.Generator) -> Prompt:
    """Return a prompt with one number hidden among sentences of another kind."""
    city, number = str(random.choice(_CITIES)), _number(random)
    return Prompt(
        "Remember the secret number in this text.",
        ((float(random.uniform()), f" The secret number of {city} is {number}."),),
        lambda: _sentence(random),
        f"\nWhat is the secret number of {city}?",
        f" The secret number of {city} is",
        f" {number}",
    )


def lookup(random: np.random.Generator) -> Prompt:
    """Return a prompt with one pair among many pairs of its own kind."""
    cities = [str(one) for one in random.permutation(_CITIES)]
    number = _number(random)
    used = itertools.count()

    def other() -> str:
        # Cities come again only after all others, and with a word that tells them apart.
        index = next(used)
        name = cities[1 + index % (len(cities) - 1)]
        extra = "" if index < len(cities) - 1 else f" {_WORDS[(index + 1) % len(_WORDS)]}"
        return f" The code of {name}{extra} is {_number(random)}."

    return Prompt(
        "Remember the codes.",
        ((float(random.uniform()), f" The code of {cities[0]} is {number}."),),
        other,
        f"\nWhat is the code of {cities[0]}?",
        f" The code of {cities[0]} is",
        f" {number}",
    )


def tracking(random: np.random.Generator) -> Prompt:
    """Return a prompt in which a value passes from one name to another, far apart."""
    (first, second), number = random.choice(_CITIES, 2, replace=False), _number(random)
    early, late = sorted(random.uniform(size=2))
    return Prompt(
        "Remember the values in this text.",
        (
            (float(early), f" The value of {first} is {number}."),
            (float(late), f" The value of {second} is the value of {first}."),
        ),
        lambda: _sentence(random),
        f"\nWhat is the value of {second}?",
        f" The value of {second} is the value of {first}, which is",
        f" {number}",
    )


def frequent(random: np.random.Generator) -> Prompt:
    """Return a prompt of words, of which one comes far more often than any other."""
    word, *others = (str(one) for one in random.permutation(_WORDS))

    def some() -> str:
        return f" {word if random.uniform() < 0.4 else random.choice(others)}"

    return Prompt(
        "Count the words in this list:",
        (),
        some,
        "\nWhich word comes most often in the list?",
        " The word that comes most often is",
        f" {word}",
    )


TASKS: dict[str, Task] = {it.__name__: it for it in (needle, lookup, tracking, frequent)}
"""The tasks by name."""


def make_examples(
    task: Task, loaded: Loaded, *, length: int, count: int, seed: int = 0
) -> list[Example]:
    """Return examples of a task with prompts of exactly `length` tokens.

    The prompt is put into the chat template of the model's tokenizer where it has one.

    Args:
        task: One of `TASKS`, or another.
        loaded: The model, whose tokenizer is used.
        length: Tokens of each prompt, special ones among them.
        count: How many examples.
        seed: Decides all of them; other tasks and lengths have others.

    Raises:
        JomaError: The length has no room for the task, or the model has no tokenizer.
    """
    for name, value in (("length", length), ("count", count)):
        whole_number(name, value, 1)
    before, after = _chat(loaded)
    encode = partial(loaded.encode, special=False)
    found = []
    for number in range(count):
        random = np.random.default_rng([seed, length, number, *task.__name__.encode()])
        prompt = task(random)
        question = f"{prompt.question}{after}{prompt.opening}"
        tail, answer = _split(loaded, question, prompt.answer)
        start = [*loaded.special_tokens.before, *encode(f"{before}{prompt.head}")]
        facts = [(depth, encode(text)) for depth, text in prompt.facts]
        room = length - len(start) - len(tail) - sum(len(fact) for _, fact in facts)
        if room < 0:
            raise JomaError(
                f"length must be at least {length - room} tokens for the task {task.__name__}, got "
                f"{length}"
            )
        body = _filled(encode, prompt, facts, room)
        found.append(Example((*start, *body, *tail), tuple(answer), prompt.answer))
    return found


def _filled(
    encode: Callable[[str], list[int]],
    prompt: Prompt,
    facts: Sequence[tuple[float, list[int]]],
    room: int,
) -> list[int]:
    """Return the facts at their depths in exactly `room` tokens of filler."""
    pieces: list[list[int]] = []
    while (missing := room - sum(map(len, pieces))) > 0:
        # The last piece is cut, so that it ends as it should: what is asked comes after it.
        pieces.append(encode(prompt.filler())[-missing:])
    places = [(round(depth * len(pieces)), fact) for depth, fact in facts]
    for place, fact in reversed(places):  # from the back, so that none moves another
        pieces.insert(place, fact)
    return [token for piece in pieces for token in piece]


def task_score(
    model: nn.Module,
    examples: Sequence[Example],
    policies: Policies = None,
    *,
    chunk: int = 1,
    batch: int = 16,
) -> TaskScore:
    """Return which answers greedy decoding gives through a cache.

    The right answer is read along: decoding gives it exactly if each of its tokens is the most
    likely one after those before it.

    Args:
        model: A decoder of transformers in evaluation mode.
        examples: Prompts of one length.
        policies: One policy for all layers, one for each, or None for the plain model.
        chunk: Tokens read at once.
        batch: Examples read at the same time.

    Raises:
        JomaError: There are no examples or their lengths differ, or a cache cannot serve the model.
    """
    lengths = {len(one.prompt) for one in examples}
    if len(lengths) != 1:
        raise JomaError(f"examples must have prompts of one length, got {sorted(lengths)}")
    whole_number("batch", batch, 1)
    length, longest = lengths.pop(), max(len(one.answer) for one in examples)
    correct, held = [], 0
    for begin in range(0, len(examples), batch):
        some = examples[begin : begin + batch]
        # What is read after a shorter answer does not matter any more.
        answers = [[*one.answer, *[one.answer[-1]] * (longest - len(one.answer))] for one in some]
        tokens = torch.tensor([[*one.prompt, *own] for one, own in zip(some, answers, strict=True)])
        with opened(model, policies) as kv:
            likely = [
                logits.argmax(-1)
                for _, logits in logits_of(model, kv, tokens[:, :-1], chunk, first=length - 1)
            ]
            held += bytes_held(kv)
        hits = torch.cat(likely, 1).cpu() == torch.tensor(answers)
        correct += [bool(row[: len(one.answer)].all()) for row, one in zip(hits, some, strict=True)]
    return TaskScore(np.array(correct), held / len(examples))


def _split(loaded: Loaded, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of question and answer as they are in the whole text.

    Encoded alone, an answer may begin with other tokens than after its question.
    """
    whole, alone = (loaded.encode(it, special=False) for it in (question + answer, question))
    pairs = zip(whole, alone, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if same == len(whole):
        raise JomaError(f"the tokenizer of {loaded.source} has no tokens for {answer!r}")
    return whole[:same], whole[same:]


def _chat(loaded: Loaded) -> tuple[str, str]:
    """Return what a chat template puts before and after a question; empty without one."""
    tokenizer = getattr(loaded.tokenizer, "tokenizer", None)
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    mark = "QUESTION"
    text = tokenizer.apply_chat_template(  # type: ignore[union-attr]
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = str(text).partition(mark)
    return (before, after) if found else ("", "")
