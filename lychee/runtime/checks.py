"""Checks of what a caller gives: a value that is not allowed is refused in a sentence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar

C = TypeVar("C")


class ParameterError(ValueError):
    """A parameter has a value that is not allowed; the message names it, the value and what is allowed."""


class ContextError(ParameterError):
    """A text is longer than the model's context, or than the KV pool, has room for."""


def refuse(name: str, value: object, allowed: str) -> ParameterError:
    return ParameterError(f"{name} is {value!r}, must be {allowed}")


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; refuses booleans, fractions and numbers out of range."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < low or (high is not None and int(value) > high):
        raise refuse(name, value, f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}")
    return int(value)


def check_float(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a finite float in [low, high], or in (low, high] with `above`."""
    fits = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not fits or not (low < value if above else low <= value) or value > high:
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise refuse(name, value, f"a finite number {'above' if above else 'of at least'} {low:g}{upper}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False")
    return value


def check_names(what: str, given: Iterable[object], allowed: Iterable[str]) -> None:
    """Refuse the first name that is not allowed, with those that come closest to it, or else all of them."""
    known = sorted(allowed)
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f", may have {', '.join(known)}"
            raise ParameterError(f"{what} has no {name!r}{hint}")


def named_keywords(cls: type[C]) -> type[C]:
    """Class decorator: a keyword that the class does not have is refused by `check_names`."""
    init = cls.__init__
    allowed = list(inspect.signature(cls).parameters)

    @wraps(init)
    def checked(self: C, *args: Any, **given: Any) -> None:
        check_names(cls.__name__, given, allowed)
        init(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls
