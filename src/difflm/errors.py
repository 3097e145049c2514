"""What a person is told when something cannot be done: one or two lines, and what to do about it."""


class DifflmError(Exception):
    """The work failed; the command leaves with code 1."""

    exit_code = 1


class UsageError(DifflmError):
    """The request itself is wrong; the command leaves with code 2."""

    exit_code = 2
