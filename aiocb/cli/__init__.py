"""The command line: `aiocb chat | run | info | bench`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line (the entry point of the `aiocb` script)."""
    from aiocb.cli.app import app
    from aiocb.cli.terminal import quieten

    quieten()
    app(prog_name="aiocb")
