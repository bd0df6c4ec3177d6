"""`python -m aiocb`: the command line where no script is at hand, as under `torchrun -m aiocb`."""

from aiocb.cli import main

main()
