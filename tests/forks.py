"""Processes that start with the heavy modules imported: a server imports them once and forks for each call.

A forked process runs ``module.function(*arguments)`` and then leaves the interpreter as a script does: functions that
atexit knows are called, and an exception that nothing caught is printed. Its environment and its output are its own.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

TESTS = Path(__file__).parent


class Server:
    """A process that answers one line of JSON with another."""

    def __init__(self, modules):
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, **question):
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def close(self):
        """End the server, and with it what it has forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def server(*modules):
    """The one of this process that has imported ``modules``."""
    return Server(modules)


class Forked:
    """A forked process, with as much of `subprocess.Popen` as tests ask for."""

    def __init__(self, server, call, arguments, env, output):
        self._server = server
        self.pid = int(server.ask(call=call, arguments=arguments, env=env, output=str(output)))
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = self._server.ask(wait=self.pid)
        assert self.returncode is not None
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve():
    """Answers until the questions end, and in a forked process returns what it is to run."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.freeze()
    alive = set[int]()
    for line in sys.stdin:
        question = json.loads(line)
        if "call" in question:
            found = os.fork()
            if not found:
                return question
            alive.add(found)
        else:
            asked = question.get("poll", question.get("wait"))
            pid, status = os.waitpid(asked, os.WNOHANG if "poll" in question else 0)
            found = os.waitstatus_to_exitcode(status) if pid else None
            alive -= {pid}
        print(json.dumps(found), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


if __name__ == "__main__" and (given := _serve()) is not None:
    nowhere, output = os.open(os.devnull, os.O_RDONLY), os.open(given["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nowhere, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(given["env"])
    name, _, function = given["call"].rpartition(".")
    sys.argv[:] = ["-c", *given["arguments"]]
    getattr(importlib.import_module(name), function)(*given["arguments"])
