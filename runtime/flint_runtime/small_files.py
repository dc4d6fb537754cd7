"""Small files that strangers made: read whole but never without a limit, and JSON that says only one thing."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flint_runtime.errors import shown

MAX_CONFIG_BYTES = 4 << 20
"""Of config.json, generation_config.json, tokenizer_config.json and a chat template; real ones have some kilobytes."""
MAX_TOKENIZER_BYTES = 64 << 20
"""Of tokenizer.json: three times that of a vocabulary of 150,000."""

_MAX_DEPTH = 64
"""Objects and lists inside one another; real files have less than ten. What walks over them may be recursive."""
_LARGEST = 1 << 64
_LFS_START = b"version https://git-lfs.github.com/spec/"
LFS_HEAD_BYTES = len(_LFS_START)
LFS_PROBLEM = "it is a Git LFS pointer, not the file itself. Run 'git lfs pull' in its directory, or download it again"


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins with `head` (LFS_HEAD_BYTES of it are enough) stands for one in Git LFS."""
    return head.startswith(_LFS_START)


def read_small_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, is too long, no regular file, or a Git LFS pointer; the text says which.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is not a regular file")
            data = file.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise ValueError(f"it is longer than {most >> 20} MiB")
    if is_lfs_pointer(data):
        raise ValueError(LFS_PROBLEM)
    return data


def utf8(data: bytes) -> str:
    """Text of a file. Raises ValueError where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from None


def json_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: not JSON, not an object, a key twice, a number that is not finite or beyond 64 bits, or too deep.
    """
    try:
        found = json.loads(
            utf8(data),
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"its values are nested more than {_MAX_DEPTH} deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a JSON {_json_type(found)}, expected an object")
    _check_depth(found)
    return found


def listed(names: Sequence[str], most: int = 10) -> str:
    """Names for messages: at most `most`, each at most 100 characters, and how many are left."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if len(name) <= 100 else name[:99] + "…" for name in names[:most]) + more


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} occurs twice in an object")
        found[name] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"it has the number {shown(text)}; finite numbers are expected")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _integer(text: str) -> int:
    # Without the length check Python would compare or refuse thousands of digits, in its own words.
    value = int(text) if len(text) < 24 else _LARGEST
    if not -_LARGEST < value < _LARGEST:
        raise ValueError(f"it has the number {shown(text)}, which is beyond 64 bits")
    return value


def _check_depth(root: Any) -> None:
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"its values are nested more than {_MAX_DEPTH} deep")
        children = [item for box in level for item in (box.values() if isinstance(box, dict) else box)]
        level = [item for item in children if isinstance(item, dict | list)]


def _json_type(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
