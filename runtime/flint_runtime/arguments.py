"""Checks of what a caller passes in. Each names the argument that is wrong, in a UsageError."""

from __future__ import annotations

import math
import operator
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flint_runtime.errors import UsageError, shown

_LONGEST_SHOWN = 100
SMALLEST_FLOAT32 = 2.0**-126
"""The smallest normal number of the device."""


def whole_number(value: object) -> int | None:
    """A whole number as an int, of numpy's kinds too; None for anything else, a bool among it."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integer(name: str, value: object, low: int, high: int) -> int:
    """A whole number in a range. Raises UsageError."""
    found = whole_number(value)
    if found is None or not low <= found <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, found {shown(value)}.")
    return found


def number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """A number in a range, which the device can hold as float32. Raises UsageError.

    Args:
        high: may be infinite; then the number must still be finite, and in float32's range.
        open_low: `low` itself is too low.
    """
    found = _float32(value)
    if found is None or not low <= found <= high or (open_low and found == low):
        start = f"above {low:g}" if open_low else f"from {low:g}"
        ending = f"up to {high:g}" if high < math.inf else "in the range of 32-bit floats"
        raise UsageError(f"{name} must be a number {start}, {ending}; found {shown(value)}.")
    return found


def _float32(value: Any) -> float | None:
    """A number as a float; None for anything that is not finite, or not in float32's range."""
    if isinstance(value, bool | str | bytes) or not hasattr(type(value), "__float__"):
        return None
    try:
        found = float(value)
        struct.pack("<f", found)  # checked, as "f" is not
    except Exception:  # 10^400, 1e39, an array
        return None
    return found if math.isfinite(found) else None


def flag(name: str, value: object) -> bool:
    """True or false, numpy's too. Raises UsageError."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_") and hasattr(value, "dtype"):
        return bool(value)
    raise UsageError(f"{name} must be true or false, found {shown(value)}.")


def text(name: str, value: object) -> str:
    """A text that can be encoded as UTF-8. Raises UsageError."""
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text, found {shown(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} has half of a surrogate pair, {value[error.start]!a}, at character {error.start}, which is no "
            "character. Decode the text with errors='replace', or leave it out."
        ) from None
    return value


def path(name: str, value: object) -> Path:
    """A path that a file may have. Raises UsageError."""
    try:
        found = Path(value)  # type: ignore[arg-type]
        if b"\0" in os.fsencode(found):
            raise ValueError("a null byte")
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be the path of a file or directory, found {shown(value)}.") from None
    return found


def texts(name: str, values: object, *, most: int, longest: int) -> tuple[str, ...]:
    """Texts that are not empty; a single one may stand alone, None is none. Raises UsageError.

    Args:
        most: how many there may be.
        longest: characters of each.
    """
    if values is None:
        return ()
    if isinstance(values, str):
        values = (values,)
    found = tuple(text(name, value) for value in _members(name, values, "texts"))
    if "" in found:
        raise UsageError(f"{name} must have no empty text, found {shown(values)}.")
    if len(found) > most:
        raise UsageError(f"{name} must be at most {most} texts, found {len(found)}.")
    if any(len(value) > longest for value in found):
        raise UsageError(f"{name} must have at most {longest} characters each, found {max(map(len, found))}.")
    return tuple(dict.fromkeys(found))


def token_ids(name: str, values: object, most: int | None = None) -> tuple[int, ...]:
    """Token ids, each once, in their order; None is none. Whether the model has them is checked later.

    Args:
        most: how many there may be.
    Raises:
        UsageError: they are no whole numbers from 0 on, or too many.
    """
    if values is None:
        return ()
    found = []
    for value in _members(name, values, "token ids"):
        token = whole_number(value)
        if token is None or not 0 <= token < 2**31:
            raise UsageError(f"{name} must be token ids, whole numbers from 0 on; found {shown(value)}.")
        found.append(token)
    if most is not None and len(found) > most:
        raise UsageError(f"{name} must be at most {most} token ids, found {len(found)}.")
    return tuple(dict.fromkeys(found))


def _members(name: str, values: object, what: str) -> Iterator[Any]:
    """The members of a list, tuple, set or array. Raises UsageError for anything else."""
    if isinstance(values, Collection) and not isinstance(values, str | bytes | bytearray | memoryview | Mapping):
        try:
            return iter(values)
        except TypeError:  # numpy's arrays without a dimension
            pass
    raise UsageError(f"{name} must be a list of {what}, found {shown(values)}.")
