"""What the server tells of itself: its log, one JSON object per line on stderr, in ASCII and without control
characters; and its counters, in the text format of Prometheus."""

import json
import logging
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

LOGGERS = ("uvicorn.error", "uvicorn.asgi", "asyncio")  # other libraries, whose warnings are logged here too
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, float("inf"))  # seconds
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS = {
    "requests_total": ("counter", "Answers by route and status."),
    "errors_total": ("counter", "Requests whose texts were not made."),
    "texts_total": ("counter", "Finished texts."),
    "request_seconds": ("histogram", "Seconds of requests for texts."),
}
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def log_event(event: str, error: BaseException | None = None, **facts: object) -> None:
    """Write a line; `event` says what happened."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    told = {"traceback": "".join(traceback.format_exception(error))} if error else {}
    line = json.dumps({"time": now, "event": event, **facts, **told}, default=str)
    print(line.replace("\x7f", "\\u007f"), file=sys.stderr, flush=True)


class JsonHandler(logging.Handler):
    """Writes what a library logs as lines of this log."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        log_event(record.levelname.lower(), error, logger=record.name, message=record.getMessage())


def use_json_logs() -> None:
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [JsonHandler(logging.WARNING)], False


class Metrics:
    """Counts of one server since it started; several threads add to them."""

    def __init__(self) -> None:
        self._lock, self._samples = threading.Lock(), Counter[str]()  # by name and labels, as they are printed
        self.count_seconds(0.0, 0)

    def count_seconds(self, seconds: float, requests: int = 1) -> None:
        """Count a request that generated texts."""
        for bound in BOUNDS:
            self.count("request_seconds_bucket", requests * (seconds <= bound), le=f"{bound:g}".replace("inf", "+Inf"))
        self.count("request_seconds_sum", seconds)
        self.count("request_seconds_count", requests)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        inside = ",".join(f'{key}="{text.translate(ESCAPES)}"' for key, text in labels.items())
        with self._lock:
            self._samples[name + (f"{{{inside}}}" if inside else "")] += amount  # type: ignore[assignment]

    def render(self, gauges: Mapping[str, tuple[str, int]]) -> str:
        """Render all metrics, with the current values `gauges` by name, each with its description."""
        with self._lock:
            samples = dict(self._samples) | {name: value for name, (_, value) in gauges.items()}
        lines = []
        for name, (kind, meaning) in (METRICS | {name: ("gauge", text) for name, (text, _) in gauges.items()}).items():
            lines += [f"# HELP difflm_{name} {meaning}", f"# TYPE difflm_{name} {kind}"]
            lines += [f"difflm_{key} {value}" for key, value in samples.items() if key.startswith(name)]
        return "\n".join(lines) + "\n"
