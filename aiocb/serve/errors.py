"""What goes wrong, as clients of OpenAI's interface know it: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from aiocb.errors import (
    AiocbError,
    EngineClosed,
    EngineError,
    InvalidRequest,
    QueueFull,
    RequestError,
    RequestTimeout,
)

__all__ = ["ApiError", "error_of"]

_RETRY_S = "5"
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}
_TOO_LONG = re.compile(r"the prompt has \d+ tokens|after a prompt of \d+ tokens")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for a person: what is wrong, and what to do.
        param: which field, as a pointer (`messages[0].content`).
        code: for a program.
        headers: further ones of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's word for this kind of error."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    @property
    def body(self) -> bytes:
        """The object that is sent, as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def error_of(error: Exception) -> ApiError:
    """What a client is told of an exception of the engine's."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            is_long = _TOO_LONG.search(str(error)) is not None
            return ApiError(400, str(error), code="context_length_exceeded" if is_long else None)
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": _RETRY_S})
        case RequestTimeout() if error.stage == "queue":
            return ApiError(503, str(error), code="queue_timeout", headers={"retry-after": _RETRY_S})
        case RequestTimeout():
            return ApiError(504, str(error), code="timeout")
        case RequestError():
            return ApiError(500, str(error), code="request_failed")
        case EngineClosed():
            return ApiError(503, str(error), code="not_ready", headers={"retry-after": _RETRY_S})
        case EngineError():
            return ApiError(503, str(error), code="engine_dead")
        case AiocbError():
            return ApiError(500, str(error))
        case _:
            # What it says may hold what is nobody's business; the log has it.
            return ApiError(500, "an error inside the server; its log says which", code="internal_error")
