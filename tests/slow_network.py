"""A network with a stated rate and latency between network namespaces of this machine, for runs of several processes.

Linux has no latency for its own links where the kernel lacks ``netem``. So each namespace has a TUN device, and a
process carries packets from one to the others: each leaves when those before it have left at the stated rate, and comes
after the latency. Needs root and ``ip`` (iproute2).

    network = SlowNetwork(2, rate=25e6, latency_s=0.005)
    subprocess.Popen([*network.inside(0), sys.executable, "train.py"], env=os.environ | network.variables | ...)
    network.close()
"""

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque

DEVICE = "net"
MTU = 9000
PORT = 29500
"""Where processes meet."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def unavailable():
    """Return why there can be no namespaces here; None if there can."""
    if os.geteuid() or shutil.which("ip") is None or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs root, ip (iproute2) and /dev/net/tun"
    name = f"rp-{os.getpid()}-probe"
    found = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return found.stderr.strip() or "no network namespaces" if found.returncode else None


def address(machine):
    return f"10.77.0.{machine + 1}"


class SlowNetwork:
    """Namespaces, one for each machine, and the process that carries packets between them.

    Args:
        machines: how many.
        rate: bytes a second that a machine can send.
        latency_s: seconds that a packet takes.
    """

    def __init__(self, machines, rate, latency_s):
        self._names = [f"rp-{os.getpid()}-{id(self) & 0xFFFF:x}-{machine}" for machine in range(machines)]
        self._carrier = None
        try:
            for machine, name in enumerate(self._names):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "tuntap", "add", "dev", DEVICE, "mode", "tun")
                _ip("-n", name, "addr", "add", f"{address(machine)}/24", "dev", DEVICE)
                _ip("-n", name, "link", "set", DEVICE, "up", "mtu", str(MTU))
            command = [sys.executable, __file__, str(rate), str(latency_s), *self._names]
            self._carrier = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._carrier.stdout is not None
            assert self._carrier.stdout.readline() == "ready\n"
        except BaseException:
            self.close()
            raise

    @property
    def variables(self):
        """Environment variables with which processes in the namespaces find each other."""
        return {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE}

    def inside(self, machine):
        """Return the beginning of a command that runs in a machine's namespace."""
        return ["ip", "netns", "exec", self._names[machine]]

    def sent(self, machine):
        """Return the bytes that a machine has sent, headers included."""
        found = subprocess.run(
            [*self.inside(machine), "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(found.stdout)

    def stall(self):
        """Carry nothing any more."""
        assert self._carrier is not None
        self._carrier.send_signal(signal.SIGSTOP)

    def stall_gloo(self):
        """Carry only what comes from or goes to the port of the job's store."""
        assert self._carrier is not None
        self._carrier.send_signal(signal.SIGUSR1)

    def close(self):
        """End what runs in the namespaces, and take them away."""
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


# -------------------------------------------------------------------------------------------------------- the carrier


class _Link:
    """What a machine sends: packets wait for their turn [1], and travel [2]."""

    def __init__(self, rate, latency_s):
        self._rate, self._latency, self._free = rate, latency_s, 0.0
        self._on_their_way = deque()
        self._queued, self._most = 0, rate * (latency_s + 0.05) + 2**18
        self._moved = threading.Condition()

    def send(self, packet, device):
        with self._moved:
            while self._queued > self._most:  # the sender's kernel drops packets then, and TCP sends less
                self._moved.wait()
            self._free = max(self._free, time.monotonic()) + len(packet) / self._rate  # [1]
            self._on_their_way.append((self._free + self._latency, device, packet))
            self._queued += len(packet)
            self._moved.notify_all()

    def deliver(self):
        while True:
            with self._moved:
                while not self._on_their_way:
                    self._moved.wait()
                at, device, packet = self._on_their_way.popleft()
            time.sleep(max(0.0, at - time.monotonic()))  # [2]
            os.write(device, packet)
            with self._moved:
                self._queued -= len(packet)
                self._moved.notify_all()


def _open(name):
    """Return a descriptor of the device of a namespace, which this thread enters."""
    namespace = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def carry(rate, latency_s, names):
    """Carry packets between the namespaces until this process is killed."""
    devices = {address(machine): _open(name) for machine, name in enumerate(names)}
    only_store = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: only_store.set())

    def read(device, link):
        while True:
            packet = os.read(device, MTU + 64)
            to = devices.get(".".join(map(str, packet[16:20]))) if packet[0] >> 4 == 4 else None
            header = 4 * (packet[0] & 15)
            ports = struct.unpack("!HH", packet[header : header + 4])
            if to is None or (only_store.is_set() and PORT not in ports):
                continue
            link.send(packet, to)

    for device in devices.values():
        link = _Link(rate, latency_s)
        threading.Thread(target=read, args=(device, link), daemon=True).start()
        threading.Thread(target=link.deliver, daemon=True).start()
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    carry(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
