"""`joma series`, and how a series of checkpoints is named and printed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._progress import reports
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.models.series import Integrity, Series


@dataclass(frozen=True, kw_only=True)
class VerifySeries(cmd.Command):
    """Find repeated, missing and damaged checkpoints.

    Exits with 1 when something is found.
    """

    summary = "Check the checkpoints of a training."
    example = "series verify EleutherAI/pythia-70m@step0,step1,step2,step4"

    series: list[str] = cmd.argument(
        "SERIES",
        "A folder of checkpoint folders, several such folders, or HUBID@step0,step1000 "
        "(HUBID@pythia for Pythia's).",
    )
    json: bool = cmd.json_flag()

    def run(self) -> None:
        """Check the series."""
        from joma.models.series import verify

        chosen = named(self.series)
        start = time.perf_counter()
        with reports("series verify") as report:
            integrity = verify(chosen, progress=report)
        if self.json:
            _render.as_json(integrity.as_json())
        else:
            put_findings(integrity)
            if count := len(integrity.unverified):
                of = (
                    f"{count} checkpoints carry no"
                    if integrity.verified
                    else "No checkpoint carries"
                )
                _render.say(f"{of} checksums: unverified.")
            seconds = time.perf_counter() - start
            _render.say(f"{summary(integrity, len(chosen.steps))} {seconds:.1f} s.")
        if not integrity.clean:
            raise typer.Exit(1)


def named(names: Sequence[str]) -> "Series":
    """Return the series that the user names: a folder, several folders, or a hub id."""
    from joma.models.series import Series

    if len(names) > 1 and any("@" in name and not Path(name).exists() for name in names):
        raise JomaError("several series must be folders, got " + " and ".join(names))
    return Series.of(names if len(names) > 1 else names[0])


def summary(integrity: "Integrity", count: int) -> str:
    """Return the result of checking a series, in one sentence."""
    checkpoints = f"{count} checkpoint{'' if count == 1 else 's'}"
    if integrity.clean:
        return f"{checkpoints}: none repeated, missing or damaged."
    number = len(integrity.findings)
    return f"{checkpoints}: {number} finding{'' if number == 1 else 's'}."


def put_findings(integrity: "Integrity") -> None:
    """Print what is wrong with a series."""
    for finding in integrity.findings:
        _render.say(_render.sentence(finding.sentence))


app = cmd.command_group(
    "Series of checkpoints.", "series verify checkpoints", {"verify": VerifySeries}
)
