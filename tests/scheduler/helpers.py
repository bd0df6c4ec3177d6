"""A scheduler over the KV oracle, driven by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiocb.cache import CacheManager
from aiocb.config import SchedulerType
from aiocb.sampling_params import SamplingParams
from aiocb.scheduler import Finished, ParallelGroup, Request, Scheduler, Update
from aiocb.step import CacheLayout, StepOutOfMemory, StepPlan
from aiocb.testing.oracle import KVOracle
from aiocb.testing.records import simple_layout

VOCAB = 11


class Harness:
    """Scheduler, oracle and what came out; every step checks all invariants."""

    def __init__(
        self,
        *,
        num_blocks: int | Sequence[int] = 64,
        page_size: int = 4,
        windows: Sequence[int | None] = (None,),
        is_chunked: bool = False,
        num_slots: int = 0,
        interval: int | None = None,
        swap_places: int = 0,
        layout: CacheLayout | None = None,
        sharing: bool = True,
        max_batch_tokens: int = 64,
        max_requests: int = 16,
        chunk: int | None = None,
        policy: SchedulerType = "fifo",
        margin: float = 0.0,
        depth: int = 1,
        draft_len: int = 0,
        max_draft_rows: int | None = None,
        errors: Callable[[StepPlan], Mapping[int, Exception] | None] | None = None,
        interrupt: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.layout = layout or simple_layout(
            num_blocks,
            page_size=page_size,
            windows=windows,
            is_chunked=is_chunked,
            num_slots=num_slots,
            interval=interval,
            swap_places=swap_places,
        )
        self.cache = CacheManager(self.layout, sharing)
        self.scheduler = Scheduler(
            self.cache,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests,
            max_prefill_chunk=chunk,
            scheduler_type=policy,
            safety_margin=margin,
            drafter=self.guess if draft_len else None,
            max_draft_rows=max_draft_rows,
        )
        self.draft_len = draft_len
        self.oracle = KVOracle(self.layout, vocab_size=VOCAB, depth=depth, errors=errors, interrupt=interrupt)
        self.flights: deque[StepPlan] = deque()
        self.requests: list[Request] = []
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}
        self.plans: list[StepPlan] = []
        self.now = 0.0

    def request(
        self,
        prompt: Sequence[int],
        num_output: int = 4,
        *,
        group: ParallelGroup | None = None,
        seed: int = 0,
        priority: int = 0,
        salt: str | None = None,
        deadline: float | None = None,
        queue_deadline: float | None = None,
        **sampling: Any,
    ) -> Request:
        """A request that has not been added yet."""
        request = Request(
            list(prompt),
            salt,
            id=len(self.requests) + 1,
            sampling=SamplingParams(**{"temperature": 0.0, "eos_token_id": (), "min_new_tokens": 0, **sampling}),
            max_tokens=len(prompt) + num_output,
            seed=seed,
            priority=priority,
            deadline=deadline,
            queue_deadline=queue_deadline,
            group=group,
            index=sum(request.group is group for request in self.requests) if group is not None else 0,
        )
        self.requests.append(request)
        self.outputs[request.id] = []
        return request

    def add(self, prompt: Sequence[int], num_output: int = 4, **options: Any) -> Request:
        request = self.request(prompt, num_output, **options)
        self.scheduler.add(request)
        return request

    def add_group(self, n: int, prompt: Sequence[int], num_output: int = 4, **options: Any) -> list[Request]:
        group = ParallelGroup()
        options.setdefault("temperature", 1.0)
        requests = [self.request(prompt, num_output, group=group, seed=1000 + i, **options) for i in range(n)]
        for request in requests:
            self.scheduler.add(request)
        return requests

    def ended(self, finished: Finished | None) -> None:
        if finished is not None:
            assert finished.request.id not in self.ends, "a request ended twice"
            self.ends[finished.request.id] = finished

    def finish(self, request: Request, reason: Any = "cancelled") -> None:
        self.ended(self.scheduler.finish(request, reason))

    def expire(self, now: float) -> list[Finished]:
        self.now = now
        finished = self.scheduler.expire(now)
        for event in finished:
            self.ended(event)
        return finished

    def guess(self, request: Request) -> list[int]:
        """Drafts of which the first ones are right, how many depends on where it is."""
        known = request.num_output_tokens
        drafts = self.expected(request)[known : known + self.draft_len]
        right = request.num_tokens % (self.draft_len + 1)
        return drafts[:right] + [(token + 1) % VOCAB for token in drafts[right:]]

    def schedule(self) -> StepPlan:
        scheduler = self.scheduler
        has_work = any(True for _ in scheduler._roster.running()) or bool(scheduler._roster.queue)
        plan = scheduler.schedule(self.now)
        if not self.flights:
            assert bool(plan.entries) == has_work, "work, but nothing is done"
        assert plan.num_tokens <= scheduler.max_batch_tokens
        assert len(plan.entries) <= scheduler.max_requests_per_batch
        self.plans.append(plan)
        return plan

    def execute(self, plan: StepPlan) -> list[Update]:
        """Submit a plan; collect the oldest one when as many are in flight as may be, or nothing new is to be done."""
        updates: list[Update] = []
        if plan.entries or plan.closed:
            try:
                self.flights.append(self.oracle.submit(plan))
            except StepOutOfMemory as error:
                updates += self.scheduler.retract([plan], error)
        while self.flights and (len(self.flights) >= self.oracle.depth or not plan.entries):
            oldest = self.flights.popleft()
            try:
                updates += self.scheduler.update(oldest, self.oracle.collect(oldest), self.now)
            except StepOutOfMemory as error:
                updates += self.scheduler.retract([each for each in (oldest, *self.flights) if each.entries], error)
                self.flights.clear()
            if plan.entries:
                break
        for update in updates:
            self.outputs[update.request.id] += update.token_ids
            self.ended(update.finished)
        self.scheduler.check_invariants()
        self.oracle.check_records(self.scheduler.open_requests())
        return updates

    def step(self) -> StepPlan:
        self.scheduler.check_invariants()
        plan = self.schedule()
        self.scheduler.check_invariants()
        self.execute(plan)
        return plan

    def run(self, max_steps: int = 5000) -> int:
        """Step until nothing is left to do; return the number of steps."""
        for step in range(max_steps):
            if not self.scheduler.has_work:
                return step
            self.step()
        raise AssertionError(f"no end: {self.scheduler!r}")

    def expected(self, request: Request) -> list[int]:
        return self.oracle.expected_output(
            request.tokens[: request.num_prompt_tokens],
            request.sampling,
            max_tokens=request.max_tokens,
            seed=request.seed,
        )

    def assert_quiescent(self) -> None:
        """All have ended once, with the output they have alone, the cache is free, the runner remembers nothing."""
        self.run()
        assert self.scheduler.num_requests == 0 and not self.scheduler.has_work
        assert self.oracle.num_open == 0
        assert self.cache.usage() == 0.0
        assert self.cache.swap is None or (self.cache.swap.usage == 0.0 and not self.cache.swap.pending)
        assert self.cache.states is None or self.cache.states.usage == 0.0
        self.scheduler.check_invariants()
        for request in self.requests:
            if request.arrival < 0:
                continue
            assert request.is_finished
            end = self.ends[request.id]
            assert request.finish_reason == end.reason
            output, expected = self.outputs[request.id], self.expected(request)
            assert output == request.tokens[request.num_prompt_tokens :] == expected[: len(output)]
            if end.reason in ("stop", "length"):
                assert output == expected

    def num_computed(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)


def ids(plan: StepPlan) -> list[int]:
    return [entry.request_id for entry in plan.entries]


def chunks(plan: StepPlan) -> list[tuple[int, int]]:
    return [(entry.request_id, entry.num_new_tokens) for entry in plan.entries]
