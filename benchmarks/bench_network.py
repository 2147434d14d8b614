"""How long a step of two machines takes over a network of a stated rate, beside what the planner simulates.

Two processes in network namespaces of this machine train a stack of layers that sleep, so that other work on the
machine hardly shows. Needs root, ``ip`` and /dev/net/tun.

    python benchmarks/bench_network.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from typing import Any

import torch
from common import BatchEnds, Sleepers, batches, quiet, show, trainer
from slow_network import SlowNetwork

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import CallCost, Costs, Plan
from lightning_roundpipe.planning.network import Network
from lightning_roundpipe.planning.pipeline import Rules, run_steps

MACHINES, LAYERS, MICROBATCHES, WORKERS, STEPS = 2, 8, 4, 2, 8
FORWARD_S, BACKWARD_S = 0.03, 0.06
PLAN = "forward 0-1 2-3 4-5; fused 6-7; backward 4-5 2-3 0-1; round 4"
RATES = (50, 100)
"""Mbit/s of each machine."""
ELEMENTS = 1024 * 1025
"""Weights of a layer."""


def work(staleness: int) -> None:
    """Train on one of the machines, and print the median seconds from step to step."""
    quiet()
    torch.set_num_threads(1)
    module, ends = Sleepers([(FORWARD_S, BACKWARD_S)] * LAYERS, [ELEMENTS] * LAYERS), BatchEnds()
    strategy = RoundPipeStrategy(num_microbatches=MICROBATCHES, layers=["Sleeper"], plan=PLAN, staleness=staleness)
    fitter = trainer(strategy, WORKERS, callbacks=ends, num_nodes=MACHINES, use_distributed_sampler=False)
    fitter.fit(module, batches(torch.ones(MICROBATCHES * STEPS, 4), MICROBATCHES))
    # The first steps find the trace, and fill the pipeline.
    print(json.dumps(statistics.median(b - a for a, b in pairwise(ends.seconds[2:]))))


def measured(network: SlowNetwork, staleness: int) -> float:
    """Return the seconds of a step."""
    processes = [
        subprocess.Popen(
            [*network.inside(rank), sys.executable, __file__, str(staleness)],
            env=os.environ | network.variables | {"NODE_RANK": str(rank), "WORLD_SIZE": str(MACHINES)},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(MACHINES)
    ]  # fmt: skip
    found = [float(process.communicate()[0].splitlines()[-1]) for process in processes]
    return max(found)


def simulated(rate: float, staleness: Any) -> float:
    """Return the seconds of a step by the planner, with the same sleeps and nothing else that takes time."""
    call = (FORWARD_S, BACKWARD_S, 4 * ELEMENTS, 4 * ELEMENTS, 0, 0, True)
    costs = Costs(tuple(CallCost(f"layers.{number}", *call) for number in range(LAYERS)))
    rules = Rules(staleness=staleness, network=Network(MACHINES, rate, 1.0))
    return run_steps(Plan.parse(PLAN), costs, WORKERS, MICROBATCHES, rules, STEPS).period_s(STEPS - 3)


def main() -> None:
    rows = []
    for rate in RATES:
        nbytes = rate * 1e6 / 8
        network = SlowNetwork(MACHINES, nbytes, 0.005)
        try:
            for staleness in (0, 1):
                seconds = simulated(nbytes, staleness), measured(network, staleness)
                rows.append((f"{rate} Mbit/s", str(staleness), *(f"{each:.2f}" for each in seconds)))
        finally:
            network.close()
    title = f"{MACHINES} machines, {LAYERS * ELEMENTS * 4 / 1e6:.1f} MB of gradients, 5 ms of latency"
    show(title, ("network", "staleness", "simulated (s)", "measured (s)"), rows)


if __name__ == "__main__":
    work(int(sys.argv[1])) if len(sys.argv) > 1 else main()
