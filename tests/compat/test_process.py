"""What concerns the whole process: cheap imports, Ctrl-C, and an interpreter that ends without `stop`."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from aiocb.compat import transformers as compat
from tests.compat.helpers import generation

FORGOTTEN = """
import sys
import aiocb.compat.transformers
from aiocb.compat.transformers.manager import ContinuousBatchingManager
from aiocb.engine.source import RunnerSource
from aiocb.sampling_params import ModelDefaults
from aiocb.step import CacheGroup, CacheLayout, ImmediateRunner, StepResult
assert "torch" not in sys.modules and "transformers" not in sys.modules

class Runner(ImmediateRunner):
    cache_layout = CacheLayout(4, (CacheGroup(None, (0,), 400, 1),))
    vocab_size, max_model_len, device_type, choices = 10, 1000, "cpu", ()
    def execute(self, plan):
        return StepResult([(1,) if entry.is_sampled else () for entry in plan.entries])
    def release(self):
        pass
    def close(self):
        print("closed")

manager = ContinuousBatchingManager(None, source=RunnerSource(lambda _: Runner(), ModelDefaults(10, 1000)))
manager.start()
for _ in range(3):
    manager.add_request([1], streaming=True)
print(manager.get_result().status.name)
"""


FORKED = """
import asyncio, os, sys, threading
from aiocb.compat.transformers import hosting
from aiocb.compat.transformers.manager import ContinuousBatchingManager
from aiocb.engine.source import RunnerSource
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import FakeRunner

class Model:
    pass

model = Model()
manager = ContinuousBatchingManager(
    None, source=RunnerSource(lambda _: FakeRunner(), ModelDefaults(260, 4096))
)
manager.start()
manager.add_request([1], "a", max_new_tokens=3)
hosting.keep_on_model(model, manager)
STOP
is_locked, may_unlock = threading.Event(), threading.Event()

def hold():  # as a worker may, while somebody forks
    with manager._router.lock:
        is_locked.set()
        may_unlock.wait()

if IS_RUNNING:
    threading.Thread(target=hold).start()
    is_locked.wait()
pid = os.fork()
if pid == 0:
    async def handle():
        manager.register_result_handler("a", print)

    if not IS_RUNNING:
        manager.start()
        manager.add_request([1], "b", max_new_tokens=5)
        print([len(one.generated_tokens) for one in manager])
        manager.destroy()
    else:
        print(manager.is_running(), hosting.kept_manager(model))
        pause = manager.pause()
        for call in (lambda: manager.add_request([1]), lambda: manager.add_requests([[1]]), manager.get_result,
                     lambda: list(manager), lambda: list(manager.request_id_iter("a")), manager.start, manager.warmup,
                     lambda: manager.cancel_request("a"), pause.__enter__, lambda: asyncio.run(handle())):
            try:
                print("no error", call())
            except Exception as error:
                print(type(error).__name__, "fork before" in str(error))
        manager.__exit__(None, None, None)
        manager.stop()
        manager.join()
        manager.destroy()
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
may_unlock.set()
manager.destroy()
"""


def forked(stop: str, *, is_running: bool) -> list[str]:
    code = FORKED.replace("STOP", stop).replace("IS_RUNNING", str(is_running))
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]  # 3.12 warns of threads at a fork
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("stop", ["", "manager.stop(keep_for_next_session=True)"])
def test_a_fork_while_there_is_a_session_gets_typed_errors_at_once(stop: str) -> None:
    lines = forked(stop, is_running=True)
    assert lines == ["False None", *["EngineClosed True"] * 10]


def test_a_fork_after_a_stop_may_start_again() -> None:
    assert forked("manager.stop()", is_running=False) == ["[3, 5]"]


def test_an_interpreter_ends_without_stop() -> None:
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["DECODING", "closed"], "")


def test_ctrl_c_ends_a_batch_at_once(model: Any) -> None:
    calls: list[int] = []
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(token_ids: Any, logits: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.pthread_kill(main, signal.SIGINT)
        return logits

    with pytest.raises(KeyboardInterrupt):
        compat.generate_batch(model, [[1, 2]], generation(max_new_tokens=900), logits_processors=[interrupt])
    assert len(calls) < 800
    assert not [thread for thread in threading.enumerate() if thread.name == "aiocb worker"]
