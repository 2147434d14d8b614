"""Waiting in tests that hold on any machine: for as long as it takes, and with delays that outgrow what else it does.

A bound that a busy machine can miss makes a test that fails for nothing. So whoever waits for something to happen waits
`PATIENCE_S`, which only a hang reaches, and whoever looks at how long things take, or at what comes first, says so with
delays that get longer until the look succeeds: what a machine adds is some seconds, not a factor.
"""

import functools
import inspect
import threading
import time

PATIENCE_S = 100.0
"""Less than a test's time limit, so that it is said what did not happen."""
TIMES = (1.0, 4.0, 16.0, 64.0)
"""Factors of delays, one try each."""


def until(condition, what=""):
    """Wait until ``condition``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what or "does not happen"
        time.sleep(0.001)


def start(*functions):
    """Threads that run ``functions``, one each. They do not keep the interpreter alive."""
    threads = [threading.Thread(target=f, name="roundpipe-test", daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    """Wait for the end of ``threads``, and of those that are added meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def longer_each_try(test, each=TIMES):
    """Let ``test``, which takes ``times``, succeed with one of ``each``. It multiplies its delays and bounds by it."""

    @functools.wraps(test)
    def tried(**given):
        for times in each:
            try:
                return test(times=times, **given)
            except Exception:
                if times == each[-1]:
                    raise

    signature = inspect.signature(test)
    parameters = [p for p in signature.parameters.values() if p.name != "times"]
    tried.__signature__ = signature.replace(parameters=parameters)
    return tried
