"""A hub of one's own on 127.0.0.1: what loading a model asks of the Hugging Face hub, over a dict of files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repository:
    """What the hub has of one model.

    Attributes:
        files: contents by path.
        revisions: names of its one commit.
        gated: files are given to those who send a token.
        cut: paths of which only the first half comes, and nothing the next time.
        stalled: paths of which only the first half comes, and then nothing for as long as the hub runs.
        says: a status with which every call is answered.
    """

    files: Mapping[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    cut: tuple[str, ...] = ()
    stalled: tuple[str, ...] = ()
    says: int = 0
    was_cut: set[str] = field(default_factory=set)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """The server; `repositories` may change while it runs, `paths` has every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.paths: list[str] = []
        self.has_stalled = threading.Event()
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[str]:
        """Which files have been sent, in order."""
        return [
            path.rpartition("/resolve/")[2].partition("/")[2]
            for path in self.paths
            if path.startswith("GET /") and "/resolve/" in path
        ]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        hub.shutdown()
        hub.server_close()
        thread.join()


@contextmanager
def using_hub(hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub's client of this process asks that server and keeps files in a folder of the test."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub
    _PATHS: ClassVar = (
        re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?P<tree>/tree/(?P<of>[^/]+))"),
        re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?"),
        re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"),
    )

    def do_GET(self) -> None:
        self.server.paths.append(f"{self.command} {self.path}")
        path = urlsplit(self.path).path
        match = next((match for pattern in self._PATHS if (match := pattern.fullmatch(path))), None)
        groups: dict[str, Any] = match.groupdict() if match else {}
        repository = self.server.repositories.get(groups.get("name", ""))
        if repository is None:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repository.says:
            self._send(repository.says, b"")
        elif unquote(groups.get("of") or groups.get("revision") or "main") not in (
            *repository.revisions,
            repository.commit,
        ):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "tree" in groups:
            self._send_json([_entry(path, content) for path, content in repository.files.items()])
        elif "file" not in groups:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in repository.files.items()]
            self._send_json({"id": groups["name"], "sha": repository.commit, "siblings": siblings, "tags": []})
        elif repository.gated and "Authorization" not in self.headers:
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self._send_file(repository, unquote(groups["file"]))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send_file(self, repository: Repository, path: str) -> None:
        content = repository.files.get(path)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
            return
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": repository.commit}
        if self.command == "GET" and path in repository.cut:
            if path in repository.was_cut:
                self._send(503, b"")
                return
            repository.was_cut.add(path)
            self.close_connection = True
            self._send(200, content, headers, count=len(content) // 2)
            return
        if self.command == "GET" and path in repository.stalled:
            self._send(200, content, headers, count=len(content) // 2)
            self.wfile.flush()
            self.server.has_stalled.set()
            self.server.is_over.wait()
            self.close_connection = True
            return
        self._send(200, content, headers)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None, count: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:count])

    def log_message(self, *_: Any) -> None:
        pass


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
