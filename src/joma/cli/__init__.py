"""The command line: thin commands that parse, call and print.

Nothing heavy is imported at the top of these files, so that `joma --help` answers at once; a
command imports what it needs when it runs. Exit codes: 0 done, 1 a checked claim or comparison
failed, 2 bad input, 130 interrupted, 141 nobody reads the output any more.
"""

import sys


def main() -> None:
    """The `joma` command."""
    try:
        from joma.cli._app import run  # here, so that Ctrl-C is answered during imports too

        run()
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
