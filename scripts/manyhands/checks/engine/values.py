"""Values as plain data: what kind is asked for, when two are the same, and how they differ.

A `form` takes what a learner's function returned and gives plain data (numbers, text, lists, dicts,
tensors), or raises `Malformed` with words. What is of another kind is told without a guess.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MAX_SHOWN = 100  # letters of a value
BROKEN = "this does not hold: "  # and which statement, where one is False


class Malformed(Exception):
    """A value of the wrong kind: what was seen, what was asked for, and what to try."""

    def __init__(self, seen: str, why: str, hint: str = "") -> None:
        super().__init__(seen, why, hint)


# ---- kinds of values ------------------------------------------------------------------------


def kind(value: object) -> str:
    """What a value is, for people."""
    if value is None:
        return "None"
    if hasattr(value, "__next__"):
        return "a generator"
    article = "an" if type(value).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(value).__name__}"


def malformed(value: object, wanted: str, hint: str = "") -> Malformed:
    """The error for a value where `wanted`, such as "a list of whole numbers", is asked for."""
    shown = kind(value)
    if value is not None and not hasattr(value, "__next__") and len(repr(value)) <= 60:
        shown += f", {value!r}"
    return Malformed(shown, f"The exercise asks for {wanted}.", hint)


def number(value: object) -> float | int:
    """A number of Python, NumPy or torch as int or float."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise malformed(value, "a number", "Return the number itself.")
    return int(value) if isinstance(value, Integral) else float(value)


def integer(value: object) -> int:
    """A whole number; a float is refused, also one without a fraction."""
    if isinstance(value, bool):
        raise malformed(value, "a whole number")
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value.item())
    try:
        return operator.index(value)
    except TypeError:
        hint = "Use // where a count is divided." if isinstance(value, float) else ""
        raise malformed(value, "a whole number", hint) from None


def boolean(value: object) -> bool:
    """True or False, also NumPy's and torch's."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype is torch.bool:
        return bool(value.item())
    if type(value).__name__ not in ("bool", "bool_"):
        raise malformed(value, "True or False")
    return bool(value)


def text(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise malformed(value, "a text")
    return value


def tensor(value: object) -> Tensor:
    """A tensor, detached and copied, so that a later change of it is not seen here."""
    if not isinstance(value, Tensor):
        raise malformed(value, "a tensor")
    return value.detach().clone()


def listing(each: Callable = lambda one: one, wanted: str = "a list") -> Callable:
    """The form of a list, tuple, array or vector, with each element in its own form."""

    def form(value: object) -> list:
        is_list = isinstance(value, list | tuple | range | Tensor) or hasattr(value, "__array__")
        if not is_list or getattr(value, "ndim", 1) == 0:
            hint = "A generator can be read only once." if hasattr(value, "__next__") else ""
            raise malformed(value, wanted, hint)
        return [each(one) for one in value]

    return form


def record(names: Sequence[str], each: Callable = number) -> Callable:
    """The form of a dict or NamedTuple with these names; a further name must hold 0."""

    def form(value: object) -> dict:
        value = value._asdict() if hasattr(value, "_asdict") else value
        hint = f"The names are {', '.join(names)}."
        if not isinstance(value, Mapping):
            raise malformed(value, f"a dict with {len(names)} names", hint)
        extra = [name for name in value if name not in names]
        if missing := [name for name in names if name not in value]:
            also = f" but has {', '.join(map(repr, extra))}" if extra else ""
            said = f"a dict without {', '.join(map(repr, missing))}{also}"
            raise Malformed(said, "Every name is asked for, also where its value is 0.", hint)
        for name in extra:
            if value[name] != 0:
                said = f"a dict with {value[name]!r} under {name!r}"
                raise Malformed(said, f"The exercise has no part named {name!r}.", hint)
        return {name: each(value[name]) for name in names}

    return form


# ---- when two are the same ------------------------------------------------------------------


def same(found: object, wanted: object, tolerance: float | None = None) -> bool:
    """Equal, but for rounding.

    Args:
        tolerance: relative; by default that of the wanted tensor's type, and 1e-9 for a number. In
            a tensor it is relative to the largest element: numbers of different size, of which each
            counts, are observed as a list.
    """
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return _same_tensors(found, wanted, tolerance)
    if isinstance(found, bool) or isinstance(wanted, bool):
        return type(found) is type(wanted) and found == wanted
    if isinstance(found, Real) and isinstance(wanted, Real):
        if math.isnan(found) or math.isnan(wanted):
            return math.isnan(found) and math.isnan(wanted)
        if isinstance(found, int) and isinstance(wanted, int) and tolerance is None:
            return found == wanted
        return math.isclose(found, wanted, rel_tol=tolerance or 1e-9, abs_tol=1e-12)
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        pairs = zip(found, wanted, strict=False)
        return len(found) == len(wanted) and all(same(a, b, tolerance) for a, b in pairs)
    if isinstance(found, dict) and isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            return False
        return all(same(found[name], value, tolerance) for name, value in wanted.items())
    return type(found) is type(wanted) and bool(found == wanted)


def _same_tensors(found: Tensor, wanted: Tensor, tolerance: float | None) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return not _wrong_elements(found, wanted, tolerance).any()


def _wrong_elements(found: Tensor, wanted: Tensor, tolerance: float | None) -> Tensor:
    """Which elements differ by more than rounding, measured by the largest one that is wanted."""
    if not wanted.is_floating_point():
        return found != wanted
    relative = tolerance or TOLERANCE.get(wanted.dtype, 1e-5)
    one, other = found.detach().double(), wanted.detach().double()
    finite = other[other.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 1.0
    return ~torch.isclose(one, other, rtol=relative, atol=relative * scale, equal_nan=True)


# ---- how they differ ------------------------------------------------------------------------


def show(value: object, digits: int = 6) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        numbers = [show(one, digits) for one in value.flatten()[:6].tolist()]
        more = ", ..." if value.numel() > 6 else ""
        shape = "x".join(map(str, value.shape)) or "no dimensions"
        return f"a tensor ({shape}) of {', '.join(numbers)}{more}"
    if type(value) is float:
        return f"{value:.{digits}g}"
    if type(value) is int:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list | tuple) and all(isinstance(one, Real) for one in value):
        shown = ", ".join(show(one, digits) for one in value[:12])
        return f"[{shown}{', ...' if len(value) > 12 else ''}]"
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[: MAX_SHOWN - 3]}..."


def pair(found: object, wanted: object) -> str:
    """`found, not wanted`, with as many digits as it takes to see the difference."""
    for digits in (6, 9, 12, 17):
        one, other = show(found, digits), show(wanted, digits)
        if one != other:
            return f"{one}, not {other}"
    return f"{kind(found)} {show(found)}, not {kind(wanted)} {show(wanted)}"


def difference(found: object, wanted: object, tolerance: float | None = None) -> str:
    """The first difference: where it is, what was found there and what was expected."""
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return _tensor_difference(found, wanted, tolerance)
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        name = next(n for n in wanted if not same(found[n], wanted[n], tolerance))
        if wanted[name] is True and found[name] is False:
            return f"{BROKEN}{name}"
        return f"{name}: {difference(found[name], wanted[name], tolerance)}"
    if isinstance(found, dict) and isinstance(wanted, dict) and _is_cut(found, wanted):
        return _name_difference(found, wanted)
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        short = len(wanted) <= 12 and all(isinstance(one, Real) for one in [*found, *wanted])
        if short or not wanted:
            return pair(found, wanted)
        if len(found) != len(wanted):
            return f"{len(found)} elements, not {len(wanted)}"
        pairs = enumerate(zip(found, wanted, strict=True))
        index, (one, other) = next(p for p in pairs if not same(*p[1], tolerance))
        inner = difference(one, other, tolerance)
        return f"element {index}{': ' if inner.startswith('element') else ' is '}{inner}"
    return pair(found, wanted)


def _is_cut(*values: object) -> bool:
    """Is one of them too long to be shown whole?"""
    return any(len(repr(value)) > MAX_SHOWN for value in values)


def _name_difference(found: dict, wanted: dict) -> str:
    """The first name that only one of two dicts has."""
    for name, value in wanted.items():
        if name not in found:
            return f"{name!r} is missing, which should be {show(value)}"
    name = next(name for name in found if name not in wanted)
    return f"{name!r} is {show(found[name])}, and should not be there"


def first_difference(found: object, wanted: object) -> str:
    """The first difference as a verdict says it, behind the words for the call."""
    told = difference(found, wanted)
    if told.startswith(BROKEN):
        return f"breaks this rule: {told.removeprefix(BROKEN)}"
    return f"gives {told}"


def _tensor_difference(found: Tensor, wanted: Tensor, tolerance: float | None) -> str:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"{found.dtype}, not {wanted.dtype}"
    wrong = _wrong_elements(found, wanted, tolerance)
    index = tuple(wrong.nonzero()[0].tolist())
    words = pair(found[index].item(), wanted[index].item())
    if wanted.numel() == 1:
        return words
    place = ", ".join(map(str, index))
    return f"element [{place}] is {words} ({int(wrong.sum())} of {wanted.numel()} differ)"
