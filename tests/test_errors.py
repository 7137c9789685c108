import sys

import pytest

from joma.errors import MESSAGE_LENGTH, JomaError, printable


def test_a_users_mistake_is_a_value_error():
    assert issubclass(JomaError, ValueError)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\x08", "a\\rb\\x08"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("file\udcff.txt", "file\\udcff.txt"),
        ("é日 ρ\n\tsecond line", "é日 ρ\n\tsecond line"),
        ("", ""),
    ],
)
def test_what_acts_on_a_terminal_is_escaped(text, shown):
    assert printable(text) == shown


def test_every_character_can_be_encoded_and_none_acts_on_a_terminal():
    everything = "".join(map(chr, [*range(0x10000), *range(0x10000, sys.maxunicode, 97)]))
    shown = printable(everything, limit=None)
    shown.encode()
    acting = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
    assert not acting & set(map(ord, shown))


def test_long_text_loses_its_middle():
    shown = printable(f"begin {'x' * 100_000} end")
    assert len(shown) == MESSAGE_LENGTH
    assert shown.startswith("begin x")
    assert shown.endswith("x end")
    assert " … " in shown
    assert printable("x" * MESSAGE_LENGTH) == "x" * MESSAGE_LENGTH
    assert len(printable("x" * 10_000, limit=None)) == 10_000
