"""Code in a process of its own, for what importing joma does and what must not meet other tests."""

import subprocess
import sys


def said(code: str, *arguments: object) -> list[str]:
    """Return the lines that a process prints which runs this code; its errors fail the test."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
