"""Runs pip and reports what it is doing, where it would be silent for minutes.

`python tools/install.py PIP-INSTALL-ARGUMENTS`: a line that is rewritten on a terminal, elsewhere a
line now and then. What pip printed is shown if it fails. Needs nothing but Python.
"""

import re
import shutil
import subprocess
import sys
import threading
import time

EVERY = 10.0
"""Seconds between lines that are not rewritten."""

_SEEN = re.compile(r"(Collecting|Downloading|Installing|Building|Preparing|Using cached)\s+(.*)")


class _Status:
    """What pip is doing now, and what it has done."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.doing = "starting pip"
        self.downloaded = 0
        self.finished = threading.Event()

    def read(self, line: str) -> None:
        """Note what a line of pip's says."""
        found = _SEEN.match(line.strip())
        if found is None:
            return
        verb, what = found[1].lower(), found[2]
        self.downloaded += verb in ("downloading", "using cached")
        if what.startswith("collected packages"):
            count = what.count(",") + 1
            self.doing = f"installing {count} packages, the longest part without a word"
            return
        name = re.split(r"[\s<>=!;\[]", what.rpartition("/")[2] or what)[0]
        name = re.sub(r"(-\d[^-]*)-.*", r"\1", name)  # of a file, name and version
        size = re.search(r"\([\d.]+ [kMG]B\)", what)
        self.doing = f"{verb} {name}{f' {size[0]}' if size else ''}"

    def line(self) -> str:
        """Return how long it takes so far, how many packages there are, and what is done now."""
        seconds = time.monotonic() - self.began
        return f"install: {seconds:.0f} s, {self.downloaded} packages fetched, {self.doing}"

    def show(self) -> None:
        """Show it until pip has finished."""
        terminal = sys.stdout.isatty()
        while not self.finished.wait(0.5 if terminal else EVERY):
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r{self.line()[:width]:<{width}}", end="", flush=True)
            else:
                print(self.line(), flush=True)
        if terminal:
            print(f"\r{'':<{shutil.get_terminal_size().columns - 1}}\r", end="")


def main(arguments: list[str]) -> int:
    """Run `pip install` with these arguments and return its exit code."""
    status = _Status()
    shown = threading.Thread(target=status.show, daemon=True)
    shown.start()
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", *arguments]
    printed: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            printed.append(line)
            status.read(line)
    status.finished.set()
    shown.join()
    if pip.returncode:
        print("".join(printed[-40:]), end="")
    else:
        print(f"install: done in {time.monotonic() - status.began:.0f} s", flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
