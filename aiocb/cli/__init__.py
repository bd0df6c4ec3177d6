"""The command line: `aiocb chat | run | info | pull | list | rm | bench`."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line (the entry point of the `aiocb` script).

    What a user can mend (a wrong option, a model that is not there, a request that was refused, a file that cannot be
    written) is one line on standard error; what is our own fault, or anything with `--debug`, keeps its traceback.

    Raises:
        SystemExit: 0; 1 after an error; 2 for wrong usage; 130 after Ctrl-C.
    """
    import typer

    from aiocb.cli.app import app
    from aiocb.cli.terminal import INTERRUPTED, is_silent, one_line, quieten
    from aiocb.errors import AiocbError

    quieten()
    state: dict[str, bool] = {}
    try:
        code = app(prog_name="aiocb", standalone_mode=False, obj=state)
    except typer.TyperException as error:
        if message := one_line(error.format_message()):  # none where the help has been shown instead
            print(f"aiocb: {message} (-h shows what there is)", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        cause = error
        while isinstance(cause, ExceptionGroup):  # of a task group: they all have one cause
            cause = cause.exceptions[0]
        if state.get("debug") or not isinstance(cause, (AiocbError, OSError)):
            raise
        if isinstance(cause, BrokenPipeError):
            # The reader (`| head`) has left. Python would complain about it once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        elif not is_silent():
            print(f"aiocb: {one_line(str(cause)) or type(cause).__name__}", file=sys.stderr)
        raise SystemExit(1) from None
    if code == INTERRUPTED:
        print("aiocb: interrupted", file=sys.stderr)
        _leave_at_once(code)
    raise SystemExit(code)


def _leave_at_once(code: int) -> NoReturn:
    """Exit without waiting for a daemon thread that may be in the middle of loading a model."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
