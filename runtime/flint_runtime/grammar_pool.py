"""The engine's side of the grammar processes: starts them, keeps the latest, and talks to them for each answer."""

from __future__ import annotations

import hashlib
import os
import pickle
import select
import socket
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from flint_runtime import grammar_worker as worker
from flint_runtime.errors import ResourceError, UsageError
from flint_runtime.grammar_worker import Limits, Vocabulary

Mask = npt.NDArray[np.int32]

MAX_CHARACTERS = 2 << 20
"""Of a grammar's text: twice that of a schema of 50,000 texts."""
_CACHED_GRAMMARS = 64
"""Each one keeps a process: 3 MB of its own, and what the grammar takes."""
_CACHED_REFUSALS = 1024
_MAX_GRAMMARS = 256
"""Different ones that are in use at the same time."""
_PATIENCE_S = 60.0
"""Real time for what has seconds of processor time: beyond it the machine is stuck."""
_START_S = 120.0


def check_size(kind: str, characters: int) -> None:
    """Raise UsageError for a text that is too long, before anything reads it."""
    if characters > MAX_CHARACTERS:
        raise UsageError(
            f"structured_outputs.{kind} has {characters:,} characters, and may have {MAX_CHARACTERS:,}. Shorten it."
        )


class GrammarPool:
    """Grammars over one vocabulary, each in its process. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits | None = None) -> None:
        self._vocabulary, self._limits = vocabulary, limits or Limits()
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._making: dict[tuple[str, bytes], Future[_GrammarProcess]] = {}
        self._processes: weakref.WeakValueDictionary[tuple[str, bytes], _GrammarProcess] = weakref.WeakValueDictionary()
        self._latest: OrderedDict[tuple[str, bytes], _GrammarProcess] = OrderedDict()
        """Those that are kept though nobody may use them."""
        self._refusals: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        # Nobody's schema takes all processors from the engine.
        self._compiling = threading.BoundedSemaphore(max(2, (os.cpu_count() or 1) // 2))
        self.compiled = 0
        """Grammars for which a process was made."""

    def open(self, kind: str, text: str) -> Session:
        """Start an answer: compile the grammar, or use the process that has it.

        Raises:
            UsageError: the grammar cannot be used, or takes too much.
            ResourceError: processes cannot be started.
        """
        check_size(kind, len(text))
        key = (kind, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        for _ in range(2):
            process = self._process(key, text)
            session = process.open(self._mask_words())
            if session is not None:
                return session
            # It has ended or takes nobody any more: a new one does.
            with self._lock:
                if self._processes.get(key) is process:
                    del self._processes[key]
                    self._latest.pop(key, None)
        raise ResourceError("The process of a grammar ended before it could be used. Is the machine out of memory?")

    def close(self) -> None:
        """End the processes; answers that use them end with an error."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None
            self._latest.clear()

    def _mask_words(self) -> int:
        return -(-len(self._vocabulary.tokens) // 32)

    def _process(self, key: tuple[str, bytes], text: str) -> _GrammarProcess:
        """The grammar's process; whoever asks while it is being made waits for the same one."""
        with self._lock:
            if key in self._refusals:
                self._refusals.move_to_end(key)
                raise UsageError(self._refusals[key])
            process = self._processes.get(key)
            if process is not None:
                self._keep(key, process)
                return process
            future = self._making.get(key)
            mine = future is None
            if future is None:
                future = self._making[key] = Future()
        if mine:
            try:
                future.set_result(self._make(key, text))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                with self._lock:
                    del self._making[key]
        try:
            return future.result()
        except (UsageError, ResourceError) as error:
            raise type(error)(str(error)) from None  # A new one for everyone.

    def _make(self, key: tuple[str, bytes], text: str) -> _GrammarProcess:
        with self._lock:  # Those that nobody uses make room first.
            while len(self._processes) >= _MAX_GRAMMARS and self._latest:
                self._latest.popitem(last=False)
        if len(self._processes) >= _MAX_GRAMMARS:
            raise ResourceError(
                f"{_MAX_GRAMMARS} different grammars are in use, the most at the same time. Try again when some "
                "answers have ended."
            )
        with self._compiling:
            process, reason = self._start().compile(key[0], text)
        with self._lock:
            if process is not None:
                self.compiled += 1
                self._processes[key] = process
                self._keep(key, process)
                return process
            message = f"structured_outputs.{key[0]} cannot be used: {reason}"
            self._refusals[key] = message
            while len(self._refusals) > _CACHED_REFUSALS:
                self._refusals.popitem(last=False)
        raise UsageError(message)

    def _keep(self, key: tuple[str, bytes], process: _GrammarProcess) -> None:
        self._latest[key] = process
        self._latest.move_to_end(key)
        while len(self._latest) > _CACHED_GRAMMARS:
            self._latest.popitem(last=False)

    def _start(self) -> _Server:
        with self._lock:
            if self._server is None or not self._server.is_running():
                self._server = _Server(self._vocabulary, self._limits)
            return self._server


class _Server:
    """The process from which those of the grammars are forked."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self._limits = limits
        self._control, other = _sockets(socket.SOCK_STREAM)
        with other:
            try:
                process = subprocess.Popen(
                    worker.command(other.fileno()),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(other.fileno(),),
                    start_new_session=True,  # Ctrl-C in a terminal is for the engine.
                )
            except OSError as error:
                raise ResourceError(f"The process that compiles grammars cannot be started: {error}.") from None
        self._process = process
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _end, self._control, process, os.getpid())
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pickle.dump((vocabulary, limits), pipe)
        self._control.settimeout(_START_S)
        try:
            ready = self._control.recv(1)
        except OSError:
            ready = b""
        if not ready:
            self.close()
            raise ResourceError(
                "The process that compiles grammars did not start. It needs llguidance, tokenizers and some hundred MB "
                "of memory."
            )

    def is_running(self) -> bool:
        return self._process.poll() is None and self.close.alive

    def compile(self, kind: str, text: str) -> tuple[_GrammarProcess | None, str]:
        """A process with a grammar, or why there is none."""
        channel, other = _sockets(socket.SOCK_STREAM)
        with other, self._lock:
            try:
                socket.send_fds(self._control, [b"g"], [other.fileno()])
            except OSError:
                channel.close()
                raise ResourceError("The process that compiles grammars has ended. Try again.") from None
        begin = time.monotonic()
        channel.settimeout(_PATIENCE_S)
        try:
            worker.send_text(channel, kind)
            worker.send_text(channel, text)
            reason = worker.receive_text(channel)
        except OSError:
            seconds = self._limits.compile_seconds
            reason = _what_ended_it(time.monotonic() - begin, seconds, self._limits, "to be compiled")
        if reason:
            channel.close()
            return None, reason
        return _GrammarProcess(channel, self._limits), ""


class _GrammarProcess:
    """A process that has a grammar. It ends when this object and its sessions are gone."""

    def __init__(self, channel: socket.socket, limits: Limits) -> None:
        self.limits = limits
        self._channel = channel
        self._lock = threading.Lock()

    def open(self, mask_words: int) -> Session | None:
        """Start an answer in the grammar's first state; None where the process takes no more."""
        own, other = _sockets(socket.SOCK_SEQPACKET)
        try:
            with other, self._lock:
                socket.send_fds(self._channel, [b"s"], [other.fileno()])
        except OSError:
            own.close()
            return None
        session = Session(own, mask_words, self)
        if not session.wait(_PATIENCE_S) or session.error is not None:
            return None
        return session


class Session:
    """One answer's parser, which works while the engine does: `advance`, then `wait` for what it found.

    Attributes:
        mask: the tokens allowed next, [V / 32]; all zero after an error.
        finished: whether only an end-of-sequence token may follow.
        error: why the answer cannot go on.
    """

    def __init__(self, channel: socket.socket, mask_words: int, process: _GrammarProcess) -> None:
        channel.setblocking(False)
        self._channel, self._process = channel, process
        self._words = mask_words
        self._buffer = np.zeros(1 + max(mask_words, worker.REASON_CHARACTERS), np.int32)
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._pending = True
        self._since = time.monotonic()
        self.mask: Mask = self._buffer[1 : 1 + mask_words]
        self.finished = False
        self.error: str | None = None

    def advance(self, token_id: int) -> None:
        """Hand a token over."""
        self._pending, self._since = True, time.monotonic()
        # An end of the other side shows when its answer is read.
        with suppress(OSError):
            self._channel.send(worker.TOKEN.pack(token_id))

    def restart(self) -> None:
        """Ask for the grammar's first state again."""
        self.finished = False
        self.advance(worker.RESTART)

    def wait(self, seconds: float) -> bool:
        """Wait so long at most for what the parser finds; whether it is there."""
        if not self._pending:
            return True
        left = max(0.0, self._since + _PATIENCE_S - time.monotonic())
        if not self._poll.poll(max(0.0, min(seconds, left)) * 1000):
            if seconds < left:
                return False
            self._fail("its process does not answer; is the machine overloaded?")
            return True
        try:
            count = self._channel.recv_into(self._buffer.data)
        except OSError:
            count = 0
        state = int(self._buffer[0]) if count else None
        if state is None:
            limits = self._process.limits
            self._fail(_what_ended_it(time.monotonic() - self._since, limits.mask_seconds, limits, "for a token"))
        elif state == worker.FAILED:
            self._fail(self._buffer.view(np.uint8)[worker.STATE.size : count].tobytes().decode("utf-8", "replace"))
        else:
            self._pending, self.finished = False, state == worker.FINISHED
        return True

    def _fail(self, reason: str) -> None:
        self._pending, self.finished = False, False
        self.mask[:] = 0
        self.error = f"structured_outputs cannot be followed any further: {reason}"
        self._channel.close()


def _sockets(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Two that are connected. Raises ResourceError."""
    try:
        return socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise ResourceError(
            f"Every answer with structured_outputs needs a socket, and there is none left: {error}. Ask for fewer at "
            "once, or raise the limit of open files (ulimit -n)."
        ) from None


def _what_ended_it(took: float, seconds: float, limits: Limits, purpose: str) -> str:
    """Why a grammar's process is gone: the kernel ended it, and nobody can ask it why."""
    what = "takes too long" if took >= seconds else "takes too much memory or is nested too deeply"
    memory = f"{limits.memory_bytes >> 20} MB of memory"
    return f"it {what}; it may use {seconds:g} s of processor time {purpose} and {memory}. Make it simpler."


def _end(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    control.close()
    if os.getpid() != owner:  # A forked child says goodbye: the server is its parent's.
        return
    process.kill()
    process.wait()
