"""Standard streams that the process was started without."""

import os
import sys


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
