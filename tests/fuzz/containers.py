"""Damage to GGUF and safetensors files that keeps most of the format whole, so that the deeper checks are reached."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from random import Random

from gguf.constants import GGUFValueType

from tests.builder.checkpoint.tiny import gguf_entry, gguf_text
from tests.fuzz.mutate import NUMBERS, TEXTS, mutate_bytes, mutate_document

_ALIGNMENT = 32
_PACKED = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.FLOAT64: "<d",
}
_SCALARS = (0, 1, -1, 2, 255, 1 << 31, (1 << 64) - 1, 0.5, 1e-6, 1e30, float("nan"), float("inf"))


@dataclass
class GgufParts:
    """A valid GGUF file, taken apart."""

    entries: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    numbers: list[tuple[int, int]] = field(default_factory=list)
    """(offset, width) of every count, length, type, dimension and offset in the header."""
    header_bytes: int = 0
    data: bytes = b""

    @classmethod
    def split(cls, file: bytes) -> GgufParts:
        """Take a file without arrays in its metadata apart."""
        parts, at = cls(), 8

        def number(width: int) -> int:
            nonlocal at
            parts.numbers.append((at, width))
            at += width
            return int.from_bytes(file[at - width : at], "little")

        tensors, entries = number(8), number(8)
        for _ in range(entries):
            start = at
            at = number(8) + at
            kind = GGUFValueType(number(4))
            if kind is GGUFValueType.STRING:
                at = number(8) + at
            else:
                at += struct.calcsize(_PACKED[kind])
            parts.entries.append(file[start:at])
        for _ in range(tensors):
            start = at
            at = number(8) + at
            for _ in range(number(4)):
                number(8)
            number(4), number(8)
            parts.tensors.append(file[start:at])
        parts.header_bytes = -(-at // _ALIGNMENT) * _ALIGNMENT
        parts.data = file[parts.header_bytes :]
        return parts

    def join(self, entries: list[bytes], tensors: list[bytes]) -> bytes:
        """A file of other entries, with the right counts, before the same data."""
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join((*entries, *tensors))
        return head + bytes(-len(head) % _ALIGNMENT) + self.data


def mutate_gguf(random: Random, file: bytes, parts: GgufParts, keys: tuple[str, ...]) -> bytes:
    """A GGUF file with one part damaged: a number, an entry, bytes of the header or of the data, or its end."""
    kind = random.randrange(10)
    end = parts.header_bytes
    if kind < 2:
        return mutate_bytes(random, file[:end]) + file[end:]
    if kind < 5:
        found = bytearray(file)
        for _ in range(random.choice((1, 1, 2))):
            at, width = random.choice(parts.numbers)
            value = int.from_bytes(found[at : at + width], "little")
            value = random.choice((*NUMBERS, value + 1, value - 1, value * 2, value + 32, random.randrange(50)))
            found[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        return bytes(found)
    if kind < 8:
        entries, tensors = list(parts.entries), list(parts.tensors)
        changed = random.choice((entries, entries, entries, tensors))
        at = random.randrange(len(changed))
        if random.random() < 0.5:
            entries.insert(random.randrange(len(entries)), _entry(random, keys))
        elif random.random() < 0.5:
            del changed[at]
        else:
            changed.insert(random.randrange(len(changed)), mutate_bytes(random, changed.pop(at)))
        return parts.join(entries, tensors)
    if kind == 8:
        return file[:end] + _damaged(random, parts.data)
    return file[: random.choice((random.randrange(len(file)), random.randrange(end), 0, 4, 8, 24))]


def _entry(random: Random, keys: tuple[str, ...]) -> bytes:
    """A metadata entry with a known key and a value of any type; some lie about their length."""
    key = random.choice(keys)
    kind = random.choice(list(GGUFValueType))
    if kind is GGUFValueType.STRING:
        return gguf_entry(key, kind, gguf_text(random.choice(TEXTS).encode()))
    if kind is not GGUFValueType.ARRAY:
        return gguf_entry(key, kind, _scalar(random, kind))
    item = random.choice(list(GGUFValueType))
    count = random.choice((0, 1, 4, 1000))
    if item is GGUFValueType.STRING:
        values = b"".join(gguf_text(random.choice(TEXTS).encode()) for _ in range(count))
    else:
        values = b"".join(_scalar(random, item) for _ in range(count))
    count = random.choice((count, count, count, *NUMBERS)) % (1 << 64)
    return gguf_entry(key, kind, struct.pack("<IQ", item, count) + values)


def _scalar(random: Random, kind: GGUFValueType) -> bytes:
    code = _PACKED.get(kind, "<H")
    value = random.choice(_SCALARS)
    try:
        return struct.pack(code, bool(value) if code == "<?" else value if code in ("<f", "<d") else int(value))
    except (struct.error, OverflowError, ValueError):
        return bytes([0xFF]) * struct.calcsize(code)


def _damaged(random: Random, data: bytes) -> bytes:
    """Data of the same size with some bytes replaced: by NaN, infinity, the largest codes, or anything."""
    found = bytearray(data)
    for _ in range(random.choice((1, 3, 30))):
        at = random.randrange(max(1, len(found) - 8))
        value = random.choice((b"\xff" * 4, b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\x80" * 4, random.randbytes(4)))
        found[at : at + 4] = value
    return bytes(found[: len(data)])


def mutate_safetensors(random: Random, file: bytes) -> bytes:
    """A safetensors file with another header, with damaged data, or cut off."""
    end = 8 + int.from_bytes(file[:8], "little")
    kind = random.randrange(10)
    if kind < 2:
        return mutate_bytes(random, file[:end]) + file[end:]
    if kind < 7:
        header = json.loads(file[8:end])
        words = ("BF16", "F32", "F16", "U8", "I64", "F8_E4M3", "__metadata__", "dtype", "shape", *list(header)[:50])
        for _ in range(random.choice((1, 1, 2))):
            if isinstance(header, dict | list):
                header = mutate_document(random, header, words)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + file[end:]
    if kind == 7:
        length = random.choice((*NUMBERS, end - 8 + 1, end - 8 - 1, len(file), len(file) - 8)) % (1 << 64)
        return length.to_bytes(8, "little") + file[8:]
    if kind == 8:
        return file[:end] + _damaged(random, file[end:])
    return file[: random.choice((random.randrange(len(file)), random.randrange(end), 0, 4, 8))] + random.choice(
        (b"", b"", b"\0")
    )
