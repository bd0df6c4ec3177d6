from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiocb.text.detokenizer import Detokenizer, TokenText
from aiocb.text.pieces import MAX_BYTE_RUN, Replacer

relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@functools.cache
def token_text(tokenizer: Any) -> TokenText:
    return TokenText(tokenizer)


def deltas(tokenizer: Any, ids: Sequence[int], *, skip: bool = True, sizes: Sequence[int] = (1,)) -> list[str]:
    """Push the ids in groups of the given sizes (repeated); the last delta is what flush returns."""
    detokenizer = token_text(tokenizer).detokenizer(skip_special_tokens=skip)
    result, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        result.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*result, detokenizer.flush()]


def expected(tokenizer: Any, ids: Sequence[int], *, skip: bool = True) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip))


TEXTS = [
    "Hello, world!  Two spaces. It's 3.5 degrees; I don't know , they 've left ' x ' .\n\n\tEnd",
    "日本語のテキスト、中文，한국어 텍스트",
    "👩‍👩‍👧‍👦 family 🇩🇪 flag 👍🏽 e\u0301 a\u0308\u0323 z\u0335\u0336",
    "𓀀𓂀 ꧁꧂ ༄༅ \u200b\ufeff \ufffd end",
    "العربية हिन्दी ไทย עברית",
    "<s>inside</s> <|im_start|>user <|im_end|> <bos> <tool>x  y",
]


@pytest.mark.slow
def test_the_fast_path_is_taken_where_it_should_be(named_tokenizer: tuple[str, Any]) -> None:
    from .conftest import EXACT

    name, tokenizer = named_tokenizer
    assert token_text(tokenizer).is_exact == (name in EXACT)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_texts(tokenizer: Any, text: str, skip: bool) -> None:
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        for end in {len(ids), len(ids) - 1, len(ids) // 2, 1, 0}:
            assert "".join(deltas(tokenizer, ids[:end], skip=skip)) == expected(tokenizer, ids[:end], skip=skip)


@relaxed
@given(data=st.data())
def test_random_ids(tokenizer: Any, data: st.DataObject) -> None:
    size = len(tokenizer)
    # The first ids of a vocabulary hold its specials and bytes.
    ids = data.draw(st.lists(st.integers(0, size - 1) | st.integers(0, min(size, 300) - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    assert "".join(deltas(tokenizer, ids, skip=skip, sizes=sizes)) == expected(tokenizer, ids, skip=skip)


@relaxed
@given(text=st.text(max_size=15), data=st.data())
def test_random_text(tokenizer: Any, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = data.draw(st.integers(0, len(ids)))
    assert "".join(deltas(tokenizer, ids[:end])) == expected(tokenizer, ids[:end])


def test_no_delta_ends_within_a_code_point(tokenizer: Any) -> None:
    for text in TEXTS[:3]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" in expected(tokenizer, ids):
            continue
        assert not [delta for delta in deltas(tokenizer, ids) if "\ufffd" in delta]


def test_text_comes_token_by_token(smollm2: Any) -> None:
    ids = smollm2.encode("Every word is shown as soon as it is there.")
    assert [delta for delta in deltas(smollm2, ids) if delta] == [smollm2.decode([token_id]) for token_id in ids]


def test_little_is_held_back(tokenizer: Any) -> None:
    chance = random.Random(7)
    detokenizer = token_text(tokenizer).detokenizer(skip_special_tokens=False)
    ids: list[int] = []
    emitted = ""
    for _ in range(200):
        ids.append(chance.randrange(len(tokenizer)))
        emitted += detokenizer.push(ids[-1:])
        assert len(expected(tokenizer, ids, skip=False)) - len(emitted) <= 80


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_flood_of_broken_bytes_is_released_at_once(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    flood = {"smollm2": "\u0122", "gemma3": "<0x80>"}[name]  # a continuation byte that follows nothing
    token_id = tokenizer.convert_tokens_to_ids(flood)
    detokenizer = token_text(tokenizer).detokenizer()
    emitted = ""
    for count in range(1, 500):
        emitted += detokenizer.push((token_id,))
        assert len(emitted) >= count - 4
    assert emitted + detokenizer.flush() == expected(tokenizer, [token_id] * 499)


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


def test_a_run_of_byte_tokens_is_text_or_broken_as_a_whole(gemma3: Any) -> None:
    word = gemma3.encode("word", add_special_tokens=False)
    family = byte_ids(gemma3, "👩‍👩‍👧‍👦".encode())
    for ids in (
        family,
        family + word,
        family[:-1],
        family[:-1] + word,
        family + [family[-1]] + word,
        word + family[1:],
    ):
        assert "".join(deltas(gemma3, ids)) == expected(gemma3, ids)
    # Specials that are left out do not end a run.
    split = [*family[:2], gemma3.eos_token_id, *family[2:], *word]
    for skip in (True, False):
        assert "".join(deltas(gemma3, split, skip=skip)) == expected(gemma3, split, skip=skip)


def test_a_long_run_of_byte_tokens_is_shown_while_it_lasts(gemma3: Any) -> None:
    text = "𓀀" * 100
    ids = byte_ids(gemma3, text.encode())
    detokenizer = token_text(gemma3).detokenizer()
    emitted = ""
    for count, token_id in enumerate(ids, 1):
        emitted += detokenizer.push((token_id,))
        assert count - len(emitted.encode()) <= MAX_BYTE_RUN
    assert emitted + detokenizer.flush() == text
    # The one exception to equality: decode() would take back the whole run for its last byte.
    assert "".join(deltas(gemma3, ids[:-1])) == "𓀀" * 99 + "\ufffd" * 3
    assert "".join(deltas(gemma3, [*ids[:-1], *ids[:4]])) == "𓀀" * 99 + "\ufffd" * 7


def test_the_leading_space_goes_once() -> None:
    from .conftest import llama_like, metaspace

    for tokenizer in (llama_like(), metaspace()):
        space = tokenizer.convert_tokens_to_ids("▁")
        hello = tokenizer.encode("hello", add_special_tokens=False)
        for ids in (hello, [space, *hello], [space, space, *hello], [1, *hello], [1, space, *hello], [*hello, *hello]):
            for skip in (True, False):
                assert "".join(deltas(tokenizer, ids, skip=skip)) == expected(tokenizer, ids, skip=skip)


def test_ids_beyond_the_tokenizer_yield_nothing(tokenizer: Any) -> None:
    # Models pad their vocabulary: an id may be possible for the model and unknown to the tokenizer.
    beyond = len(tokenizer) + 100
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(deltas(tokenizer, [beyond, *ids, beyond])) == expected(tokenizer, ids)


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = TokenText(None)
    text.prepare()
    detokenizer = text.detokenizer()
    assert type(detokenizer) is Detokenizer
    assert detokenizer.push([1, 2]) == detokenizer.flush() == ""


def test_a_tokenizer_that_decodes_in_its_own_way_is_windowed(smollm2: Any) -> None:
    class Loud:
        """Overrides decode, so that the backend's text is not what counts."""

        def __getattr__(self, name: str) -> Any:
            return getattr(smollm2, name)

        def __len__(self) -> int:
            return len(smollm2)

        def decode(self, ids: list[int], **arguments: Any) -> str:
            return str(smollm2.decode(ids, **arguments)).upper()

    loud = Loud()
    ids = smollm2.encode("naïve 👩‍👩‍👧‍👦 text, token by token")
    assert not token_text(loud).is_exact
    result = deltas(loud, ids)
    assert "".join(result) == loud.decode(ids)
    assert sum(map(bool, result)) > 4


def test_a_tokenizer_that_cannot_be_read_is_windowed(smollm2: Any) -> None:
    class Bare:
        """Nothing but the two methods that every tokenizer has."""

        def encode(self, text: str, **arguments: Any) -> list[int]:
            return list(smollm2.encode(text, **arguments))

        def decode(self, ids: list[int], **arguments: Any) -> str:
            return str(smollm2.decode(ids, **arguments))

    bare: Any = Bare()
    ids = smollm2.encode("naïve 👩‍👩‍👧‍👦 text")
    assert not token_text(bare).is_exact
    assert "".join(deltas(bare, ids)) == bare.decode(ids)


@relaxed
@given(st.text("ab ", max_size=12), st.text("ab ", min_size=1, max_size=4), st.data())
def test_replacing_in_parts_is_replacing(text: str, old: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    replacer = Replacer(old, "b")
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    assert "".join(map(replacer.push, parts)) + replacer.flush() == text.replace(old, "b")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_cost(name: str, request: pytest.FixtureRequest) -> None:
    """Loose bounds (the machine is shared); the figures are a fifth of them."""
    tokenizer = request.getfixturevalue(name)
    fastest = 1.0
    for _ in range(3):
        start = time.perf_counter()
        text = TokenText(tokenizer)
        text.prepare()
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 0.15

    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog, and some more text follows. " * 600)

    def per_token(count: int) -> float:
        best = 1.0
        for _ in range(5):
            detokenizer = text.detokenizer()
            start = time.perf_counter()
            for token_id in ids[:count]:
                detokenizer.push((token_id,))
            best = min(best, (time.perf_counter() - start) / count)
        return best

    short, long = per_token(500), per_token(8000)
    assert short < 2e-6
    assert long < 3 * short
