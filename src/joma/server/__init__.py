"""The web server behind `joma serve`: run folders in the browser, while they are being written.

`application` makes the Starlette application and `RunServer` runs it. Everything is read-only: the
server never writes to a run folder and never holds its lock. What may live here is finding runs,
serving what `joma.report` draws, telling browsers what changed, and refusing requests; no drawing
and no mathematics.

This room needs the extra `serve` (Starlette and uvicorn).
"""

from joma.errors import JomaError, how_to_install

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise JomaError(f"joma serve needs {error.name}: {how_to_install('serve')}") from error

from joma.server._application import application
from joma.server._serving import Address, RunServer

__all__ = ["Address", "RunServer", "application"]
