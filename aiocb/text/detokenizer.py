"""How a tokenizer's ids become text.

For almost every tokenizer `decode` is a join of pieces: what a token contributes depends on the token and on whether
it is the first, not on its neighbours. `TokenText` works the pieces out one by one as tokens appear (a table of a
262k vocabulary would take longer to build than a whole answer) and compares the result with `tokenizer.decode` on
probe sequences before it is trusted. A tokenizer that fails the comparison gets a window of tokens that is decoded
again and again instead.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiocb.text.pieces import (
    CleaningDetokenizer,
    Detokenizer,
    MarkingDetokenizer,
    Piece,
    PieceDetokenizer,
    Pieces,
    Replacer,
    WindowDetokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer", "TokenText", "byte_alphabet"]

logger = logging.getLogger("aiocb")

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
# transformers' clean_up_tokenization: one pass over the whole text each, in this order.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_PROBE_TEXTS = (
    "Hello, world! It's a test; don't we 've 're ' x ' know?  Two  spaces.\n\ttabs\r\n",
    "naïve café Ελλάδα Привет 日本語 한국어 العربية हिन्दी ไทย",
    "😀 👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b \ufeff 𓀀𓂀 ▁ _ Ġ",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x != 0}  # 1,234 . ! ? ,",
)


def byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class TokenText:
    """How one tokenizer turns ids into text. Built once, used for every request; not changed by them.

    Args:
        tokenizer: a transformers tokenizer, or None (then there is no text).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer: Any = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._special: frozenset[str] = frozenset()
        self._strip = ("", 0)
        self._is_byte_level = False
        self._has_byte_fallback = False
        self._is_cleaned = False
        self._is_known = functools.cache(self._try)
        self._anchor: tuple[list[int], str] = ([], "")
        self._tables: dict[bool, tuple[Pieces, Pieces]] = {}
        self._is_prepared = tokenizer is None

    def prepare(self) -> None:
        """Choose the path and prove it (tens of milliseconds). Idempotent; `detokenizer` does it when it must."""
        if self._is_prepared:
            return
        try:
            self._tables = self._prove()
        except Exception as error:  # a tokenizer that brings its own code: the window asks nothing of it but decode
            logger.debug("the tokenizer's pieces cannot be read (%r); decoding windows", error)
        self._is_prepared = True

    def _prove(self) -> dict[bool, tuple[Pieces, Pieces]]:
        """Return the tables, with and without specials; empty when they do not render as `decode` does."""
        self._special = frozenset(_special_tokens(self._tokenizer, self._backend))
        self._read_decoder()
        self._anchor = self._find_anchor()
        probes = self._probes()
        raw, shown = ([decode(ids, False) for ids in probes] for decode in (self._decode_raw, self._decode))
        self._is_cleaned = raw != shown and list(map(_clean_up, raw)) == shown
        tables = {skip: self._make_tables(skip) for skip in (True, False)}
        is_proven = all(self._is_equal(tables[skip], ids, skip) for skip in tables for ids in probes)
        return tables if is_proven else {}

    def _is_equal(self, tables: tuple[Pieces, Pieces], ids: list[int], skip: bool) -> bool:
        detokenizer = self._with_pieces(tables)
        text = "".join([detokenizer.push((token_id,)) for token_id in ids]) + detokenizer.flush()
        return text == self._decode(ids, skip)

    @property
    def is_exact(self) -> bool:
        """True when the fast path was proven for this tokenizer."""
        self.prepare()
        return bool(self._tables)

    @property
    def special_tokens(self) -> frozenset[str]:
        """Contents of the tokens that `skip_special_tokens` leaves out."""
        self.prepare()
        return self._special

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh detokenizer for one request."""
        if self._tokenizer is None:
            return Detokenizer()
        self.prepare()
        if self._tables:
            return self._with_pieces(self._tables[skip_special_tokens])
        decode = self._decode_raw if self._is_cleaned else self._decode
        return self._cleaning(WindowDetokenizer(lambda ids: decode(ids, skip_special_tokens)))

    def marking(self, marks: Mapping[int, str]) -> Detokenizer:
        """Return a detokenizer that leaves special tokens out, but yields a mark in the place of some.

        Args:
            marks: by token id, what is yielded for it.
        """
        plain = self.detokenizer()
        if not self._tables:
            return MarkingDetokenizer(plain, marks)
        pieces, first = self._tables[True]
        return self._with_pieces((_with_marks(pieces, marks), _with_marks(first, marks)))

    def piece(self, token_id: int) -> bytes:
        """What the token contributes in the middle of a text, specials included; b"" when that is not known."""
        if self._tokenizer is None:
            return b""
        self.prepare()
        piece = self._tables[False][0][token_id] if self._tables else self._decode_raw([token_id], False)
        if isinstance(piece, str):
            return piece.encode("utf-8", "surrogatepass")
        return bytes((piece,)) if isinstance(piece, int) else piece or b""

    def _with_pieces(self, tables: tuple[Pieces, Pieces]) -> Detokenizer:
        return self._cleaning(PieceDetokenizer(*tables, self._strip))

    def _cleaning(self, detokenizer: Detokenizer) -> Detokenizer:
        if not self._is_cleaned:
            return detokenizer
        return CleaningDetokenizer(detokenizer, (Replacer(old, new) for old, new in _CLEAN_UP))

    def _decode(self, ids: list[int], skip: bool, **options: bool) -> str:
        """The text that counts."""
        if self._backend is None:
            ids = [token_id for token_id in ids if self._is_known(token_id)]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip, **options))

    def _decode_raw(self, ids: list[int], skip: bool) -> str:
        """The same without transformers' clean-up."""
        if self._backend is None:
            return self._decode(ids, skip, clean_up_tokenization_spaces=False)
        return str(self._backend.decode(ids, skip_special_tokens=skip))

    def _token(self, token_id: int) -> str | None:
        if self._backend is not None:
            token: str | None = self._backend.id_to_token(token_id)
            return token
        token = self._tokenizer.convert_ids_to_tokens(token_id) if self._is_known(token_id) else None
        return token if isinstance(token, str) else None

    def _try(self, token_id: int) -> bool:
        """False for ids between a Python tokenizer's vocabulary and the model's: it raises what it likes for them."""
        try:
            self._tokenizer.decode([token_id])
        except Exception:
            return False
        return True

    def _read_decoder(self) -> None:
        decoder = getattr(self._backend, "decoder", None)
        if decoder is None:
            return
        state = json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        self._is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in kinds
        if "Fuse" in kinds and kinds[-1] == "Strip":  # of the whole text; before Fuse it is of each token
            self._strip = (steps[-1]["content"], steps[-1]["start"])

    def _find_anchor(self) -> tuple[list[int], str]:
        """A token that stands in front while another one's text is read off."""
        encoded = self._tokenizer.encode("a", add_special_tokens=False)
        for token_id in (*encoded, *range(min(1000, len(self._tokenizer)))):
            text = self._decode_raw([token_id], False)
            if text.strip().isalnum() and text.isascii() and self._token(token_id) not in self._special:
                return [token_id], text
        return [], ""

    def _make_tables(self, skip: bool) -> tuple[Pieces, Pieces]:
        alphabet = byte_alphabet() if self._is_byte_level else {}
        anchor, anchor_text = self._anchor

        def middle(token_id: int) -> Piece:
            token = self._token(token_id)
            if token is None or (skip and token in self._special):
                return None
            if alphabet:
                try:
                    piece = bytes([alphabet[character] for character in token])
                except KeyError:  # an added token with characters outside of the alphabet stands for itself
                    piece = token.encode()
                try:
                    return piece.decode()
                except UnicodeDecodeError:
                    return piece
            if self._has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
                return int(match[1], 16)
            return self._decode_raw([*anchor, token_id], skip)[len(anchor_text) :]

        pieces = Pieces(middle)
        if alphabet or self._strip[1]:
            return pieces, pieces

        def first(token_id: int) -> Piece:
            piece = pieces[token_id]
            return self._decode_raw([token_id], skip) if isinstance(piece, str) else piece

        return pieces, Pieces(first)

    def _probes(self) -> list[list[int]]:
        """Sequences that show how this tokenizer decodes: random ones, texts, bytes, specials."""
        chance = random.Random(0)
        size = len(self._tokenizer)
        encoded = [self._tokenizer.encode(text, add_special_tokens=False) for text in _PROBE_TEXTS]
        special = [i for i in getattr(self._tokenizer, "all_special_ids", []) if i is not None] or [0]
        byte_ids = []
        if self._has_byte_fallback:
            found = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
            byte_ids = [token_id for token_id in found if token_id is not None]
        probes = [[], *encoded, [*special[:8], *encoded[0][:4], *special[:8]]]
        pools = [range(size), [token_id for ids in encoded for token_id in ids], byte_ids, special]
        for length in (1, 2, 3, 8, 24):
            for _ in range(12):
                # A pool per sequence, or a mixture: both pure runs and every kind of neighbour occur.
                pool = chance.choice(pools[:3])
                mixed = [chance.choice(chance.choice(pools) or range(size)) for _ in range(length)]
                probes.append([chance.choice(pool) for _ in range(length)] if pool else mixed)
                probes.append(mixed)
        return probes


def _with_marks(pieces: Pieces, marks: Mapping[int, str]) -> Pieces:
    marked = Pieces(pieces.__getitem__)
    marked.update(marks)
    return marked


def _special_tokens(tokenizer: Any, backend: Any) -> Iterable[str]:
    if backend is None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        return [*map(str, getattr(tokenizer, "all_special_tokens", ())), *(str(t) for t in added if t.special)]
    return [token.content for token in backend.get_added_tokens_decoder().values() if token.special]


def _clean_up(text: str) -> str:
    for old, new in _CLEAN_UP:
        text = text.replace(old, new)
    return text
