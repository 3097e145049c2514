"""`difflm studio`."""

import importlib.util
import re
from typing import Annotated

import typer

from difflm.app.commands.options import Device, load_model, option, report_errors
from difflm.app.console import note
from difflm.errors import UsageError


@report_errors
def studio(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Bundled models or directories of runs; requests name one of them."),
    ] = None,
    host: Annotated[str, option("The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, option("The port; 0 is any free one.")] = 8000,
    no_browser: Annotated[bool, option("Do not open the page.", None, "--no-browser")] = False,
    token: Annotated[str | None, option("Ask every client for this bearer token.", envvar="DIFFLM_TOKEN")] = None,
    log_requests: Annotated[bool, option("Log every request as a line of JSON.", None, "--log-requests")] = False,
    cors: Annotated[
        list[str] | None, option("Pages of this origin may ask, too: https://example.org. Repeatable.", "ORIGIN")
    ] = None,
    device: Device = "auto",
) -> None:
    """The page and the HTTP API, on this machine, until Ctrl-C."""
    if not 0 <= port < 65536:
        raise UsageError(f"--port must lie between 0 and 65535, not {port}.")
    if token is not None and (not token.strip() or not token.isascii() or token != token.strip()):
        raise UsageError("--token must be some letters, digits or signs without spaces around them.")
    if wrong := [origin for origin in cors or () if not re.fullmatch(r"https?://[^/\s*]+", origin)]:
        raise UsageError(f"--cors {wrong[0]!r} is no origin; give one such as https://example.org, without a path.")
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"the studio needs {missing[0]}. Install it: pip install 'difflm[studio]'")
    from difflm.app.studio.served import Served
    from difflm.app.studio.server import LOOPBACK, serve

    def ready(url: str) -> None:
        note(f"{url} (Ctrl-C ends). The API is described at {url}/docs")
        if host not in LOOPBACK and token is None:
            note("Anyone who reaches this machine may use it; --token asks them for a word.")

    served = [Served(load_model(name, device), name) for name in models or ["e2e"]]
    serve(served, host, port, token, ready, not no_browser, log_requests, cors or ())
