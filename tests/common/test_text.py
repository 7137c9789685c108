"""Short pieces of text for messages."""

import sys

from joma.common.text import wrapped

SUMMARY = """\
12 steps watched
- warning: one two three four five six
    Try a third of the rate, then less."""


def test_lines_break_between_words_and_are_indented() -> None:
    assert wrapped(SUMMARY, 24).splitlines() == [
        "12 steps watched",
        "- warning: one two three",
        "  four five six",
        "    Try a third of the",
        "    rate, then less.",
    ]


def test_lines_stay_whole_where_nothing_is_known_of_the_width(monkeypatch) -> None:
    assert wrapped(SUMMARY, 0) == SUMMARY
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert wrapped(SUMMARY) == SUMMARY


def test_the_width_of_a_terminal_counts(monkeypatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    assert max(map(len, wrapped(SUMMARY).splitlines())) <= 30
