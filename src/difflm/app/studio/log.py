"""The server's log: one JSON object per line on stderr, in ASCII and without control characters."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

LOGGERS = ("uvicorn.error", "uvicorn.asgi", "asyncio")  # other libraries, whose warnings are logged here too


def log_event(event: str, **facts: object) -> None:
    """Write a line; `event` says what happened."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "event": event, **facts}, default=str)
    print(line.replace("\x7f", "\\u007f"), file=sys.stderr, flush=True)


def describe_error(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class JsonHandler(logging.Handler):
    """Writes what a library logs as lines of this log."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        facts = {"traceback": describe_error(error)} if error else {}
        log_event(record.levelname.lower(), logger=record.name, message=record.getMessage(), **facts)


def use_json_logs() -> None:
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [JsonHandler(logging.WARNING)], False
