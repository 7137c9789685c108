"""The command line: thin commands that parse, call and print.

Nothing heavy is imported at the top of these files, so that `joma --help` answers at once; a
command imports what it needs when it runs. Exit codes: 0 done, 1 a checked claim or comparison
failed, 2 bad input, 70 a defect of joma, 130 interrupted, 141 nobody reads the output any more.
"""

import atexit
import os
import sys
from typing import NoReturn


def main() -> None:
    """The `joma` command."""
    reopen_closed_streams()
    try:
        from joma.cli._app import app  # here, so that Ctrl-C is answered during imports too
        from joma.cli._show import spell_out_what_streams_lack

        spell_out_what_streams_lack()
        app(prog_name="joma")
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    except SystemExit as ended:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            _leave(ended.code)
        raise


def _leave(code: object) -> NoReturn:
    """End a process that torchrun started.

    Threads of gloo may outlive the interpreter, which then aborts a training that was done.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def reopen_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed.

    Python has None in its place, and the next file to be opened would take its number: what other
    libraries print would then be written into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
