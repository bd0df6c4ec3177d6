"""The chat page: static files under a policy that runs nothing but them.

What a model writes is shown as Markdown by markdown-it, with HTML switched off, and cleaned by DOMPurify on its way
into the page; both lie in `static/vendor/` with their licences, `VENDORED` says which. The policy forbids inline
scripts and styles, and every address but this server's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.routing import Route

from aiocb.serve.body import Receive, Scope, Send
from aiocb.serve.errors import ApiError
from aiocb.serve.respond import Endpoint, send_bytes

__all__ = ["VENDORED", "routes"]

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".LICENSE": b"text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
VENDORED = {
    "markdown-it.mjs": (
        "markdown-it 15.0.3, MIT",
        "40ee4f75f35a4c8d24f1d7a902f4c56a26da8bd9eec5bb02ad4a672d6ba05525",
    ),
    "purify.mjs": (
        "DOMPurify 3.5.0, Apache-2.0 or MPL-2.0",
        "7d86ceda137fff72b0726a35241e92b6edb5610349d04992b625e48ee9871244",
    ),
}
"""By file: what it is, and its SHA-256. They are the published files without the address of their source map."""


class _File(Endpoint):
    """The page, or a file of it."""

    def __init__(self) -> None:
        # All of it, once: it is small, and a path of a client's never touches the disk.
        self._files: dict[str, tuple[bytes, bytes, str]] = {}
        for path in sorted(_STATIC.rglob("*")):
            if path.is_file():
                body = path.read_bytes()
                tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                self._files[path.relative_to(_STATIC).as_posix()] = body, _TYPES[path.suffix], tag

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; 304 where the browser has it."""
        name = scope["path_params"].get("name", "index.html")
        found = self._files.get(name)
        if found is None:
            raise ApiError(404, f"no file {name[:100]!r} here", code="not_found")
        body, content_type, tag = found
        headers = {**_HEADERS, "etag": tag}
        if dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1") == tag:
            await send_bytes(send, 304, b"", content_type, headers)
        else:
            await send_bytes(send, 200, body, content_type, headers)


def routes() -> list[Route]:
    """The routes of the page: `/` and `/static/...`."""
    file = _File()
    return [Route("/", file, methods=["GET"]), Route("/static/{name:path}", file, methods=["GET"])]
