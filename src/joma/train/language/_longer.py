"""Going on with a training for more steps than it was begun with."""

from collections.abc import Mapping
from typing import Any

from joma.runs import differing
from joma.train.language._config import Config

STEPS = "training.steps"


def growing(config: Config) -> str | None:
    """The setting that may be larger than in the run that is gone on with; None for none.

    It is the number of steps, if no step made so far would have been another had there been more.
    """
    return STEPS if config.optimizer.schedule == "constant" else None


def check_longer(config: Config, before: Mapping[str, Any]) -> None:
    """Says why a training cannot be made longer, where nothing but its length differs.

    Args:
        config: what is asked for.
        before: the configuration of the run that is to be gone on with.

    Raises:
        ValueError: its learning rates follow from how many steps there are.
    """
    asked = {"name": before.get("name"), **config.sections()}
    grown = differing(before, asked).keys() == {STEPS} and not differing(
        before, asked, growing=STEPS
    )
    if grown and growing(config) is None:
        raise ValueError(
            f"training.steps must stay {before['training']['steps']} with the schedule "
            f"{config.optimizer.schedule}, which takes the learning rate to its end in as many "
            f"steps, got {config.training.steps}; with the schedule constant a training can be "
            "made longer, and in another folder a longer one begun"
        )
