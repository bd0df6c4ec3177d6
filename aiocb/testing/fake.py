"""A model without weights: `FakeRunner`, its tokenizer, and `fake_engine` around both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.config import Choice, EngineConfig
from aiocb.engine.engine import Engine
from aiocb.records import Record
from aiocb.sampling_params import ModelDefaults
from aiocb.step import ImmediateRunner, StepPlan, StepResult
from aiocb.testing.gate import Gate
from aiocb.testing.records import CheckedRecords, fake_result, simple_layout
from aiocb.text.detokenizer import byte_alphabet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["EOS_TOKEN_ID", "FakeRunner", "byte_tokenizer", "fake_engine"]

_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
EOS_TOKEN_ID = 256
"""Of `byte_tokenizer`: ids below it are bytes."""
_VOCAB_SIZE = EOS_TOKEN_ID + len(_SPECIAL)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Reply = Sequence[int] | Callable[[Sequence[int]], Sequence[int]]


class FakeRunner(ImmediateRunner):
    """A `Runner` that computes nothing: every request gets its reply, one token per step.

    Steps are counted from 1. A request's tokens depend on its own prompt (and seed, when it samples) alone.

    It is stricter than a model: a second thread, an id that was used before, or requests that are left when a life has
    ended fail the step that meets them, and so the engine.

    Args:
        reply: the tokens of every answer, or a function from a prompt to them; `eos_token_id` follows (without one the
            reply starts over). None: letters that depend on the history, without an end.
        vocab_size, max_model_len: as a model would report them.
        eos_token_id: ends a scripted reply.
        num_blocks, page_size, windows: the cache that it pretends to hold; one group of layers per window.
        num_slots: of states that it pretends to hold, the null slot included; 0 for a model without states.
        swap_places: of the swap space that it pretends to have, per group of layers.
        gate: holds every step until the test lets it pass.
        step_time: seconds that a step takes (asleep: the event loop is free).
        raise_at: exceptions by step: the step raises, which kills the engine.
        hang_at: steps that hang until `resume()` is called.
        fail: called with the step's number and the `Record` of each of its requests; an exception that it returns ends
            that request.

    Attributes:
        num_steps, num_tokens: computed so far, tokens of prompts included.
        max_requests: of the largest step.
        is_hanging: True while a step of `hang_at` waits.
        is_closed: the engine has given it back.
    """

    def __init__(
        self,
        reply: Reply | None = None,
        *,
        vocab_size: int = _VOCAB_SIZE,
        max_model_len: int = 1 << 16,
        eos_token_id: int | None = None,
        num_blocks: int = 1024,
        page_size: int = 16,
        windows: Sequence[int | None] = (None,),
        num_slots: int = 0,
        swap_places: int = 0,
        gate: Gate | None = None,
        step_time: float = 0.0,
        raise_at: Mapping[int, BaseException] | None = None,
        hang_at: Collection[int] = (),
        fail: Callable[[int, Record], Exception | None] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_id = eos_token_id
        self.cache_layout = simple_layout(
            num_blocks, page_size=page_size, windows=windows, num_slots=num_slots, swap_places=swap_places
        )
        self.device_type = "cpu"
        self.choices = (Choice("model", "FakeRunner", "scripted tokens"),)
        self.num_steps = 0
        self.num_tokens = 0
        self.max_requests = 0
        self.is_hanging = False
        self.is_closed = False
        self._reply = reply
        self._records = CheckedRecords()
        self._gate = gate
        self._step_time = step_time
        self._raise_at = dict(raise_at or {})
        self._hang_at = frozenset(hang_at)
        self._fail = fail or (lambda step, record: None)
        self._resumed = threading.Event()

    @property
    def num_open(self) -> int:
        """Requests that were opened and not closed."""
        return len(self._records)

    def execute(self, plan: StepPlan) -> StepResult:
        """Pass the gate, do what the fault plan says, and answer."""
        records = self._records.begin(plan)
        if not plan.entries:
            return StepResult(())
        if self._gate is not None:
            self._gate.enter()
        self.num_steps += 1
        step = self.num_steps
        if step in self._hang_at:
            self.is_hanging = True
            self._resumed.wait()
            self.is_hanging = False
        if self._step_time:
            time.sleep(self._step_time)
        if step in self._raise_at:
            raise self._raise_at[step]
        failures = {record.request_id: self._fail(step, record) for record in records}
        errors = {request_id: error for request_id, error in failures.items() if error is not None}
        sampled = [
            (self._next_token(record),) if entry.is_sampled and entry.request_id not in errors else ()
            for entry, record in zip(plan.entries, records, strict=True)
        ]
        result = fake_result(plan, records, sampled, errors)
        self._records.finish(records, result)
        self.num_tokens += plan.num_tokens
        self.max_requests = max(self.max_requests, len(plan.entries))
        if self._gate is not None:
            self._gate.leave()
        return result

    def _next_token(self, record: Record) -> int:
        tokens = record.tokens
        position = len(tokens) - record.num_prompt_tokens
        reply = self._reply
        if reply is None:
            seed = 0 if record.sampling.is_greedy else record.seed % 1009 + 1
            mixed = tokens[0] + 31 * tokens[-1] + 7 * len(tokens) + seed * (position + 1)
            first = ord("a") if self.vocab_size > ord("z") else 0
            return first + mixed % min(26, self.vocab_size)
        if record.state is None:
            record.state = reply(tokens[: record.num_prompt_tokens]) if callable(reply) else reply
        script: Sequence[int] = record.state
        if position < len(script):
            return script[position]
        return self.eos_token_id if self.eos_token_id is not None else script[position % len(script)]

    def resume(self) -> None:
        """Let the step that hangs go on, and those that would (any thread)."""
        self._resumed.set()

    def release(self) -> None:
        """Check that a life has left nothing, and forget it."""
        num_open = self.num_open
        self._records.clear()
        assert not num_open, f"a life of the engine has left {num_open} requests open"

    def reload_weights(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Note that the engine has given it back. It can be used again."""
        self.is_closed = True
        self._records.clear()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids below 256 are the bytes of the text, with an end token and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend, eos_token=_SPECIAL[0], chat_template=_CHAT_TEMPLATE
    )
    return tokenizer


def fake_engine(
    reply: str | Callable[[str], str] | None = None,
    *,
    runner: FakeRunner | None = None,
    tokenizer: Any = None,
    config: EngineConfig | None = None,
    drain: float | None = 0.0,
    **options: Any,
) -> Engine:
    """Return an engine without a model, for tests of programs that use one. It is entered like any other.

    Args:
        reply: what every request is answered, or a function from the prompt's text (special tokens included) to it.
            None: letters that depend on the prompt, until `max_new_tokens`.
        runner: instead of `reply` and `options`, to look at it or to steer it.
        tokenizer: instead of `byte_tokenizer()`; False for an engine without one.
        config: instead of the default, which checks every invariant after every step.
        drain: as for `Engine`.
        options: of `FakeRunner`: `gate=`, `raise_at=`, `hang_at=`, `fail=`, `num_blocks=`, `step_time=`, ...
    """
    made = byte_tokenizer() if tokenizer is None else tokenizer or None
    if runner is None:
        options.setdefault("eos_token_id", EOS_TOKEN_ID)
        runner = FakeRunner(_as_tokens(reply, made), **options)
    elif reply is not None or options:
        raise TypeError("give either a runner, or a reply and options to make one with")
    eos = () if runner.eos_token_id is None else (runner.eos_token_id,)
    return Engine.from_runner(
        lambda _: runner,
        ModelDefaults(runner.vocab_size, runner.max_model_len, eos),
        made,
        config=config or EngineConfig(debug_checks=True),
        drain=drain,
    )


def _as_tokens(reply: str | Callable[[str], str] | None, tokenizer: Any) -> Reply | None:
    if reply is None:
        return None
    if tokenizer is None:
        raise TypeError("a reply in text needs a tokenizer")
    if isinstance(reply, str):
        return list(tokenizer.encode(reply, add_special_tokens=False))

    def answer(prompt: Sequence[int]) -> Sequence[int]:
        return list(tokenizer.encode(reply(tokenizer.decode(prompt)), add_special_tokens=False))

    return answer
