"""Engines without a model that say which process answers, and do what the prompt tells them. Imported by replicas."""

from __future__ import annotations

import os
import re
import time

import aiocb
from aiocb.testing import fake_engine


def make_engine() -> aiocb.Engine:
    config = aiocb.EngineConfig(hang_timeout=1.0)
    return fake_engine(_reply, config=config, step_time=0.004, num_blocks=8192)


def _reply(prompt: str) -> str:
    """`pid=1234 tick tick ...`, as many as the prompt's `ticks=N` says; the prompt may also kill or hang the engine."""
    if "die now" in prompt:
        raise RuntimeError("the prompt has killed the engine")
    if "hang now" in prompt:
        time.sleep(3600)
    ticks = re.search(r"ticks=(\d+)", prompt)
    return f"pid={os.getpid()} " + "tick " * (int(ticks[1]) if ticks else 4)
