"""`aiocb serve`: an engine and its server, until a signal. Main thread."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from aiocb.cli.terminal import ModelOptions, build_engine, one_line
from aiocb.errors import ConfigError, explain

__all__ = ["ServeOptions", "run_server"]


def _option(help_text: str, *names: str, panel: str = "Server", **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The fields of `ServeConfig` as options, and those of the engine that servers set."""

    served_model_name: Annotated[list[str] | None, _option("Name of the model for clients; may be repeated.")] = None
    adapter: Annotated[list[str] | None, _option("A LoRA adapter, as name=folder; may be repeated.")] = None
    host: Annotated[str, _option("Where to listen.")] = "127.0.0.1"
    port: Annotated[int, _option("0 takes a free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        list[str] | None, _option("A key that clients must send; may be repeated.", envvar="AIOCB_API_KEY")
    ] = None
    cors_origin: Annotated[list[str] | None, _option("An origin whose pages may call; may be repeated.")] = None
    max_body_size: Annotated[int, _option("Bytes of a body.", panel="Limits")] = 16 << 20
    max_body_depth: Annotated[int, _option("Levels of lists and objects in a body.", panel="Limits")] = 64
    body_timeout: Annotated[float, _option("Seconds for a body to arrive.", panel="Limits")] = 30.0
    max_connections: Annotated[int, _option("Requests open at once.", panel="Limits")] = 4096
    keep_alive: Annotated[float, _option("Seconds that an idle connection is kept.")] = 75.0
    heartbeat: Annotated[float, _option("Seconds of silence before a comment line; 0 is off.")] = 10.0
    resume_window: Annotated[float, _option("Seconds that a cut stream can be resumed in; 0 is off.")] = 0.0
    resume_buffer: Annotated[int, _option("Bytes kept of each such stream.")] = 1 << 20
    max_resumable: Annotated[int, _option("Such streams at once.", panel="Limits")] = 256
    drain: Annotated[float, _option("Seconds that open requests may go on for after a signal.")] = 30.0
    max_queue_time: Annotated[float, _option("Seconds in the queue; 0 is no bound.", panel="Limits")] = 0.0
    request_timeout: Annotated[float, _option("Seconds for a request; 0 is no bound.", panel="Limits")] = 0.0
    max_n: Annotated[int, _option("Choices of a request.", panel="Limits")] = 128
    max_logprobs: Annotated[int, _option("Log-probabilities at a token.", panel="Limits")] = 20
    access_log: Annotated[bool, _option("One line of JSON per request.")] = True
    metrics_prefix: Annotated[str, _option("Before the names at /metrics.")] = "aiocb:"
    metrics_buckets: Annotated[list[float] | None, _option("A bound of the histograms, in seconds; repeated.")] = None
    root_path: Annotated[str, _option("The path under which a proxy shows the server.")] = ""
    enable_page: Annotated[bool, _option("The chat page at /.", "--page/--no-page")] = True
    max_queue_size: Annotated[int, _option("Requests that may wait; more are answered 429.", panel="Limits")] = 1024
    kv_cache_dtype: Annotated[
        Literal["int8"] | None, _option("Keys and values in half the memory, on the CPU.", panel="Engine")
    ] = None
    target_itl: Annotated[
        float | None, _option("Seconds that a step with prompts may last; 0 is no bound.", panel="Engine")
    ] = None
    target_ttft: Annotated[float, _option("Seconds after which a prompt may stretch steps.", panel="Engine")] = 0.5
    speculation: Annotated[
        Literal["prompt_lookup"] | None, _option("Propose what a request has said before.", panel="Engine")
    ] = None
    num_speculative_tokens: Annotated[int, _option("Most tokens of a proposal.", panel="Engine")] = 7


_ENGINE_SETTINGS = ("max_queue_size", "kv_cache_dtype", "target_ttft", "speculation", "num_speculative_tokens")


def _engine_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options out that are settings of the engine."""
    settings = {name: values.pop(name) for name in _ENGINE_SETTINGS}
    target, buckets = values.pop("target_itl"), values.pop("metrics_buckets")
    if target is not None:
        settings["target_itl"] = target or None
    if buckets:
        settings["latency_buckets"] = tuple(buckets)
    return settings


def run_server(model: ModelOptions, options: ServeOptions) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        ConfigError: the model cannot be loaded, an option cannot be, or the extra `serve` is missing.
    """
    try:
        from aiocb.serve import ServeConfig
        from aiocb.serve.run import serve
        from aiocb.serve.service import LoadProgress
    except ImportError as error:
        raise ConfigError(
            f"the server needs more packages ({error.name} is missing): pip install 'aiocb[serve]'"
        ) from None
    values = dataclasses.asdict(options)
    settings = _engine_settings(values)
    values = {
        name: tuple(value or ()) if value is None or isinstance(value, list) else value
        for name, value in values.items()
    }
    if not values["served_model_name"]:
        values["served_model_name"] = (model.model,)
    config = ServeConfig(**values)
    if config.adapter:  # which the whole step does not apply
        settings["attention"] = "cpu"
    _log_to_stderr()
    progress = LoadProgress()
    engine = build_engine(model, progress, **settings)
    with contextlib.suppress(KeyboardInterrupt):
        failure = serve(engine, config, progress)
        if failure is not None:
            print(f"cannot load {model.model}: {one_line(explain(failure))}", file=sys.stderr)
            return 1
    return 0


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("aiocb", "uvicorn"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
