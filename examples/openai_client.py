"""The `openai` client against `aiocb serve`: streaming, a tool, structured output.

aiocb serve smollm2
pip install openai && python examples/openai_client.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Colours(BaseModel):
    warm: bool


async def main(url: str) -> tuple[str, str, Colours | None]:
    messages: Any = [{"role": "user", "content": "Is red a warm colour?"}]
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        model = (await client.models.list()).data[0].id

        text = ""
        async with client.chat.completions.stream(model=model, messages=messages, max_tokens=40) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    text += event.delta

        forced = await client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
        )
        calls = forced.choices[0].message.tool_calls or []
        call: Any = calls[0].function

        parsed = await client.chat.completions.parse(
            model=model, messages=messages, response_format=Colours, max_tokens=40
        )
        return text, f"{call.name}({call.arguments})", parsed.choices[0].message.parsed


if __name__ == "__main__":
    print(*asyncio.run(main(sys.argv[1])), sep="\n")
