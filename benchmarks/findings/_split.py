"""Which cases thresholds may be chosen on, and which they are judged on."""

from typing import Literal

from benchmarks.findings._case import Case

Half = Literal["choose", "held out"]
HELD_OUT_ARCHITECTURE = "gpt2"
HELD_OUT_SEED = 2


def split(case: Case) -> Half:
    """Return which half of the evidence a case belongs to.

    Fixed before any rule or threshold was chosen, and not to be changed afterwards. Held out are

    - every run of GPT-2, an architecture that thresholds are never chosen on (its weights are
      stored transposed, its queries, keys and values in one matrix);
    - seed 2 of the seeds 0, 1 and 2 of every variant that is sick or worth a note;
    - every second healthy run, by its number. The list of healthy runs has two of each recipe
      (optimizer, schedule, …) for each architecture after each other, so that both halves have
      every recipe of every architecture other than GPT-2.

    Runs of the sweep define the best learning rate, and are judged in neither half; they follow
    the same rule of architecture and seed.
    """
    if case.architecture == HELD_OUT_ARCHITECTURE:
        return "held out"
    if case.state == "healthy":
        return "held out" if case.number % 2 else "choose"
    return "held out" if case.seed == HELD_OUT_SEED else "choose"
