"""Fig. 6 of JoMA: attention entropy of language models of 1, 2, 5 and 10 layers while they learn.

The setting is that of the paper's WikiText-2 runs, with its odd corners: see
`joma.experiments.language`. What the paper does not show, the stable rank of the MLP's lower
layers, is drawn below. A network of five layers is trained at all learning rates of Fig. 8 at once;
Fig. 6 shows one of them. On another text, such as the paper's WikiText-103, it is trained at that
one alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.experiments._experiment import ChoiceOption, Experiment, Scale
from joma.experiments.language import REFERENCE
from joma.experiments.language._groups import (
    EMBEDDED,
    GROUPS,
    SIZES,
    TEXTS,
    WIKITEXT_2,
    WIKITEXT_103,
    sized,
)

SCALES = {
    "tiny": Scale(seconds=12, device="2 CPU cores", memory="1 GB"),
    "small": Scale(seconds=100, device="2 CPU cores", memory="1 GB"),
    "full": Scale(seconds=570, device="one H200", memory="20 GB of GPU memory"),
}
_SECONDS_A_TOKEN = 1e-6
"""To read a text, count its words and number them, on one core."""


def folder_or_hub(given: str) -> str:
    """Return a text that is none of those with a name, as the run folder keeps it."""
    folder = Path(given)
    if given.startswith("hub:"):
        return given
    if not given or not folder.is_dir():
        raise JomaError(
            "corpus must be wikitext-2, wikitext-103, embedded, hub:NAME or a folder with "
            f"train.txt and valid.txt, got {given!r}, which is none of them"
        )
    missing = [name for name in ("train.txt", "valid.txt") if not (folder / name).is_file()]
    if missing:
        raise JomaError(
            "corpus must be a folder with train.txt and valid.txt, "
            f"got {given!r}, which has no {' and no '.join(missing)}"
        )
    return str(folder.resolve())  # the same from wherever it is named


def corpus_option(defaults: Mapping[str, str]) -> ChoiceOption:
    """Return the option for the text of an experiment, given that of each scale."""
    return ChoiceOption(
        "corpus",
        defaults,
        "the text, wikitext-2, wikitext-103, embedded (prose that comes with Python), "
        "hub:NAME, or a folder with train.txt and valid.txt; as the scale has it if not given",
        choices=("wikitext-2", "wikitext-103", EMBEDDED),
        other=folder_or_hub,
    )


def estimate(options: Mapping[str, Any]) -> dict[str, Scale]:
    """Return what the scales take with a text, by its steps, words and networks."""
    return {scale: _with_text(scale, options["corpus"]) for scale in SCALES}


def _with_text(scale: str, corpus: str) -> Scale:
    takes, usual, own = SCALES[scale], SIZES[scale], sized(scale, corpus)
    if own == usual:
        return takes
    published = TEXTS.get(corpus, WIKITEXT_2)  # as good a guess as any
    larger = own.networks * own.last / (usual.networks * usual.last)
    if own.vocabulary is None:
        larger *= published.words / WIKITEXT_2.words
    seconds = takes.seconds * larger + published.tokens * _SECONDS_A_TOKEN
    where = takes.device
    if scale == "full":
        where += ", estimated and not measured"
        where += "" if corpus in TEXTS else f", with as many words as {published.title}"
    memory = takes.memory
    if published is WIKITEXT_103:
        memory = "30 GB of GPU memory" if scale == "full" else "4 GB"
    return replace(takes, seconds=seconds, device=where, memory=memory)


EXPERIMENT = Experiment(
    name="fig6",
    title="Fig. 6: attention entropy while language models of 1 to 10 layers learn",
    published=(
        "on WikiText-2 (and WikiText-103) attention first becomes sparse and then dense again; "
        "the best validation loss is 5.357, 5.255, 5.169 and 5.110 (5.047, 4.912, 4.762 and "
        "4.679) at 1, 2, 5 and 10 layers."
    ),
    run="joma.experiments.language.figure:fig6",
    scales=SCALES,
    default_scale="small",
    options=(corpus_option({scale: size.corpus for scale, size in SIZES.items()}),),
    groups=tuple(GROUPS),
    resumable=True,
    reference=REFERENCE,
    needs="joma.experiments.language.figure:needs",
    estimate=estimate,
)
