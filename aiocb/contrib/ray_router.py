"""A request router of Ray Serve that sends a prompt to the replica which has its beginning in its cache.

Runs in the loop of the handle's router, in every process that has a handle, and never waits there: what it knows is its
own. Nothing in it can hold a request up: without a prompt, or with one that it cannot read, the least loaded replica
takes the request.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Counter

from aiocb.contrib.ray_affinity import PrefixTable, chain_of, decide

__all__ = ["PrefixAffinityRouter"]

log = logging.getLogger("aiocb.contrib.ray")

_WAY_S = 1.0
"""A request that was not sent within this time after the decision goes somewhere else, or nowhere."""


class PrefixAffinityRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica with the most of a prompt, within a bound on the imbalance.

    What it has decided is the counter `aiocb_router_requests` of Ray's metrics, by `deployment` and `reason`.
    """

    def initialize_state(self, max_imbalance: int = 8, max_blocks: int = 200_000) -> None:
        """Take `request_router_kwargs`.

        Args:
            max_imbalance: how many more requests than the least loaded replica one may have and still be preferred.
            max_blocks: blocks of prompts that are remembered.
        """
        self._max_imbalance = max_imbalance
        self._table: PrefixTable[ReplicaID] = PrefixTable(max_blocks)
        self._on_their_way: defaultdict[ReplicaID, deque[float]] = defaultdict(deque)
        self._counter = Counter(
            "aiocb_router_requests",
            description="Requests by why their replica was chosen.",
            tag_keys=("deployment", "reason"),
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a request."""
        # In another order each time: of replicas with equal loads, the first is taken.
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        replicas = {replica.replica_id: replica for replica in shuffled}
        if not replicas:
            return []
        chain: Sequence[int] = ()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all are full, wait before the next try
            chain = _chain(pending_request)
        loads = {each: self._load_of(each) for each in replicas}
        decision = decide(loads, chain, self._table.depths(chain), self._max_imbalance)
        self._on_their_way[decision.order[0]].append(time.monotonic())
        self._counter.inc(1, {"deployment": str(self._deployment_id.name), "reason": decision.reason})
        return [[replicas[each]] for each in decision.order]

    def _load_of(self, replica: ReplicaID) -> int:
        """What Ray knows of it, and what was decided since.

        Requests that come at once are decided before the first of them is sent. What Ray knows comes from the replica,
        or is forgotten after ten seconds; a count of our own would grow for ever, as Ray does not tell of all cancelled
        requests that they have ended.
        """
        decided, before = self._on_their_way[replica], time.monotonic() - _WAY_S
        while decided and decided[0] < before:
            decided.popleft()
        return (self.replica_queue_len_cache.get(replica) or 0) + len(decided)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """From here on Ray counts it."""
        if self._on_their_way[replica_id]:
            self._on_their_way[replica_id].popleft()
        super().on_send_request(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember who has the prompt."""
        self._table.note(_chain(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Nothing of what it had is left."""
        super().on_replica_actor_died(replica_id)
        self._forget({replica_id})

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget those that are no more."""
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        if gone:
            self._forget(gone)

    def _forget(self, gone: set[ReplicaID]) -> None:
        self._table.forget(gone)
        for replica in gone:
            self._on_their_way.pop(replica, None)


def _chain(request: PendingRequest) -> Sequence[int]:
    """The blocks of a request's prompt: as its sender has found them, else of the first argument."""
    try:
        given = request.kwargs.get("prefix")
        if given is not None:
            return tuple(given)
        return chain_of(request.kwargs.get("prompt", request.args[0] if request.args else None))
    except Exception:  # whatever the arguments are, a request is routed
        log.debug("no prompt can be read from a request", exc_info=True)
        return ()
