"""Strings of JSON that have a format: how each is written, as a regular expression, and how it is checked, by a reader
of its own."""

import ipaddress
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

LEAP = "(19|20)(0[48]|[2468][048]|[13579][26])|2000"
DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"((19|20)[0-9][0-9]-({DAYS})|({LEAP})-02-29)"
TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-](0[0-9]|1[0-3]):[03]0)"
NAME = "[a-z0-9]{1,16}"
HOST = f"{NAME}(-{NAME})?[.]([a-z]{{2,8}}[.])?[a-z]{{2,4}}"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"


class Format(NamedTuple):
    """`written` is the expression of its texts, which have from `shortest` to `longest` characters; `read` raises a
    ValueError for a string that is not of the format."""

    written: str
    shortest: int
    longest: int
    read: Callable[[str], Any]


def read_date(text: str) -> date:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        raise ValueError("not year-month-day")
    return date.fromisoformat(text)


def read_time(text: str) -> datetime:
    return read_date_time(f"2000-01-01T{text}")


def read_date_time(text: str) -> datetime:
    """With its offset, as RFC 3339 asks for; a leap second counts as the second before it."""
    shape = r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d):(\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)"
    found = re.fullmatch(shape, text, re.ASCII)
    if found is None:
        raise ValueError("not a date and a time with its offset")
    day, minute, second, _, offset = found.groups()
    second = "59" if second == "60" else second
    return datetime.fromisoformat(f"{day}T{minute}:{second}{'+00:00' if offset in 'Zz' else offset}")


def read_email(text: str) -> None:
    name, _, host = text.rpartition("@")
    plain = re.fullmatch(r"[\w!#$%&'*+/=?^`{|}~-]+(\.[\w!#$%&'*+/=?^`{|}~-]+)*", name)
    if not plain or len(name) > 64 or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", host):
        raise ValueError("not an address")


def read_uri(text: str) -> None:
    parts = urlsplit(text)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", parts.scheme) or re.search(r'[\s"<>\\^`{|}]', text):
        raise ValueError("not a scheme and what follows it")
    if not (parts.netloc or parts.path):
        raise ValueError("nothing follows the scheme")


def read_uuid(text: str) -> uuid.UUID:
    if not re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text):
        raise ValueError("not five groups of digits")
    return uuid.UUID(text)


FORMATS: Mapping[str, Format] = {
    "date": Format(DATE, 10, 10, read_date),
    "date-time": Format(f"{DATE}T{TIME}", 20, 25, read_date_time),
    "time": Format(TIME, 9, 14, read_time),
    "email": Format(f"{NAME}([._]{NAME})?@{HOST}", 6, 80, read_email),
    "uuid": Format("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", 36, 36, read_uuid),
    "uri": Format(f"https?://(www[.])?{HOST}(/[a-z0-9-]{{1,16}}){{0,2}}/?", 11, 94, read_uri),
    "ipv4": Format(f"{BYTE}([.]{BYTE}){{3}}", 7, 15, ipaddress.IPv4Address),
}


def has_format(text: str, name: str) -> bool:
    try:
        FORMATS[name].read(text)
    except ValueError:
        return False
    return True
