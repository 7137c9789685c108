"""Other people's libraries, asked to be quiet while they work for us."""

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator

from joma.errors import JomaError


def need_transformers(what: str) -> None:
    """Says how to install transformers where it is missing; `what` is what needs it."""
    if importlib.util.find_spec("transformers") is None:
        raise JomaError(f"{what} needs transformers: pip install 'joma[hf]'")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No log lines, bars or warnings of transformers inside; what was set before is set after.

    Bars of downloads stay: those are worth a reader's time.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    # Not `disable_progress_bar`, which would silence the bars of downloads too.
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging._tqdm_active = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        logging._tqdm_active = bars


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
