"""Forks, threads and memory that run out, and two threads on one handle. Every program runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from aiocb.kernels import Library

pytestmark = pytest.mark.slow

PRELUDE = """
import os, resource, threading
import numpy as np
import torch
from aiocb.kernels import KernelError, Library
from aiocb.kernels.formats import FLOAT32, WeightSource
from aiocb.kernels.generic import GenericKernels
from tests.kernels.helpers import native
from tests.kernels.test_kernels import _addresses

library = Library({path!r})
torch.manual_seed(0)
torch.set_num_threads(2)
WEIGHT, A = torch.randn(300, 96), torch.randn(40, 96)
EXPECTED = (A.double() @ WEIGHT.double().T).float()

def model_of(threads=3):
    model = native(library, library.instruction_sets()[0], "float32", num_threads=threads)
    model.set_linear(0, "out", _addresses(WEIGHT), 96, source=WeightSource.of("float32"), weight_format=FLOAT32)
    return model

def multiply(model):
    out = torch.empty(40, 300)
    model.check(library.calls.aiocb_linear(model.handle, 0, 1, A.data_ptr(), 384, 40, out.data_ptr(), 300))
    assert (out - EXPECTED).abs().max() < 1e-3
    return out

def kernels_of(**options):
    kernels = GenericKernels(library, num_threads=3, **options)
    kernels.pack(WEIGHT.data_ptr(), 384, 300, 96, FLOAT32, None)
    return kernels

def multiply_generic(kernels):
    out = torch.empty(40, 300)
    kernels.check(kernels.call_linear(kernels.handle, 0, A.data_ptr(), 384, 40, out.data_ptr()))
    assert (out - EXPECTED).abs().max() < 1e-3
    return out

def in_child(work):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0

def num_tasks():
    return len(os.listdir("/proc/self/task"))

def limit(name, more):
    field = {{"DATA": "VmData", "AS": "VmSize"}}[name]
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) << 10
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (used + more, resource.RLIM_INFINITY))

def refused(call):
    try:
        call()
    except KernelError as error:
        return str(error)
    raise AssertionError("not refused")
"""


def run(library: Library, program: str) -> str:
    code = PRELUDE.format(path=str(library.path)) + textwrap.dedent(program) + "\nprint('done')\n"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("done\n")
    return done.stdout


def test_a_forked_child_goes_on_with_threads_of_its_own(library: Library) -> None:
    """And so does its own child, and the parent."""
    run(library, """
        model, idle = model_of(), model_of()
        first = multiply(model)

        def child():
            before = num_tasks()
            assert torch.equal(multiply(model), first)
            assert num_tasks() == before + 2
            in_child(grandchild)
            model.close()
            assert num_tasks() == before
            idle.close()  # its threads were never here
            fresh = model_of()
            multiply(fresh)
            fresh.close()

        def grandchild():
            assert torch.equal(multiply(model), first)
            multiply(idle)

        in_child(child)
        in_child(model.close)
        assert torch.equal(multiply(model), first)
        model.close()
    """)  # fmt: skip


@pytest.mark.parametrize("shares", [False, True])
def test_single_operators_in_a_forked_child(library: Library, shares: bool) -> None:
    """In the thread that forked, whose OpenMP threads are gone, and in another one."""
    run(library, f"""
        kernels = kernels_of(shares_threads={shares})
        assert kernels.threads == ("torch's" if {shares} else "own")
        first = multiply_generic(kernels)
        torch.randn(2000, 2000).sum()  # torch's own team, too

        def child():
            assert torch.equal(multiply_generic(kernels), first)
            results = []
            for _ in range(2):
                thread = threading.Thread(target=lambda: results.append(multiply_generic(kernels)))
                thread.start()
                thread.join()
            assert all(torch.equal(one, first) for one in results) and len(results) == 2
            kernels.close()

        in_child(child)
        assert torch.equal(multiply_generic(kernels), first)
        kernels.close()
    """)  # fmt: skip


def test_a_fork_in_the_middle_of_a_call_is_said(library: Library) -> None:
    """Another thread's call goes on in the parent; in the child it never ends, so nothing may touch what it left."""
    run(library, """
        kernels = kernels_of()
        thread = threading.Thread(target=kernels.bandwidth, args=(1 << 29,))
        thread.start()
        while kernels.call_linear(kernels.handle, 0, A.data_ptr(), 384, 0, None) == 0:
            pass
        assert "another thread is in a call" in refused(kernels.clear)
        assert "another thread is in a call" in refused(kernels.close)

        def child():
            assert "forked" in refused(kernels.clear)
            assert "forked" in refused(lambda: multiply_generic(kernels))
            kernels.close()

        in_child(child)
        thread.join()
        multiply_generic(kernels)
        kernels.close()
    """)  # fmt: skip


@pytest.mark.parametrize("make", ["model_of(64)", "GenericKernels(library, num_threads=64)"])
def test_threads_that_cannot_start(library: Library, make: str) -> None:
    """The ones that were started are gone, too."""
    out = run(library, f"""
        multiply(model_of(1))
        before = num_tasks()
        limit("AS", 100 << 20)
        print(refused(lambda: {make}))
        assert num_tasks() == before
    """)  # fmt: skip
    assert "of 64 cannot be started: Resource temporarily unavailable" in out


def test_packing_until_no_memory_is_left(library: Library) -> None:
    """Each pack is whole or refused; what was packed computes on, and there is room again after a clear."""
    run(library, """
        kernels = kernels_of()
        large, bias = torch.zeros(4096, 512), torch.ones(4096)
        limit("DATA", 150 << 20)
        packed, messages = 0, set()
        for _ in range(60):
            for weight in (large, large[:9, :16].contiguous()):
                columns, depth = weight.shape
                try:
                    kernels.pack(weight.data_ptr(), depth * 4, columns, depth, FLOAT32, bias.data_ptr())
                    packed += 1
                except KernelError as error:
                    messages.add(str(error).split(" for ")[0])
        assert 10 < packed < 120 and messages == {"no memory"}
        multiply_generic(kernels)
        kernels.clear()
        for _ in range(8):
            kernels.pack(large.data_ptr(), 2048, 4096, 512, FLOAT32, bias.data_ptr())
        kernels.close()
    """)  # fmt: skip


def test_a_model_goes_on_after_steps_that_found_no_memory(library: Library) -> None:
    run(library, """
        from tests.kernels.helpers import MiniScheduler, Request, Rows, step_arguments
        from tests.kernels.test_families import make, runner_of

        def tokens():
            return MiniScheduler(runner).run([Request(0, [5, 6, 7, 8], 6)])

        runner = runner_of(make("qwen2_moe"), library=library, num_blocks=2002)
        expected, keep = tokens(), []
        huge = step_arguments([Rows(range(1, 2001), 0, 32000)], keep)
        limit("DATA", 24 << 20)
        for _ in range(3):
            assert "no memory for" in refused(lambda: runner.native.step(huge))
            runner.release()
            assert tokens() == expected
        runner.close()
    """)  # fmt: skip
