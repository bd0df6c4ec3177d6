"""The span of whoever sent a request, by its `traceparent` header: the parent of the spans that the engine makes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from aiocb.serve.body import Scope

__all__ = ["caller_span"]


@contextlib.contextmanager
def caller_span(scope: Scope) -> Iterator[None]:
    """Make the sender's span the current one; nothing where the program has not set up OpenTelemetry."""
    headers = dict(scope["headers"])
    if b"traceparent" not in headers or "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import context, propagate

    names = (b"traceparent", b"tracestate", b"baggage")
    carrier = {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)
