"""`Engine`: what users hold. Any thread; a session does the work.

```
Engine ─► Lives ─► Session (one per life) ─► Worker (thread) ─► EngineCore ─► Scheduler, Runner
   └─► Stream (one per request) ──► Slot / Lane ◄── LoopBridge (one per event loop)
```
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from aiocb.config import Choice, DistributedConfig, EngineConfig
from aiocb.engine.batch import CompletionIterator, run_batch
from aiocb.engine.bridge import Signal
from aiocb.engine.core import EngineCore
from aiocb.engine.lives import Lives
from aiocb.engine.prepare import Prompt, StreamSpec
from aiocb.engine.session import Session
from aiocb.engine.settings import refuse_unbuilt
from aiocb.engine.source import LoadedSource, PretrainedSource, Progress, RunnerSource, Source
from aiocb.engine.stats import EngineState, Health, Stats
from aiocb.engine.stream import Stream
from aiocb.errors import ConfigError, EngineClosed, InvalidRequest, show_value
from aiocb.model.request import ModelRequest
from aiocb.outputs import Completion
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import Runner
from aiocb.text.prompts import take_prompt, take_values

if TYPE_CHECKING:
    from typing import Unpack

    from transformers import GenerationConfig
    from transformers.distributed.configuration_utils import DistributedConfig as TransformersConfig

    from aiocb.options import RequestOptions, StreamOptions, ToolChoice
    from aiocb.text.processor import TextProcessor

    Params = SamplingParams | GenerationConfig | None

__all__ = ["Engine"]


class Engine:
    """Continuous batching over one model, inside the caller's process.

    Entering starts the worker thread (and, the first time, loads the model there); leaving ends every open stream and
    joins the thread. One engine can be built outside any event loop, entered from several loops at once (the last to
    leave closes it), and entered again afterwards.

    Args:
        model: a loaded transformers causal language model. It is used as it is and left as it was found.
        tokenizer: its tokenizer; None takes and yields token ids only.
        config: settings; every None in it is decided at start (see `describe()`).
        drain: seconds that leaving `async with` waits for open streams before it ends them; None waits for all.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        config: EngineConfig | None = None,
        drain: float | None = 0.0,
    ) -> None:
        self._init(LoadedSource(model, tokenizer), config, drain)

    def _init(self, source: Source, config: EngineConfig | None, drain: float | None) -> None:
        self._source = source
        self._config = refuse_unbuilt(config or EngineConfig(), source.device_type)
        self._drain = drain
        self._labels = itertools.count(1)
        self._lives = Lives(self, source, self._config)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        config: EngineConfig | None = None,
        dtype: Any = "auto",
        device: Any = None,
        quantization: Literal["int8", "int4"] | None = None,
        distributed_config: DistributedConfig | TransformersConfig | None = None,
        progress: Progress | None = None,
        drain: float | None = 0.0,
        **options: Any,
    ) -> Engine:
        """Return an engine at once; the model is loaded in the worker thread on the first entry and then kept.

        Args:
            name_or_path: `owner/repo` on the hub, `owner/repo:Q4_K_M` (one of its GGUF files), either with `@revision`,
                a link to one of these, a directory, a GGUF file, or `smollm2` / `gemma3-270m` (the packaged models).
            config: settings.
            dtype: a torch dtype, its name, or `"auto"`.
            device: where to put the model; None chooses.
            quantization: `"int8"` or `"int4"` for weights of so many bits in the native CPU kernels.
            distributed_config: spreads the model over the processes that `torchrun` has started: a `DistributedConfig`,
                or transformers' own. Every process makes and enters the engine; rank 0 takes the requests, on the
                others `async with` ends when it does there.
            progress: called as `progress(stage, fraction)` while the model is loaded, in the worker thread or (stage
                `download`) in one of the hub client's, never in two at once.
            drain: as for the constructor.
            options: passed on to transformers' `from_pretrained` (revision, trust_remote_code, ...).

        Raises:
            ConfigError: an option is the name of a setting, which belongs in `config`.
        """
        engine = cls.__new__(cls)
        settings = sorted(options.keys() & inspect.signature(EngineConfig).parameters.keys())
        if settings:
            wanted = ", ".join(f"{name}={options[name]!r}" for name in settings)
            raise ConfigError(f"{', '.join(settings)}: settings of the engine; pass config=EngineConfig({wanted})")
        request = ModelRequest(
            config or EngineConfig(),
            name_or_path,
            None,
            dtype,
            device,
            quantization,
            progress,
            options,
            distributed=distributed_config,
        )
        engine._init(PretrainedSource(request), config, drain)
        return engine

    @classmethod
    def from_runner(
        cls,
        make_runner: Callable[[EngineConfig], Runner],
        defaults: ModelDefaults,
        tokenizer: Any = None,
        *,
        config: EngineConfig | None = None,
        drain: float | None = 0.0,
    ) -> Engine:
        """Return an engine over a runner of one's own (see `aiocb.testing` for fakes); `make_runner` runs in the
        worker thread.
        """
        engine = cls.__new__(cls)
        engine._init(RunnerSource(make_runner, defaults, tokenizer), config, drain)
        return engine

    def __repr__(self) -> str:
        session = self._lives.session
        core = None if session is None else session.worker.core
        if core is None:
            return f"<Engine {self._source.name} {self.state}>"
        return f"<Engine {self._source.name} {self.state} {core.scheduler!r}>"

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Engine:
        """Start, or join an engine that is already running.

        Raises:
            ConfigError: the model or the settings cannot work; no thread is left behind.
            EngineError: an earlier life of this engine has kept the model for longer than `start_timeout`.
            EngineClosed: it was running when this process was forked, or was closed while it was starting.
            Exception: whatever loading the model raised.
        """
        await self._lives.enter()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._lives.leave()
        if session is not None:
            is_failing = exc_type is not None
            await session.shutdown(0.0 if is_failing else self._drain, leaves_others=is_failing)

    async def aclose(self, drain: float | None = 0.0) -> None:
        """Close, whoever has entered: refuse new requests, finish open ones for `drain` seconds, end the rest.

        Idempotent. `drain=None` waits until everything has finished.
        """
        session = self._lives.release()
        if session is not None:
            await session.shutdown(drain)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        cache_salt: str | None = None,
        stream_interval: int = 1,
        max_unread_tokens: int | None = None,
        on_unread: Literal["pause", "cancel"] = "pause",
        on_full: Literal["wait", "refuse"] = "wait",
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **sampling: Unpack[StreamOptions],
    ) -> Stream:
        """Return a stream over one prompt; nothing is submitted before it is iterated, entered or awaited.

        Args:
            prompt: text, token ids (list, 1-D tensor, a tokenizer's encoding), or chat messages (mappings, or objects
                with their fields, as the OpenAI client returns them). It is copied here: what its owner does to it
                afterwards does not matter. An empty one is refused.
            params: sampling parameters; keywords (`temperature=0.8`, `max_new_tokens=256`, ...) override them.
            request_id: a label for logs and chunks; need not be unique.
            priority: lower runs first, with `scheduler_type="priority"`.
            timeout: seconds from submission to the end.
            queue_timeout: seconds that the request may wait before its first step.
            cache_salt: requests share cached prefixes only with requests of the same salt.
            stream_interval: tokens per chunk.
            max_unread_tokens: what to let the reader fall behind by; None is no bound (deltas merge, memory is bounded
                by the output's length).
            on_unread: beyond that bound, `pause` the request (its cache is kept) or `cancel` it.
            on_full: when `EngineConfig.max_queue_size` is reached, `wait` or `refuse` with `QueueFull`.
            tools: functions that the model may call, for a prompt of messages: JSON schemas in OpenAI's shape, or
                functions with type hints and a docstring. Rendered by the chat template; calls come as
                `Chunk.tool_calls` and `Completion.tool_calls`.
            tool_choice: `auto` (as None, with tools) lets the model choose, `none` keeps the tools from it, `required`
                makes it call at least one, `{"type": "function", "function": {"name": ...}}` exactly this one.
            parallel_tool_calls: False ends the answer with its first call.
            chat_template_kwargs: passed to the chat template.
            adapter: name of a loaded adapter (see `load_adapter`); None is the model alone.
            sampling: fields of `SamplingParams`.

        Raises:
            InvalidRequest: an unknown parameter or adapter, or one that can be seen to be wrong without the model.
            EngineError: rank 0 of several processes takes the requests, and this is another one.
        """
        spec = StreamSpec(
            take_prompt(prompt),
            SamplingParams.build(params, sampling),
            request_id if request_id is not None else f"request-{next(self._labels)}",
            priority,
            timeout,
            queue_timeout,
            cache_salt,
            stream_interval,
            max_unread_tokens,
            on_unread,
            on_full,
            None if tools is None else take_values("tools", tools),
            None if chat_template_kwargs is None else take_values("chat_template_kwargs", chat_template_kwargs),
            None if tool_choice is None else take_values("tool_choice", tool_choice),
            parallel_tool_calls,
            adapter,
        )
        spec.check()
        session = self._lives.session
        if adapter is not None and session is not None and session.worker.core is not None:
            session.worker.core.adapters.key_of(adapter)
        if session is not None and session.rank:
            session.raise_if_following()
        return Stream(self, spec)

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        n: int,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | GenerationConfig | None = None,
        *,
        n: int | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Return the whole output of one prompt; where `n` is given, the list of so many samples.

        Args:
            prompt, params, request_id, options: as for `stream`.
            n: how many parallel samples. An `n` in `params` does not count, with a warning: the type of what is
                returned must not depend on it.

        Raises:
            RequestError, EngineError: see `Stream.__anext__`; what had been produced is in `RequestError.partial`.
        """
        stream = self.stream(prompt, params, request_id=request_id, n=1 if n is None else n, **options)
        if n is not None:
            return await stream.completions()
        if isinstance(params, SamplingParams) and params.n != 1:
            warnings.warn(f"generate() returns one completion: pass n={params.n} to it for a list", stacklevel=2)
        return (await stream.completions())[0]

    async def generate_batch(
        self,
        prompts: Iterable[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        progress: bool = False,
        return_exceptions: bool = False,
        n: int | None = None,
        request_id: Sequence[str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Return the outputs of all prompts, in the order given.

        Args:
            prompts: as for `stream`.
            params: one for all, or a sequence with one per prompt.
            progress: show a progress bar.
            return_exceptions: a failed request yields a `Completion` with `finish_reason` `"error"` or `"timeout"`
                and its `error`, instead of ending the whole batch.
            n: samples of every prompt, one after the other; None takes that of `params`.
            request_id: labels, one per prompt; None takes the prompts' positions, `"0"`, `"1"`, ...
            options: as for `stream`.

        Raises:
            RequestError, EngineError: the first failure; the other requests are aborted.
        """
        streams = self._streams(prompts, params, n, request_id, options)
        return await run_batch(streams, progress=progress, return_exceptions=return_exceptions)

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        return_exceptions: bool = False,
        n: int | None = None,
        request_id: Sequence[str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> CompletionIterator:
        """Return an async iterator over the outputs of all prompts, each as it finishes.

        A completion's `request_id` tells which prompt it belongs to. Arguments are those of `generate_batch`.
        """
        streams = self._streams(prompts, params, n, request_id, options)
        return CompletionIterator(streams, return_exceptions=return_exceptions)

    def _streams(
        self,
        prompts: Iterable[Prompt],
        params: Params | Sequence[Params],
        n: int | None,
        labels: Sequence[str] | None,
        options: RequestOptions,
    ) -> list[Stream]:
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise InvalidRequest(f"prompts must be a list of prompts, not {show_value(prompts)}; generate() takes one")
        prompts = list(prompts)
        many = params if isinstance(params, Sequence) else [params] * len(prompts)
        if labels is None:
            labels = [str(index) for index in range(len(prompts))]
        keywords: dict[str, Any] = {**options} if n is None else {**options, "n": n}
        if len(many) != len(prompts) or isinstance(labels, str) or len(labels) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts need as many params and request ids, when those are sequences")
        return [
            self.stream(prompt, each, request_id=label, **keywords)
            for prompt, each, label in zip(prompts, many, labels, strict=True)
        ]

    def _running(self) -> Session:
        session = self._lives.session
        if session is None:
            raise EngineClosed("the engine is not running: use it inside `async with engine:`")
        session.raise_if_unusable()
        return session

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def model(self) -> Any:
        """The transformers model. Use it inside `pause()` only.

        None before it is loaded, and where `from_pretrained` runs it in the native kernels: they take its weights over
        and free the originals. To use or change such a model, load it yourself and pass it to `Engine`, or set
        `EngineConfig(native=False)`.
        """
        return self._source.model

    @contextlib.asynccontextmanager
    async def pause(self) -> AsyncIterator[Any]:
        """Hold the step loop while the model is used or changed; yields `Engine.model`, which may be None.

        Requests stay as they are and go on afterwards, with the model's weights as they then are (the native kernels
        read them again). Prefixes that were cached before are not hit after it. The model's shape and dtype must stay.

        Raises:
            EngineClosed, EngineDead: the engine is not running.
        """
        session = self._running()
        paused = Signal()
        session.put((EngineCore.pause, paused.set))
        try:
            await paused.wait()
            if session.worker.state in ("dead", "closed"):
                session.raise_if_unusable()
            yield self._source.model
        finally:
            session.put((EngineCore.unpause, None))

    @property
    def adapters(self) -> Mapping[str, str]:
        """The folder of each adapter that is loaded, by name; empty while the engine does not run."""
        session = self._lives.session
        core = None if session is None else session.worker.core
        return {} if core is None else core.adapters.paths()

    async def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load a LoRA adapter that requests may choose by name, until it is unloaded or the engine is closed.

        Cached prefixes belong to the adapter's content: other weights under the same name do not find them, the same
        weights do.

        Args:
            name: any text; one that is taken gets the new weights.
            path: a folder as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors`.

        Raises:
            ConfigError: the adapter cannot be read, or not be applied to this model; nothing has changed.
            AdapterInUse: requests run with other weights of this name.
            EngineClosed, EngineDead: the engine is not running.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of an adapter must be a text, not {show_value(name)}")
        session = self._running()
        from aiocb.model.load.peft import read_adapter

        weights = await asyncio.to_thread(read_adapter, str(path))
        await session.ask(lambda core: core.load_adapter(name, str(path), weights))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            InvalidRequest: there is none of this name.
            AdapterInUse: requests run with it.
            EngineClosed, EngineDead: the engine is not running.
        """
        await self._running().ask(lambda core: core.unload_adapter(name))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes at the next step; running requests keep theirs.

        Raises:
            EngineClosed, EngineDead: the engine is not running.
        """
        self._running().put((EngineCore.reset_prefix_cache, None))

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def config(self) -> EngineConfig:
        """The settings as given."""
        return self._config

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        session = self._lives.session
        return None if session is None or session.text is None else session.text.tokenizer

    @property
    def name(self) -> str:
        """What the model was named by, or its class."""
        return self._source.name

    @property
    def text_processor(self) -> TextProcessor:
        """The tokenizer as the engine uses it: encodes prompts, and knows every token's text. Any thread.

        Raises:
            EngineClosed, EngineDead: the engine is not running.
        """
        text = self._running().text
        assert text is not None
        return text

    @property
    def rank(self) -> int:
        """Of this process among those that run the model together, once the engine has been entered; 0 takes the
        requests, and is all there is in one process.
        """
        session = self._lives.session
        return 0 if session is None else session.rank

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that one request can have.

        Raises:
            EngineClosed, EngineDead: the engine is not running.
        """
        limits = self._running().limits
        assert limits is not None
        return limits.longest

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        session = self._lives.session
        return "created" if session is None else session.state

    def describe(self) -> list[Choice]:
        """What was decided at start, and why; empty before the engine has run."""
        session = self._lives.session
        return [] if session is None else list(session.choices)

    def health(self) -> Health:
        """Whether the engine can serve; tells dead *and* hung. Never blocks."""
        session = self._lives.session
        if session is None or session.worker.core is None:
            error = None if session is None else session.worker.error
            return Health(self.state, False, False, None, error)
        core, state = session.worker.core, session.state
        age = time.monotonic() - core.last_event_at
        is_hung = core.is_stepping and age > self._config.hang_timeout and not session.is_foreign
        is_ok = state in ("running", "draining") and not is_hung
        return Health(state, is_ok, is_hung, age, session.worker.error)

    def stats(self) -> Stats:
        """A snapshot of all counters. Never blocks.

        Raises:
            EngineClosed: the engine has not run yet.
        """
        session = self._lives.session
        if session is None or session.worker.core is None:
            raise EngineClosed("the engine has not run yet")
        return session.worker.core.stats(session.num_wakeups)
