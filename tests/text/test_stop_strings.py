from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiocb.text.stop_strings import StopMatcher

relaxed = settings(max_examples=300, deadline=None)


def run(stops: Sequence[str], parts: Iterable[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    emitted = ""
    for part in parts:
        text, matched = matcher.push(part)
        emitted += text
        if matched is not None:
            return emitted, matched
    return emitted + matcher.flush(), None


def oracle(stops: Sequence[str], text: str, include: bool) -> tuple[str, str | None]:
    """The match that completes first, then the one that starts first; by trying everything."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def split(text: str, cuts: Iterable[int]) -> list[str]:
    points = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(points, points[1:])]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("text", ["one STOP two", "one SSTOP two STOP", "STOP", "", "no STO P", "STSTOP", "日本STOP語"])
def test_cut_at_every_position(text: str, include: bool) -> None:
    wanted = oracle(["STOP"], text, include)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert run(["STOP"], [text[:first], text[first:second], text[second:]], include) == wanted
    assert run(["STOP"], text, include) == wanted


@relaxed
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5),
    text=st.text("abcd", max_size=30),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    include=st.booleans(),
)
def test_against_brute_force(stops: list[str], text: str, cuts: list[int], include: bool) -> None:
    assert run(stops, split(text, cuts), include) == oracle(stops, text, include)


@relaxed
@given(stops=st.lists(st.text(min_size=1, max_size=3), max_size=4), text=st.text(max_size=40))
def test_any_characters(stops: list[str], text: str) -> None:
    assert run(stops, text) == oracle(stops, text, False)


@relaxed
@given(stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), text=st.text("abc", max_size=30))
def test_only_a_live_prefix_is_held(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for count, character in enumerate(text, 1):
        part, matched = matcher.push(character)
        emitted += part
        if matched is not None:
            return
        seen = text[:count]
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert emitted == seen[: count - held]


def test_a_false_start_is_released_at_once() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("\nUse") == ("", None)
    assert matcher.push("ful") == ("\n\nUseful", None)


def test_the_longer_of_two_that_end_together_wins() -> None:
    assert run(["b", "ab"], "xab", include=False) == ("x", "ab")
    assert run(["abc", "b"], ["a", "bc"]) == ("a", "b")


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(["."], include=True)
    assert matcher.push("One. Two.") == ("One.", ".")


def test_without_stops_everything_passes() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None)
    assert run(["^]", "]", "\\"], "a\\") == ("a", "\\")
    assert run(["-z", "^"], "amz^") == ("amz", "^")


def test_cost_does_not_depend_on_the_stops() -> None:
    def seconds(stops: list[str]) -> float:
        best = 1.0
        for _ in range(3):
            matcher = StopMatcher(stops)
            start = time.perf_counter()
            for _ in range(2000):
                matcher.push("aaaa ")
            best = min(best, (time.perf_counter() - start) / 2000)
        return best

    few, many = seconds(["aaab"]), seconds(["a" * 200 + chr(0x4E00 + i) for i in range(100)])
    assert few < 10e-6
    assert many < 10 * few
