"""Runs of several machines: a process each, on this machine, which meet at a free port.

``launch`` starts them, each with a job of ``several_jobs``, and returns what they said. Nothing outlives it. A server
has imported the heavy modules once, and forks for each of them.
"""

import atexit
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["harness", "zoo", "torch.distributed.optim"])


class Forked(FORKING.Process):
    """A process that runs a job as a script does, with as much of `subprocess.Popen` as `collect` asks for."""

    def __init__(self, arguments, env, output):
        super().__init__(target=_run, args=(arguments, env, output), daemon=True)
        with contextlib.ExitStack() as stack:
            before = os.environ.get("PYTHONPATH")
            stack.callback(os.environ.pop if before is None else os.environ.__setitem__, "PYTHONPATH", before)
            os.environ["PYTHONPATH"] = env["PYTHONPATH"]  # of the server, which the first process starts
            self.start()

    def poll(self):
        return self.exitcode

    wait = FORKING.Process.join
    returncode = FORKING.Process.exitcode


def _run(arguments, env, output):
    """Its environment and its output are its own. An error is printed before functions that atexit knows are called."""
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.clear()
    os.environ.update(env)
    try:
        importlib.import_module("several_jobs").main(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


@dataclass
class Machine:
    """What one process left: its exit status and its output."""

    status: int
    output: str


def free_port():
    """A port that nothing listens on, and that the system gives to nobody who asks for any: those are above 32767.

    Processes of one run of the tests, which pytest-xdist numbers, have ranges of their own.
    """
    first = 20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port := first + next(_ports) % 500))
            return port


_ports = itertools.count(os.getpid())


def environment(rank, machines, port, slurm=False):
    """The variables that a user sets on each machine, or those of SLURM, which has no address."""
    found = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "PYTHONUNBUFFERED": "1",
    }
    if slurm:
        return found | {
            "SLURM_JOB_ID": str(port),
            "SLURM_JOB_NAME": "train",
            "SLURM_NODELIST": "127.0.0.1",
            "SLURM_NNODES": str(machines),
            "SLURM_NTASKS": str(machines),
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank),
            "SLURM_LOCALID": "0",
        }
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return found | meet | {"NODE_RANK": str(rank), "WORLD_SIZE": str(machines)}


def start(job, machines, folder, arguments, slurm=False):
    """Start the processes. Their output goes to files in ``folder``."""
    port, given = free_port(), [job, str(folder), json.dumps(arguments)]
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Forked(given, environment(rank, machines, port, slurm), folder / f"output-{rank}.txt")
        for rank in range(machines)
    ]


def torchrun(job, machines, folder, arguments):
    """Start ``torchrun`` for each machine, as ``docs/several-machines.md`` has it, with one restart each."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    ours = ("NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}", "--nproc-per-node=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=1"]
    return [
        subprocess.Popen(
            [*command, f"--node-rank={rank}", "-m", "several_jobs", job, str(folder), json.dumps(arguments)],
            env={name: value for name, value in environment(rank, machines, port).items() if name not in ours},
            stdout=open(folder / f"output-{rank}.txt", "w"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(machines)
    ]


LEFT = 1000
"""Exit status of a process that had to be killed."""


def collect(processes, folder, limit, *, until=None):
    """Wait for the processes, or ``until`` one of them has ended, and kill what is left at last."""
    deadline, ended = time.monotonic() + limit, set[int]()
    while len(ended) < len(processes) and time.monotonic() < deadline and (until is None or until not in ended):
        ended |= {rank for rank, process in enumerate(processes) if process.poll() is not None}
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    return [
        Machine(process.returncode if rank in ended else LEFT, (folder / f"output-{rank}.txt").read_text())
        for rank, process in enumerate(processes)
    ]


def launch(job, folder, *, machines=2, limit=240, **arguments):
    """Run ``job`` on each machine and return what they left."""
    return collect(start(job, machines, folder, arguments), folder, limit)


def results(job, folder, *, machines=2, limit=240, **arguments):
    """Run ``job`` on each machine and return what each saved. All must end well."""
    import torch

    found = launch(job, folder, machines=machines, limit=limit, **arguments)
    assert [one.status for one in found] == [0] * machines, "\n\n".join(one.output for one in found)
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(machines)]
