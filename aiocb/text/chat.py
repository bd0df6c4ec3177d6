"""Chat messages to text: what the template wants, what it would drop, and what users may not spell in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiocb.errors import InvalidRequest, explain, show_value
from aiocb.text.answer.dialect import Dialect, find_dialect
from aiocb.text.answer.formats import FORMATS
from aiocb.text.history import HistoryForm, find_history_form, merge_messages, shape_history
from aiocb.text.prompts import texts_of
from aiocb.text.tools import describe_tools

__all__ = ["ChatTemplate", "Rendered", "SpecialTexts"]

_BREAKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters, which Unicode keeps for a program's own use; one of them breaks special tokens apart."""
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_MEDIA_FIELDS = ("image", "images", "image_url", "audio", "audios", "input_audio", "video", "videos", "file", "files")
_NO_CONTENT = frozenset({"role", "name", "tool_call_id"})
_NOT_FOR_TEMPLATES = frozenset(
    {
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_PROBE = "Xq7"
_PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_PRINTED_PART = re.compile(rf"""['"]text['"]:\s*['"]{_PROBE}""")
_MAX_KNOWN_TEMPLATES = 8


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
        parts: the text. More than one where it spells special tokens that have to stay text: each is cut in two, so
            that no part holds one that is not the template's own.
        dialect: how the model writes its answer.
        is_thinking: a block of reasoning is open where the answer begins.
        is_thought_over: one has been closed there.
    """

    parts: list[str]
    dialect: Dialect
    is_thinking: bool
    is_thought_over: bool


class SpecialTexts:
    """Finds what spells a special token in texts of users, and breaks it apart.

    Args:
        texts: of the special tokens. One of a single character cannot be told from text and is left alone.
        normalize: what the tokenizer does to a text before it looks for the special tokens in `normalized`.
        normalized: those that are looked for in the normalized text.
    """

    def __init__(
        self, texts: Iterable[str], normalize: Callable[[str], str] | None = None, normalized: Iterable[str] = ()
    ) -> None:
        # Not one regular expression: alternatives are tried one by one, and a vocabulary may have thousands.
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(re.escape(character) for character in {text[0] for text in self._texts})
        self._first = re.compile(f"[{first}]" if first else "(?!)")
        self._normalize = normalize
        self._normalized = [text for text in normalized if len(text) > 1]

    def are_in(self, value: Any) -> bool:
        """Whether any text of a copied structure spells a special token."""
        return any(self._is_in(text) for text in texts_of(value))

    def split(self, text: str) -> list[str]:
        """Cut a text within everything that spells a special token, so that no part does."""
        parts, start = [], 0
        while (found := self._find(text, start)) is not None:
            parts.append(text[start : found[0] + 1])
            start = found[0] + 1  # within it: special tokens may overlap
        parts.append(text[start:])
        # What only the normalized text shows can be anywhere.
        return list(text) if any(self._is_in(part) for part in parts) else parts

    def broken(self, value: Any, mark: str) -> Any:
        """Copy a structure with `mark` wherever `split` cuts its texts and keys."""
        if isinstance(value, str):
            return mark.join(self.split(value))
        if isinstance(value, Mapping):
            return {self.broken(key, mark): self.broken(each, mark) for key, each in value.items()}
        return [self.broken(each, mark) for each in value] if isinstance(value, (list, tuple)) else value

    def replace(self, text: str, replace: Callable[[str], str]) -> str:
        """Replace every special token in a text; of several that begin together, the longest."""
        parts, start = [], 0
        while (found := self._find(text, start)) is not None:
            place, special = found
            parts += [text[start:place], replace(special)]
            start = place + len(special)
        return "".join([*parts, text[start:]])

    def _is_in(self, text: str) -> bool:
        if self._find(text, 0) is not None:
            return True
        if not self._normalized or self._normalize is None:
            return False
        text = self._normalize(text)
        return any(special in text for special in self._normalized)

    def _find(self, text: str, start: int) -> tuple[int, str] | None:
        texts, lengths = self._texts, self._lengths
        for candidate in self._first.finditer(text, start):
            place = candidate.start()
            for length in lengths:
                if (special := text[place : place + length]) in texts:
                    return place, special
        return None


class _Wants(NamedTuple):
    """What a template renders: a content that is a text, or one that is a list of parts."""

    text: bool
    parts: bool


class _Known(NamedTuple):
    """What has been found out about a template."""

    wants: _Wants
    renders_tools: bool
    dialect: Dialect


class ChatTemplate:
    """A tokenizer's chat template as an engine uses it; every refusal is an `InvalidRequest`.

    Args:
        tokenizer: a transformers tokenizer.
        specials: its special tokens.
    """

    def __init__(self, tokenizer: Any, specials: SpecialTexts) -> None:
        self._tokenizer = tokenizer
        self._specials = specials
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._history: dict[tuple[Any, ...], HistoryForm] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any] | None,
        *,
        parses_specials: bool,
        parsers: tuple[str, str] = ("auto", "auto"),
    ) -> Rendered:
        """Render messages, ready for the assistant's answer.

        Args:
            messages: as `take_prompt` returns them.
            tools: as `take_tools` returns them.
            arguments: further ones of the template; also `chat_template`, `add_generation_prompt` and
                `continue_final_message` (which replaces the former).
            parses_specials: what messages, tools and documents spell may become special tokens.
            parsers: `EngineConfig.tool_parser` and `reasoning_parser`.

        Raises:
            InvalidRequest: no template, a message without content, a part or tools that the template leaves out,
                arguments that are no template's, or the template refused.
        """
        given = self._arguments(arguments)
        if self._tokenizer.chat_template is None and given.get("chat_template") is None:
            raise InvalidRequest(
                "this model's tokenizer has no chat template (a base model?): give the prompt as text, or a template "
                "with chat_template_kwargs={'chat_template': ...}"
            )
        tools = list(tools or ()) or None
        known = self._find_out(tools, given, parsers)
        dialect = known.dialect
        messages = shape_history(messages, lambda: self._history_form(given, parsers), dialect)
        if tools is not None and not known.renders_tools:
            messages = _with_described(messages, tools, dialect)
            tools = None
        prepared = self._prepare(messages, tools, given, known.wants)
        theirs = [prepared, tools, given.get("documents")]
        if parses_specials or not self._specials.are_in(theirs):
            parts = [self._render(prepared, tools, given)]
        else:
            mark = next((mark for mark in _BREAKS if not any(mark in text for text in texts_of(theirs))), None)
            if mark is None:
                raise InvalidRequest(
                    "the messages spell special tokens and hold every noncharacter; remove one of them"
                )
            broken, tools, documents = self._specials.broken(theirs, mark)
            if documents is not None:
                given["documents"] = documents
            parts = self._render(broken, tools, given).split(mark)
        text = "".join(parts)
        is_over = dialect.thoughts is not None and text.rstrip().endswith(dialect.thoughts.closer)
        return Rendered(parts, dialect, _is_thinking(text, prepared, given, dialect), is_over)

    def dialect(self, parsers: tuple[str, str]) -> Dialect:
        """How the model writes answers to messages with tools, by its own template."""
        return find_dialect(self._source([_PROBE_TOOL], {}), *parsers)

    def _arguments(self, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
        given = dict(arguments or {})
        wrong = sorted(_NOT_FOR_TEMPLATES & given.keys())
        if wrong:
            raise InvalidRequest(f"chat_template_kwargs must not hold {', '.join(wrong)}: the template does not see it")
        given.setdefault("add_generation_prompt", not given.get("continue_final_message", False))
        return given

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, arguments: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **arguments)
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise InvalidRequest(f"the chat template refused these messages: {explain(error)}") from error
        return str(text)

    # ── contents ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, arguments: Mapping[str, Any], wants: _Wants
    ) -> list[Mapping[str, Any]]:
        """The messages with contents of the form that the template wants; nothing of them is dropped."""
        prepared: list[Mapping[str, Any]] = []
        suspects: dict[str, None] = {}
        for number, message in enumerate(messages):
            where = f"message {number} ({show_value(message['role'])})"
            if message.keys() <= _NO_CONTENT:
                raise InvalidRequest(f"{where} has no content; give it one, an empty text if need be")
            suspects.update(dict.fromkeys(name for name in _MEDIA_FIELDS if message.get(name)))
            if message.get("content") is None:
                prepared.append(message)
                continue
            content, media = _content(message["content"], wants, where)
            suspects.update(dict.fromkeys(media))
            prepared.append({**message, "content": content})
        if suspects:
            everything = self._render(prepared, tools, arguments)
            for kind in suspects:
                if self._render([_without(message, kind) for message in prepared], tools, arguments) == everything:
                    raise InvalidRequest(
                        f"the chat template of this model leaves out content of type {kind!r}: remove it, or say in "
                        "text what it shows"
                    )
        return prepared

    def _find_out(self, tools: Any, arguments: Mapping[str, Any], parsers: tuple[str, str]) -> _Known:
        """What a template does, by rendering it; remembered."""
        template = arguments.get("chat_template")
        key = (template if isinstance(template, str) else None, tools is not None, parsers)
        known = self._known.get(key)
        if known is None:
            quiet = {**arguments, "add_generation_prompt": False, "continue_final_message": False}
            some = None if tools is None else [_PROBE_TOOL]  # a tokenizer may have another template for tools

            def render(content: Any, tools: Any = some) -> str:
                try:
                    return self._render([{"role": "user", "content": content}], tools, quiet)
                except InvalidRequest:
                    return ""

            text = render(_PROBE)
            parts = render([{"type": "text", "text": _PROBE}])
            wants = _Wants(_PROBE in text, _PROBE in parts and not _PRINTED_PART.search(parts))
            renders_tools = tools is not None and any(
                render(content) != render(content, None) for content in (_PROBE, [{"type": "text", "text": _PROBE}])
            )
            if not any(wants):  # it does not take a single message of a user: nothing is known
                wants, renders_tools = _Wants(text=True, parts=False), True
            known = _Known(wants, renders_tools, find_dialect(self._source(tools, arguments), *parsers))
            if len(self._known) >= _MAX_KNOWN_TEMPLATES:
                self._known.clear()
            self._known[key] = known
        return known

    def _history_form(self, arguments: Mapping[str, Any], parsers: tuple[str, str]) -> HistoryForm:
        """The same for calls of earlier turns; only asked where there are some."""
        template = arguments.get("chat_template")
        key = (template if isinstance(template, str) else None,)
        form = self._history.get(key)
        if form is None:
            quiet = {**arguments, "add_generation_prompt": False, "continue_final_message": False}

            def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str | None:
                try:
                    return self._render(messages, list(tools), quiet)
                except InvalidRequest:
                    return None

            form = find_history_form(render)
            if len(self._history) >= _MAX_KNOWN_TEMPLATES:
                self._history.clear()
            self._history[key] = form
        return form

    def _source(self, tools: Any, arguments: Mapping[str, Any]) -> str:
        """The text of the template that is going to be used."""
        given, own = arguments.get("chat_template"), self._tokenizer.chat_template
        if isinstance(own, Mapping):
            found = own.get(given) or given or (own.get("tool_use") if tools else None) or own.get("default")
        else:
            found = given or own
        return found if isinstance(found, str) else ""


def _with_described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], dialect: Dialect
) -> Sequence[Mapping[str, Any]]:
    """Messages that say in words which tools there are."""
    if not dialect.is_asked_for or dialect.call_format is None:
        raise InvalidRequest(
            "the chat template of this model leaves tools out: it was not made to call any. To have them described in "
            "a system message, and calls read as JSON, set EngineConfig(tool_parser='json')"
        )
    described = {"role": "system", "content": describe_tools(tools, in_json=dialect.call_format is FORMATS["json"])}
    if messages and messages[0]["role"] == "system":
        return [merge_messages(messages[0], described), *messages[1:]]
    return [described, *messages]


def _is_thinking(
    text: str, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], dialect: Dialect
) -> bool:
    """Whether a block of reasoning is open at the end of a prompt."""
    if dialect.thoughts is None:
        return False
    opener, closer = dialect.thoughts
    if text.rstrip().endswith(opener):
        return True
    content = messages[-1].get("content") if messages and arguments.get("continue_final_message") else None
    return isinstance(content, str) and content.rfind(opener) > content.rfind(closer)


def _content(content: Any, wants: _Wants, where: str) -> tuple[Any, list[str]]:
    """A message's content as the template wants it, and the types of its parts that are not text."""
    if isinstance(content, str):
        return (content if wants.text else [{"type": "text", "text": content}]), []
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list) or not parts:
        raise InvalidRequest(f"the content of {where} must be a text or a list of parts, not {show_value(content)}")
    prepared: list[Any] = []
    media: list[str] = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or (kind in _TEXT_TYPES and not isinstance(part.get("text"), str)):
            raise InvalidRequest(
                f"the content of {where} must hold parts with a 'type' and what belongs to it, not {show_value(part)}"
            )
        if kind in _TEXT_TYPES:
            prepared.append({"type": "text", "text": part["text"]})
        else:
            media.append(kind)
            prepared.append(part)
    if wants.parts:
        return prepared, media
    if media:
        raise InvalidRequest(
            f"the content of {where} has a part of type {media[0]!r}, but the chat template of this model takes text "
            "only: remove it, or say in text what it shows"
        )
    return "".join([part["text"] for part in prepared]), []


def _without(message: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A message without the parts or the field of a kind."""
    kept = {key: value for key, value in message.items() if key != kind}
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = [part for part in content if part.get("type") != kind]
    return kept
