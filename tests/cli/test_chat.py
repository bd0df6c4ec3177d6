from __future__ import annotations

import time

import pytest

from .conftest import CTRL_C, CTRL_D, FAKE, REAL, Spawn, run_plain


def test_a_conversation(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake", "--max-new-tokens", "5000"], FAKE_STEP_S="0.002")
    terminal.expect("fake: /help")
    terminal.expect("> ")
    terminal.send("hello 😀\n")
    terminal.expect("user:hello 😀;>")
    terminal.expect(r"\[\d+ tokens, \d+ tok/s, first after \d+\.\d\d s\]")

    # The conversation and the system message reach the model.
    terminal.expect("> ")
    terminal.send("/system Be brief.\n")
    terminal.expect("system message is set")
    terminal.send("two\n")
    terminal.expect("system:Be brief.;user:hello 😀;assistant:user:hello 😀;>;user:two;>")

    terminal.send("/temperature 0.5\n")
    terminal.expect("temperature is 0.5 now")
    for wrong in ("hot", "-1", "nan", "inf"):
        terminal.send(f"/temperature {wrong}\n")
        terminal.expect("must be a number from 0 up")
    terminal.send("/temperature\n")
    terminal.expect("the model’s own now")
    terminal.send("/nonsense\n")
    terminal.expect("unknown command /nonsense")
    terminal.send("/help\n")
    terminal.expect("/reset +forget")

    terminal.send("/reset\n")
    terminal.expect("forgotten")
    terminal.send("/system\n")
    terminal.expect("no system message")
    terminal.send("one \\\n")
    terminal.expect(r"\.\.\. ")
    terminal.send("line\n")
    terminal.expect("(?<!;)user:one \n+line;>")

    # Ctrl-C stops the answer, not the program; what was said stays in the conversation.
    terminal.expect("> ")
    terminal.send("forever\n")
    terminal.expect("tick tick tick")
    started = time.monotonic()
    terminal.send(CTRL_C)
    terminal.expect(r"\[stopped, \d+ tokens")
    assert time.monotonic() - started < 5
    terminal.expect("> ")
    terminal.send("/reset\n")
    terminal.expect("forgotten")
    terminal.send("after\n")
    terminal.expect("user:after;>")

    # At the prompt it begins the line anew.
    terminal.expect("> ")
    terminal.send("half a line" + CTRL_C)
    terminal.expect("Ctrl-D leaves")
    terminal.expect("> ")
    terminal.send("whole\n")
    terminal.expect("user:whole;>")
    terminal.expect("> ")
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.output
    assert "Error" not in terminal.output


def test_a_refused_question_does_not_end_the_chat(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake", "--max-new-tokens", "65000"])
    terminal.expect("> ")
    terminal.send("/system " + "long " * 200 + "\n")
    terminal.expect("is set")
    terminal.send("hello\n")
    terminal.expect("65000")
    terminal.expect("> ")
    terminal.send("/system\n/quit\n")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.output


def test_ctrl_c_while_loading(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "chat", "fake"], FAKE_LOAD_S="60")
    terminal.expect("Loading fake")
    terminal.expect("load 50%")
    terminal.send(CTRL_C)
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.output


def test_from_a_pipe() -> None:
    result = run_plain([*FAKE, "chat", "fake"], stdin="one\n\n/reset\ntwo\n")
    assert result.stdout == "user:one;>\nuser:two;>\n"
    assert result.returncode == 0


def test_a_model_without_a_chat_template_is_refused() -> None:
    result = run_plain([*FAKE, "chat", "base"])
    assert result.returncode == 1
    assert "no chat template" in result.stderr
    assert "aiocb run --raw" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.model
@pytest.mark.timeout(400)  # the first start of all compiles the kernels
def test_a_real_model(spawn: Spawn) -> None:
    terminal = spawn([*REAL, "chat", "--temperature", "0"])
    terminal.expect("smollm2: /help", 300)
    terminal.expect("> ")
    terminal.send("What is the capital of France?\n")
    terminal.expect("Paris")
    terminal.expect(r"\[\d+ tokens")
    terminal.send("Write a very long story about the sea.\n")
    terminal.expect("> Write.*\n.+ .+ ")
    terminal.send(CTRL_C)
    terminal.expect(r"\[stopped, \d+ tokens")
    terminal.expect("> ")
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    for noise in ("Traceback", "Warning", "warning"):
        assert noise not in terminal.output
