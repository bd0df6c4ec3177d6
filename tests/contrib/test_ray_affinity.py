"""Which replica takes a prompt: decided without Ray."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from aiocb.contrib.ray_affinity import BLOCK, PrefixTable, chain_of, chain_of_body, decide

LONG = "The quick brown fox jumps over the lazy dog. " * 40


def chat(*texts: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


class TestChains:
    def test_a_longer_prompt_has_the_chain_of_its_beginning(self) -> None:
        chain = chain_of(LONG)
        assert len(chain) == len(LONG) // BLOCK and len(set(chain)) == len(chain)
        longer = chain_of(LONG + "and so on " * 100)
        assert longer[: len(chain)] == chain and len(longer) > len(chain)
        assert chain_of("x" + LONG)[0] != chain[0]

    def test_the_next_turn_of_a_chat(self) -> None:
        first, second = chain_of_body(chat(LONG)), chain_of_body(chat(LONG, "an answer", "a question" * 200))
        assert first and second[: len(first)] == first
        parts = json.loads(chat(LONG))
        parts["messages"][0]["content"] = [{"type": "text", "text": LONG}]
        assert chain_of_body(json.dumps(parts).encode())

    def test_what_else_is_a_prompt(self) -> None:
        assert chain_of_body(json.dumps({"prompt": LONG}).encode()) == chain_of_body(
            json.dumps({"input": LONG}).encode()
        )
        ids = list(range(1000))
        assert chain_of_body(json.dumps({"prompt": ids}).encode()) == chain_of(ids) != ()
        salted = chain_of_body(chat(LONG, cache_salt="mine"))
        assert salted and salted[0] != chain_of_body(chat(LONG))[0]

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"messages": null}', b'{"messages": {"a": [1, {}]}}'],
    )
    def test_whatever_comes_there_is_an_answer(self, body: bytes) -> None:
        assert chain_of_body(body) == ()

    def test_a_prompt_of_any_length_costs_the_same(self) -> None:
        assert len(chain_of(LONG * 1000)) == len(chain_of([LONG] * 1000)) == 128
        assert chain_of("short") == chain_of(None) == chain_of(object()) == chain_of(b"x" * 1000) == ()


class TestTable:
    def test_depths(self) -> None:
        table: PrefixTable[str] = PrefixTable()
        table.note((1, 2, 3), "a")
        table.note((1, 2, 9), "b")
        assert table.depths((1, 2, 3, 4)) == {"a": 3, "b": 2}
        assert table.depths((2, 3)) == {"a": 2, "b": 1}
        assert table.depths((7, 1)) == table.depths(()) == {}

    def test_replicas_that_are_gone_are_forgotten(self) -> None:
        table: PrefixTable[str] = PrefixTable()
        table.note((1, 2), "a")
        table.note((1,), "b")
        table.forget({"a", "x"})
        assert table.depths((1, 2)) == {"b": 1} and len(table) == 1

    def test_it_does_not_grow_without_a_bound(self) -> None:
        table: PrefixTable[int] = PrefixTable(max_blocks=100)
        for number in range(1000):
            table.note((0, number, number + 1), number % 50)
        assert len(table) == 100
        assert len(table.depths((0,))) == 8  # who had it longest ago is forgotten


class TestDecisions:
    def test_who_has_most_of_it(self) -> None:
        assert decide({"a": 3, "b": 0, "c": 0}, (1, 2), {"a": 2, "b": 1}, 4) == (["a", "b", "c"], "affinity")

    def test_not_where_there_is_too_much_to_do(self) -> None:
        assert decide({"a": 5, "b": 0, "c": 1}, (1, 2), {"a": 2, "c": 1}, 4) == (["c", "b", "a"], "affinity")
        assert decide({"a": 5, "b": 0}, (1, 2), {"a": 2}, 4) == (["b", "a"], "balance")
        assert decide({"a": 1, "b": 0}, (1, 2), {"a": 2}, 0) == (["b", "a"], "balance")

    def test_without_a_prompt_the_least_loaded(self) -> None:
        assert decide({"a": 2, "b": 1}, (), {}, 4) == (["b", "a"], "no_prompt")
        assert decide({"a": 2, "b": 1}, (1,), {"gone": 1}, 4) == (["b", "a"], "new")

    def test_sessions_stay_and_loads_stay_close(self) -> None:
        """A day of chats: every turn goes to where the last one was, except to keep the balance."""
        source = random.Random(1)
        table: PrefixTable[int] = PrefixTable()
        loads, running = dict.fromkeys(range(4), 0), []
        sessions: list[tuple[int, ...]] = [(number, number * 1000) for number in range(40)]
        reasons = []
        for step in range(4000):
            index = source.randrange(len(sessions))
            chain = sessions[index] = (*sessions[index], 10_000 + step)
            decision = decide(loads, chain, table.depths(chain), 3)
            chosen = decision.order[0]
            assert loads[chosen] <= min(loads.values()) + 3
            table.note(chain, chosen)
            loads[chosen] += 1
            running.append(chosen)
            reasons.append(decision.reason)
            while len(running) > 12:
                loads[running.pop(source.randrange(len(running)))] -= 1
        assert reasons.count("affinity") > 0.9 * len(reasons) and reasons.count("new") == 40
