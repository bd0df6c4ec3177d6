"""What the commands share."""

from __future__ import annotations

import asyncio
import signal

import pytest

from aiocb.cli import terminal
from aiocb.cli.terminal import ModelOptions, open_engine

from .fake_aiocb import build_engine


async def answer(delay: int) -> str:
    """Ctrl-C comes so many callbacks after this line."""
    loop = asyncio.get_running_loop()

    def tick(left: int) -> None:
        if left:
            loop.call_soon(tick, left - 1)
        else:
            signal.raise_signal(signal.SIGINT)

    loop.call_soon(tick, delay)
    return "an answer"


@pytest.mark.parametrize("delay", range(4))
def test_ctrl_c_as_an_answer_ends_leaves_the_loop_usable(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "build_engine", build_engine)
    with open_engine(ModelOptions("fake")) as (run, engine):
        with pytest.raises(KeyboardInterrupt):
            run(answer(delay))
            for _ in range(delay):
                run(asyncio.sleep(0))  # where it comes later than the end, the next one gets it
        assert run(engine.generate("hi", max_new_tokens=1)).token_ids
