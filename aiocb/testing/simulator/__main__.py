"""The command: run one or several seeds and say how fast."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from aiocb.testing import simulator
from aiocb.testing.simulator import LAYOUTS, Simulation

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m aiocb.testing.simulator", description=simulator.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each")
    parser.add_argument("--layout", choices=[layout.name for layout in LAYOUTS], help="instead of the seed's own")
    parser.add_argument("--depth", type=int, choices=(1, 2), help="instead of the seed's own")
    parser.add_argument("--no-faults", dest="faults", action="store_false", help="nothing fails")
    given = parser.parse_args(arguments)
    layout = next((layout for layout in LAYOUTS if layout.name == given.layout), None)
    for seed in range(given.seed, given.seed + given.seeds):
        report = Simulation(seed, layout=layout, depth=given.depth, faults=given.faults).run(given.steps)
        events = ", ".join(f"{name} {count}" for name, count in sorted(report.events.items()))
        sys.stdout.write(
            f"seed {seed} ({report.layout.name}, depth {report.depth}): {report.num_steps} steps, "
            f"{report.num_clients} clients, {report.num_tokens} tokens, "
            f"{report.num_steps / report.elapsed_s:.0f} steps/s, digest {report.digest}\n  {events}\n"
        )


if __name__ == "__main__":
    logging.getLogger("aiocb").setLevel(logging.ERROR)  # what is planned is no news
    main()
