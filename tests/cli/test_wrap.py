"""Word wrap of text that arrives in pieces."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len

from aiocb.cli.wrap import WordWrap

PROSE = "The sea was calm that morning, and nobody – not even the keeper – expected   a storm.\n\n  - first\n  - second"


def wrapped(pieces: list[str], width: int) -> list[str]:
    written: list[str] = []
    wrap = WordWrap(written.append, lambda: width)
    for piece in pieces:
        wrap.push(piece)
    wrap.flush()
    return "".join(written).split("\n")


@pytest.mark.parametrize("width", [10, 17, 80])
def test_words_are_whole_and_lines_fit_however_the_text_arrives(width: int) -> None:
    expected = wrapped([PROSE], width)
    assert all(cell_len(line) <= width for line in expected)
    assert " ".join(expected).split() == PROSE.split()
    chance = random.Random(0)
    for _ in range(20):
        cuts = sorted(chance.choices(range(len(PROSE)), k=12))
        assert wrapped([PROSE[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)], width) == expected


def test_line_ends_and_indentation_of_the_text_are_kept() -> None:
    assert wrapped(["if x:\n\treturn 1\n\n"], 40) == ["if x:", "    return 1", "", ""]


def test_a_word_is_written_as_soon_as_it_is_whole() -> None:
    written: list[str] = []
    wrap = WordWrap(written.append, lambda: 20)
    wrap.push("half of a wo")
    assert "".join(written) == "half of a"
    wrap.push("rd ")
    assert "".join(written) == "half of a word"


def test_wide_characters_take_two_cells_and_need_no_spaces() -> None:
    lines = wrapped(["東京は日本の", "首都です。", "大阪"], 10)
    assert lines == ["東京は日本", "の首都で", "す。大阪"]  # a line does not begin with a full stop
    assert all(cell_len(line) <= 10 for line in lines)


def test_a_word_that_no_line_can_hold_is_cut_and_does_not_wait() -> None:
    written: list[str] = []
    wrap = WordWrap(written.append, lambda: 10)
    wrap.push("see " + "x" * 25)
    assert "".join(written).count("x") == 25
    wrap.push("y end")
    wrap.flush()
    assert "".join(written).split("\n") == ["see", "x" * 10, "x" * 10, "xxxxxy end"]


def test_the_width_may_change() -> None:
    written: list[str] = []
    widths = [30]
    wrap = WordWrap(written.append, lambda: widths[0])
    wrap.push("one two three ")
    widths[0] = 10
    wrap.push("four five")
    wrap.flush()
    assert "".join(written) == "one two three\nfour five"
