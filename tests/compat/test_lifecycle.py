"""Start, stop, start again, destroy, pause, and the worker's death; over a fake runner."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiocb.compat.transformers import RequestStatus
from aiocb.compat.transformers.manager import ContinuousBatchingManager
from aiocb.compat.transformers.session import ThreadSession, Ticket
from aiocb.config import EngineConfig
from aiocb.engine.prepare import Prepared
from aiocb.engine.source import RunnerSource
from aiocb.errors import EngineDead
from aiocb.sampling_params import ModelDefaults
from tests.compat.helpers import (
    MAX_LEN,
    VOCAB,
    WAIT,
    FakeRunner,
    Setup,
    assert_nothing_left,
    expected,
    finish,
    running,
)


def test_start_stop_start() -> None:
    setup = Setup()
    manager = setup.manager
    assert not manager.is_running()
    manager.start()
    assert manager.is_running()
    manager.add_request([1, 2], "a", max_new_tokens=5)
    manager.stop()
    assert not manager.is_running()
    assert setup.runner.is_closed
    # Results that were not read before the stop are not lost.
    result = manager.get_result()
    assert result is not None and result.generated_tokens == expected([1, 2], 5)
    assert manager.get_result() is None

    manager.start()
    assert len(setup.runners) == 2
    manager.add_request([3], "b", max_new_tokens=3)
    assert [one.generated_tokens for one in manager] == [expected([3], 3)]
    finish(setup)


def test_stop_finishes_queued_and_active_work() -> None:
    setup = Setup(gated=True, max_requests_per_batch=2)
    with running(setup) as manager:
        ids = manager.add_requests([[n, n + 1] for n in range(6)], max_new_tokens=8)
        setup.runner.wait_for_step(1)
        setup.runner.allow()
        manager.stop()
        results = {one.request_id: one for one in manager}
        results.update({one.request_id: one for one in iter(manager.get_result, None)})
        assert [results[name].generated_tokens for name in ids] == [expected([n, n + 1], 8) for n in range(6)]


def test_submissions_after_stop_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(gated=True)
    with running(setup) as manager:
        manager.add_request([1], "a", max_new_tokens=4)
        setup.runner.wait_for_step(1)
        manager.stop(block=False)
        assert manager.is_running()
        assert manager.add_request([2], "b") is None
        assert "stopping" in caplog.text
        setup.runner.allow()
        manager.join()
        assert not manager.is_running()
        caplog.clear()
        assert manager.add_request([2], "b") is None
        assert manager.add_requests([[2], [3]]) == []
        assert caplog.text.count("has been stopped") == 2
        assert [one.request_id for one in iter(manager.get_result, None)] == ["a"]


def test_hard_stop_fails_queued_and_active_requests() -> None:
    setup = Setup(gated=True, max_requests_per_batch=1)
    with running(setup) as manager:
        manager.add_request([1], "active", max_new_tokens=50)
        manager.add_request([2], "queued", max_new_tokens=50)
        setup.runner.wait_for_step(1)
        setup.runner.allow(3)
        setup.runner.wait_for_step(4)
        manager.stop(hard_stop=True, block=False)
        setup.runner.allow()
        manager.join()
        results = {one.request_id: one for one in iter(manager.get_result, None)}
        for name in ("active", "queued"):
            assert results[name].status is RequestStatus.FAILED
            assert isinstance(results[name].exception, RuntimeError)
            assert "hard_stop" in str(results[name].error)
        assert results["active"].generated_tokens == expected([1], 4)
        assert results["queued"].generated_tokens == []
        manager.start()
        manager.add_request([1], "again", max_new_tokens=3)
        setup.runner.allow()
        assert [one.generated_tokens for one in manager] == [expected([1], 3)]


def test_hard_stop_after_a_stop_that_takes_too_long() -> None:
    setup = Setup(gated=True)
    with running(setup) as manager:
        manager.add_request([1], "a", max_new_tokens=50)
        setup.runner.wait_for_step(1)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(manager.stop)
            while manager.add_request([2], "late") is not None:  # until the stop has been seen
                pass
            manager.stop(hard_stop=True, block=False)
            setup.runner.allow()
            stopping.result(WAIT)
        results = [one for one in iter(manager.get_result, None) if one.request_id == "a"]
        assert [one.status for one in results] == [RequestStatus.FAILED]


def test_a_stop_that_runs_out_of_time_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(gated=True)
    with running(setup) as manager:
        manager.add_request([1], "a", max_new_tokens=6)
        setup.runner.wait_for_step(1)
        manager.stop(timeout=0.01)
        assert "still finishing" in caplog.text
        assert manager.is_running()
        setup.runner.allow()
        result = manager.get_result("a", timeout=WAIT)
        assert result is not None and result.generated_tokens == expected([1], 6)
        manager.start()  # waits for the earlier session
        assert len(setup.runners) == 2


def test_requests_before_the_start_wait_for_it() -> None:
    setup = Setup()
    manager = setup.manager
    assert manager.add_request([1, 2], "a", max_new_tokens=3) == "a"
    assert manager.add_request([1, 200], "bad", max_new_tokens=3) == "bad"
    assert manager.add_request([5], "gone", max_new_tokens=3) == "gone"
    assert manager.get_result() is None
    assert list(manager) == []
    manager.cancel_request("gone")
    with running(setup):
        results = {one.request_id: one for one in manager}
        assert results["a"].generated_tokens == expected([1, 2], 3)
        assert "vocabulary" in str(results["bad"].error)
        assert "cancelled" in str(results["gone"].error)


def test_a_request_that_is_cancelled_while_the_start_submits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    prepare = ThreadSession.prepare

    def cancel_first(session: ThreadSession, ticket: Ticket) -> Prepared:
        setup.manager.cancel_request("gone")
        return prepare(session, ticket)

    monkeypatch.setattr(ThreadSession, "prepare", cancel_first)
    for name in ("gone", "other"):
        setup.manager.add_request([1], name, max_new_tokens=3)
    with running(setup):
        results = {one.request_id: one for one in setup.manager}
    assert "cancelled" in str(results["gone"].error)
    assert results["other"].generated_tokens == expected([1], 3)
    assert setup.runner.prompts == [(1,)]


def test_destroy_ends_requests_that_never_ran() -> None:
    setup = Setup()
    setup.manager.add_request([1], "a")
    finish(setup)
    result = setup.manager.get_result("a")
    assert result is not None and "destroyed before" in str(result.error)
    assert setup.manager.get_result("a") is None


def test_destroy_is_final_and_idempotent(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    with running(setup) as manager:
        manager.add_request([1], "a", max_new_tokens=3)
        manager.destroy()
        manager.destroy()
        assert not manager.is_running()
        assert [one.request_id for one in iter(manager.get_result, None)] == ["a"]
        with pytest.raises(RuntimeError, match="destroyed"):
            manager.start()
        with pytest.raises(RuntimeError, match="destroyed"):
            manager.warmup()
        assert manager.add_request([1]) is None
        assert "destroyed" in caplog.text


def test_start_and_stop_twice_only_warn(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    setup.manager.stop()
    assert "not been started" in caplog.text
    with running(setup) as manager:
        manager.start()
        assert "already been started" in caplog.text
        assert len(setup.runners) == 1
        manager.stop()
        manager.stop()


def test_as_a_context_manager() -> None:
    setup = Setup(gated=True)
    with setup.manager as manager:
        manager.add_request([1], "a", max_new_tokens=3)
        setup.runner.allow()
    assert not manager.is_running()
    with pytest.raises(KeyError), setup.manager as manager:
        manager.add_request([1], "b", max_new_tokens=150)
        setup.runner.wait_for_step(1)
        setup.runner.allow(3)
        threading.Timer(0, setup.runner.allow).start()
        raise KeyError
    results = {one.request_id: one.status for one in iter(manager.get_result, None)}
    assert results["a"] is RequestStatus.FINISHED
    assert set(results) == {"a", "b"}
    finish(setup)


def test_warmup_builds_and_runs_nothing() -> None:
    setup = Setup()
    setup.manager.warmup()
    assert len(setup.runners) == 1 and setup.manager.warmed_up
    setup.manager.add_request([1], "a", max_new_tokens=2)
    assert not setup.manager.is_running()
    assert setup.runner.num_steps == 0
    with running(setup) as manager:
        assert len(setup.runners) == 1
        assert [one.generated_tokens for one in manager] == [expected([1], 2)]


def test_warmup_and_destroy() -> None:
    setup = Setup()
    setup.manager.warmup()
    finish(setup)


def test_what_is_wrong_is_raised_by_start() -> None:
    setup = Setup()
    setup.build_error = ValueError("no such device")
    setup.manager.add_request([1], "a", max_new_tokens=2)
    with pytest.raises(ValueError, match="no such device"):
        setup.manager.start()
    assert not setup.manager.is_running()
    setup.build_error = None
    with running(setup) as manager:
        assert [one.generated_tokens for one in manager] == [expected([1], 2)]


def test_a_kept_session_is_used_again() -> None:
    setup = Setup()
    manager = setup.manager
    for _ in range(3):
        manager.start()
        manager.add_request([1], max_new_tokens=3)
        assert [one.generated_tokens for one in manager] == [expected([1], 3)]
        manager.stop(keep_for_next_session=True)
        assert not manager.is_running()
        assert manager.add_request([1]) is None
    assert len(setup.runners) == 1 and not setup.runner.is_closed
    finish(setup)


def test_hard_stop_of_a_kept_session() -> None:
    setup = Setup(gated=True)
    manager = setup.manager
    manager.start()
    manager.add_request([1], "a", max_new_tokens=50)
    setup.runner.wait_for_step(1)
    manager.stop(keep_for_next_session=True, hard_stop=True, block=False)
    setup.runner.allow()
    manager.join()
    result = manager.get_result()
    assert result is not None and result.status is RequestStatus.FAILED
    manager.start()
    manager.add_request([1], "b", max_new_tokens=3)
    assert [one.generated_tokens for one in manager] == [expected([1], 3)]
    assert len(setup.runners) == 1
    finish(setup)


class TestDeath:
    def test_a_failed_step_fails_all_requests_once(self, caplog: pytest.LogCaptureFixture) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager:
            manager.add_requests([[1], [2], [3]], max_new_tokens=9)
            setup.runner.wait_for_step(1)
            setup.runner.error = OSError("the device is gone")
            setup.runner.allow()
            results = list(manager)
            assert [one.status for one in results] == [RequestStatus.FAILED] * 3
            assert all("the device is gone" in str(one.error) for one in results)
            assert all(isinstance(one.exception, EngineDead) for one in results)
            manager.join()
            assert not manager.is_running()
            assert manager.add_request([1]) is None
            assert "has died" in caplog.text
            assert manager.get_result() is None
            assert manager.get_result(timeout=60.0) is None
            with pytest.raises(RuntimeError, match="not running"), manager.pause():
                pass
            manager.start()
            setup.runner.allow()
            manager.add_request([1], max_new_tokens=2)
            assert [one.generated_tokens for one in manager] == [expected([1], 2)]

    def test_a_waiting_reader_wakes(self) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager, ThreadPoolExecutor(3) as pool:
            manager.add_request([1], "a", max_new_tokens=9)
            setup.runner.wait_for_step(1)
            waiting = [pool.submit(manager.get_result, name) for name in ("a", None)]
            iterating = pool.submit(list, manager.request_id_iter("a"))
            setup.runner.error = OSError("gone")
            setup.runner.allow()
            found = [one.result(WAIT) for one in waiting]
            found += iterating.result(WAIT)
            assert len([one for one in found if one is not None]) == 1

    def test_stop_after_death(self) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager:
            manager.add_request([1], "a", max_new_tokens=9)
            setup.runner.error = OSError("gone")
            setup.runner.allow()
            manager.join()
            manager.stop()
            assert not manager.is_running()


class TestPause:
    def test_no_step_runs_inside(self) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager:
            manager.add_request([1], "a", max_new_tokens=20)
            setup.runner.wait_for_step(1)
            threading.Timer(0, setup.runner.allow).start()
            with manager.pause():
                before = setup.runner.num_steps
                manager.add_request([2], "b", max_new_tokens=2)
                assert manager.get_result("b", timeout=0.05) is None
                assert setup.runner.num_steps == before
            results = {one.request_id: one.generated_tokens for one in manager}
            assert results == {"a": expected([1], 20), "b": expected([2], 2)}

    def test_the_last_thread_to_leave_resumes(self) -> None:
        setup = Setup()
        with running(setup) as manager, ThreadPoolExecutor(1) as pool:
            entered, leave = threading.Event(), threading.Event()

            def other() -> None:
                with manager.pause():
                    entered.set()
                    assert leave.wait(WAIT)

            with manager.pause():
                future = pool.submit(other)
                assert entered.wait(WAIT)
                with manager.pause():
                    pass
            manager.add_request([1], "a", max_new_tokens=2)
            assert manager.get_result("a", timeout=0.05) is None
            leave.set()
            future.result(WAIT)
            assert manager.get_result("a", timeout=WAIT) is not None

    def test_stopping_from_inside_is_refused(self) -> None:
        setup = Setup()
        with running(setup) as manager, manager.pause():
            for call in (manager.stop, manager.destroy):
                with pytest.raises(RuntimeError, match="leave the pause"):
                    call()

    @pytest.mark.parametrize("keeps", [False, True])
    def test_a_stop_from_another_thread_waits_for_its_end(self, keeps: bool) -> None:
        """Also where there is no request: the model is its holder's until then, and nothing started anew runs."""
        setup = Setup()
        with running(setup) as manager, ThreadPoolExecutor(1) as pool:

            def restart() -> None:
                manager.stop(keep_for_next_session=keeps)
                manager.start()
                manager.add_request([1], "a", max_new_tokens=2)

            with manager.pause():
                future = pool.submit(restart)
                with pytest.raises(TimeoutError):
                    future.result(0.1)
                assert manager.is_running()
            future.result(WAIT)
            assert manager.get_result("a", timeout=WAIT) is not None

    def test_a_hard_stop_from_another_thread_ends_it(self) -> None:
        setup = Setup()
        with running(setup) as manager, ThreadPoolExecutor(1) as pool:
            manager.add_request([1], "a", max_new_tokens=2)
            with manager.pause():
                manager.add_request([2], "b", max_new_tokens=2)
                pool.submit(manager.stop, hard_stop=True).result(WAIT)
            assert not manager.is_running()
            statuses = {one.request_id: one.status for one in iter(manager.get_result, None)}
            assert statuses["b"] is RequestStatus.FAILED

    def test_needs_a_running_manager(self) -> None:
        setup = Setup()
        with pytest.raises(RuntimeError, match="not running"), setup.manager.pause():
            pass
        assert_nothing_left(setup.manager)


def test_what_was_chosen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(max_batch_tokens=64)
    assert setup.manager.describe() == []
    with caplog.at_level(logging.INFO, "aiocb"), running(setup) as manager:
        choices = manager.describe()
        assert ("max_batch_tokens", "64", "as configured") in choices
        said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
        assert said == [f"{one.name} = {one.value} ({one.reason})" for one in choices]
        manager.stop()
        assert manager.describe() == choices


def test_destroy_while_it_is_warmed_up() -> None:
    setup = Setup()
    began, may_end = threading.Event(), threading.Event()
    make = setup._make

    def slow(config: EngineConfig) -> FakeRunner:
        began.set()
        assert may_end.wait(WAIT)
        return make(config)

    manager = ContinuousBatchingManager(None, source=RunnerSource(slow, ModelDefaults(VOCAB, MAX_LEN)))
    with ThreadPoolExecutor(1) as pool:
        warming = pool.submit(manager.warmup)
        assert began.wait(WAIT)
        manager.destroy()
        may_end.set()
        with pytest.raises(RuntimeError, match="destroyed"):
            warming.result(WAIT)
    assert manager._life.last is not None
    manager._life.last.worker.join(WAIT)
    assert_nothing_left(manager)
    assert setup.runner.is_closed


def test_repr() -> None:
    setup = Setup()
    assert "new" in repr(setup.manager)
    with running(setup) as manager:
        assert "running" in repr(manager)
