"""Whole random lives of an `EngineCore`: synchronous, with a virtual clock, replayed from a seed.

    $ python -m aiocb.testing.simulator --seed 7 --steps 5000

A step of the simulation is: random events (arrivals, cancels, faults, pauses, new weights, clock jumps ...), one
`EngineCore.step`, delivery to readers of all tempers, and every invariant. The runner is a `KVOracle`, so that a wrong
block is noticed when it is read and the right output of every request is known. At the end everything is let go and has
to be quiescent: each output has had exactly one end, its tokens are what a solo run gives, no block, request or waiter
is left.

```
Simulation ─► Life ─► EngineCore ─► KVOracle      one life after the other, one oracle for all until it dies
                └► Client ◄─ Sink ◄─┘             readers, and event loops without a loop
```
"""

from aiocb.testing.simulator.report import Report
from aiocb.testing.simulator.simulation import Simulation, SimulationError
from aiocb.testing.simulator.workload import LAYOUTS, Layout

__all__ = ["LAYOUTS", "Layout", "Report", "Simulation", "SimulationError"]
