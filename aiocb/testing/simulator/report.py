"""What a simulation has done so far, and the last of it in words."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiocb.testing.simulator.clients import Client
    from aiocb.testing.simulator.workload import Layout

__all__ = ["Report"]


@dataclass(slots=True)
class Report:
    """Filled while it goes.

    Attributes:
        digest: of everything that was read: equal histories give equal digests.
        events: how often what happened.
        latest: the latest events, with their steps.
        errors: the latest that readers got.
    """

    seed: int
    layout: Layout
    depth: int
    num_steps: int = 0
    num_clients: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    digest: str = ""
    events: Counter[str] = field(default_factory=Counter)
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    errors: deque[Exception] = field(default_factory=lambda: deque(maxlen=64))

    def note(self, event: str) -> None:
        """Keep an event for the message of a failure."""
        self.latest.append(f"{self.num_steps}: {event}")

    def take(self, client: Client) -> None:
        """Count a client whose output is over.

        Raises:
            AssertionError: another one has had the same error.
        """
        error = client.error
        if error is not None:
            assert all(error is not other for other in self.errors), "two streams have one error"
            self.errors.append(error)
            self.events[type(error).__name__] += 1
        self.events.update(f"ended: {chunk.finish_reason}" for chunk in client.last if chunk is not None)
        read = repr((self.digest, client.name, client.tokens, client.texts, type(error).__name__))
        self.digest = hashlib.blake2b(read.encode(), digest_size=8).hexdigest()
