"""Going on with a training for another number of steps than it was begun with."""

from joma.errors import JomaError
from joma.runs import Run, differing
from joma.train.language._config import Config

STEPS = "training.steps"


CHECKPOINT_SECONDS = "checkpoints.seconds"


def changing(config: Config) -> tuple[str, ...]:
    """Return the settings that may be others than in the run that is resumed.

    How often checkpoints are saved changes no number. The number of steps may change if no step
    made so far would have been another with it.
    """
    constant = config.optimizer.schedule == "constant"
    return (CHECKPOINT_SECONDS, STEPS) if constant else (CHECKPOINT_SECONDS,)


def check_length(config: Config, run: Run) -> None:
    """Says why a training cannot have another length, where nothing but its length differs.

    Args:
        config: what is asked for.
        run: what is to be gone on with.

    Raises:
        ValueError: its learning rates follow from how many steps there are, or it has made more.
    """
    asked = {"name": run.name, **config.sections()}
    if differing(run.config, asked, changing=(CHECKPOINT_SECONDS,)).keys() != {STEPS}:
        return
    if STEPS not in changing(config):
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
