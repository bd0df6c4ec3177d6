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
