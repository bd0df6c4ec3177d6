"""`ServeConfig`: every option of the server. Torch-free; checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from aiocb.errors import ConfigError, show_value

__all__ = ["ServeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of `aiocb serve`; each is an option of the command.

    Attributes:
        served_model_name: names of the model on the wire; the first is shown. Empty: the name it was loaded by.
        adapter: LoRA adapters as `name=folder`; `model: name` chooses one.
        host, port: where to listen; port 0 takes a free one. Only this machine by default.
        api_key: keys of which a request has to carry one (`Authorization: Bearer ...`); empty asks for none.
            `/health` and the chat page are open all the same.
        cors_origin: origins whose pages may call the server (`*` for any); empty answers none.
        max_body_size: bytes of a request's body.
        max_body_depth: levels of lists and objects in it.
        body_timeout: seconds in which it has to arrive.
        max_connections: open at once; those beyond are answered 503.
        keep_alive: seconds that an idle connection is kept: longer than a proxy before it keeps its own.
        heartbeat: seconds of silence after which a stream gets a comment line, before its first token too; 0 is off.
        resume_window: seconds that a stream whose client asked for it goes on without a reader, to be resumed; 0
            refuses to be asked.
        resume_buffer: bytes of a stream that are kept for that.
        max_resumable: streams kept at once for that.
        drain: seconds that open requests may go on for after a signal to stop.
        max_queue_time: seconds that a request may wait for its first step; 0 is no bound.
        request_timeout: seconds from a request's arrival to its end; 0 is no bound. A request may ask for less.
        max_n, max_logprobs: the most choices, and log-probabilities of a token, that a request may ask for.
        access_log: one line of JSON per request on the logger `aiocb.serve.access`.
        metrics_prefix: before the names at `/metrics`; `vllm:` serves dashboards made for that server.
        root_path: the path under which a proxy shows the server.
        enable_page: show the chat page at `/`.
    """

    served_model_name: tuple[str, ...] = ()
    adapter: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    max_body_size: int = 16 << 20
    max_body_depth: int = 64
    body_timeout: float = 30.0
    max_connections: int = 4096
    keep_alive: float = 75.0
    heartbeat: float = 10.0
    resume_window: float = 0.0
    resume_buffer: int = 1 << 20
    max_resumable: int = 256
    drain: float = 30.0
    max_queue_time: float = 0.0
    request_timeout: float = 0.0
    max_n: int = 128
    max_logprobs: int = 20
    access_log: bool = True
    metrics_prefix: str = "aiocb:"
    root_path: str = ""
    enable_page: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(field.default, bool):
                is_good, wanted = isinstance(value, bool), "True or False"
            elif isinstance(field.default, (int, float)):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                is_good, wanted = is_number and math.isfinite(value) and value >= 0, "a number that is not negative"
                if isinstance(field.default, int):
                    is_good, wanted = is_good and isinstance(value, int), "a whole number that is not negative"
            elif isinstance(field.default, tuple):
                is_good = isinstance(value, tuple) and all(isinstance(each, str) and each for each in value)
                wanted = "a tuple of texts, none empty"
            else:
                is_good, wanted = isinstance(value, str), "a text"
            if not is_good:
                raise ConfigError(f"{field.name} must be {wanted}, not {show_value(value)}")
        for entry in self.adapter:
            name, _, path = entry.partition("=")
            if not name or not path:
                raise ConfigError(f"an adapter is given as name=folder, not {show_value(entry)}")
        shared = self.served_model_name + tuple(self.adapters)
        if len(self.adapters) != len(self.adapter) or len(set(shared)) != len(shared):
            raise ConfigError(f"names of models and adapters must differ: {', '.join(map(repr, shared))}")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, not {self.port}")
        if "*" in self.cors_origin and self.api_key == () and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError("cors_origin='*' without an api_key lets any page use this server: name the origins")

    @property
    def adapters(self) -> dict[str, str]:
        """The folder of each adapter, by name."""
        parts = (entry.partition("=") for entry in self.adapter)
        return {name: path for name, _, path in parts}
