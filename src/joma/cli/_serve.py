"""`joma serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from joma.cli import _render
from joma.cli._command import Command, argument, flag, option, parsed
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.server import Address

EXAMPLE = "serve runs --port 8765"
_port = parsed(int, lambda number: 0 <= number <= 65535, "a whole number, at most 65535")


@dataclass(frozen=True, kw_only=True)
class Serve(Command):
    """Show runs in the browser, also while they are being written, until Ctrl-C.

    The list of runs, the views of `joma report` and the laboratory. The server reads and never
    writes. From another computer: ssh -L 8765:127.0.0.1:8765 THIS-MACHINE.
    """

    runs: list[Path] | None = argument(
        "RUNS", "Run folders, or folders to search for runs; otherwise ./runs.", default=None
    )
    port: int | None = option("N", "Port; otherwise 8765, or the next free one.", parser=_port)
    host: str = option(
        "HOST", "Address to listen on; elsewhere than here, a token is asked.", "127.0.0.1"
    )
    allow_host: list[str] | None = option("NAME", "A further name that browsers may reach it by.")
    token: bool = flag("Ask for a token here too: others use this machine.")
    open_: bool = flag("Open a browser.", name="--open")

    def run(self) -> None:
        """Serve until Ctrl-C."""
        folders = self.runs or [Path("runs")]
        for folder in folders:
            if not folder.is_dir():
                what = "is not a folder" if folder.exists() else "does not exist"
                hint = "" if self.runs else "; give the folder of your runs"
                raise JomaError(f"RUNS {folder} {what}{hint}")
        for name in self.allow_host or ():
            if not name or any(sign in name for sign in "/@*?#: "):
                raise JomaError(
                    f"--allow-host must be a name without scheme, port or path, got {name!r}"
                )
        from joma.common.signals import raising_on_sigterm
        from joma.server import RunServer

        def report(address: "Address") -> None:
            where = ", ".join(str(folder) for folder in folders)
            # In one line, however long: scripts read the address from it.
            typer.echo(_render.printable(f"Serving {where} at {address.url}"))
            _render.say("Ctrl-C ends it.")
            if self.open_:
                import webbrowser

                webbrowser.open(address.url)

        server = RunServer(
            folders,
            host=self.host,
            port=self.port,
            allowed_hosts=self.allow_host or (),
            ask_token=self.token,
            on_start=report,
        )
        try:
            with raising_on_sigterm():
                server.run()
        except KeyboardInterrupt as error:
            if type(error) is not KeyboardInterrupt:
                raise  # SIGTERM
            _render.say("Stopped.")
