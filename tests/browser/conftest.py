"""Servers in threads of their own, and pages of headless Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

import aiocb
from aiocb.serve import ServeConfig, create_app
from aiocb.serve.run import Protocol, Server


class _Quiet(Server):
    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


class Running:
    """A server in a thread.

    Attributes:
        url: of its page.
    """

    def __init__(self, engine: aiocb.Engine, **settings: Any) -> None:
        settings.setdefault("served_model_name", ("fake",))
        self.engine = engine
        self._settings = settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = create_app(self.engine, ServeConfig(**self._settings))
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, http=Protocol, ws="none", log_config=None, timeout_graceful_shutdown=1
        )
        self._server = _Quiet(config, app.state.service)
        task = asyncio.create_task(self._server.serve())
        while not self._server.started or app.state.service.is_loading:
            await asyncio.sleep(0.01)
        self._ready.set()
        await task

    def kill(self) -> None:
        """Cut every connection, as a process that dies."""
        loop = self._loop
        for connection in list(self._server.server_state.connections):
            loop.call_soon_threadsafe(connection.transport.abort)
        self.stop()

    def stop(self) -> None:
        """End it."""
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path is not None, "chromium is not installed: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(engine: aiocb.Engine, **settings: Any) -> Running:
        running.append(Running(engine, **settings))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page whose errors fail the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.set_default_timeout(20_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    context.close()
    assert not problems
