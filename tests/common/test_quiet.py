"""Other libraries silenced, by several threads at the same time."""

from contextlib import ExitStack

import pytest

from joma.common.quiet import without_log_lines

logging = pytest.importorskip("transformers.utils.logging")


def test_the_last_block_to_end_restores_what_was_before_the_first():
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        first, second = ExitStack(), ExitStack()
        first.enter_context(without_log_lines())
        second.enter_context(without_log_lines())
        first.close()  # in another order than nested blocks end
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
        second.close()
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before)
