"""Parts by name: our own, those that a `register` call adds, and those that installed packages declare."""

import threading
import traceback
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import ClassVar, Generic, Protocol, TypeVar

from difflm.errors import DifflmError, first_line


class Named(Protocol):
    name: ClassVar[str]


T = TypeVar("T", bound=Named)  # a class, such as a method
_foreign: dict[str, str] = {}  # packages of which a class was asked for, and what it is to us


class Registry(Mapping[str, type[T]], Generic[T]):
    """A mapping from names to subclasses of `base`. In `own`, a class may be given as "module:class": it is imported
    when it is asked for. Entry points of `group` are loaded once, when a name is asked for that is not ours, or all
    names are. A package that cannot be loaded is kept in `broken` and raises an error only when its name is asked for,
    so that all others can still be used."""

    def __init__(self, group: str, base: type[object], own: Mapping[str, type[T] | str]) -> None:
        self.group, self.base = group, base
        self._parts = dict(own)
        self._broken: dict[str, str] = {}
        self._loaded, self._lock = False, threading.RLock()

    def register(self, part: type[T], name: str | None = None) -> type[T]:
        """Add a class under its own `name`, or under the one given; also as a decorator. A taken name is an error,
        unless it is the same class defined again, as in a notebook."""
        if not (isinstance(part, type) and issubclass(part, self.base)):
            raise DifflmError(f"{part!r} is not a subclass of {self.base.__module__}.{self.base.__name__}.")
        name = name or part.name
        if not isinstance(name, str) or not name:
            raise DifflmError(f"{part.__name__} has no name: give it a class attribute `name`.")
        taken = name_class(self._parts.get(name, part))
        if taken != name_class(part):
            raise DifflmError(f"the name {name!r} is taken by {taken}.")
        self._parts[name] = part
        return part

    @property
    def broken(self) -> dict[str, str]:
        """One line for each entry point that could not be loaded."""
        self._load()
        return self._broken

    def _load(self) -> None:
        with self._lock:  # reentrant: a package may ask for names while it is being imported
            points = () if self._loaded else entry_points(group=self.group)
            self._loaded = True
            for point in points:
                try:
                    part = point.load()
                    if getattr(part, "name", point.name) != point.name:
                        raise DifflmError(f"the class calls itself {part.name!r}.")
                    self.register(part, point.name)
                except (Exception, SystemExit) as error:  # other packages' code may fail in any way
                    package = f"package {point.dist.name}" if point.dist else point.value
                    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
                    said = f"{self.group} {point.name!r} of {package} cannot be loaded: {reason}."
                    self._broken[point.name] = said

    def __contains__(self, name: object) -> bool:
        if name not in self._parts and name in self.broken:
            raise DifflmError(self.broken[str(name)])
        return name in self._parts

    def __getitem__(self, name: str) -> type[T]:
        if name not in self:
            raise KeyError(name)
        part = self._parts[name]
        found: type[T] = resolve_name(part) if isinstance(part, str) else part
        if (package := found.__module__.partition(".")[0]) != "difflm":
            _foreign[package] = f"{self.group} {name!r}"
        return found

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter([*self._parts])

    def __len__(self) -> int:
        self._load()
        return len(self._parts)


def blame_package(error: Exception) -> str:
    """Say where the code of another package fails, or that it does not fit to ours; "" if none of it is used."""
    reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}."
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if what := _foreign.get(frame.f_globals.get("__name__", "").partition(".")[0]):
            return f"{what} fails in {frame.f_code.co_name} ({frame.f_code.co_filename}, line {line}): {reason}"
    used = " or ".join(_foreign.values())
    advice = "Compare what its functions take and return with those of its base classes."
    return f"{used} does not fit: {reason} {advice}" if used else ""


def name_class(part: type[object] | str) -> str:
    """The module and the name of a class, or of what stands for one."""
    return part.replace(":", ".") if isinstance(part, str) else f"{part.__module__}.{part.__qualname__}"
