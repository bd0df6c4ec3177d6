"""Any thread: prompts to token ids. Short prompts are encoded on the event loop, long ones in a thread (`is_long`).

A tokenizer belongs to its user, who may be encoding with it in other threads at the same time, with truncation and
padding that a fast tokenizer keeps as *state*. So nothing is changed here: the backend is called directly, which
also releases the GIL while it works, and a result that another thread's truncation has cut is thrown away.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.errors import InvalidRequest
from aiocb.sampling_params import check_ids
from aiocb.text.detokenizer import Detokenizer, TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextProcessor", "is_long", "is_messages"]

LONG_TEXT = 2000
"""Characters (about 0.3 ms of work) from which a prompt is encoded in a thread."""
LONG_IDS = 100_000
"""Ids (about a millisecond of checks) from which the same holds for a prompt of token ids."""

_PROBES = ("Hello, world!  It's 3.5 °C.\n\n", "日本語 😀 naïve", "<s> [INST] x [/INST]</s>", "")


class TextProcessor:
    """A tokenizer as an engine uses it: thread-safe, never changed, every refusal an `InvalidRequest`.

    Args:
        tokenizer: a transformers tokenizer, or None: then prompts are token ids and there is no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer: Any = tokenizer
        self._token_text = TokenText(tokenizer)
        # For tokenizers in Python: their state is not known. Long texts get a copy and a lock of their own, so that a
        # short one on the event loop never waits for a long one in a thread.
        self._lock = threading.Lock()
        self._long_lock = threading.Lock()
        self._long_tokenizer: Any = None
        self._backend: Any = None

    def prepare(self) -> None:
        """Choose and prove the fast paths; meant for the thread that loads the model. Idempotent."""
        self._token_text.prepare()
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
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer as it was given."""
        tokenizer: PreTrainedTokenizerBase | None = self._tokenizer
        return tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """False when prompts can only be token ids."""
        return self._tokenizer is not None

    @property
    def token_text(self) -> TokenText:
        """The table behind the detokenizers."""
        return self._token_text

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a sequence, if the tokenizer has one."""
        value = getattr(self._tokenizer, "bos_token_id", None)
        return value if isinstance(value, int) else None

    def special_id(self, text: str) -> int | None:
        """The id of the special token written `text`, None when there is none.

        Special tokens are left out of the text by default, so a stop string that names one never shows up there.
        """
        if text not in self._token_text.special_tokens:
            return None
        token_id = self._tokenizer.convert_tokens_to_ids(text)
        return token_id if isinstance(token_id, int) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text as the tokenizer does.

        Raises:
            InvalidRequest: there is no tokenizer, or it refused the text.
        """
        tokenizer = self._need_tokenizer("a prompt of text")
        backend = self._backend
        try:
            if backend is not None:
                for _ in range(4):
                    ids = _encode(backend, text, add_special_tokens)
                    if ids is not None:
                        return ids
                # Its user leaves truncation or padding switched on: an own copy (seconds for a large vocabulary, once).
                with self._lock:
                    if self._backend is backend:
                        self._backend = _private(backend)
                return _encode(self._backend, text, add_special_tokens) or []
            if len(text) < LONG_TEXT:
                with self._lock:
                    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
            with self._long_lock:
                if self._long_tokenizer is None:
                    # A large backend takes seconds to copy, and what is shared there is its truncation only.
                    has_backend = getattr(tokenizer, "backend_tokenizer", None) is not None
                    self._long_tokenizer = tokenizer if has_backend else copy.deepcopy(tokenizer)
                return list(self._long_tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:
            raise InvalidRequest(f"the tokenizer cannot encode this prompt: {error}") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages with the chat template, ready for the assistant's answer.

        Args:
            messages: mappings with `role` and `content`.
            tools: JSON schemas or documented functions, as `apply_chat_template` takes them.
            chat_template_kwargs: further arguments of the template; also `chat_template`, `add_generation_prompt`
                and `continue_final_message` (which replaces the former).

        Raises:
            InvalidRequest: no tokenizer, no template, malformed messages, or the template refused them.
        """
        tokenizer = self._need_tokenizer("a prompt of chat messages")
        arguments = dict(chat_template_kwargs or {})
        if tokenizer.chat_template is None and arguments.get("chat_template") is None:
            raise InvalidRequest(
                "this model's tokenizer has no chat template (a base model?): give the prompt as text, or a template "
                "with chat_template_kwargs={'chat_template': ...}"
            )
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequest(
                    f"a chat message must be a mapping with a 'role' and its 'content', not {message!r}"
                )
        arguments.setdefault("add_generation_prompt", not arguments.get("continue_final_message", False))
        arguments["tokenize"] = False
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=list(tools) if tools else None, **arguments
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise InvalidRequest(f"the chat template refused these messages: {error}") from error
        return str(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render messages (`render_chat`) and encode the result, without further special tokens.

        Raises:
            InvalidRequest: as `render_chat` and `encode`.
        """
        text = self.render_chat(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The tokenizer's own `decode`, "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        detokenizer = self.make_detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(list(token_ids)) + detokenizer.flush()

    def make_detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh detokenizer; one per request and sample."""
        return self._token_text.detokenizer(skip_special_tokens=skip_special_tokens)

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Every way in which the tokenizer writes each word: at the start of a text, after a space, within a text.

        Raises:
            InvalidRequest: no tokenizer, or a word that is empty.
        """
        self._need_tokenizer("bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise InvalidRequest(f"bad_words must hold words, not {word!r}")
            bare = word.lstrip()
            wanted = {bare.encode(), b" " + bare.encode()}
            before = len(found)
            for context in ("", " ", "\n", "(", "a "):
                ids = self.encode(context + bare, add_special_tokens=False)
                pieces = [self._token_text.piece(token_id) for token_id in ids]
                for start in range(len(ids)):
                    if b"".join(pieces[start:]) in wanted:
                        found[tuple(ids[start:])] = None
                        break
            if len(found) == before:  # a tokenizer that rewrites words, say in lower case
                ids = self.encode(bare, add_special_tokens=False)
                if ids and getattr(self._tokenizer, "unk_token_id", None) not in ids:
                    found[tuple(ids)] = None
        return tuple(found)

    def normalize_prompt(
        self,
        prompt: Any,
        *,
        vocab_size: int,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Turn any kind of prompt into a fresh list of token ids.

        Args:
            prompt: a text; chat messages; token ids as a sequence, a tensor or array of one row, or a tokenizer's
                encoding (padding is dropped).
            vocab_size: every id must lie below it.
            tools, chat_template_kwargs: as for `render_chat`; only with chat messages.

        Raises:
            InvalidRequest: it is none of these, holds an id that the model does not have, or is empty and the
                tokenizer has no token that begins a sequence.
        """
        if is_messages(prompt):
            messages = [prompt] if isinstance(prompt, Mapping) else prompt
            ids = self.encode_chat(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        elif tools or chat_template_kwargs:
            raise InvalidRequest("tools and chat_template_kwargs need a prompt of chat messages")
        elif isinstance(prompt, str):
            ids = self.encode(prompt)
        else:
            ids = _ids_of(prompt)
        if not ids:
            if self.bos_token_id is None:
                raise InvalidRequest("the prompt is empty and there is no token to begin with; give at least one token")
            ids = [self.bos_token_id]
        return _checked(ids, vocab_size)

    def _need_tokenizer(self, what: str) -> Any:
        if self._tokenizer is None:
            raise InvalidRequest(f"this engine has no tokenizer, so {what} cannot be encoded; give token ids instead")
        return self._tokenizer


def is_messages(prompt: Any) -> bool:
    """True for chat messages (a sequence of mappings, or a single mapping with a role)."""
    if isinstance(prompt, Mapping):
        return "role" in prompt
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_long(prompt: Any, tools: Sequence[Any] | None = None) -> bool:
    """True when turning the prompt into ids could hold up an event loop: do it in a thread."""
    if isinstance(prompt, str):
        return len(prompt) >= LONG_TEXT
    if is_messages(prompt):
        # The price of tools is in rendering their schemas (and reading the signatures of functions).
        return bool(tools) or _text_len(prompt, LONG_TEXT) >= LONG_TEXT
    try:
        return len(prompt) >= LONG_IDS
    except TypeError:
        return False


def _text_len(value: Any, limit: int) -> int:
    """Characters in nested messages, counted up to `limit`."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    total = 0
    for item in items:
        total += 8 + _text_len(item, limit - total)  # 8: what a template adds around each
        if total >= limit:
            break
    return total


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


def _ids_of(prompt: Any) -> list[Any]:
    mask = None
    if isinstance(prompt, Mapping) or hasattr(prompt, "data"):  # transformers' BatchEncoding is a UserDict
        data = prompt if isinstance(prompt, Mapping) else prompt.data
        if isinstance(data, Mapping):
            if "input_ids" not in data:
                raise InvalidRequest("a mapping as a prompt must be a tokenizer's encoding with 'input_ids'")
            mask = data.get("attention_mask")
            prompt = data["input_ids"]
            if isinstance(prompt, (list, tuple)) and len(prompt) == 1 and not isinstance(prompt[0], int):
                prompt, mask = prompt[0], mask and mask[0]
    elif hasattr(prompt, "ids") and hasattr(prompt, "attention_mask"):  # tokenizers.Encoding
        prompt, mask = prompt.ids, prompt.attention_mask
    ids, kept = _row(prompt), None if mask is None else _row(mask)
    if kept is not None and len(kept) == len(ids) and 0 in kept:
        ids = [token_id for token_id, keep in zip(ids, kept, strict=True) if keep]
    return ids


def _row(values: Any) -> list[Any]:
    """A list from a sequence, or from a tensor or array of one row."""
    to_list: Callable[[], Any] | None = getattr(values, "tolist", None)
    if to_list is not None:
        shape = tuple(values.shape)
        if len(shape) == 2 and shape[0] == 1:
            row: list[Any] = to_list()[0]
            return row
        if len(shape) != 1:
            raise InvalidRequest(f"a prompt of token ids must have one dimension, not the shape {list(shape)}")
        return list(to_list())
    if isinstance(values, (list, tuple, range)):
        if values and isinstance(values[0], (str, list, tuple)):
            raise InvalidRequest("several prompts were given where one is expected; use generate_batch for many")
        return list(values)
    raise InvalidRequest(
        "a prompt must be a text, a list of token ids, a list of chat messages, or a tokenizer's encoding, "
        f"not {type(values).__name__}"
    )


def _checked(ids: list[Any], vocab_size: int) -> list[int]:
    # Passes in C for the usual case; the loop below only finds out what to say.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    return list(check_ids("the prompt", ids, vocab_size))
