"""Test tools for programs that use aiocb, and for aiocb itself: no weights, no GPU, no sleeping.

    from aiocb.testing import assert_quiescent, fake_engine

    async def test_chat() -> None:
        async with fake_engine(reply="Hello!") as engine:
            completion = await engine.generate("Hi")
            assert completion.text == "Hello!"
            await assert_quiescent(engine)

- `fake_engine` is a real `Engine` (same thread, same scheduler, same streams) over a `FakeRunner`, which stands in for
  the model: a scripted reply, or a deterministic one, and faults when asked for.
- `Gate` lets a test decide when each step runs, so that "cancel in the middle of the prompt" is a line and not a race.
- `assert_quiescent` proves that nothing is left: no request, no block of the cache, no task, after closing no thread.
- `KVOracle` checks the cache's book-keeping of every step; `aiocb.testing.simulator` runs whole random histories on it.
"""

from aiocb.testing.fake import FakeRunner, byte_tokenizer, fake_engine
from aiocb.testing.gate import Gate
from aiocb.testing.oracle import KVOracle
from aiocb.testing.quiescent import assert_quiescent, settle, submitted
from aiocb.testing.records import KVMismatch, simple_layout

__all__ = [
    "FakeRunner",
    "Gate",
    "KVMismatch",
    "KVOracle",
    "assert_quiescent",
    "byte_tokenizer",
    "fake_engine",
    "settle",
    "simple_layout",
    "submitted",
]
