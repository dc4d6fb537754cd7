"""Running a server: the socket, the engine, signals, and the end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.command_line import raise_at_sigterm
from flint_runtime.errors import EngineError, UsageError, foreign_error, foreign_errors
from flint_runtime.executors import ExecutorChoice
from flint_runtime.server.app import create_app
from flint_runtime.server.errors import ApiError
from flint_runtime.server.service import Service
from flint_runtime.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 3
"""That cancelled requests have to tell their clients, at the end."""
_BACKLOG = 2048


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and how it ends."""

    host: str
    port: int
    uds: Path | None
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    shutdown_timeout: float
    """Seconds that running answers have after SIGTERM."""


def run_server(
    engine: Path, executor: ExecutorChoice, core: Mapping[str, Any], settings: ServerSettings, listening: Listening
) -> None:
    """Open an engine and serve it until SIGTERM or Ctrl-C.

    Raises:
        UsageError: it cannot listen there.
        FlintError: what `AsyncLLM` raises.
    """
    raise_at_sigterm()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its infos are said below
    # Bound before the engine is opened: that takes a while, and a port that is taken would waste it.
    with _socket(listening) as bound:
        with foreign_errors(f"Engine {engine} cannot be read", EngineError, "Copy it again or rebuild it."):
            llm = AsyncLLM(engine, executor, **core)
        with llm:
            app = create_app(llm, settings)
            tls = {"ssl_certfile": listening.ssl_certfile, "ssl_keyfile": listening.ssl_keyfile}
            try:
                config = uvicorn.Config(
                    app,
                    loop="uvloop",
                    http="httptools",
                    ws="none",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    backlog=_BACKLOG,
                    timeout_graceful_shutdown=_LAST_WORDS_S,
                    **{name: str(path) for name, path in tls.items() if path is not None},  # type: ignore[arg-type]
                )
                config.load()
            except OSError as error:  # ssl.SSLError is one
                raise foreign_error(
                    error, "TLS cannot be set up", UsageError, "Check --ssl-certfile and --ssl-keyfile."
                ) from error
            gc.collect()
            gc.freeze()  # What is there now stays: the collector need not look at it again.
            logger.info("Serving %s at %s", ", ".join(settings.model_names), _address(bound, listening))
            _Server(config, app.state.service, listening.shutdown_timeout).run(sockets=[bound])
            logger.info("Done.")


class _Server(uvicorn.Server):
    """Ends in two steps: first nothing new is taken, with 503 as the answer; then, with nobody left, it closes."""

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._service, self._shutdown_timeout = service, shutdown_timeout
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal; a second one does not wait for running answers."""
        logger.info("%s: no new requests are taken.", signal.Signals(sig).name)
        if self._deadline is None:
            self._service.draining = True
            self._deadline = time.monotonic() + self._shutdown_timeout
        else:
            self._deadline = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to end."""
        if self._deadline is not None:
            late = time.monotonic() >= self._deadline
            if late:
                self._service.fail_all(
                    ApiError(503, "The server was shut down before the answer was complete.", code="draining")
                )
            self.should_exit = self.should_exit or late or not self._service.places
        return await super().on_tick(counter)


@contextmanager
def _socket(listening: Listening) -> Iterator[socket.socket]:
    """The socket, bound but not yet listening. Raises UsageError."""
    where = str(listening.uds or f"{listening.host}:{listening.port}")
    try:
        found = _bound(listening)
    except (OSError, UnicodeError) as error:
        raise foreign_error(
            error, f"The server cannot listen at {where}", UsageError, "Choose another address or port."
        ) from error
    try:
        yield found
    finally:
        found.close()
        if listening.uds is not None:
            with suppress(OSError):
                os.unlink(listening.uds)


def _bound(listening: Listening) -> socket.socket:
    if listening.uds is not None:
        _remove_old(listening.uds)
        family, address = socket.AF_UNIX, str(listening.uds)
    else:
        flags = socket.AI_PASSIVE
        every = socket.getaddrinfo(listening.host, listening.port, type=socket.SOCK_STREAM, flags=flags)
        family, address = every[0][0], every[0][4]  # type: ignore[assignment]
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except BaseException:
        found.close()
        raise
    return found


def _remove_old(path: Path) -> None:
    """Remove a socket that nobody listens at any more, as a server that was killed leaves it."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()


def _address(bound: socket.socket, listening: Listening) -> str:
    if listening.uds is not None:
        return f"unix:{listening.uds}"
    host, port = bound.getsockname()[:2]
    scheme = "https" if listening.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
