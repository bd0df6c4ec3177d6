"""Any thread: prompts to token ids, and what turns an output's token ids into text.

A tokenizer belongs to its user, who may be encoding with it in other threads at the same time, with truncation and
padding that a fast tokenizer keeps as *state*. So nothing is changed here: the backend is called directly, which
also releases the GIL while it works, and a result that another thread's truncation has cut is thrown away.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.checks import check_ids
from aiocb.errors import InvalidRequest, explain, show_value
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.structure import CompiledStructure, Structure, structure_of
from aiocb.text.answer.dialect import AnswerPlan, Dialect
from aiocb.text.answer.grammar import answer_grammar
from aiocb.text.answer.output import AnswerOutput
from aiocb.text.chat import ChatTemplate, SpecialTexts
from aiocb.text.detokenizer import TokenText
from aiocb.text.output import MARKS, Marking, TextOutput
from aiocb.text.pieces import Detokenizer
from aiocb.text.prompts import Messages, Refused, take_prompt
from aiocb.text.stop_strings import StopMatcher, StopStrings
from aiocb.text.tools import ToolSet, take_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from aiocb.sampling.grammar import Compiler

__all__ = ["TextProcessor"]

_PROBES = ("Hello, world!  It's 3.5 °C.\n\n", "日本語 😀 naïve", "<s> [INST] x [/INST]</s>", "")
_BEFORE = "\n"
"""Stands before a part of a text while it is encoded: at the start of a text, some tokenizers add a space."""


class Chat(NamedTuple):
    """A conversation as a prompt, and what has to be found in the answers."""

    token_ids: list[int]
    plan: AnswerPlan


class TextProcessor:
    """A tokenizer as an engine uses it: thread-safe, never changed, every refusal an `InvalidRequest`.

    Args:
        tokenizer: a transformers tokenizer, or None: then prompts are token ids and there is no text.

    Attributes:
        tokenizer: as it was given.
        token_text: makes the detokenizers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.token_text = TokenText(tokenizer)
        self._tokenizer: Any = tokenizer  # the same, without types
        self._lock = threading.Lock()  # for tokenizers in Python: their state is not known
        self._backend: Any = None
        self._compiler: Compiler | None = None

    def prepare(self) -> None:
        """Choose and prove the fast paths; meant for the thread that loads the model. Idempotent."""
        self.token_text.prepare()
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or self._backend is not None:
            return
        if all(
            self._tokenizer.encode(text, add_special_tokens=special) == _encode(backend, text, special)
            for text in _PROBES
            for special in (True, False)
        ):
            self._backend = backend

    @property
    def has_tokenizer(self) -> bool:
        """False when prompts can only be token ids."""
        return self._tokenizer is not None

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text as the tokenizer does.

        Raises:
            InvalidRequest: there is no tokenizer, or it refused the text.
        """
        tokenizer = self._need_tokenizer("a prompt of text")
        backend = self._backend
        try:
            if backend is None:
                with self._lock:
                    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
            for _ in range(4):
                ids = _encode(backend, text, add_special_tokens)
                if ids is not None:
                    return ids
            # Its user leaves truncation or padding switched on: an own copy (seconds for a large vocabulary, once).
            with self._lock:
                if self._backend is backend:
                    self._backend = _private(backend)
            return _encode(self._backend, text, add_special_tokens) or []
        except Exception as error:
            raise InvalidRequest(f"the tokenizer cannot encode this prompt: {explain(error)}") from error

    def encode_as_text(self, text: str) -> list[int]:
        """Encode a text as `encode` does, but what spells a special token in it stays ordinary text.

        Raises:
            InvalidRequest: as `encode`.
        """
        if not self._specials.are_in(text):
            return self.encode(text)
        first, *rest = self._specials.split(text)
        ids = self.encode(first)
        bare = self.encode(first, add_special_tokens=False)
        # What the tokenizer adds behind a text has to stand behind the whole.
        end = next((at + len(bare) for at in range(len(ids)) if ids[at : at + len(bare)] == bare), len(ids))
        return [*ids[:end], *self._encode_after(rest), *ids[end:]]

    def take_chat(
        self,
        messages: Any,
        *,
        tools: ToolSet | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special_tokens: bool = False,
        parsers: tuple[str, str] = ("auto", "auto"),
    ) -> Chat:
        """Render messages with the chat template and encode the result, without further special tokens.

        What messages, tools and documents spell does not become a special token, unless `parse_special_tokens`. The
        ids are those of the rendered text as a whole wherever nothing spells one.

        Args:
            messages: as for `take_prompt`.
            tools: what may be called.
            chat_template_kwargs, parse_special_tokens, parsers: see `ChatTemplate.render`.

        Raises:
            InvalidRequest: as `ChatTemplate.render` and `encode`.
        """
        taken = take_prompt(messages)
        if not isinstance(taken, Messages):
            raise InvalidRequest(taken.reason if isinstance(taken, Refused) else "these are no chat messages")
        offered = tools or ToolSet()
        rendered = self._chat.render(
            taken.messages,
            None if offered.choice == "none" else offered.tools,
            chat_template_kwargs,
            parses_specials=parse_special_tokens,
            parsers=parsers,
        )
        first, *rest = rendered.parts
        plan = AnswerPlan(
            rendered.dialect,
            rendered.is_thinking,
            rendered.is_thought_over,
            offered.schemas,
            looks_for_calls=bool(offered.tools),
            ends_after_call=not offered.is_parallel,
        )
        return Chat([*self.encode(first, add_special_tokens=False), *self._encode_after(rest)], plan)

    def encode_chat(self, messages: Any, *, tools: Sequence[Any] | None = None, **options: Any) -> list[int]:
        """The token ids of `take_chat`.

        Args:
            messages, options: see there.
            tools: see `take_tools`.
        """
        return self.take_chat(messages, tools=take_tools(tools), **options).token_ids

    def find_dialect(self, parsers: tuple[str, str]) -> Dialect | None:
        """How the model writes reasoning and calls, by its own template; None without one."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return None
        return self._chat.dialect(parsers)

    def normalize_prompt(
        self,
        prompt: Any,
        *,
        vocab_size: int,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special_tokens: bool | None = None,
    ) -> list[int]:
        """Turn any kind of prompt into a fresh list of token ids.

        Args:
            prompt: see `take_prompt`.
            vocab_size: every id must lie below it.
            tools, chat_template_kwargs: as for `encode_chat`; only with chat messages.
            parse_special_tokens: see `SamplingParams`.

        Raises:
            InvalidRequest: it can be no prompt, is empty, or holds an id that the model does not have.
        """
        taken = take_prompt(prompt)
        if isinstance(taken, Refused):
            raise InvalidRequest(taken.reason)
        if isinstance(taken, Messages):
            ids = self.encode_chat(
                taken,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                parse_special_tokens=bool(parse_special_tokens),
            )
        elif tools or chat_template_kwargs:
            raise InvalidRequest("tools and chat_template_kwargs need a prompt of chat messages")
        elif isinstance(taken, str):
            ids = self.encode_as_text(taken) if parse_special_tokens is False else self.encode(taken)
        else:
            ids = list(taken)
        if not ids:
            raise InvalidRequest("the tokenizer makes no tokens of this prompt; give at least one token")
        return list(check_ids("the prompt", ids, vocab_size))

    # ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────

    def make_outputs(
        self,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        count: int,
        plan: AnswerPlan | None = None,
    ) -> tuple[TextOutput, ...]:
        """What turns the tokens of `count` samples of one prompt into text.

        Args:
            sampling: resolved parameters.
            prompt_token_ids: for an echo.
            plan: where reasoning and calls are to be told apart from content.
        """
        skip = bool(sampling.skip_special_tokens)
        stops, marking, marks = self._make_stops(sampling.stop or (), skip)

        def make_matcher() -> StopMatcher | None:
            return None if stops is None else StopMatcher(stops, sampling.include_stop_str_in_output)

        echo = prompt_token_ids if sampling.echo else ()
        least = sampling.min_new_tokens or 0
        output: TextOutput
        if plan is not None and not plan.is_plain:
            if skip:
                specials = self.token_text.special_tokens
                found = {marker: marker for marker in plan.markers if marker in specials}
                shown = self._marking({**marks, **found})
            else:
                shown = self.token_text.detokenizer(skip_special_tokens=False)
            names = None if marking is None else marking.names
            output = AnswerOutput(shown, plan, make_matcher(), min_new_tokens=least, echo=echo, stop_names=names)
        else:
            output = TextOutput(
                self.token_text.detokenizer(skip_special_tokens=skip),
                make_matcher(),
                min_new_tokens=least,
                echo=echo,
                marking=marking,
            )
        return (output, *(output.fork(make_matcher()) for _ in range(count - 1)))

    def _marking(self, marks: Mapping[str, str]) -> Detokenizer:
        """A detokenizer that leaves special tokens out, but yields a mark in the place of some, given by their text."""
        return self.token_text.marking(
            {self._tokenizer.convert_tokens_to_ids(text): mark for text, mark in marks.items()}
        )

    def _make_stops(
        self, stops: Sequence[str], skip: bool
    ) -> tuple[StopStrings | None, Marking | None, Mapping[str, str]]:
        """Stop strings; those that name special tokens which the text leaves out, with marks for these."""
        if not stops:
            return None, None, {}
        marks: dict[str, str] = {}
        names: dict[str, str] = {}
        if skip:

            def mark(special: str) -> str:
                return marks.setdefault(special, chr(MARKS[len(marks)]))

            names = {self._specials.replace(stop, mark): stop for stop in stops}
        if not marks:
            return StopStrings(stops), None, {}
        return StopStrings(names), Marking(self._marking(marks), names), marks

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Every way in which the tokenizer writes each word: at the start of a text, after a space, within a text.

        Raises:
            InvalidRequest: no tokenizer, or a word that is empty.
        """
        self._need_tokenizer("bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            if not bare:
                raise InvalidRequest(f"bad_words must hold words, not {show_value(word)}")
            wanted = {bare.encode(), b" " + bare.encode()}
            before = len(found)
            for context in ("", " ", "\n", "(", "a "):
                ids = self.encode(context + bare, add_special_tokens=False)
                pieces = [self.token_text.piece(token_id) for token_id in ids]
                for start in range(len(ids)):
                    if b"".join(pieces[start:]) in wanted:
                        found[tuple(ids[start:])] = None
                        break
            if len(found) == before:  # a tokenizer that rewrites words, say in lower case
                ids = self.encode(bare, add_special_tokens=False)
                if ids and getattr(self._tokenizer, "unk_token_id", None) not in ids:
                    found[tuple(ids)] = None
        return tuple(found)

    def has_compiled(self, sampling: SamplingParams) -> bool:
        """Whether the structure that a request asks for is there already (unresolved parameters). Never waits."""
        compiler = self._compiler
        if compiler is None:
            return False
        try:
            structure = structure_of(sampling.structure_values)
        except InvalidRequest:
            return True  # to be refused where requests are
        return structure is None or compiler.find(structure) is not None

    def with_structure(self, sampling: SamplingParams, defaults: ModelDefaults) -> SamplingParams:
        """Resolved parameters with what has been compiled of their structure as `grammar`.

        Raises:
            InvalidRequest: it cannot be compiled.
        """
        structure = structure_of(sampling.structure_values)
        if structure is None:
            return sampling
        grammar = self._compile(structure, defaults)
        return dataclasses.replace(sampling, json_schema=None, regex=None, choice=None, grammar=grammar)

    def _compile(self, structure: Structure, defaults: ModelDefaults) -> CompiledStructure:
        tokenizer = self._need_tokenizer("an output's structure")
        from aiocb.sampling.grammar import Compiler  # which needs torch

        with self._lock:
            if self._compiler is None:
                ends = [token_id for token_id in defaults.eos_token_ids if token_id < defaults.vocab_size]
                self._compiler = Compiler(tokenizer, defaults.vocab_size, ends)
        return self._compiler.compile(structure)

    def with_answer(
        self,
        sampling: SamplingParams,
        defaults: ModelDefaults,
        plan: AnswerPlan,
        tools: ToolSet,
        structure: Structure | None,
    ) -> SamplingParams:
        """Resolved parameters that make an answer what a plan, a choice of tools and a structure ask for.

        Raises:
            InvalidRequest: these do not go together, or cannot be compiled.
        """
        if structure is not None:
            self._compile(structure, defaults)  # what is wrong with it is told as its own
        if tools.choice == "none" and plan.call_format is not None:
            found = [self._marker_id(opener) for opener in plan.call_format.openers]
            banned = tuple([(token_id,) for token_id in found if token_id is not None])
            if banned:
                sampling = dataclasses.replace(sampling, bad_words_ids=(*(sampling.bad_words_ids or ()), *banned))
        may_call = bool(tools.schemas)
        if structure is not None and may_call and (tools.is_forced or structure.kind == "grammar"):
            raise InvalidRequest(
                f"{structure.kind} was given with tools"
                + (" and a tool_choice that leaves no room for it" if tools.is_forced else "")
                + ": leave one of them out"
            )
        if structure is not None and structure.kind == "grammar":
            sampling = dataclasses.replace(sampling, grammar=structure.text)
        elif tools.is_forced or structure is not None or (may_call and tools.strict):
            grammar = answer_grammar(plan, self._marker_id, forced=tools.is_forced, structure=structure)
            sampling = dataclasses.replace(sampling, grammar=grammar)
        else:
            return sampling.resolve(defaults)
        return self.with_structure(sampling.resolve(defaults), defaults)

    def _marker_id(self, marker: str) -> int | None:
        """The token that a marker is, where it is one."""
        found: int | None = self._added_tokens.get(marker)
        return found

    # ── within ───────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        return dict(self._tokenizer.get_added_vocab())

    @cached_property
    def _specials(self) -> SpecialTexts:
        self._need_tokenizer("a prompt of text")
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        normalizer: Any = getattr(backend, "normalizer", None)
        normalized: list[str] = []
        if normalizer is not None:
            added = backend.get_added_tokens_decoder().values()
            normalized = [normalizer.normalize_str(t.content) for t in added if t.special and t.normalized]
        return SpecialTexts(self.token_text.special_tokens, getattr(normalizer, "normalize_str", None), normalized)

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self._need_tokenizer("a prompt of chat messages"), self._specials)

    def _encode_after(self, parts: Iterable[str]) -> list[int]:
        """Encode parts of one text that follow others."""
        ids: list[int] = []
        before = self.encode(_BEFORE, add_special_tokens=False)
        for part in parts:
            found = self.encode(_BEFORE + part, add_special_tokens=False)
            is_apart = found[: len(before)] == before
            ids += found[len(before) :] if is_apart else self.encode(part, add_special_tokens=False)
        return ids

    def _need_tokenizer(self, what: str) -> Any:
        if self._tokenizer is None:
            raise InvalidRequest(f"this engine has no tokenizer, so {what} cannot be encoded; give token ids instead")
        return self._tokenizer


def _encode(backend: Any, text: str, add_special_tokens: bool) -> list[int] | None:
    """Encode without changing the tokenizer; None when truncation or padding was switched on meanwhile."""
    if backend.truncation is not None or backend.padding is not None:
        return None
    # encode_batch_fast, not encode: it releases the GIL and does not compute offsets.
    encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    if encoding.overflowing or backend.truncation is not None or backend.padding is not None:
        return None
    ids: list[int] = encoding.ids
    return ids


def _private(backend: Any) -> Any:
    own = copy.deepcopy(backend)
    own.no_truncation()
    own.no_padding()
    return own
