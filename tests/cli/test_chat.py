from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import CTRL_C, CTRL_D, FAKE, READY, REAL, Spawn, Terminal, environment, run_plain

pytestmark = pytest.mark.slow

PASTE = "\x1b[200~{}\x1b[201~"
UP = "\x1b[A"
NOTE = r"\[\d+ tokens, \d+ tok/s, first after \d+\.\d\d s\]"


def ask(terminal: Terminal, text: str, answer: str) -> None:
    terminal.expect(READY)
    terminal.send(text + "\n")
    terminal.expect(answer)


def test_a_conversation(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake", "--max-new-tokens", "5000"], FAKE_STEP_S="0.002")
    terminal.expect("fake: /help")
    ask(terminal, "hello 😀", "\nuser:hello 😀;>")
    terminal.expect(NOTE)

    # The conversation and the system message reach the model.
    ask(terminal, "/system Be brief.", "system message is set")
    ask(terminal, "two", "\nsystem:Be brief.;user:hello 😀;assistant:user:hello 😀;>;user:two;>")
    ask(terminal, "/reset", "forgotten")
    ask(terminal, "/system\\\nTwo\\\nlines.", "system message is set")
    ask(terminal, "three", "\nsystem:Two\nlines.;user:three;>")
    ask(terminal, "/system", "no system message")

    # Ctrl-C stops the answer, not the program; what was said stays in the conversation.
    ask(terminal, "forever", "tick tick tick")
    started = time.monotonic()
    terminal.send(CTRL_C)
    terminal.expect(r"\[stopped, \d+ tokens")
    assert time.monotonic() - started < 5
    ask(terminal, "/reset", "forgotten")
    ask(terminal, "after", "\nuser:after;>")
    terminal.expect(READY)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.output
    assert "Error" not in terminal.output


def test_what_is_pasted_is_one_message(spawn: Spawn, tmp_path: Path) -> None:
    terminal = spawn([*FAKE, "chat", "fake"])
    terminal.expect(READY)
    terminal.send(PASTE.format("def f():\r\n    return 1\r\n\r\n# what is this?\n") + "\r")
    terminal.expect("\nuser:def f\\(\\):\n    return 1\n\n# what is this\\?;>\n")
    # Also what was pasted while an answer was written; and the same key sends a pasted command.
    ask(terminal, "/reset", "forgotten")
    ask(terminal, "forever", "tick tick")
    terminal.send(CTRL_C)
    ask(terminal, PASTE.format("/reset"), "forgotten")
    # Lines by hand.
    ask(terminal, "one\\\ntwo\x1b\rthree", "\nuser:one\ntwo\nthree;>")
    terminal.expect(READY)
    terminal.send(UP)
    terminal.expect("three *")  # whole messages are kept, for this chat ...
    terminal.send(CTRL_C)
    terminal.expect(READY)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    (history,) = tmp_path.glob("aiocb/chat_history")
    assert history.stat().st_mode & 0o777 == 0o600

    again = spawn([*FAKE, "chat", "fake"])
    again.expect(READY)
    again.send(UP + "\n")  # ... and for the next
    again.expect("\nuser:one\ntwo\nthree;>")
    again.expect(READY)
    again.send("/quit\n")
    assert again.wait() == 0


def test_without_a_place_for_the_history(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    terminal = spawn([*FAKE, "chat", "fake"], XDG_STATE_HOME=str(tmp_path / "file"))
    ask(terminal, "hello", "\nuser:hello;>")
    terminal.expect(READY)
    terminal.send("/quit\n")
    assert terminal.wait() == 0


def test_ctrl_c_at_the_prompt_begins_the_line_anew_and_twice_leaves(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake"])
    terminal.expect(READY)
    terminal.send("half a line" + CTRL_C)
    terminal.expect("Ctrl-D leaves")
    ask(terminal, "whole", "\nuser:whole;>")
    terminal.expect(READY)
    terminal.send(CTRL_C)
    terminal.expect(READY)
    terminal.send(CTRL_C)
    assert terminal.wait() == 0


def test_a_second_ctrl_c_leaves_a_slow_answer(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake"], FAKE_STEP_S="0.4")
    ask(terminal, "forever", "\ntick")
    terminal.send(CTRL_C)
    time.sleep(0.1)  # two signals at once are one
    terminal.send(CTRL_C)
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.output


def test_settings(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake"])
    ask(terminal, "/temperature 0.5", "temperature is 0.5 now")
    for command in ("/temperature hot", "/temperature -1", "/temperature nan", "/top_p 2", "/max 0", "/max many"):
        ask(terminal, command, "number|must be")
    ask(terminal, "/temperature", "temperature is the model’s own now")
    ask(terminal, "/top_p 0.9", "top_p is 0.9 now")
    ask(terminal, "/max 7", "max_new_tokens is 7 now")
    ask(terminal, "hello", r"\nuser:he\n\[cut, 7 tokens")
    ask(terminal, "/max", "max_new_tokens is unset now")
    ask(terminal, "/reset", "forgotten")
    ask(terminal, "hello", "\nuser:hello;>")
    ask(terminal, "/nonsense", "unknown command /nonsense")
    ask(terminal, "/help", "/save FILE +write")
    terminal.expect(READY)
    terminal.send("/quit\n")
    assert terminal.wait() == 0


def test_saving_replaces_no_file_of_somebody_else(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("do not touch")
    terminal = spawn([*FAKE, "chat", "fake", "--system", "Short."])
    ask(terminal, "hello 😀", ">\n")
    ask(terminal, f"/save {tmp_path}/chat.json", "Saved 3 messages")
    ask(terminal, f"/save {tmp_path}/precious", "File exists")
    ask(terminal, f"/save {tmp_path}/missing/chat", "No such file")
    ask(terminal, "/save", "/save FILE")
    ask(terminal, f"/save {tmp_path}/chat.txt", "Saved 3 messages")
    ask(terminal, "two", ">\n")
    ask(terminal, f"/save {tmp_path}/chat.txt", "Saved 5 messages")
    terminal.expect(READY)
    terminal.send("/quit\n")
    assert terminal.wait() == 0
    answer = "system:Short.;user:hello 😀;>"
    roles = [("system", "Short."), ("user", "hello 😀"), ("assistant", answer)]
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == [{"role": role, "content": content} for role, content in roles]
    assert (
        (tmp_path / "chat.txt").read_text().startswith(f"system:\nShort.\n\nuser:\nhello 😀\n\nassistant:\n{answer}\n")
    )
    assert (tmp_path / "precious").read_text() == "do not touch"


def test_the_limit_is_what_is_left_of_the_context(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake", "--max-new-tokens", "1024"], FAKE_CONTEXT="100")
    ask(terminal, "forever", r"(tick ){17}t\n\[cut at the end of the context, 86 tokens")  # 14 are the prompt
    ask(terminal, "/reset", "forgotten")
    # A question that leaves little room is answered all the same, one that leaves none is refused.
    ask(terminal, "forever" + "x" * 70, r"\[cut at the end of the context, 16 tokens")
    ask(terminal, "y" * 200, "prompt has .* tokens, which is over the model's limit of 100 tokens")
    terminal.expect(READY)
    terminal.send("/quit\n")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.output


def test_the_oldest_turns_make_room_and_the_system_message_stays(spawn: Spawn, tmp_path: Path) -> None:
    terminal = spawn([*FAKE, "chat", "fake", "--system", "S", "--max-new-tokens", "20"], FAKE_CONTEXT="120")
    for name in ("a", "b"):
        ask(terminal, name * 10, r"\[cut, 20 tokens")
    assert "left out" not in terminal.output
    ask(terminal, "c" * 10, r"left out.*: the oldest turns of the chat, 1\]")
    ask(terminal, "/reset", "forgotten")
    for name in ("e", "f"):
        ask(terminal, name, "tokens, ")
    # What is sent is what the fake repeats: the system message, and not the oldest turns.
    ask(terminal, "g" * 60, r"left out.*, 2\]\n+system:S;user:gggggg\n")
    ask(terminal, f"/save {tmp_path}/chat.json", "Saved 7 messages")  # nothing is lost
    terminal.expect(READY)
    terminal.send("/quit\n")
    assert terminal.wait() == 0


def test_answers_are_wrapped_at_words(spawn: Spawn) -> None:
    words = " ".join(f"word{number}" for number in range(40)) + " 東京は日本の首都です"
    terminal = spawn([*FAKE, "chat", "fake"], columns=30)
    terminal.expect(READY)
    terminal.send(words + "\n")
    shown = terminal.expect(r"\nuser:word0(.|\n)*;>\n")
    assert all(len(line) <= 30 for line in shown.splitlines())
    assert re.findall(r"word\d+", shown) == re.findall(r"word\d+", words)
    assert "首都です" in shown.replace("\n", "")


def test_ctrl_c_while_loading(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake"], FAKE_LOAD_S="60")
    terminal.expect("Loading fake")
    terminal.expect(r"\(load\).* 50%")
    terminal.send(CTRL_C)
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.output


def test_from_a_pipe() -> None:
    result = run_plain([*FAKE, "chat", "fake"], stdin="one\n\n/reset\ntwo \\\nlines\n")
    assert result.stdout == "user:one;>\nuser:two \nlines;>\n"
    assert result.stderr == "The conversation is forgotten.\n"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("lines", "answers", "says"),
    [
        ("y" * 200 + "\n", "", "over the model's limit"),
        ("hi\n" + "y" * 200 + "\n", "user:hi;>\n", "over the model's limit"),
        ("", "", "no message"),
        ("/help\n\n", "", "no message"),
    ],
)
def test_a_pipe_that_was_not_answered_is_a_failure(lines: str, answers: str, says: str) -> None:
    result = run_plain([*FAKE, "chat", "fake"], stdin=lines, FAKE_CONTEXT="100")
    assert result.returncode == 1
    assert result.stdout == answers
    assert says in result.stderr.splitlines()[-1]


def test_ctrl_c_at_a_pipe_is_an_interrupt() -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([*FAKE, "chat", "fake"], stdin=pipe, stdout=pipe, stderr=pipe, env=environment())
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    assert process.stdout.read(10) == b"user:hi;>\n"
    os.kill(process.pid, signal.SIGINT)  # whether the answer has just ended or is about to
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == b"aiocb: interrupted\n"


def test_answers_into_a_file(spawn: Spawn, tmp_path: Path) -> None:
    terminal = spawn(["bash", "-c", " ".join(FAKE) + f" chat fake > {tmp_path}/answers"], columns=20)
    terminal.expect(READY)
    terminal.send("a question that is longer than a line\n")
    terminal.expect(READY)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    assert (tmp_path / "answers").read_text() == "user:a question that is longer than a line;>\n"


def test_a_model_without_a_chat_template_is_refused() -> None:
    result = run_plain([*FAKE, "chat", "base"])
    assert result.returncode == 1
    assert "no chat template" in result.stderr
    assert "aiocb run --raw" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.model
@pytest.mark.timeout(400)  # the first start of all compiles the kernels
def test_a_real_model(spawn: Spawn) -> None:
    terminal = spawn([*REAL, "chat", "--temperature", "0"])
    terminal.expect("smollm2: /help", 300)
    ask(terminal, "What is the capital of France?", "Paris")
    terminal.expect(r"\[\d+ tokens")
    ask(terminal, "Write a very long story about the sea.", "\n.+ .+ ")
    terminal.send(CTRL_C)
    terminal.expect(r"\[stopped, \d+ tokens")
    terminal.expect(READY)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    for noise in ("Traceback", "Warning", "warning"):
        assert noise not in terminal.output
