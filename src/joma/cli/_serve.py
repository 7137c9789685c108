"""`joma serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joma.cli import _show
from joma.cli._options import option, whole
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.server import Address

_LARGEST_PORT = 65535


def serve(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS", help="Run folders, or folders to search for runs; otherwise ./runs."
        ),
    ] = None,
    port: Annotated[
        int | None,
        option("--port", "N", "Port; otherwise 8765, or the next free one.", parser=whole(0)),
    ] = None,
    host: Annotated[
        str,
        option("--host", "HOST", "Address to listen on; elsewhere than here, a token is asked."),
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        option("--allow-host", "NAME", "A further name that browsers may reach it by."),
    ] = None,
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token here too: others use this machine.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Show runs in the browser, also while they are being written, until Ctrl-C.

    The list of runs, the views of `joma report` and the laboratory. The server reads and never
    writes. From another computer: ssh -L 8765:127.0.0.1:8765 THIS-MACHINE.
    """
    folders = _folders(runs)
    if port is not None and port > _LARGEST_PORT:
        raise JomaError(f"--port must be at most {_LARGEST_PORT}, got {port}")
    for name in allow_host or ():
        if not name or any(sign in name for sign in "/@*?#: "):
            raise JomaError(
                f"--allow-host must be a name without scheme, port or path, got {name!r}"
            )
    from joma.common.signals import raising_on_sigterm
    from joma.server import RunServer

    def report(address: "Address") -> None:
        where = ", ".join(str(folder) for folder in folders)
        # In one line, however long: scripts read the address from it.
        typer.echo(_show.printable(f"Serving {where} at {address.url}"))
        _show.say("Ctrl-C ends it.")
        if open_:
            import webbrowser

            webbrowser.open(address.url)

    server = RunServer(
        folders,
        host=host,
        port=port,
        allowed_hosts=allow_host or (),
        ask_token=token,
        on_start=report,
    )
    try:
        with raising_on_sigterm():
            server.run()
    except KeyboardInterrupt as error:
        if type(error) is not KeyboardInterrupt:
            raise  # SIGTERM
        _show.say("Stopped.")


def _folders(given: list[Path] | None) -> list[Path]:
    """Return the folders to serve."""
    folders = given or [Path("runs")]
    for folder in folders:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            hint = "" if given else "; give the folder of your runs"
            raise JomaError(f"RUNS {folder} {what}{hint}")
    return folders
