"""Submitting, reading, streaming, cancelling, handlers; over a fake runner."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aiocb.compat.transformers import GenerationOutput, RequestQueueFull, RequestStatus
from aiocb.compat.transformers.router import Callback, _call_all
from aiocb.errors import InvalidRequest
from tests.compat.helpers import EOS, MAX_LEN, VOCAB, WAIT, Setup, expected, generation, running


class TestAdding:
    def test_ids(self) -> None:
        with running(Setup()) as manager:
            assert manager.add_request([1], "mine", max_new_tokens=1) == "mine"
            first = manager.add_request([1], max_new_tokens=1)
            second = manager.add_request([1], max_new_tokens=1)
            assert first is not None and second is not None and first != second
            assert {one.request_id for one in manager} == {"mine", first, second}

    def test_add_requests_sorts_for_prefix_hits_and_answers_in_order(self) -> None:
        setup = Setup(gated=True, max_requests_per_batch=1)
        prompts = [[1, 2], [9], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [5]]
        with running(setup) as manager:
            ids = manager.add_requests(prompts, max_new_tokens=2)
            setup.runner.allow()
            results = {one.request_id: one for one in manager}
            assert [results[name].prompt_ids for name in ids] == prompts
            assert [results[name].generated_tokens for name in ids] == [expected(one, 2) for one in prompts]
            assert [list(one) for one in setup.runner.prompts] == sorted(prompts, reverse=True)

    def test_without_sharing_the_order_is_kept(self) -> None:
        setup = Setup(max_requests_per_batch=1, allow_block_sharing=False)
        with running(setup) as manager:
            manager.add_requests([[1], [3], [2]], max_new_tokens=1)
            assert len(list(manager)) == 3
            assert setup.runner.prompts == [(1,), (3,), (2,)]

    def test_tensors_and_encodings(self) -> None:
        import torch

        with running(Setup()) as manager:
            ids = manager.add_requests([torch.tensor([1, 2]), torch.tensor([[3, 4]])], max_new_tokens=2)
            ids.append(str(manager.add_request({"input_ids": [0, 5], "attention_mask": [0, 1]}, max_new_tokens=2)))
            results = {one.request_id: one for one in manager}
            assert [results[name].prompt_ids for name in ids] == [[1, 2], [3, 4], [5]]

    @pytest.mark.parametrize(
        ("prompt", "options", "words"),
        [
            ([], {}, "empty"),
            ([VOCAB], {}, "vocabulary"),
            ("text", {}, "no tokenizer"),
            ([1] * MAX_LEN, {}, "no room"),
            ([1], {"max_new_tokens": MAX_LEN}, "at most"),
            ([1], {"max_new_tokens": -1}, "max_new_tokens"),
            ([1], {"temperature": -1.0}, "temperature"),
            ([1], {"temperature": float("nan")}, "temperature"),
            ([1], {"top_p": 1.5}, "top_p"),
            ([1], {"n": 0}, "n must be"),
            ([1], {"eos_token_id": VOCAB}, "eos_token_id"),
        ],
    )
    def test_what_cannot_run_fails_alone(self, prompt: Any, options: dict[str, Any], words: str) -> None:
        with running(Setup()) as manager:
            manager.add_request(prompt, "bad", **options)
            manager.add_request([1], "good", max_new_tokens=2)
            results = {one.request_id: one for one in manager}
            assert results["bad"].status is RequestStatus.FAILED
            assert words in str(results["bad"].error)
            assert isinstance(results["bad"].exception, InvalidRequest)
            assert results["good"].status is RequestStatus.FINISHED

    def test_unknown_parameters_are_refused_by_name(self, caplog: pytest.LogCaptureFixture) -> None:
        with running(Setup()) as manager:
            with pytest.raises(InvalidRequest, match="temprature"):
                manager.add_request([1], temprature=0.5)
            with pytest.raises(InvalidRequest, match="temprature"):
                manager.add_requests([[1]], temprature=0.5)
            assert manager.add_request([1], max_new_tokens=1, filter_value=-1.0) is not None
            assert "filter_value" in caplog.text

    def test_what_has_no_place_here_is_refused(self) -> None:
        with running(Setup()) as manager:
            with pytest.raises(InvalidRequest, match="prompt_logprobs"):
                manager.add_request([1], prompt_logprobs=1)
            wrong: Any = ["a", "list"]
            with pytest.raises(InvalidRequest, match="request_id must be a text"):
                manager.add_request([1], wrong)

    def test_a_prompt_is_taken_when_it_is_given(self) -> None:
        setup = Setup()
        prompt = [1, 2]
        setup.manager.add_request(prompt, "a", max_new_tokens=2)
        prompt.clear()
        with running(setup) as manager:
            assert [one.generated_tokens for one in manager] == [expected([1, 2], 2)]

    def test_zero_new_tokens(self) -> None:
        with running(Setup()) as manager:
            manager.add_request([1, 2], "a", max_new_tokens=0)
            result = manager.get_result("a")
            assert result is not None and result.status is RequestStatus.FINISHED and result.generated_tokens == []

    def test_a_full_queue_makes_the_producer_wait(self) -> None:
        setup = Setup(gated=True, max_queue_size=2, max_requests_per_batch=1)
        with running(setup) as manager, ThreadPoolExecutor(1) as pool:
            manager.add_request([1], "a", max_new_tokens=2)
            setup.runner.wait_for_step(1)
            adding = pool.submit(manager.add_requests, [[n] for n in range(2, 12)], max_new_tokens=2)
            setup.runner.allow()
            assert len(adding.result(WAIT)) == 10
            assert len(list(manager)) == 11

    def test_a_queue_that_stays_full_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiocb.compat.transformers.manager._QUEUE_TIMEOUT", 0.01)
        setup = Setup(gated=True, max_queue_size=1, max_requests_per_batch=1)
        with running(setup) as manager:
            manager.add_request([1], "a", max_new_tokens=2)
            setup.runner.wait_for_step(1)
            manager.add_request([2], "b", max_new_tokens=2)
            with pytest.raises(queue.Full):
                manager.add_request([3], "c", max_new_tokens=2)
            with pytest.raises(RequestQueueFull):
                manager.add_request([3], "n", max_new_tokens=2, n=2)
            ids = manager.add_requests([[4], [5]], max_new_tokens=2)
            for name in ids:
                result = manager.get_result(name)
                assert result is not None and "full" in str(result.error)
            setup.runner.allow()
            assert {one.request_id for one in manager} == {"a", "b"}

    def test_a_queue_before_the_start_is_bounded_too(self) -> None:
        setup = Setup(max_queue_size=1)
        setup.manager.add_request([1], "a", max_new_tokens=1)
        with pytest.raises(queue.Full):
            setup.manager.add_request([1], "b", max_new_tokens=1)
        with running(setup) as manager:
            assert [one.request_id for one in manager] == ["a"]

    def test_a_waiting_producer_wakes_when_the_worker_dies(self) -> None:
        setup = Setup(gated=True, max_queue_size=1, max_requests_per_batch=1)
        with running(setup) as manager, ThreadPoolExecutor(1) as pool:
            manager.add_request([1], "a", max_new_tokens=2)
            setup.runner.wait_for_step(1)
            manager.add_request([2], "b", max_new_tokens=2)
            adding = pool.submit(manager.add_request, [3], "c", max_new_tokens=2)
            setup.runner.error = OSError("gone")
            setup.runner.allow()
            assert adding.result(WAIT) in (None, "c")


class TestStopping:
    def end_after(self, setup: Setup, count: int, token: int) -> None:
        setup.runner.force = lambda tokens: token if len(tokens) == count else 11

    @pytest.mark.parametrize("eos", [5, [5, 6]])
    def test_eos_of_the_request(self, eos: int | list[int]) -> None:
        setup = Setup()
        with running(setup) as manager:
            self.end_after(setup, 4, 5)
            manager.add_request([1], "a", max_new_tokens=20, eos_token_id=eos)
            result = manager.get_result("a")
            # The end-of-sequence token is part of the output.
            assert result is not None and result.generated_tokens == [11, 11, 11, 5]

    @pytest.mark.parametrize("eos", [-1, [-1]])
    def test_minus_one_is_no_eos(self, eos: int | list[int]) -> None:
        setup = Setup()
        with running(setup) as manager:
            self.end_after(setup, 4, EOS)
            manager.add_request([1], "a", max_new_tokens=6, eos_token_id=eos)
            manager.add_request([1], "b", max_new_tokens=6)
            results = {one.request_id: one.generated_tokens for one in manager}
            assert results == {"a": [11, 11, 11, EOS, 11, 11], "b": [11, 11, 11, EOS]}

    def test_a_config_without_eos_ends_by_length(self, caplog: pytest.LogCaptureFixture) -> None:
        setup = Setup(generation=generation(max_new_tokens=6))
        assert "no eos_token_id" in caplog.text
        with running(setup) as manager:
            self.end_after(setup, 4, EOS)
            manager.add_request([1], "a")
            result = manager.get_result("a")
            assert result is not None and len(result.generated_tokens) == 6

    def test_a_config_that_wants_more_than_fits_gets_what_fits(self) -> None:
        setup = Setup(generation=generation(max_new_tokens=10_000, eos_token_id=EOS))
        with running(setup) as manager:
            manager.add_request([1] * 190, "a")
            result = manager.get_result("a")
            assert result is not None and len(result.generated_tokens) == MAX_LEN - 190

    def test_no_bound_at_all_is_what_fits(self) -> None:
        with running(Setup()) as manager:
            manager.add_request([1] * 190, "a", eos_token_id=-1)
            result = manager.get_result("a")
            assert result is not None and len(result.generated_tokens) == MAX_LEN - 190


class TestReading:
    def test_in_order_of_arrival_and_by_request(self) -> None:
        setup = Setup()
        with running(setup) as manager:
            for name, count in (("a", 6), ("b", 2), ("c", 4)):
                manager.add_request([1], name, max_new_tokens=count)
            last = manager.get_result("a")
            assert last is not None and last.request_id == "a"
            names = [one.request_id for one in manager]
            assert sorted(names) == ["b", "c"]
            assert list(manager) == []

    def test_a_filter_waits_for_its_request_and_moves_nothing(self) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager:
            manager.add_request([1], "fast", max_new_tokens=1)
            manager.add_request([1], "slow", max_new_tokens=3)
            setup.runner.allow()
            slow = manager.get_result("slow")
            assert slow is not None and slow.request_id == "slow"
            fast = manager.get_result()
            assert fast is not None and fast.request_id == "fast"

    def test_nothing_to_wait_for(self) -> None:
        with running(Setup()) as manager:
            assert manager.get_result("unknown") is None
            assert manager.get_result("unknown", timeout=0.01) is None
            assert manager.get_result(timeout=0.01) is None
            assert list(manager.request_id_iter("unknown")) == []

    def test_a_reader_may_be_there_first(self) -> None:
        with running(Setup()) as manager, ThreadPoolExecutor(2) as pool:
            by_id = pool.submit(manager.get_result, "a", WAIT)
            manager.add_request([1], "a", max_new_tokens=2)
            result = by_id.result(WAIT)
            assert result is not None and result.request_id == "a"
            any_one = pool.submit(manager.get_result)
            manager.add_request([1], "b", max_new_tokens=2)
            result = any_one.result(WAIT)
            assert result is not None and result.request_id == "b"
            blocked = pool.submit(manager.get_result)
            manager.stop()
            assert blocked.result(WAIT) is None

    def test_times(self) -> None:
        with running(Setup()) as manager:
            manager.add_request([1], "a", max_new_tokens=4, record_timestamps=True)
            manager.add_request([1], "b", max_new_tokens=4)
            results = {one.request_id: one for one in manager}
            a, b = results["a"], results["b"]
            assert a.timestamps is not None and len(a.timestamps) == 4 and list(a.timestamps) == sorted(a.timestamps)
            assert b.timestamps is None
            assert a.created_time <= a.lifespan[0] <= a.timestamps[0] <= a.timestamps[-1] <= a.lifespan[1]

    def test_many_readers_of_many_requests(self) -> None:
        with running(Setup()) as manager, ThreadPoolExecutor(8) as pool:
            names = [f"r{n}" for n in range(40)]
            for n, name in enumerate(names):
                manager.add_request([n], name, max_new_tokens=10, streaming=True)
            read = [pool.submit(lambda name: list(manager.request_id_iter(name)), name) for name in names]
            for n, future in enumerate(read):
                chunks = future.result(WAIT)
                assert [len(one.generated_tokens) for one in chunks] == list(range(1, 11))
                assert chunks[-1].generated_tokens == expected([n], 10)


class TestStreaming:
    def test_outputs_are_cumulative_one_per_token(self) -> None:
        with running(Setup(return_logprobs=True)) as manager:
            manager.add_request([1], "a", max_new_tokens=5, streaming=True, record_timestamps=True)
            chunks = list(manager.request_id_iter("a"))
            tokens = expected([1], 5)
            assert [one.generated_tokens for one in chunks] == [tokens[: n + 1] for n in range(5)]
            assert [list(one.logprobs) for one in chunks] == [[-t / 10 for t in tokens[: n + 1]] for n in range(5)]
            assert [len(one.timestamps or ()) for one in chunks] == [1, 2, 3, 4, 5]
            assert [one.generated_tokens[-1:] for one in chunks] == [[token] for token in tokens]
            assert [one.status for one in chunks] == [RequestStatus.DECODING] * 4 + [RequestStatus.FINISHED]
            assert all(one.lifespan[1] == -1 for one in chunks[:-1])
            last = chunks[-1].generated_tokens
            assert isinstance(last, list)
            last.clear()  # it is the reader's own
            assert chunks[-2].generated_tokens == tokens[:4]

    def test_two_streams_read_in_turns_lose_nothing(self) -> None:
        with running(Setup()) as manager:
            for n in (1, 2):
                manager.add_request([n], f"s{n}", max_new_tokens=20, streaming=True)
            iterators = [manager.request_id_iter(f"s{n}") for n in (1, 2)]
            for pair in zip(*iterators):
                for n, chunk in enumerate(pair, 1):
                    assert chunk.generated_tokens == expected([n], len(chunk.generated_tokens))

    def test_requests_that_share_a_label_are_read_one_after_the_other(self) -> None:
        with running(Setup()) as manager:
            manager.add_request([1], "same", max_new_tokens=4, streaming=True)
            manager.add_request([2], "same", max_new_tokens=3, streaming=True)
            first = list(manager.request_id_iter("same"))
            second = list(manager.request_id_iter("same"))
            assert [one.generated_tokens for one in (first[-1], second[-1])] == [expected([1], 4), expected([2], 3)]
            assert (len(first), len(second)) == (4, 3)


class TestCancelling:
    def test_ends_with_an_output(self) -> None:
        setup = Setup(gated=True, max_requests_per_batch=1)
        with running(setup) as manager:
            manager.add_request([1], "active", max_new_tokens=100)
            manager.add_request([2], "queued", max_new_tokens=100)
            manager.add_request([3], "next", max_new_tokens=2)
            setup.runner.wait_for_step(1)
            setup.runner.allow(2)
            setup.runner.wait_for_step(3)
            manager.cancel_request("active")
            manager.cancel_request("queued")
            manager.cancel_request("unknown")
            setup.runner.allow()
            results = {one.request_id: one for one in manager}
            assert results["active"].status is results["queued"].status is RequestStatus.FAILED
            assert "cancelled" in str(results["active"].error)
            assert results["active"].generated_tokens == expected([1], 3)
            assert results["next"].generated_tokens == expected([3], 2)
            manager.cancel_request("next")

    def test_ends_a_stream(self) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager:
            manager.add_request([1], "a", max_new_tokens=100, streaming=True)
            setup.runner.allow(2)
            chunks = []
            for chunk in manager.request_id_iter("a"):
                chunks.append(chunk)
                if len(chunks) == 2:
                    manager.cancel_request("a")
                    setup.runner.allow()
            assert chunks[-1].status is RequestStatus.FAILED
            assert [one.status for one in chunks[:-1]] == [RequestStatus.DECODING] * (len(chunks) - 1)

    def test_after_preemption_the_others_go_on(self) -> None:
        # The reference stalls for ever when the requests that pushed another one out are cancelled.
        setup = Setup(gated=True, num_blocks=14, safety_margin=0.0)
        with running(setup) as manager:
            for name in "abc":
                manager.add_request([1] * 8, name, max_new_tokens=30)
            setup.runner.allow(20)
            setup.runner.wait_for_step(21)
            manager.cancel_request("a")
            manager.cancel_request("b")
            setup.runner.allow()
            results = {one.request_id: one for one in manager}
            assert results["c"].generated_tokens == expected([1] * 8, 30)


class TestSamples:
    def test_n_of_the_config(self) -> None:
        setup = Setup(generation=generation(do_sample=True, num_return_sequences=3, max_new_tokens=3, eos_token_id=EOS))
        with running(setup) as manager:
            assert manager.num_return_sequences == 3
            manager.add_request([1], "a")
            manager.add_request([2, 3], "b")
            results = {one.request_id: one for one in manager}
            assert set(results) == {"a", "a__child#0", "a__child#1", "b", "b__child#0", "b__child#1"}
            assert all(one.generated_tokens == expected(one.prompt_ids, 3) for one in results.values())

    def test_cancelling_one_cancels_all(self) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager:
            manager.add_request([1], "a", max_new_tokens=50, n=3)
            setup.runner.wait_for_step(1)
            manager.cancel_request("a__child#1")
            setup.runner.allow()
            assert [one.status for one in manager] == [RequestStatus.FAILED] * 3


class TestHandlers:
    def run(self, manager: Any, names: list[str], *, before: bool) -> dict[str, list[GenerationOutput]]:
        async def main() -> dict[str, list[GenerationOutput]]:
            found: dict[str, list[GenerationOutput]] = {name: [] for name in names}
            done = asyncio.Event()

            def take(output: GenerationOutput) -> None:
                assert asyncio.get_running_loop() is loop
                found[output.request_id].append(output)
                if all(items and items[-1].is_finished() for items in found.values()):
                    done.set()

            loop = asyncio.get_running_loop()
            for n, name in enumerate(names):
                if before:
                    manager.register_result_handler(name, take)
                manager.add_request([n], name, max_new_tokens=5, streaming=True)
                if not before:
                    manager.register_result_handler(name, take)
            await asyncio.wait_for(done.wait(), WAIT)
            return found

        return asyncio.run(main())

    @pytest.mark.parametrize("before", [True, False])
    def test_gets_every_output_on_its_loop(self, before: bool) -> None:
        with running(Setup()) as manager:
            manager.add_request([9], "plain", max_new_tokens=5)
            found = self.run(manager, ["a", "b", "c"], before=before)
            for n, items in enumerate(found.values()):
                assert [len(one.generated_tokens) for one in items] == [1, 2, 3, 4, 5]
                assert items[-1].generated_tokens == expected([n], 5)
            assert [one.request_id for one in manager] == ["plain"]
            assert not manager._router._handlers and not manager._router._replies

    def test_two_loops(self) -> None:
        with running(Setup()) as manager, ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self.run, manager, [f"{n}a", f"{n}b"], before=True) for n in range(2)]
            for future in both:
                assert all(items[-1].is_finished() for items in future.result(WAIT).values())

    def test_results_that_came_before_it(self) -> None:
        with running(Setup()) as manager:
            manager.add_request([1], "a", max_new_tokens=2)
            manager.stop()

            async def main() -> GenerationOutput:
                future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
                manager.register_result_handler("a", future.set_result)
                return await asyncio.wait_for(future, WAIT)

            assert asyncio.run(main()).generated_tokens == expected([1], 2)

    def test_one_that_raises_harms_no_other(self) -> None:
        with running(Setup()) as manager:

            async def main() -> tuple[list[Any], GenerationOutput]:
                loop = asyncio.get_running_loop()
                raised: list[Any] = []
                loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
                good: asyncio.Future[GenerationOutput] = loop.create_future()
                handlers: dict[str, Any] = {}
                manager.register_result_handler("bad", lambda output: handlers[output.request_id])
                manager.register_result_handler("good", good.set_result)
                manager.add_request([1], "bad", max_new_tokens=1)
                manager.add_request([1], "good", max_new_tokens=1)
                return raised, await asyncio.wait_for(good, WAIT)

            raised, output = asyncio.run(main())
            assert output.status is RequestStatus.FINISHED
            assert [type(one) for one in raised] in ([KeyError], [])

    @pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, SystemExit, KeyboardInterrupt])
    def test_whatever_one_raises_the_others_are_called(self, error: type[BaseException]) -> None:
        with running(Setup()) as manager:
            manager.add_requests([[1], [2], [3]], max_new_tokens=1)
            names = ["req_0", "req_1", "req_2"]
            manager.stop()
            found: list[str] = []

            def take(output: GenerationOutput) -> None:
                found.append(output.request_id)
                if output.request_id == "req_1":
                    raise error

            items: list[tuple[Callback, GenerationOutput]]
            items = [(take, output) for name in names if (output := manager.get_result(name)) is not None]
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(lambda _, context: found.append(type(context["exception"]).__name__))
            loop.call_soon(_call_all, loop, items)
            for _ in range(3):
                loop.call_soon(loop.stop)
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as ended:
                    found.append(type(ended).__name__)
            loop.close()
            assert found == ["req_0", "req_1", error.__name__, "req_2"]

    def test_a_closed_loop_ends_its_own_requests(self) -> None:
        setup = Setup(gated=True)
        with running(setup) as manager:

            async def main() -> None:
                manager.register_result_handler("a", lambda _: None)
                manager.add_request([1], "a", max_new_tokens=100, streaming=True)

            asyncio.run(main())
            manager.add_request([2], "b", max_new_tokens=4)
            setup.runner.allow()
            results = {one.request_id: one for one in manager}
            assert results["a"].status is RequestStatus.FAILED
            assert results["b"].generated_tokens == expected([2], 4)

    def test_needs_a_loop(self) -> None:
        with running(Setup()) as manager, pytest.raises(RuntimeError, match="event loop"):
            manager.register_result_handler("a", print)


def test_concurrent_producers_and_consumers() -> None:
    setup = Setup()
    with running(setup) as manager, ThreadPoolExecutor(8) as pool:
        total, seen, lock = 200, [], threading.Lock()

        def produce(start: int) -> None:
            for n in range(start, start + total // 4):
                manager.add_request([n % 90], f"r{n}", max_new_tokens=3)

        def consume() -> None:
            while (output := manager.get_result()) is not None:
                with lock:
                    seen.append(output.request_id)

        consumers = [pool.submit(consume) for _ in range(4)]
        producers = [pool.submit(produce, start) for start in range(0, total, total // 4)]
        for future in producers:
            future.result(WAIT)
        manager.stop()
        for future in consumers:
            future.result(WAIT)
        seen += [one.request_id for one in iter(manager.get_result, None)]
        assert sorted(seen) == sorted(f"r{n}" for n in range(total))


def test_a_long_stream_shares_one_list() -> None:
    with running(Setup()) as manager:
        manager.add_request([1], "a", max_new_tokens=50, streaming=True)
        chunks = list(manager.request_id_iter("a"))
        assert len({id(getattr(one.generated_tokens, "_items")) for one in chunks[:-1]}) == 1
