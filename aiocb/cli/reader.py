"""What the user types: an editor on a terminal (history, several lines, pasted text), plain lines from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit.history import History

__all__ = ["make_reader"]


def make_reader() -> Callable[[], str]:
    """Return a function that reads the next message.

    It raises `EOFError` at the end of the input (Ctrl-D) and `KeyboardInterrupt` on Ctrl-C.
    """
    return _make_editor() if sys.stdin is not None and sys.stdin.isatty() else _read_line


def _read_line() -> str:
    """One line; one that ends in a backslash goes on in the next."""
    lines: list[str] = []
    for line in sys.stdin or ():
        text = line.removesuffix("\n")
        lines.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            break
    if not lines:
        raise EOFError
    return "\n".join(lines)


def _make_editor() -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output

    bindings = KeyBindings()

    # Pasted text arrives as one key of its own, so the line ends in it are not this key.
    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(always_prefer_tty=True)  # also when the answers go to a file
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # the cursor's position is needed for menus only; not every terminal tells it
    session: PromptSession[str] = PromptSession(
        multiline=True, key_bindings=bindings, history=_history(), prompt_continuation="... ", output=output
    )
    return lambda: session.prompt([("ansicyan", "> ")])


def _history() -> History:
    """A file that only the user can read; the memory where there can be none."""
    import platformdirs
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = platformdirs.user_state_path("aiocb", appauthor=False) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("ab"):
            return FileHistory(path)
    except OSError:
        return InMemoryHistory()
