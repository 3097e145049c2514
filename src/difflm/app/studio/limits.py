"""How much one request, and all of them together, may ask of the server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Defaults for a laptop: a full queue of usual requests is worked off within the time limit."""

    n: int = 16  # texts of a request
    candidates: int = 8  # for each of them
    rows: int = 32  # texts times candidates: what one request really costs
    steps: int = 200
    signs: int = 4_000  # of any text that a request holds
    items: int = 32  # entries of any list or table that a request holds
    body_bytes: int = 65_536
    body_seconds: float = 10.0  # to send a body
    queue: int = 64  # requests that wait; one more is told to come again
    seconds: float = 120.0  # of a request, waiting included
    stuck_seconds: float = 30.0  # without a step or a text while there is work: then the server is not healthy
    frames: int = 64  # that wait for a client who does not read them; older ones are dropped
    stall_seconds: float = 20.0  # in which a client takes too little of what waits for it; then it is let go
