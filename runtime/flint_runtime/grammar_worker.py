"""What runs in the grammar processes. Nothing of the engine is in them, so nothing that a grammar does can harm it.

The parser is native code: a grammar from outside can make it overflow the stack, take gigabytes or compute for hours,
and none of that can be caught where it happens. So `main` is a process of its own, which prepares the vocabulary once
and then forks a child per grammar. The child compiles it, computes masks for every request that uses it, and may use so
much memory and processor time; beyond that the kernel ends it, and its sockets say so to whoever waits.

Three kinds of sockets, which `flint_runtime.grammar_pool` holds the other ends of:

control, to `main`: one byte and a descriptor, the child's own socket, per grammar.
grammar, to a child: in, the grammar's kind and text; out, "" or why it cannot be used; then one byte and a descriptor
    per request.
session, to a child, of whole messages: in, a token or RESTART; out, after it and at the start, a state and a mask or a
    reason.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flint_runtime.json_schema import normalize_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

REASON_CHARACTERS = 500
_NO_TEXT = "no text matches it"

OPEN, FINISHED, FAILED = range(3)
"""States of a session: more may follow, only an end may follow, the answer cannot go on."""
STATE = struct.Struct("<i")
TOKEN = struct.Struct("<i")
RESTART = -1
"""In a token's place: back to the first state."""
LENGTH = struct.Struct("<Q")

_STACK_BYTES = 512 << 20
"""The parser recurses over what is nested. Only what is touched takes memory."""
WHITESPACE = r"[ \t\r\n]{1,32}"
"""Between the tokens of JSON. Bounded: a small model may otherwise write white space for ever."""


@dataclass(frozen=True)
class Limits:
    """Of one grammar. The kernel ends the process that goes beyond."""

    compile_seconds: float = 10.0
    """Processor time to compile it. A schema of 50,000 texts takes 1 to 2 s, an ordinary one some milliseconds."""
    mask_seconds: float = 1.0
    """Processor time for a token: to take it in, and for the mask behind it. Ordinary ones take 0.1 to 5 ms."""
    memory_bytes: int = 256 << 20
    """Of the grammar and the parser's states. The schema of 50,000 texts takes 60 MB, an ordinary one 12."""
    answer_bytes: int = 8 << 20
    """More for every answer that is under way: each has states of its own, which grow with its length."""


@dataclass(frozen=True)
class Vocabulary:
    """What the parser must know of a tokenizer."""

    tokenizer: str
    """tokenizer.json's text."""
    tokens: list[bytes]
    special: list[int]
    eos: list[int]


def main(control_fd: int) -> None:
    """Fork a child for every grammar that comes, until the socket ends.

    Args:
        control_fd: of the control socket. The vocabulary and the limits come from standard input, pickled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # It is the engine's to end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Children leave without being waited for.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # A child has a socket for every answer.
    control = socket.socket(fileno=control_fd)
    vocabulary, limits = pickle.load(sys.stdin.buffer)
    parser = Parser(vocabulary)
    del vocabulary
    gc.freeze()  # The children share these pages as long as nobody writes to them.
    control.sendall(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if not descriptors:  # There was none left for it. Whoever sent it sees its other end closed.
            continue
        if os.fork() == 0:
            control.close()
            _run_child(parser, limits, socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _run_child(parser: Parser, limits: Limits, grammar: socket.socket) -> None:
    """Serve one grammar on a large stack, then leave without the interpreter's farewell."""
    threading.stack_size(_STACK_BYTES)
    # The reserved stack is address space, not memory.
    most = _address_space() + _STACK_BYTES + limits.memory_bytes
    child = _Child(parser, limits, grammar, most)
    child.limit_memory()
    thread = threading.Thread(target=child.serve)
    thread.start()
    thread.join()
    os._exit(0)


class Parser:
    """llguidance over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
        self.bos_token_id = None
        self.eos_token_id = vocabulary.eos[0]
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special
        self.vocabulary: LLTokenizer = LLTokenizer(TokenizerWrapper(self), eos_token=list(vocabulary.eos))
        self.tokens = []
        # The process's limits count. These are so high that no grammar within them ends here.
        self.limits: LLParserLimits = LLParserLimits(
            max_items_in_row=20_000,
            initial_lexer_fuel=50_000_000,
            step_lexer_fuel=20_000_000,
            step_max_items=1_000_000,
            max_grammar_size=2_000_000,
            verbose_errors=False,
        )

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of a text, as llguidance asks for them where a grammar leaves only one text."""
        text = text if isinstance(text, str) else text.decode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def compile(self, kind: str, text: str) -> LLMatcher:
        """A grammar in its first state. Raises ValueError with the library's reason."""
        from llguidance import LLMatcher, grammar_from

        if kind == "json":
            source = LLMatcher.grammar_from_json_schema(
                normalize_schema(text), defaults={"whitespace_pattern": WHITESPACE}
            )
        elif kind == "choice":
            # One terminal, not as many as there are texts: those would be told apart at every byte.
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            source = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        else:
            # That of calls is Lark, whatever it looks like.
            source = grammar_from("lark" if kind == "calls" else kind, text)  # type: ignore[arg-type]
        matcher = LLMatcher(self.vocabulary, source, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class _Child:
    """Compiles one grammar and serves its sessions."""

    def __init__(self, parser: Parser, limits: Limits, grammar: socket.socket, most_address_space: int) -> None:
        """
        Args:
            most_address_space: bytes, without those of answers.
        """
        self._parser, self._limits, self._grammar = parser, limits, grammar
        self._most_address_space = most_address_space
        self._sessions: dict[int, tuple[socket.socket, LLMatcher]] = {}
        self._poll = select.poll()
        self._most_bytes = _resident() + limits.memory_bytes // 2

    def serve(self) -> None:
        """Until nobody needs the grammar."""
        if not self._compile():
            return
        self._poll.register(self._grammar, select.POLLIN)
        while self._sessions or self._grammar.fileno() >= 0:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._grammar.fileno():
                    self._open()
                elif descriptor in self._sessions:
                    self._advance(descriptor)

    def limit_memory(self) -> None:
        """Let the process have what the grammar may take, and what the answers under way may."""
        most = self._most_address_space + len(self._sessions) * self._limits.answer_bytes
        highest = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = most if highest == resource.RLIM_INFINITY else min(most, highest)
        resource.setrlimit(resource.RLIMIT_AS, (most, highest))

    def _compile(self) -> bool:
        try:
            kind, text = receive_text(self._grammar), receive_text(self._grammar)
            with _processor_time(self._limits.compile_seconds):
                self._matcher = self._parser.compile(kind, text)
                first = self._matcher.deep_copy()
                mask = first.compute_bitmask()
            if first.is_error():
                raise ValueError(first.get_error())
            if not any(mask):
                raise ValueError(_NO_TEXT)
            self._first = (FINISHED if first.is_stopped() else OPEN, mask)
            reason = ""
        except OSError:
            return False
        except RecursionError:
            reason = "it is nested too deeply"
        except BaseException as error:  # The library's panics are no Exceptions.
            reason = _reason(str(error) or type(error).__name__)
        with suppress(OSError):
            send_text(self._grammar, reason)
        return not reason

    def _open(self) -> None:
        """A request wants this grammar from its first state on."""
        message, descriptors, _, _ = socket.recv_fds(self._grammar, 1, 1)
        if not message or not descriptors:  # Nobody comes any more, or no descriptor is left.
            self._retire()
            return
        session = socket.socket(fileno=descriptors[0])
        self._sessions[session.fileno()] = (session, self._matcher.deep_copy())
        self.limit_memory()
        self._poll.register(session, select.POLLIN)
        self._answer(session, *self._first)
        # States of the parser are kept for all requests, and grow. Who needs the grammar later gets a new process.
        if _resident() > self._most_bytes:
            self._retire()

    def _advance(self, descriptor: int) -> None:
        """A request's next token, or its end."""
        session, matcher = self._sessions[descriptor]
        try:
            message = session.recv(TOKEN.size)
        except OSError:
            message = b""
        if not message:
            self._poll.unregister(session)
            session.close()
            del self._sessions[descriptor]
            self.limit_memory()
            return
        token = TOKEN.unpack(message)[0]
        if token == RESTART:
            self._sessions[descriptor] = (session, self._matcher.deep_copy())
            self._answer(session, *self._first)
            return
        try:
            with _processor_time(self._limits.mask_seconds):
                matcher.consume_token(token)
                mask = matcher.compute_bitmask()
            error = matcher.get_error() if matcher.is_error() else ""
        except BaseException as found:
            error = str(found) or type(found).__name__
        if error:
            self._answer(session, FAILED, _reason(error).encode())
            self._retire()  # What this one ran into is shared.
        else:
            self._answer(session, FINISHED if matcher.is_stopped() else OPEN, mask)

    def _answer(self, session: socket.socket, state: int, body: bytes) -> None:
        with suppress(OSError):  # Nobody listens any more; the end comes next.
            session.sendall(STATE.pack(state) + body)

    def _retire(self) -> None:
        """Take no more requests."""
        if self._grammar.fileno() >= 0:
            self._poll.unregister(self._grammar)
            self._grammar.close()


def send_text(channel: socket.socket, text: str) -> None:
    """Send a text of any length."""
    data = text.encode("utf-8", "surrogatepass")
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive_text(channel: socket.socket) -> str:
    """What `send_text` sent. Raises ConnectionError where the other side is gone."""
    (length,) = LENGTH.unpack(_receive(channel, LENGTH.size))
    return _receive(channel, length).decode("utf-8", "surrogatepass")


def _receive(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = channel.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other side is gone")
        data += piece
    return bytes(data)


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Within so much processor time, or the kernel ends the process: time in native code can end in no other way."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _reason(text: str) -> str:
    """The library's own words: without its own notes, its backtraces and what would fill a page."""
    for mark in ("<non-verbose/>", "<backtrace>"):
        text = text.partition(mark)[0]
    text = text.strip()
    if text.startswith("NoExtension"):  # What the library says where even the first byte has no way on.
        return _NO_TEXT
    return text if len(text) <= REASON_CHARACTERS else text[:REASON_CHARACTERS] + " ..."


def _statm(field: int) -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


def _address_space() -> int:
    return _statm(0)


def _resident() -> int:
    return _statm(1)


def command(control_fd: int) -> list[str]:
    """How to start `main`: under this interpreter, with this one's paths."""
    arguments: dict[str, Any] = {"path": sys.path, "control": control_fd}
    code = (
        "import json, sys; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments['path']; "
        "from flint_runtime.grammar_worker import main; main(arguments['control'])"
    )
    return [sys.executable, "-c", code, json.dumps(arguments)]
