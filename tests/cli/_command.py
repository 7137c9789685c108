"""Runs a command line in this process, as a user does."""

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest.mock import patch

from joma.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def joma(*arguments: str, input: str = "") -> Ended:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(input.encode()), encoding="utf-8")
    code = 0
    with (
        patch.object(sys, "argv", ["joma", *arguments]),
        patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        for stream in (out, err):
            stream.flush()
    return Ended(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]


def sentence(result: Ended) -> str:
    """What bad input gets: exit code 2 and one line on standard error."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("joma: ")
    return line


def unwrapped(text: str) -> str:
    """A text without its line breaks: where they are depends on the names of folders in it."""
    return " ".join(text.split())
