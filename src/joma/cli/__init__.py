"""The command line: thin commands that parse, call and print.

Nothing heavy is imported at the top of these files, so that `joma --help` answers at once; a
command imports what it needs when it runs. Exit codes: 0 done, 1 a checked claim or comparison
failed, 2 bad input, 70 a defect of joma, 130 interrupted, 141 nobody reads the output any more.
"""

import sys

from joma.cli._streams import reopen_closed_streams


def main() -> None:
    """The `joma` command."""
    reopen_closed_streams()
    try:
        from joma.cli._app import run  # here, so that Ctrl-C is answered during imports too

        run()
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
