"""One output's text: stop strings at every border, special tokens in them, and the prompt in front."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.text.output import TextOutput
from aiocb.text.pieces import Detokenizer
from aiocb.text.processor import TextProcessor
from aiocb.text.stop_strings import StopMatcher

from .conftest import TRAINED, byte_level, llama_like

relaxed = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Letters(Detokenizer):
    """One letter per token; `hold` of them are held back until the end."""

    def __init__(self, hold: int = 0) -> None:
        self._held = ""
        self._hold = hold

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._held + "".join(chr(ord("a") + token) for token in token_ids)
        keep = min(self._hold, len(text))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def letters(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def run(output: TextOutput, token_ids: Sequence[int], size: int = 1) -> tuple[str, str | None, int]:
    """The text, the stop string, and how many tokens belong to the output."""
    for start in range(0, len(token_ids), size):
        if output.push(token_ids[start : start + size]) is not None:
            break
    matched = output.flush()
    return output.take(), matched, output.num_tokens


def resolved(tokenizer: Any, **values: Any) -> SamplingParams:
    return SamplingParams(**values).resolve(ModelDefaults(len(tokenizer) + 200, 10_000))


@functools.cache
def processor(tokenizer: Any) -> TextProcessor:
    return TextProcessor(tokenizer)


def outputs(tokenizer: Any, prompt: Sequence[int] = (), count: int = 1, **values: Any) -> tuple[TextOutput, ...]:
    return processor(tokenizer).make_outputs(resolved(tokenizer, **values), prompt, count)


# ── min_new_tokens ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("minimum", "text", "num_tokens"),
    [(0, "x", 3), (1, "x", 3), (2, "x", 3), (3, "x", 3), (4, "xabc", 6), (6, "xabc", 6), (7, "xabcabd", 7)],
)
def test_a_stop_string_counts_with_the_token_that_completes_it(minimum: int, text: str, num_tokens: int) -> None:
    output = TextOutput(Letters(), StopMatcher(["ab"]), min_new_tokens=minimum)
    assert run(output, letters("xabcabd")) == (text, "ab" if num_tokens < 7 else None, num_tokens)


def test_a_longer_stop_string_may_go_on_from_one_that_did_not_count() -> None:
    output = TextOutput(Letters(), StopMatcher(["ab", "abc"]), min_new_tokens=3)
    assert run(output, letters("abcd")) == ("", "abc", 3)
    output = TextOutput(Letters(), StopMatcher(["aa"]), min_new_tokens=3)
    assert run(output, letters("aaab")) == ("a", "aa", 3)


def test_what_did_not_count_is_not_held_back() -> None:
    output = TextOutput(Letters(), StopMatcher(["ab"]), min_new_tokens=10)
    output.push(letters("xab"))
    assert output.take() == "xab"


@relaxed
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    text=st.text("abcd", max_size=20),
    minimum=st.integers(0, 12),
    size=st.integers(1, 5),
    include=st.booleans(),
)
def test_against_brute_force(stops: list[str], text: str, minimum: int, size: int, include: bool) -> None:
    wanted: tuple[str, str | None, int] = (text, None, len(text))
    for end in range(max(minimum, 1), len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            wanted = (text[: end if include else end - len(stop)], stop, end)
            break
    output = TextOutput(Letters(), StopMatcher(stops, include), min_new_tokens=minimum)
    assert run(output, letters(text), size) == wanted


def test_tokens_after_the_one_that_completes_a_stop_string_are_cut() -> None:
    output = TextOutput(Letters(), StopMatcher(["bc"]))
    assert output.push(letters("ab")) is None and output.num_tokens == 2
    assert output.push(letters("cde")) == "bc" and output.num_tokens == 3
    assert (output.flush(), output.take()) == ("bc", "a")


# ── the last flush ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("include", [False, True])
def test_the_end_may_complete_a_stop_string(include: bool) -> None:
    output = TextOutput(Letters(hold=2), StopMatcher(["bc"], include))
    assert output.push(letters("abcd")) is None
    assert output.flush() == "bc"
    assert output.take() == ("abc" if include else "a")
    assert output.num_tokens == 4, "what was produced until it was seen"


def test_the_end_completes_nothing_before_its_time() -> None:
    output = TextOutput(Letters(hold=2), StopMatcher(["bc"]), min_new_tokens=5)
    assert run(output, letters("abcd")) == ("abcd", None, 4)


def test_a_byte_run_that_ends_with_the_output_completes_a_stop_string() -> None:
    tokenizer = llama_like()
    hello = tokenizer.encode("hello", add_special_tokens=False)
    run_of_bytes = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é!".encode()]
    (output,) = outputs(tokenizer, stop="é")
    assert output.push([*hello, *run_of_bytes]) is None, "the run is held back"
    assert output.flush() == "é"
    assert output.take() == "hello"


def test_half_a_character_at_the_end_completes_a_stop_string() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab😀", add_special_tokens=False)
    (output,) = outputs(tokenizer, stop="\ufffd")
    assert run(output, ids[:-1]) == ("ab", "\ufffd", len(ids) - 1)


def test_flushing_again_changes_nothing() -> None:
    output = TextOutput(Letters(hold=1), StopMatcher(["b"]))
    output.push(letters("ab"))
    assert (output.flush(), output.flush(), output.take(), output.take()) == ("b", "b", "a", "")


# ── special tokens in stop strings ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stop", "text", "wanted"),
    [
        ("<|im_end|>", "one<|im_end|>two", "one"),
        ("<|im_end|><|im_start|>", "one<|im_end|><|im_start|>two", "one"),
        ("<|im_end|>\n<|im_start|>user", "one<|im_end|>\n<|im_start|>user two", "one"),
        ("e<|im_end|>", "one<|im_end|>two", "on"),
        ("<|im_end|>t", "one<|im_end|>two", "one"),
        (["nothing", "<|im_end|>"], "one<|im_end|>two", "one"),
        (["<|im_end|>x", "tw"], "one<|im_end|>two", "one"),
    ],
)
def test_a_stop_string_may_name_special_tokens_that_the_text_leaves_out(
    smollm2: Any, stop: Any, text: str, wanted: str
) -> None:
    ids = smollm2.encode(text)
    for skip in (True, False):
        (output,) = outputs(smollm2, stop=stop, skip_special_tokens=skip)
        got, matched, num_tokens = run(output, ids)
        assert matched is not None and matched in ([stop] if isinstance(stop, str) else stop)
        assert smollm2.decode(ids[:num_tokens], skip_special_tokens=skip).startswith(got)
        assert got == (wanted if skip else text[: text.index(matched)])
        if skip:
            (output,) = outputs(smollm2, stop=stop, include_stop_str_in_output=True)
            visible = matched.replace("<|im_end|>", "").replace("<|im_start|>", "")
            assert run(output, ids)[0] == wanted + visible


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_end|>x", "one<|im_end|>two"),
        ("<|im_end|><|im_start|>", "one<|im_end|> <|im_start|>two"),
        ("|im_end|>", "one<|im_end|>two"),  # a piece of one is no special token, and is not in the text either
        ("<|im_start|>", "one<|im_end|>two"),
    ],
)
def test_what_only_looks_like_a_special_token_does_not_end(smollm2: Any, stop: str, text: str) -> None:
    ids = smollm2.encode(text)
    (output,) = outputs(smollm2, stop=stop)
    assert run(output, ids) == (smollm2.decode(ids, skip_special_tokens=True), None, len(ids))


def test_special_tokens_in_stop_strings_with_every_tokenizer(tokenizer: Any) -> None:
    unknown = tokenizer.unk_token
    special = sorted(text for text in processor(tokenizer).token_text.special_tokens if text not in (unknown, ""))
    if not special:
        return
    token_id = tokenizer.convert_tokens_to_ids(special[0])
    before = tokenizer.encode("hello fox", add_special_tokens=False)
    after = tokenizer.encode("the", add_special_tokens=False)
    (output,) = outputs(tokenizer, stop=special[0])
    text, matched, num_tokens = run(output, [*before, token_id, *after])
    assert (matched, num_tokens) == (special[0], len(before) + 1)
    assert text == tokenizer.decode([*before, token_id], skip_special_tokens=True)
    (output,) = outputs(tokenizer, stop=special[0] + "never")
    ids = [*before, token_id, *after]
    assert run(output, ids) == (tokenizer.decode(ids, skip_special_tokens=True), None, len(ids))


@relaxed
@given(data=st.data())
def test_text_is_whole_when_nothing_matches(tokenizer: Any, data: st.DataObject) -> None:
    size = len(tokenizer)
    ids = data.draw(st.lists(st.integers(0, size - 1) | st.integers(0, min(size, 300) - 1), max_size=30))
    special = sorted(text for text in processor(tokenizer).token_text.special_tokens if len(text) > 1)
    stops = ["\u2603never"] + ([special[0] + "\u2603never"] if special else [])
    prompt = data.draw(st.lists(st.integers(0, size - 1), max_size=8))
    is_echo = data.draw(st.booleans())
    (output,) = outputs(tokenizer, prompt, stop=stops, echo=is_echo)
    ids_of_text = [*prompt, *ids] if is_echo else ids
    assert run(output, ids)[0] == tokenizer.decode(ids_of_text, skip_special_tokens=True)


# ── echo ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

CUT = ["Hello world", "I like 🦜 very much", "naïve 日本語", "a ' b n't . ! x"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", CUT)
def test_an_echo_is_decoded_with_the_output(tokenizer: Any, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    for cut in range(1, len(ids)):
        for output in outputs(tokenizer, ids[:cut], 3, echo=True, skip_special_tokens=skip):
            assert run(output, ids[cut:])[0] == tokenizer.decode(ids, skip_special_tokens=skip)


def test_stop_strings_are_searched_in_the_output_only(smollm2: Any) -> None:
    prompt = smollm2.encode("stop here and")
    answer = smollm2.encode(" then stop here")
    for output in outputs(smollm2, prompt, 2, echo=True, stop="stop"):
        assert run(output, answer)[0] == "stop here and then "


def test_samples_do_not_share_what_they_hold(named_tokenizer: tuple[str, Any]) -> None:
    tokenizer = named_tokenizer[1]
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in ("日本 fox", "the ' lazy", "é")]
    made = outputs(tokenizer, prompt, 3, echo=True, stop="\u2603")
    for step in range(max(map(len, answers))):
        for output, answer in zip(made, answers, strict=True):
            output.push(answer[step : step + 1])
    for output, answer in zip(made, answers, strict=True):
        output.flush()
        assert output.take() == tokenizer.decode([*prompt, *answer], skip_special_tokens=True)


def test_only_a_plain_output_may_be_pushed_past() -> None:
    tokenizer = TRAINED["byte_level"]()
    for values, is_plain in (({}, True), ({"stop": "x"}, False), ({"echo": True}, False)):
        (output,) = outputs(tokenizer, [1], **values)
        assert output.is_plain == is_plain
