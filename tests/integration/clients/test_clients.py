"""Frameworks that speak to OpenAI's interface, pointed at a server of this process."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.docs.helpers import load_example
from tests.serve.helpers import serving
from tests.serve.test_structure import model


def test_langchain() -> None:
    async def main() -> None:
        async with serving(model()) as served:
            text, colour = await load_example("langchain_chat").main(f"http://127.0.0.1:{served.port}/v1")
            assert text
            assert colour.warm in (True, False)

    asyncio.run(main())


def test_pydantic_ai() -> None:
    async def main() -> Any:
        async with serving(model()) as served:
            return await load_example("pydantic_ai_agent").main(f"http://127.0.0.1:{served.port}/v1", "fake")

    assert asyncio.run(main()).warm in (True, False)
