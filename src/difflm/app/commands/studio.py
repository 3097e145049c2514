"""`difflm studio`."""

import importlib.util
import ipaddress
import re

from difflm.app.commands.options import check_names, command, load_model
from difflm.app.console import note
from difflm.errors import UsageError

DEFAULT = ["english", "e2e", "e2e-fast"]


@command("studio")
def studio(
    models: list[str] | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    no_browser: bool = False,
    token: str | None = None,
    insecure: bool = False,
    log_requests: bool = False,
    cors: list[str] | None = None,
    device: str = "auto",
) -> None:
    """Serve the page and the HTTP API on this machine, until Ctrl-C."""
    if not 0 <= port < 65536:
        raise UsageError(f"--port must be between 0 and 65535, not {port}.")
    if token is not None and (not token.strip() or not token.isascii() or token != token.strip()):
        raise UsageError("--token must be ASCII letters, digits or punctuation, without spaces around them.")
    if token is None and not insecure and not is_loopback(host):
        raise UsageError(f"--host {host} is reachable from other machines: give --token, or --insecure to do without.")
    if wrong := [origin for origin in cors or () if not re.fullmatch(r"https?://[^/\s*]+", origin)]:
        raise UsageError(f"--cors {wrong[0]!r} is not an origin; give one such as https://example.org, without a path.")
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UsageError(f'the studio needs {missing[0]}. Install it: pip install ".[studio]"')
    check_names(device, *(models or ()))
    from difflm.app.studio.limits import Limits
    from difflm.app.studio.served import Served
    from difflm.app.studio.server import listen, make_server, serve

    def ready(url: str) -> None:
        note(f"{url} (Ctrl-C stops it). The API is described at {url}/docs")

    served = [Served(load_model(name, device), name) for name in models or DEFAULT]
    listening = listen(host, port)
    server = make_server(served, Limits(), token, host, log_requests, cors or ())
    serve(server, listening, host, ready, browse=not no_browser)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there. Names other than localhost are not looked up:
    what they stand for may change."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
