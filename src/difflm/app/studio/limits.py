"""Limits on one request and on all of them together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The defaults suit a laptop: a full queue of usual requests is served within the time limit."""

    n: int = 16  # texts of a request
    candidates: int = 8  # per text
    rows: int = 32  # texts times candidates: the cost of one request
    steps: int = 200
    transitions: int = 16_000_000  # of patterns, times tokens of all texts: a few seconds a step on a core
    characters: int = 4_000  # of any text that a request holds
    items: int = 32  # entries of any list or table that a request holds
    body_bytes: int = 65_536
    connections: int = 256  # open at once; further ones are refused before anything is read
    body_seconds: float = 10.0  # to send a body
    queue: int = 64  # waiting requests; further ones are refused with Retry-After
    seconds: float = 120.0  # of a request, waiting included
    stuck_seconds: float = 30.0  # without a step or a text while there is work: then the server is unhealthy
    drain_seconds: float = 20.0  # for requests to finish when the server is asked to stop
    frames: int = 64  # buffered for a client that does not read them; older ones are dropped
    stall_seconds: float = 20.0  # a client that does not read its buffer for this long is disconnected
