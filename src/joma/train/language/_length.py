"""Going on with a training for another number of steps than it was begun with."""

from joma.errors import JomaError
from joma.runs import Run, differing
from joma.train.language._config import Config

STEPS = "training.steps"


def changing(config: Config) -> str | None:
    """The setting that may be another than in the run that is gone on with; None for none.

    It is the number of steps, if no step made so far would have been another with another number.
    """
    return STEPS if config.optimizer.schedule == "constant" else None


def check_length(config: Config, run: Run) -> None:
    """Says why a training cannot have another length, where nothing but its length differs.

    Args:
        config: what is asked for.
        run: what is to be gone on with.

    Raises:
        ValueError: its learning rates follow from how many steps there are, or it has made more.
    """
    if differing(run.config, {"name": run.name, **config.sections()}).keys() != {STEPS}:
        return
    if changing(config) is None:
        raise JomaError(
            f"training.steps must stay {run.config['training']['steps']} with the schedule "
            f"{config.optimizer.schedule}, which takes the learning rate to its end in as many "
            f"steps, got {config.training.steps}; give that, or another folder: only with the "
            "schedule constant can a training be made longer or shorter"
        )
    check_made(config, max(run.checkpoints.steps, default=0))


def check_made(config: Config, made: int) -> None:
    """Refuses fewer steps than a run has made."""
    if config.training.steps < made:
        raise JomaError(
            f"training.steps must be at least {made}, which the run has made, got "
            f"{config.training.steps}"
        )
