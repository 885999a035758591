"""Which peer serves which stage: where a joiner goes, who moves, and when another cut would pay.

Pure functions over one table (`LoadTable`): no I/O, no clock (time is an argument), the same table
gives the same answer everywhere, and every answer carries its reason. The leader runs them at
commits; the simulator (`swarm/sim/`) runs the same ones at sizes no one can rent.

- `table`   what is known of stages and peers, and the throughput that follows from it
- `memory`  how much a stage needs on a device, and how many microbatches fit beside it
- `joining` the stage of a joiner
- `chain`   who holds a second stage, and what that makes of the throughput
- `moves`   who moves where, and whether it pays (`sketch`: the table as it tries them;
  `small`: all assignments of a few peers)
- `optimum` what the best assignment could reach at most; whether another cut would do better

Sources: SWARM parallelism (arXiv 2301.11913, section 3.2) moves one replica every T seconds from
the least loaded stage to the most loaded. Petals (arXiv 2209.01188, section 3.2) lets each server
choose the interval of blocks where throughput is least, and move when that gains enough.
docs/decisions/rebalancing.md says where this differs, and why.
"""

from swarm.placement.chain import Second, chain_throughput, plan_seconds
from swarm.placement.joining import Placement, choose_stage
from swarm.placement.memory import (
    MemoryEstimate,
    estimate_memory,
    least_slots,
    slots_that_fit,
)
from swarm.placement.moves import Plan, plan_moves
from swarm.placement.optimum import Recut, optimum, recut
from swarm.placement.sketch import Move, MovePolicy
from swarm.placement.table import LoadTable, PeerLoad, StageNeed

__all__ = [
    "LoadTable",
    "MemoryEstimate",
    "Move",
    "MovePolicy",
    "PeerLoad",
    "Placement",
    "Plan",
    "Recut",
    "Second",
    "StageNeed",
    "chain_throughput",
    "choose_stage",
    "estimate_memory",
    "least_slots",
    "optimum",
    "plan_moves",
    "plan_seconds",
    "recut",
    "slots_that_fit",
]
