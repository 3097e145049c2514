"""The server's counters in the text format of Prometheus: `/metrics`."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts of one server since it started; several threads add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, self._errors, self._texts = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
        self._seconds, self._sum = Counter[float](), 0.0

    def count_request(self, path: str, status: int, seconds: float | None) -> None:
        """Count a response; `seconds` is given if it generated texts."""
        with self._lock:
            self._requests[path, str(status)] += 1
            if seconds is not None:
                self._seconds[next((bound for bound in BOUNDS if seconds <= bound), float("inf"))] += 1
                self._sum += seconds

    def count_error(self, kind: str) -> None:
        """Count a failed request, whether the client got an error status or an error within a stream."""
        with self._lock:
            self._errors[kind] += 1

    def count_text(self, model: str) -> None:
        with self._lock:
            self._texts[model] += 1

    def render(self, gauges: Mapping[str, tuple[str, int]]) -> str:
        """Render all metrics, with the current values `gauges` by name, each with its description."""
        with self._lock:
            counts = [self._seconds[bound] for bound in (*BOUNDS, float("inf"))]
            requests = [(dict(path=path, status=status), n) for (path, status), n in sorted(self._requests.items())]
            errors = [(dict(type=kind), n) for kind, n in sorted(self._errors.items())]
            texts = [(dict(model=name), n) for name, n in sorted(self._texts.items())]
            total = self._sum
        lines = [
            *describe("requests_total", "counter", "Answers by route and status.", requests),
            *describe("errors_total", "counter", "Requests whose texts were not made.", errors),
            *describe("texts_total", "counter", "Finished texts.", texts),
        ]
        for name, (meaning, value) in gauges.items():
            lines += describe(name, "gauge", meaning, [({}, value)])
        sums = [*accumulate(counts)]
        buckets = [
            ({"le": name}, n) for name, n in zip((*(f"{bound:g}" for bound in BOUNDS), "+Inf"), sums, strict=True)
        ]
        lines += describe("request_seconds", "histogram", "Seconds of requests for texts.", buckets, "_bucket")
        lines += [f"difflm_request_seconds_sum {total:.6f}", f"difflm_request_seconds_count {sums[-1]}"]
        return "\n".join(lines) + "\n"


def describe(
    name: str, kind: str, meaning: str, values: Iterable[tuple[Mapping[str, str], int]], suffix: str = ""
) -> list[str]:
    """The lines of one metric."""
    lines = [f"# HELP difflm_{name} {meaning}", f"# TYPE difflm_{name} {kind}"]
    for labels, value in values:
        inside = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
        lines.append(f"difflm_{name}{suffix}{'{' + inside + '}' if inside else ''} {value}")
    return lines


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
