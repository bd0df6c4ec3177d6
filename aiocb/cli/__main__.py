"""`python -m aiocb.cli`."""

from aiocb.cli import main

main()
