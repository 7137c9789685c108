"""Runs a command line in this process."""

from typer.testing import CliRunner

from joma.cli._app import app


def joma(*arguments: str):
    return CliRunner().invoke(app, list(arguments), prog_name="joma", catch_exceptions=False)


def sentence(result) -> str:
    """What bad input gets: exit code 2 and one line on standard error."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("joma: ")
    return line


def unwrapped(text: str) -> str:
    """A text without its line breaks: where they are depends on the names of folders in it."""
    return " ".join(text.split())
