"""`difflm studio`."""

import importlib.util
from typing import Annotated

from difflm.app.commands.options import Device, Model, check_names, load_model, option, report_errors
from difflm.app.console import note
from difflm.errors import UsageError


@report_errors
def studio(
    model: Model = "e2e",
    host: Annotated[str, option("The address to listen on; 0.0.0.0 listens on all of them.")] = "127.0.0.1",
    port: Annotated[int, option("The port; 0 picks a free one.")] = 8000,
    no_browser: Annotated[bool, option("Do not open the page in a browser.", None, "--no-browser")] = False,
    token: Annotated[str | None, option("Require this bearer token from every client.", envvar="DIFFLM_TOKEN")] = None,
    log_requests: Annotated[bool, option("Log every request as one line of JSON.", None, "--log-requests")] = False,
    device: Device = "auto",
) -> None:
    """Serve the page and the HTTP API on this machine, until Ctrl-C."""
    if not 0 <= port < 65536:
        raise UsageError(f"--port must be between 0 and 65535, not {port}.")
    if token is not None and (not token.strip() or not token.isascii() or token != token.strip()):
        raise UsageError("--token must be ASCII letters, digits or punctuation, without spaces around them.")
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"the studio needs {missing[0]}. Install it: pip install 'difflm[studio]'")
    check_names(device, model)
    from difflm.app.studio.served import Served
    from difflm.app.studio.server import LOOPBACK, serve

    def ready(url: str) -> None:
        note(f"{url} (Ctrl-C stops it). The API is described at {url}/docs")
        if host not in LOOPBACK and token is None:
            note("Anyone who can reach this machine can use it; --token requires a password.")

    serve(Served(load_model(model, device), model), host, port, token, ready, not no_browser, log_requests)
