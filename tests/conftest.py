"""What holds for every test: same seeds, no network, and nothing left behind."""

import gc
import logging
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports these libraries: they read the environment once.
os.environ["HF_HUB_OFFLINE"] = "1"
_datasets = tempfile.TemporaryDirectory(prefix="datasets-")  # removed when this process ends
os.environ["HF_DATASETS_CACHE"] = _datasets.name
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Several processes share the cores, and what they start does: OpenMP's threads must not spin until others have ended.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long an example takes depends on what else the machine does. A hang meets the test's own limit.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

THREAD_GRACE_SECONDS = 60.0
SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
"""Ids of tests that are slow beside those with the mark; see ``--note-slow``."""


def pytest_report_header():
    """What decides the last bits of numbers: `make test-processors` runs the tests with others."""
    import torch

    kernels, threads = torch.backends.cpu.get_cpu_capability(), os.environ.get("OMP_NUM_THREADS", "1")
    others = [f"{name}={os.environ[name]}" for name in ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA") if name in os.environ]
    return f"torch {torch.__version__}: " + ", ".join([f"{kernels} kernels", *others, f"OMP_NUM_THREADS={threads}"])


def pytest_addoption(parser):
    parser.addoption(
        "--note-slow", type=float, metavar="SECONDS", help=f"add tests that take as long to {SLOW_TESTS.name}"
    )


def pytest_configure(config):
    if config.getoption("--note-slow") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SlowNotes(config.getoption("--note-slow")))


class _SlowNotes:
    """Adds the tests that take at least ``seconds`` to `SLOW_TESTS`."""

    def __init__(self, seconds):
        self._seconds, self._found = seconds, set(_slow_tests())

    def pytest_runtest_logreport(self, report):
        if (
            report.when == "call"
            and report.passed
            and report.duration >= self._seconds
            and "slow" not in report.keywords
        ):
            self._found.add(report.nodeid)

    def pytest_sessionfinish(self):
        SLOW_TESTS.write_text("".join(f"{name}\n" for name in sorted(self._found)))


def _slow_tests():
    return SLOW_TESTS.read_text().splitlines() if SLOW_TESTS.exists() else []


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    slow = set(_slow_tests())
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    _skip_without_gpu(items)


def _skip_without_gpu(items):
    """Skips the tests marked `gpu` where there is no CUDA device. torch is imported only if there are any."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeds():
    """Every test starts from the same random state, whatever ran before it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_environment():
    """Puts back environment variables and the thread count of torch's operators, which change the bits of a sum."""
    import torch

    variables, threads = dict(os.environ), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture(autouse=True)
def same_loggers():
    """Puts back what commands and benchmarks change about the process's loggers: others' messages would be lost."""
    import lightning.pytorch  # noqa: F401  # its loggers get their handlers when it is imported

    names = [None, *(name for name in logging.root.manager.loggerDict if name.startswith("lightning"))]
    loggers = [logging.getLogger(name) for name in names]
    before = [(log.level, log.disabled, log.propagate, log.filters[:], log.handlers[:]) for log in loggers]
    streams = [(h, h.stream) for log in loggers for h in log.handlers if type(h) is logging.StreamHandler]
    yield
    for log, (level, disabled, propagate, filters, handlers) in zip(loggers, before, strict=True):
        if log.level != level:  # to set it takes a walk through all loggers
            log.setLevel(level)
        log.disabled, log.propagate, log.filters[:] = disabled, propagate, filters
        if log is not logging.root:  # whose handlers are pytest's own
            log.handlers[:] = handlers
    for handler, stream in streams:
        handler.stream = stream


@pytest.fixture
def device():
    """One emulated device."""
    import torch

    from lightning_roundpipe.config import Emulation
    from lightning_roundpipe.devices import make_devices

    [made] = make_devices("cpu", [torch.device("cpu")], Emulation())
    yield made
    made.close()


@pytest.fixture
def said(monkeypatch):
    """What the strategy informs of."""
    lines = []
    for module in ("strategy", "trainer.fit"):
        monkeypatch.setattr(f"lightning_roundpipe.{module}.rank_zero_info", lines.append)
    return lines


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """An empty one, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan_command(capsys, monkeypatch):
    """Runs ``roundpipe-plan`` with its arguments in this process: exit code, standard output, standard error."""
    from lightning_roundpipe.commands import plan

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["roundpipe-plan", *arguments])
        code = plan.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(autouse=True)
def no_threads_left():
    """Fails a test that leaves a thread behind which is ours, or which would keep the interpreter from leaving."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + THREAD_GRACE_SECONDS
    while (left := _threads_that_matter(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        pytest.fail(f"threads left behind: {', '.join(sorted(thread.name for thread in left))}")


def _threads_that_matter(before):
    threads = (t for t in threading.enumerate() if t not in before)
    return [t for t in threads if _ours(t) or not (t.daemon or _ends_at_exit(t))]


def _ends_at_exit(thread):
    """Whether it is one of Python's executors, as torch's compiler has, which end before the interpreter does."""
    return getattr(getattr(thread, "_target", None), "__module__", "") == "concurrent.futures.thread"


def _ours(thread):
    homes = [type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or ""]
    return "roundpipe" in thread.name.lower() or any(home.startswith("lightning_roundpipe") for home in homes)


def pytest_collection_finish():
    """What has been imported stays: the collector, which many tests call, does not walk through it each time."""
    gc.collect()
    gc.freeze()
