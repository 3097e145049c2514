"""The program that renders a chat template, in a process of its own (`chat.py` starts it): a template that never ends,
or takes all memory, ends this process alone. It reads JSON objects, one a line, and answers each with another."""

import json
import signal
import sys
from contextlib import suppress
from datetime import datetime

SECONDS, MEMORY, CHARACTERS = 5, 1 << 29, 1 << 22  # of a template, and of the text it writes


class Refused(Exception):
    """The template itself refuses the messages."""


def refuse(message: str) -> None:
    raise Refused(message)


def main() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # As other libraries set it up: a template reads the messages, writes a text, and nothing else.
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # some templates state the date
    sandbox.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    with suppress(ImportError, ValueError, OSError):  # Windows has none, macOS may refuse it
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    template = sandbox.from_string("")
    alarm = vars(signal).get("alarm", lambda seconds: None)  # it ends the process, whatever that does
    for line in sys.stdin:
        request, answer = json.loads(line), {}
        alarm(SECONDS)
        try:
            if "template" in request:
                template = sandbox.from_string(request["template"])
            else:
                answer["text"] = template.render(**request)
                if len(answer["text"]) > CHARACTERS:
                    answer = {"error": f"it writes more than {CHARACTERS:,} characters"}
        except Refused as error:
            answer["refused"] = str(error)
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY >> 20} MiB"}
        except Exception as error:  # a template may fail in any way
            answer["error"] = next(iter(str(error).splitlines()), type(error).__name__)
        alarm(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
