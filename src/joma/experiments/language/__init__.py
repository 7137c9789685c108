"""Figs. 6 and 8 of JoMA: attention entropy of small language models while they learn.

The setting is that of the paper's WikiText-2 runs, with its odd corners. Networks of one depth are
trained together, with every learning rate and seed that is asked of that depth. Fig. 6 has networks
of 1, 2, 5 and 10 layers at one learning rate; Fig. 8 those of five layers at seven, which are
trained with those of Fig. 6 and not again where a run of it lies next to this one. What the paper
does not show, the stable rank of the MLP's lower layers, is drawn below Fig. 6.

Here live the setting (`setting`), the text, the training and what is measured on its way
(`training`), the curves that were measured and recorded ones (`curves`), what they say
(`findings`) and the pictures (`figure`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from joma.experiments._experiment import Experiment, Scale, corpus_option
from joma.experiments.language.setting import (
    GROUPS,
    SIZES,
    SWEPT,
    TEXTS,
    WIKITEXT_2,
    WIKITEXT_103,
    sized,
)

_REFERENCE = (
    "folder with recorded curves, wikitext2_entropy.csv and wikitext2_val_loss.csv, to draw and "
    "compare with"
)
_NEEDS = "joma.experiments.language.figure:needs"
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
    where = takes.device
    if scale == "full":
        where += ", estimated and not measured"
        where += "" if corpus in TEXTS else f", with as many words as {published.title}"
    memory = takes.memory
    if published is WIKITEXT_103:
        memory = "30 GB of GPU memory" if scale == "full" else "4 GB"
    return replace(takes, seconds=seconds, device=where, memory=memory)


FIG6 = Experiment(
    name="fig6",
    title="Fig. 6: attention entropy while language models of 1 to 10 layers learn",
    published=(
        "on WikiText-2 (and WikiText-103) attention first becomes sparse and then dense again; "
        "the best validation loss is 5.357, 5.255, 5.169 and 5.110 (5.047, 4.912, 4.762 and "
        "4.679) at 1, 2, 5 and 10 layers."
    ),
    run="joma.experiments.language.figure:fig6",
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
    run="joma.experiments.language.figure:fig8",
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
