"""Messages that print anywhere and stay short; what the world does, as errors of ours."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from flint_runtime.errors import (
    CheckpointError,
    EngineError,
    FlintError,
    ResourceError,
    UsageError,
    foreign_error,
    foreign_errors,
    printable,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, é, 中文, 😀", "plain text, é, 中文, 😀"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[31mred\x07\x7f\x9b", "\\x1b[31mred\\x07\\x7f\\x9b"),
        ("\u202egpj.exe\u2066", "\\u202egpj.exe\\u2066"),
        ("\x00", "\\x00"),
        (os.fsdecode(b"caf\xe9"), "caf\\xe9"),
        ("\ud800", "\\ud800"),
        ("[/x] [red]{0}%s", "[/x] [red]{0}%s"),
    ],
)
def test_messages_print(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(UsageError(text)) == shown
    assert str(UsageError(str(UsageError(text)))) == shown, "escaped twice"


@pytest.mark.parametrize("text", ["x" * 5000, "\x00" * 5000, "é" * 991, "x" * 20_000_000])
def test_messages_are_short_and_keep_both_ends(text: str) -> None:
    message = str(CheckpointError(f"model.gguf is damaged: {text}. Download it again."))
    assert len("error: " + message) <= 1000
    assert message.startswith("model.gguf is damaged: ") and message.endswith(". Download it again.")
    assert message.isprintable()


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(EngineError("damaged", problems=["a"])))
    assert type(error) is EngineError and str(error) == "damaged" and error.details == {"problems": ["a"]}


OUT_OF = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE]


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_every_error_of_the_system(code: int) -> None:
    error = foreign_error(OSError(code, os.strerror(code), "/a/b"), "x cannot be read", CheckpointError, "Do this.")
    assert type(error) is (ResourceError if code in OUT_OF else CheckpointError)
    assert str(error).startswith(f"x cannot be read: {os.strerror(code)} (/a/b). ")


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        (MemoryError(), ResourceError, "x cannot be read: host memory ran out. Close other programs and run again."),
        (RecursionError("deep"), CheckpointError, "x cannot be read: it is nested too deeply. Do this."),
        (OSError("a library's"), CheckpointError, "x cannot be read: a library's. Do this."),
        (OSError(), CheckpointError, "x cannot be read: OSError. Do this."),
        (OSError(5, "Input/output error", 7), CheckpointError, "x cannot be read: Input/output error. Do this."),
        (OSError(5, "Bad", b"\xff", None, "to"), CheckpointError, "x cannot be read: Bad (\\xff, to). Do this."),
    ],
)
def test_other_trouble(trouble: Exception, kind: type[FlintError], message: str) -> None:
    with pytest.raises(kind) as caught, foreign_errors("x cannot be read", CheckpointError, "Do this."):
        raise trouble
    assert str(caught.value) == message and caught.value.__cause__ is trouble


def test_wrong_text_is_named_by_byte_and_offset() -> None:
    boundary = ("The prompt cannot be read", UsageError, "Convert it to UTF-8.")
    with pytest.raises(UsageError, match="it is not utf-8, byte 0xff at offset 2"), foreign_errors(*boundary):
        b"ab\xff".decode()
    with pytest.raises(UsageError, match="surrogates not allowed"), foreign_errors(*boundary):
        "\udcff".encode()


def test_bugs_and_our_own_errors_pass() -> None:
    for error in (KeyError("x"), ValueError("x"), EngineError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)), foreign_errors("x", CheckpointError, ""):
            raise error
