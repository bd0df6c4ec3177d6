"""The chat page through the application: headers, files, and what lies in it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import aiocb.serve.page
from aiocb.serve.page import VENDORED

from .helpers import serving

pytestmark = pytest.mark.asyncio
STATIC = Path(aiocb.serve.page.__file__).parent / "static"


async def test_every_file_is_there_and_guarded() -> None:
    async with serving(api_key=("k",), waits=False) as served:
        page = await served.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        wanted = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
        assert len(wanted) >= 3
        for script in STATIC.rglob("*.js"):
            inner = re.findall(r'from "\./([^"]+)"', script.read_text())
            wanted += [f"static/{name}" for name in inner]
        for path in ("", *wanted):
            response = await served.client.get(f"/{path}")
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            again = await served.client.get(f"/{path}", headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("static/", "static/none.js", "static/../__init__.py", "static/%2e%2e/__init__.py"):
            assert (await served.client.get(f"/{path}")).status_code in (401, 404)


async def test_it_can_be_switched_off() -> None:
    async with serving(enable_page=False) as served:
        assert (await served.client.get("/")).status_code == 404


async def test_it_asks_nobody_else_and_runs_nothing_inline() -> None:
    for path in STATIC.glob("*.*"):
        text = path.read_text()
        addresses = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, path
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=", page)


async def test_what_is_vendored_is_what_it_says() -> None:
    for name, (title, digest) in VENDORED.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest, title
    licences = {path.name for path in (STATIC / "vendor").glob("*.LICENSE")}
    assert licences == {f"{name.removesuffix('.mjs')}.LICENSE" for name in VENDORED}
