"""The process: a socket, uvicorn on it, and signals that let what is open come to an end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import application
from .edge import log_line
from .service import Service

BACKLOG = 1024


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet, so that nobody connects before the model is loaded. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise OSError(f"{host} port {port}: {error.strerror}") from error
    return found


class Server(uvicorn.Server):
    """SIGTERM and SIGINT drain: new requests get 503, open ones have `drain_s` to end. A second signal ends it now."""

    def __init__(
        self,
        service: Service,
        max_connections: int,
        announce: Callable[[], None],
        write: Callable[[dict[str, Any]], None] = log_line,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                application(service, write),
                http=_tracking(service.transports),
                ws="none",
                loop="asyncio",
                lifespan="on",
                backlog=BACKLOG,
                limit_concurrency=max_connections,
                timeout_graceful_shutdown=5,
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
            )
        )
        self.service, self.announce = service, announce
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is None:
            self._draining = self.loop.create_task(self._end())
        else:
            self.should_exit = self.force_exit = True

    async def _end(self) -> None:
        engine = self.service.engine
        if not await engine.drain(self.service.config.drain_s):
            await engine.stop()  # what is still open is told so
            await engine.drain(1.0)
        self.should_exit = True


def _tracking(transports: dict[tuple[str, int], asyncio.Transport]) -> type[H11Protocol]:
    """uvicorn's protocol, of which every open connection is in `transports`."""

    class Tracking(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if self.client:
                transports[self.client] = transport

        def connection_lost(self, exc: Exception | None) -> None:
            if self.client:
                transports.pop(self.client, None)
            super().connection_lost(exc)

    return Tracking


def serve(service: Service, listener: socket.socket, max_connections: int, announce: Callable[[], None]) -> None:
    """Until a signal ends it. Raises what keeps the engine from being made."""
    server = Server(service, max_connections, announce)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    asyncio.run(server.serve([listener]))
