"""Call other libraries without their log lines, and with their errors in one sentence."""

import contextlib
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator

from joma.common.text import first_line
from joma.errors import JomaError, how_to_install


def need_transformers(what: str) -> None:
    """Raise JomaError with the way to install transformers if `what` needs it and it is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise JomaError(f"{what} needs transformers: {how_to_install('hf')}")


_lock = threading.Lock()
_before: list[tuple[int, int, bool]] = []
"""What the libraries had set, while blocks of `without_log_lines` are being run."""
_blocks: list[object] = []


@contextlib.contextmanager
def without_log_lines() -> Iterator[None]:
    """Silence log lines and progress bars of transformers, except bars of downloads.

    Blocks of several threads may overlap: the first to begin silences, the last to end restores.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    own = object()
    with _lock:
        if not _blocks:
            bars = logging.is_progress_bar_enabled()
            _before[:] = [(logging.get_verbosity(), hub_logging.get_verbosity(), bars)]
            # Not `disable_progress_bar`, which would silence the bars of downloads too.
            logging.set_verbosity_error()
            hub_logging.set_verbosity_error()
            logging._tqdm_active = False
        _blocks.append(own)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(own)
            if not _blocks:
                verbosity, hub_verbosity, bars = _before.pop()
                logging.set_verbosity(verbosity)
                hub_logging.set_verbosity(hub_verbosity)
                logging._tqdm_active = bars


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence log lines, progress bars and warnings of transformers, except bars of downloads.

    Filters of warnings belong to the process: threads that run next to another use
    `without_log_lines`.
    """
    with without_log_lines(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def reading(refusal: Callable[[str], str]) -> Iterator[None]:
    """Raise what another library says of a file as a JomaError of one sentence.

    Args:
        refusal: Returns that sentence, given the first line of the library's message.
    """
    try:
        yield
    except JomaError:
        raise
    except BaseException as error:
        # A library written in Rust that fails an assertion raises a BaseException of its own.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise JomaError(refusal(first_line(error))) from error
        raise
