"""Figs. 6 and 8 of JoMA: attention entropy of small language models while they learn.

The setting is that of the paper's WikiText-2 runs, with its odd corners. Networks of one depth are
trained together, with every learning rate and seed that is asked of that depth. Fig. 6 has networks
of 1, 2, 5 and 10 layers at one learning rate; Fig. 8 those of five layers at seven, which are
trained with those of Fig. 6 and not again where a run of it lies next to this one. What the paper
does not show, the stable rank of the MLP's lower layers, is drawn below Fig. 6.

Here live the setting and, next to it, the training and what is measured on its way (`training`),
the curves that were measured and recorded ones (`curves`), what they say and the pictures
(`results`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from joma.errors import JomaError
from joma.experiments._experiment import Experiment, Scale, corpus_option

LENGTH = 35
"""Words of a window, in training as in validation."""

UNIFORM = math.lgamma(LENGTH + 1) / LENGTH
"""Mean entropy of the rows of a window if each spreads evenly over what it sees: ln(35!)/35."""

FIRST_SEED = 3
"""Torch's seed of the first recorded network; the second and third have the next two.

Found from the record: of the networks that torch draws from a seed below 60, those of 3, 4 and 5
have the recorded attention entropies before training, to all four digits.
"""

WATCHED = 100
"""Index of the validation window, of the first stream, whose attention is followed."""

DEPTHS = (1, 2, 5, 10)
SWEPT = 5
"""The depth that is trained at all learning rates."""


EMBEDDED = "embedded"
"""The text that is there on every machine, of which nothing was published."""


@dataclass(frozen=True)
class Published:
    """What was published of a text.

    Attributes:
        title: its name in a sentence.
        loss: best validation loss by depth, mean over three seeds.
        last: The published step with which its curves end.
        words: of its vocabulary.
        tokens: of its training text.
    """

    title: str
    loss: Mapping[int, float]
    last: int
    words: int
    tokens: int


WIKITEXT_2 = Published(
    "WikiText-2",
    dict(zip(DEPTHS, (5.357, 5.255, 5.169, 5.110), strict=True)),
    last=58_000,
    words=28_782,
    tokens=2_049_990,
)
WIKITEXT_103 = Published(
    "WikiText-103",
    dict(zip(DEPTHS, (5.047, 4.912, 4.762, 4.679), strict=True)),
    last=200_000,  # as far as the printed curves reach, a good third into the second epoch
    words=226_000,  # about, as the next one: they serve to estimate what it takes
    tokens=102_000_000,
)

TEXTS = {
    "wikitext-2": WIKITEXT_2,
    "wikitext-103": WIKITEXT_103,
    "hub:Salesforce/wikitext:wikitext-2-v1": WIKITEXT_2,
    "hub:Salesforce/wikitext:wikitext-103-v1": WIKITEXT_103,
}
"""The published texts, by what `joma.data.corpus` calls them."""


def named(rate: float) -> str:
    """Return a learning rate as it is written, such as 5e-5."""
    return f"{rate:.0e}".replace("e-0", "e-") if rate < 1 else f"{rate:g}"


@dataclass(frozen=True)
class LanguageSize:
    """How large the experiment is made.

    Attributes:
        corpus: the text, as `joma.data.corpus` knows it.
        vocabulary: the words there are, the most frequent; all where None.
        train_tokens: of the training text, from its beginning; all where None.
        valid_tokens: of the validation text likewise.
        width: of the residual stream.
        hidden: nodes of each layer.
        streams: of the text that are read side by side in training.
        valid_streams: likewise in validation.
        seeds: networks of one depth and learning rate.
        learning_rate: at every depth.
        learning_rates: of the depth that is swept; the other one is among them.
        every: Published steps between two measurements.
        last: The published step of the last measurement, where training ends.
    """

    corpus: str
    vocabulary: int | None
    train_tokens: int | None
    valid_tokens: int | None
    width: int
    hidden: int
    streams: int
    valid_streams: int
    seeds: int
    learning_rate: float
    learning_rates: tuple[float, ...]
    every: int
    last: int

    def rates(self, depth: int) -> tuple[float, ...]:
        """Return the learning rates at which networks of a depth are trained."""
        return self.learning_rates if depth == SWEPT else (self.learning_rate,)

    @property
    def networks(self) -> int:
        """How many of all depths."""
        return self.seeds * sum(len(self.rates(depth)) for depth in DEPTHS)


RATES = (1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 1e-3, 1e-2)
"""Of Fig. 8."""

SIZES = {
    "tiny": LanguageSize(
        corpus=EMBEDDED,
        vocabulary=150,
        train_tokens=1200,
        valid_tokens=600,
        width=16,
        hidden=16,
        streams=4,
        valid_streams=2,
        seeds=2,
        learning_rate=1e-2,
        learning_rates=(1e-4, 1e-2, 1e-1),
        every=3,
        last=12,
    ),
    "small": LanguageSize(
        corpus=EMBEDDED,
        vocabulary=1000,
        train_tokens=None,
        valid_tokens=3500,
        width=32,
        hidden=32,
        streams=20,
        valid_streams=5,
        seeds=2,
        learning_rate=3e-3,
        learning_rates=(3e-5, 3e-4, 3e-3, 3e-2),
        every=20,
        last=300,
    ),
    "full": LanguageSize(
        corpus="wikitext-2",
        vocabulary=None,
        train_tokens=None,
        valid_tokens=None,
        width=200,
        hidden=200,
        streams=20,
        valid_streams=10,
        seeds=3,
        learning_rate=1e-4,
        learning_rates=RATES,
        every=1000,
        last=WIKITEXT_2.last,
    ),
}


def sized(scale: str, corpus: str) -> LanguageSize:
    """Return the size of a scale with a text, its own or another.

    Another is trained on at the one learning rate that all depths share: the others are those of
    Fig. 8, which is of one text. At the full scale training ends where the text's published curves
    do.
    """
    size = SIZES[scale]
    if corpus == size.corpus:
        return size
    last = TEXTS[corpus].last if scale == "full" and corpus in TEXTS else size.last
    return replace(size, corpus=corpus, learning_rates=(size.learning_rate,), last=last)


GROUPS = {f"depth-{depth}": depth for depth in DEPTHS}
"""Networks that are trained together, by name, and their depth."""


@dataclass(frozen=True)
class LanguageSetting:
    """A size and the text it is trained on: all that decides the numbers but the seeds.

    A *published step* is one as the authors count: an epoch has as many as it has whole windows,
    though the short last one is trained on too. So it falls behind the updates by one an epoch.

    Attributes:
        size: of the experiment.
        words: of the vocabulary.
        stream: words of one training stream.
        digests: of the texts and the tokenizer.
        first_seed: from which torch draws the first network; see `start_as_torch`.
    """

    size: LanguageSize
    words: int
    stream: int
    digests: Mapping[str, str]
    first_seed: int = FIRST_SEED

    def __post_init__(self) -> None:
        if self.stream <= LENGTH:
            raise JomaError(
                f"stream must be longer than a window of {LENGTH} words, got {self.stream}; "
                "the training text is too short"
            )

    @property
    def published(self) -> Published | None:
        """What was published of this text at this size."""
        corpus = self.size.corpus
        return TEXTS.get(corpus) if self.size == sized("full", corpus) else None

    @property
    def windows_per_epoch(self) -> int:
        """Return the number of whole windows in an epoch."""
        return (self.stream - 1) // LENGTH

    @property
    def updates_per_epoch(self) -> int:
        """Return the number of windows in an epoch, the short last one included."""
        return -(-(self.stream - 1) // LENGTH)

    @property
    def published_steps(self) -> tuple[int, ...]:
        """Return the published steps of the measurements."""
        return tuple(range(0, self.size.last + 1, self.size.every))

    @property
    def measure_at(self) -> tuple[int, ...]:
        """Return the numbers of updates after which to measure."""
        return tuple(self.updates_at(step) for step in self.published_steps)

    def updates_at(self, published_step: int) -> int:
        """Return how many updates were made at a published step."""
        epochs, rest = divmod(published_step, self.windows_per_epoch)
        return epochs * self.updates_per_epoch + rest


_REFERENCE = (
    "folder with recorded curves, wikitext2_entropy.csv and wikitext2_val_loss.csv, to draw and "
    "compare with"
)
_NEEDS = "joma.experiments.language.results:needs"
_SECONDS_A_TOKEN = 1e-6
"""To read a text, count its words and number them, on one core."""

_FIG6_SCALES = {
    "tiny": Scale(seconds=12, device="2 CPU cores", memory="1 GB"),
    "small": Scale(seconds=100, device="2 CPU cores", memory="1 GB"),
    "full": Scale(seconds=570, device="one H200", memory="20 GB of GPU memory"),
}


def estimate(options: Mapping[str, Any]) -> dict[str, Scale]:
    """Return what the scales take with a text, by its steps, words and networks."""
    return {scale: _with_text(scale, options["corpus"]) for scale in _FIG6_SCALES}


def _with_text(scale: str, corpus: str) -> Scale:
    takes, usual, own = _FIG6_SCALES[scale], SIZES[scale], sized(scale, corpus)
    if own == usual:
        return takes
    published = TEXTS.get(corpus, WIKITEXT_2)  # as good a guess as any
    larger = own.networks * own.last / (usual.networks * usual.last)
    if own.vocabulary is None:
        larger *= published.words / WIKITEXT_2.words
    seconds = takes.seconds * larger + published.tokens * _SECONDS_A_TOKEN
    full, large = scale == "full", published is WIKITEXT_103
    memory = ("30 GB of GPU memory" if full else "4 GB") if large else takes.memory
    device = f"{takes.device}, estimated and not measured" if full else takes.device
    return Scale(seconds, device, memory)


FIG6 = Experiment(
    name="fig6",
    title="Fig. 6: attention entropy while language models of 1 to 10 layers learn",
    published=(
        "on WikiText-2 (and WikiText-103) attention first becomes sparse and then dense again; "
        "the best validation loss is 5.357, 5.255, 5.169 and 5.110 (5.047, 4.912, 4.762 and "
        "4.679) at 1, 2, 5 and 10 layers."
    ),
    run="joma.experiments.language.results:fig6",
    scales=_FIG6_SCALES,
    default_scale="small",
    options=(corpus_option({scale: size.corpus for scale, size in SIZES.items()}),),
    groups=tuple(GROUPS),
    resumable=True,
    reference=_REFERENCE,
    needs=_NEEDS,
    estimate=estimate,
)

FIG8 = Experiment(
    name="fig8",
    title="Fig. 8: attention entropy while language models learn at different learning rates",
    published=(
        "five layers on WikiText-2 learn best at learning rate 1e-4; attention becomes sparse at "
        "every learning rate, later at lower ones, and collapses at 1e-3 and 1e-2."
    ),
    run="joma.experiments.language.results:fig8",
    scales={
        "tiny": Scale(seconds=9, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=50, device="2 CPU cores", memory="1 GB"),
        "full": Scale(seconds=340, device="one H200", memory="20 GB of GPU memory"),
    },
    default_scale="small",
    groups=(f"depth-{SWEPT}",),
    resumable=True,
    reference=_REFERENCE,
    needs=_NEEDS,
)
