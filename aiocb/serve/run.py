"""`serve`: the application on uvicorn, until a signal. Main thread."""

from __future__ import annotations

import asyncio
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aiocb.serve.app import create_app
from aiocb.serve.config import ServeConfig
from aiocb.serve.errors import ApiError
from aiocb.serve.service import LoadProgress, Service

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = ["Server", "serve"]

_MAX_HEADERS = 200
_MAX_HEADER_BYTES = 64 << 10
_HEADER_S = 20.0
_FLUSH_S = 5


class Protocol(HttpToolsProtocol):
    """HTTP whose heads are bounded in size, number and time."""

    _num_header_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Give the first head its time; between requests the server's keep-alive counts."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEADER_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Count anew."""
        self._num_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count it with the headers."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(name + value)
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        """The head has come."""
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or beyond the bounds, in the words of this server, and close."""
        body = ApiError(400, f"{msg} (a head may have {_MAX_HEADERS} headers, {_MAX_HEADER_BYTES} bytes)").body
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        self.transport.close()

    def _count(self, part: bytes) -> None:
        self._num_header_bytes += len(part)
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            raise ValueError("the head is too large")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn, whose first signal lets open requests end, whose second ends them, and whose third does not wait."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        service.on_failure(self._fail)

    async def startup(self, sockets: Any = None) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal; runs between two instructions of the main thread."""
        if self._loop is None:
            self.should_exit = True
        elif self.should_exit:
            self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._service.hurry()

    async def _drain(self) -> None:
        await self._service.drain(self._service.config.drain)
        self.should_exit = True

    def _fail(self) -> None:
        self.should_exit = True


def serve(engine: Engine, config: ServeConfig, progress: LoadProgress) -> BaseException | None:
    """Serve until SIGINT or SIGTERM; return what the engine could not be started for, if so.

    Raises:
        SystemExit: the address is taken.
    """
    app = create_app(engine, config, progress)
    service: Service = app.state.service
    Server(uvicorn_config(app, config), service).run()
    return service.failure


def uvicorn_config(app: Any, config: ServeConfig) -> uvicorn.Config:
    """How uvicorn is to serve the app."""
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=Protocol,
        ws="websockets-sansio",
        ws_max_size=config.max_body_size,
        ws_ping_interval=20.0,
        ws_ping_timeout=120.0,  # above the longest step: a busy process answers late, and is alive
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(config.keep_alive),
        timeout_graceful_shutdown=_FLUSH_S,
        root_path=config.root_path,
        lifespan="on",
    )
