"""The command line: thin commands that parse, call and print.

Nothing heavy is imported at the top of these files, so that `joma --help` answers at once; a
command imports what it needs when it runs. Exit codes: 0 done, 1 a checked claim or comparison
failed, 2 bad input, 70 a defect of joma, 130 interrupted, 141 nobody reads the output any more.
"""

import atexit
import os
import sys


def main() -> None:
    """The `joma` command."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file to be opened would take its number
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    try:
        from joma.cli._app import app  # here, so that Ctrl-C is answered during imports too
        from joma.cli._render import spell_out_what_streams_lack

        spell_out_what_streams_lack()
        app(prog_name="joma")
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    except SystemExit as ended:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        # Threads of gloo may outlive the interpreter, which then aborts a training that was done.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
