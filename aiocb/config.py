"""The engine's settings: `EngineConfig`, frozen, with `None` for "decided at start, logged with its reason".

Names are those of transformers' `ContinuousBatchingConfig`. Nothing here is changed at start: what was decided lives
in another type (`Choice` lists) and is read with `engine.describe()`.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiocb.errors import ConfigError, show_value

if TYPE_CHECKING:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

__all__ = ["Choice", "DistributedConfig", "EngineConfig", "SchedulerType"]

SchedulerType = Literal["fifo", "prefill_first", "priority"]
SCHEDULER_TYPES: tuple[SchedulerType, ...] = ("fifo", "prefill_first", "priority")
MIN_PAGE_SIZE = 4
MIN_BATCH_TOKENS = 16
Q_INTERVAL = 64
KV_INTERVAL = 16384


class Choice(NamedTuple):
    """One automatic decision: what was decided, the value, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedConfig:
    """How one model is spread over several processes, each of which is started by `torchrun`.

    transformers' own `DistributedConfig` is taken in its place.

    Attributes:
        tp_size: how many processes share each layer; None is as many as there are.
        tp_plan: "auto" for the model's own plan, or rules that replace some of it, by name of module or parameter.
    """

    tp_size: int | None = None
    tp_plan: Literal["auto"] | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _at_least("tp_size", self.tp_size, 1)
        if self.tp_plan not in (None, "auto") and not isinstance(self.tp_plan, Mapping):
            raise ConfigError(f"tp_plan must be 'auto' or a mapping of names to styles, not {self.tp_plan!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. `None` is decided at start, from the model, the device and the backend.

    Attributes:
        page_size: tokens per page (one layer); at least 4.
        num_blocks: blocks of the cache that requests can have (a block is one page for every layer of a group).
        max_memory_percent: share of the free device memory for the cache, (0, 1]; on the CPU a share of what is free,
            within a modest bound.
        state_interval: tokens between snapshots of the state of a model that has one (recurrent, convolution), a
            multiple of the page; 0 takes none, so that no prefix is found again.
        max_state_memory: GiB for such states, of running requests and of snapshots.
        max_batch_tokens: token budget of a step, 16 at least. On an accelerator 8192, or what its memory has room for,
            yet 256 at least; on the CPU smaller, to keep decoding smooth.
        max_requests_per_batch: most requests in a step.
        max_prompt_length, max_generated_length: hints, together or not at all: most requests are no longer. Memory is
            planned for them; longer requests are served as well.
        max_prefill_chunk: most prompt tokens of *one* request in a step while others decode.
        target_itl: seconds that a step with prompts may last while others decode: the prompts get what is left of it.
            `auto` is 0.08 where the native kernels run, whose output does not depend on how prompts are cut; None: only
            `max_batch_tokens` counts.
        target_ttft: seconds after which a prompt that waits may make steps twice as long.
        max_model_len: refuse requests longer than this, even if the model allows more.
        scheduler_type: `fifo` (decoding first, then prompts in order of arrival), `prefill_first`, `priority`.
        safety_margin: share of the cache kept free for running requests, [0, 1]; 0.15 for fifo and priority, 0 for
            prefill_first.
        allow_block_sharing: prefix caching.
        return_logprobs: log-probabilities of the chosen token for every request.
        per_request_processors: per-request sampling is always on; an engine refuses False.
        use_cuda_graph: record steps on an accelerator before traffic and replay them: steps with prompts, and steps
            without, or one answer for both. None: those without, where that works. `use_accelerator_graph` is the
            same.
        q_padding_interval_size: tokens of the smallest recorded step with prompts; 0 is 64. Set, it asks for these.
        kv_padding_interval_size: gathered keys of recorded steps are a power of two below, and a multiple above it; 0
            is 16384.
        use_async_batching: launch a step before the last one's tokens are known. None: where that works.
        default_compile_level: torch.compile of steps without prompts: 0 none, 1 default mode, dynamic; 2
            max-autotune-no-cudagraphs, dynamic; 3 the same, static.
        varlen_compile_config, decode_compile_config: fields of transformers' `CompileConfig` (or a mapping) for steps
            with prompts, and for those without; they count before the level.
        max_blocks_per_request: blocks of a request that have room in the tables on the device; None is enough for 8192
            tokens. Longer requests run, slower. 0: all steps are prepared on the host.
        cpu_offload_space: GiB of the host's memory to which the cache of preempted requests is copied, instead of being
            recomputed; 0.0 is none, None as much as the next one allows.
        cpu_offload_space_safety_threshold: share of the memory that is left, [0, 1]: the most for `cpu_offload_space`.
        cpu_group_timeout: where several processes run one model, the seconds after which one that does not answer, or a
            step that does not end, ends the engine on all of them; None waits for ever.
        auto_switch_to_flash: take flash-attn where it is installed.
        max_queue_size: most waiting requests; 0 is no bound.
        max_prompt_characters: most characters of a prompt of text or messages; longer ones are refused unread. None: 32
            for each of the model's positions, and a million at least.
        max_request_strings: most stop strings of a request, and likewise most banned sequences of several tokens, in
            all a hundred times as many characters or tokens; and a tenth of it bad words, each of which is encoded in
            several ways.
        speculation: `prompt_lookup` proposes what followed the last tokens when they stood in the request before, and
            verifies it in one step. The output is the same without. The native kernels on the CPU can do that.
        num_speculative_tokens: most tokens of a proposal.
        jump_ahead: tokens that the structure of an output forces (`json_schema`, `regex`, `choice`, `grammar`) are
            computed in one step with the token before them. The output is the same without.
        seed: seed of unseeded requests; None is fresh randomness.
        debug_checks: check all invariants of scheduler and cache after every step.
        drop_unsupported_processors: accepted for compatibility; nothing is dropped here.
        attention: backend name; None is chosen at start.
        num_threads: threads of a step on the CPU; None is one per core (native), or what torch has (plain torch).
        native: use the native CPU kernels: None when they can be built or loaded, False never.
        freeze_gc: move all objects out of the garbage collector's sight after start (shorter pauses).
        tool_parser: how tool calls are found in answers: `auto` asks the chat template, `none` leaves them in the text,
            else the name of a format (`hermes`, `qwen3_coder`, `llama3`, `mistral`, `smollm`, `granite`, `deepseek`,
            `harmony`, `json`). `json` also describes the tools in a system message where the template leaves them out.
        reasoning_parser: how reasoning is found in answers to messages: `auto`, `none`, or whose marks they are
            (`think`, `mistral`, `seed`, `cohere`).
        start_timeout: seconds that entering waits for an earlier life of the engine to give the model back.
        hang_timeout: seconds without a finished step until `health()` calls a running engine hung.
        tracing: make OpenTelemetry spans of requests; None does where the program has set up a tracer provider.
        latency_buckets: upper bounds of the histograms of times in `stats()`, in seconds, rising; None takes 1 ms to
            2 minutes.
    """

    page_size: int | None = None
    num_blocks: int | None = None
    max_memory_percent: float | None = None
    state_interval: int | None = None
    max_state_memory: float | None = None
    max_batch_tokens: int | None = None
    max_requests_per_batch: int | None = None
    max_prompt_length: int | None = None
    max_generated_length: int | None = None
    max_prefill_chunk: int | None = None
    target_itl: float | Literal["auto"] | None = "auto"
    target_ttft: float = 0.5
    max_model_len: int | None = None
    scheduler_type: SchedulerType = "fifo"
    safety_margin: float | None = None
    allow_block_sharing: bool = True
    return_logprobs: bool = False
    per_request_processors: bool = True
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = Q_INTERVAL
    kv_padding_interval_size: int = KV_INTERVAL
    use_async_batching: bool | None = None
    default_compile_level: int = 0
    varlen_compile_config: Any = None
    decode_compile_config: Any = None
    max_blocks_per_request: int | None = None
    cpu_offload_space: float | None = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    cpu_group_timeout: float | None = 300.0
    auto_switch_to_flash: bool = True
    max_queue_size: int = 0
    max_prompt_characters: int | None = None
    max_request_strings: int = 50_000
    speculation: Literal["prompt_lookup"] | None = None
    num_speculative_tokens: int = 7
    jump_ahead: bool = True
    seed: int | None = None
    debug_checks: bool = False
    drop_unsupported_processors: bool = True
    attention: str | None = None
    num_threads: int | None = None
    native: bool | None = None
    freeze_gc: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    start_timeout: float = 60.0
    hang_timeout: float = 60.0
    latency_buckets: tuple[float, ...] | None = None
    tracing: bool | None = None
    block_size: dataclasses.InitVar[int | None] = None
    use_accelerator_graph: dataclasses.InitVar[bool | tuple[bool, bool] | None] = None

    def __post_init__(self, block_size: int | None, use_accelerator_graph: bool | tuple[bool, bool] | None) -> None:
        if use_accelerator_graph is not None and self.use_cuda_graph is None:
            object.__setattr__(self, "use_cuda_graph", use_accelerator_graph)
        _is_switch("use_cuda_graph", self.use_cuda_graph, pair=True)
        _is_switch("use_async_batching", self.use_async_batching)
        _is_switch("tracing", self.tracing)
        for name, default in (("q_padding_interval_size", Q_INTERVAL), ("kv_padding_interval_size", KV_INTERVAL)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, default)
        if block_size is not None:
            warnings.warn("block_size is deprecated, use page_size", FutureWarning, stacklevel=3)
            if self.page_size is None:
                object.__setattr__(self, "page_size", block_size)
        _at_least("page_size", self.page_size, MIN_PAGE_SIZE)
        _at_least("num_blocks", self.num_blocks, 1)
        _at_least("state_interval", self.state_interval, 0)
        _at_least("max_batch_tokens", self.max_batch_tokens, MIN_BATCH_TOKENS)
        _at_least("max_requests_per_batch", self.max_requests_per_batch, 1)
        _at_least("max_prompt_length", self.max_prompt_length, 1)
        _at_least("max_generated_length", self.max_generated_length, 1)
        if (self.max_prompt_length is None) != (self.max_generated_length is None):
            raise ConfigError("max_prompt_length and max_generated_length are hints that are given together: set both")
        _at_least("max_prefill_chunk", self.max_prefill_chunk, 1)
        if self.target_itl != "auto":
            _within("target_itl", self.target_itl, 0.0, math.inf, open_low=True)
        _within("target_ttft", self.target_ttft, 0.0, math.inf)
        if self.speculation not in (None, "prompt_lookup"):
            raise ConfigError(f"speculation {self.speculation!r} is unknown: 'prompt_lookup', or None")
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("max_queue_size", self.max_queue_size, 0)
        _at_least("max_prompt_characters", self.max_prompt_characters, 1)
        _at_least("max_request_strings", self.max_request_strings, 0)
        _at_least("max_blocks_per_request", self.max_blocks_per_request, 0)
        _at_least("num_threads", self.num_threads, 1)
        _at_least("q_padding_interval_size", self.q_padding_interval_size, 0)
        _at_least("kv_padding_interval_size", self.kv_padding_interval_size, 0)
        _within("safety_margin", self.safety_margin, 0.0, 1.0)
        _within("max_memory_percent", self.max_memory_percent, 0.0, 1.0, open_low=True)
        _within("max_state_memory", self.max_state_memory, 0.0, math.inf, open_low=True)
        _within("cpu_offload_space", self.cpu_offload_space, 0.0, math.inf)
        _within("cpu_offload_space_safety_threshold", self.cpu_offload_space_safety_threshold, 0.0, 1.0)
        _within("start_timeout", self.start_timeout, 0.0, math.inf)
        _within("cpu_group_timeout", self.cpu_group_timeout, 0.0, math.inf, open_low=True)
        _within("hang_timeout", self.hang_timeout, 0.0, math.inf, open_low=True)
        buckets = self.latency_buckets
        if buckets is not None:
            is_rising = isinstance(buckets, tuple) and buckets and list(buckets) == sorted(set(buckets))
            if not is_rising or not all(isinstance(each, (int, float)) and 0 < each < math.inf for each in buckets):
                raise ConfigError(f"latency_buckets must be a tuple of rising seconds, not {show_value(buckets)}")
        if self.scheduler_type not in SCHEDULER_TYPES:
            raise ConfigError(
                f"scheduler_type {self.scheduler_type!r} is unknown; choose one of {', '.join(SCHEDULER_TYPES)}"
            )
        if self.default_compile_level not in (0, 1, 2, 3):
            raise ConfigError(f"default_compile_level must be 0, 1, 2 or 3, not {self.default_compile_level!r}")

    @property
    def graph_booleans(self) -> tuple[bool, bool]:
        """Whether steps with prompts, and steps without, are recorded."""
        if isinstance(self.use_cuda_graph, tuple):
            return self.use_cuda_graph
        if self.use_cuda_graph is not None:
            return self.use_cuda_graph, self.use_cuda_graph
        is_padded = (self.q_padding_interval_size, self.kv_padding_interval_size) != (Q_INTERVAL, KV_INTERVAL)
        return is_padded, True

    def accelerator_settings(self) -> list[str]:
        """The names of what is asked for that only an accelerator can do."""
        asked = {
            "use_cuda_graph": self.use_cuda_graph not in (None, False, (False, False)),
            "q_padding_interval_size": self.q_padding_interval_size != Q_INTERVAL,
            "kv_padding_interval_size": self.kv_padding_interval_size != KV_INTERVAL,
            "use_async_batching": bool(self.use_async_batching),
            "default_compile_level": self.default_compile_level != 0,
            "varlen_compile_config": self.varlen_compile_config is not None,
            "decode_compile_config": self.decode_compile_config is not None,
            "max_blocks_per_request": bool(self.max_blocks_per_request),
        }
        return [name for name, is_asked in asked.items() if is_asked]

    @classmethod
    def from_transformers(cls, config: ContinuousBatchingConfig, **changes: Any) -> EngineConfig:
        """Take the fields of transformers' `ContinuousBatchingConfig` that exist here; the object is not changed.

        Args:
            config: transformers' settings.
            changes: fields of this class that it has not, or that replace its own.

        Raises:
            ConfigError: a value is out of its range.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"per_request_processors"}
        values = {name: getattr(config, name) for name in names if hasattr(config, name)}
        # The reference's class defaults are not choices of its user: leave those to be decided at start.
        if values.get("page_size") == 256:
            del values["page_size"]
        for name in ("q_padding_interval_size", "kv_padding_interval_size"):
            if not values.get(name):
                values.pop(name, None)
        return cls(**{**values, **changes})


def _is_switch(name: str, value: Any, *, pair: bool = False) -> None:
    if value is None or isinstance(value, bool):
        return
    if not pair or not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(one, bool) for one in value):
        raise ConfigError(f"{name} must be True, False{', a pair of them' if pair else ''} or None, not {value!r}")


def _at_least(name: str, value: Any, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, not {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {value}")


def _within(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise ConfigError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], not {value!r}")
