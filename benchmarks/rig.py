"""A cluster of two hosts on one machine: two network namespaces joined by a shaped link.

What it does: makes two namespaces and a veth pair between them, limits both directions to a rate with a token bucket
(``tc qdisc ... tbf rate <rate>mbit burst 1mb latency 50ms``), and runs a command once in each namespace, with the
environment of a two-node torchrun job: one rank per host, so under Lightning ``num_nodes=2, devices=1``. Whatever
happens, the processes it started and its own two namespaces are gone afterwards.

How: ``python benchmarks/rig.py --rate 100 -- python train.py``, or :func:`two_hosts` and :func:`run_on` from Python.
``python benchmarks/rig.py --rate 100 --probe`` sends 8 MB through the link with plain sockets and prints its real rate
over the rate asked for: the peer is the figure that ``tc`` was given.

Needs: root and iproute2. Duration: under a second to set up and take down.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

__all__ = ["Host", "clean_up_on_sigterm", "missing_requirement", "probe_mbit", "run_on", "start", "stop", "two_hosts"]

_PORT = 29511  # each rig has its own network: ports cannot clash
_POLL_S = 0.05
_PROBE_BYTES = 8 * 2**20
_SERVER = """
import socket, sys, time
with socket.create_server(("", int(sys.argv[1]))) as server:
    peer, _ = server.accept()
    total, first_s = 0, 0.0
    while chunk := peer.recv(1 << 16):
        first_s = first_s or time.perf_counter()
        total += len(chunk)
        # The bucket is full at the start: what it held goes through at once and is not counted.
        if total <= 2 << 20:
            counted_from, first_s = total, time.perf_counter()
    print((total - counted_from) * 8 / 1e6 / (time.perf_counter() - first_s))
"""
_CLIENT = """
import socket, sys, time
for attempt in range(100):
    try:
        peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
        break
    except OSError:
        time.sleep(0.05)
peer.sendall(bytes(int(sys.argv[3])))
peer.close()
"""


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two hosts.

    Attributes:
        index: 0 or 1, also the rank of its process.
        namespace: Name of the network namespace.
        device: Its end of the link.
        address: IPv4 address on the link.
    """

    index: int
    namespace: str
    device: str
    address: str


def missing_requirement() -> str | None:
    """Return what this machine lacks for the rig, None if nothing."""
    if os.geteuid() != 0:
        return "root is needed to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"iproute2 is needed: {' and '.join(missing)} not found" if missing else None


@contextmanager
def two_hosts(rate_mbit: float | None) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a link between them and take them down afterwards.

    Args:
        rate_mbit: Rate of the link in each direction in Mbit/s; None for no limit.

    Yields:
        The two hosts.

    Raises:
        RuntimeError: If root or iproute2 is missing.
        subprocess.CalledProcessError: If the kernel refuses.
    """
    lacking = missing_requirement()
    if lacking:
        raise RuntimeError(lacking)
    mark = f"zl{os.getpid()}"
    first, second = (Host(i, f"{mark}h{i}", f"{mark}v{i}", f"10.90.0.{i + 1}") for i in range(2))
    made: list[Host] = []
    try:
        for host in (first, second):
            _call("ip", "netns", "add", host.namespace)
            made.append(host)
        _call(
            *("ip", "link", "add", first.device, "netns", first.namespace, "type", "veth"),
            *("peer", "name", second.device, "netns", second.namespace),
        )
        for host in (first, second):
            _bring_up(host, rate_mbit)
        yield first, second
    finally:
        for host in made:
            _call("ip", "netns", "delete", host.namespace)


def run_on(
    hosts: tuple[Host, Host],
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    log: Path | None = None,
) -> int:
    """Run ``command`` on both hosts at the same time, as the two ranks of one job.

    When one rank fails, or the time is over, the other is stopped.

    Args:
        hosts: What :func:`two_hosts` yielded.
        command: Program and arguments, the same on both hosts.
        env: Added to this process's environment.
        timeout_s: Longest time to wait; None for no limit.
        log: File for what both print; None to let it through.

    Returns:
        0 if both ranks ended well, else the exit status of the rank that failed first, 124 on timeout.
    """
    port_env = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_PORT)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for host in hosts:
            rank_env = {**os.environ, **port_env, **_rank_env(host), **(env or {})}
            processes.append(start(["ip", "netns", "exec", host.namespace, *command], rank_env, log))
        return _wait(processes, timeout_s)
    finally:
        stop(processes)


def start(command: Sequence[str], env: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own; what it prints goes to the end of ``log``, if there is one."""
    if log is None:
        return subprocess.Popen(command, env=env, start_new_session=True)
    with log.open("ab") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def probe_mbit(hosts: tuple[Host, Host]) -> float:
    """Return the rate of the link from the second host to the first as plain sockets see it, in Mbit/s."""
    port = str(_PORT + 1)
    inside = ("ip", "netns", "exec")
    server = subprocess.Popen(
        [*inside, hosts[0].namespace, sys.executable, "-c", _SERVER, port], stdout=subprocess.PIPE, text=True
    )
    try:
        client = [sys.executable, "-c", _CLIENT, hosts[0].address, port, str(_PROBE_BYTES)]
        subprocess.run([*inside, hosts[1].namespace, *client], check=True)
        output, _ = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    return float(output)


def stop(processes: Sequence[subprocess.Popen[bytes]], grace_s: float = 3.0) -> None:
    """End processes that were started in sessions of their own, with their children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, number)
        deadline = time.monotonic() + grace_s
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _rank_env(host: Host) -> dict[str, str]:
    """The environment of a torchrun worker on this host; Lightning then knows that the processes exist already."""
    return {
        "RANK": str(host.index),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(host.index),
        "NODE_RANK": str(host.index),
        "TORCHELASTIC_RUN_ID": host.namespace,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": host.device,
        "NCCL_SOCKET_IFNAME": host.device,
        "TP_SOCKET_IFNAME": host.device,
    }


def _bring_up(host: Host, rate_mbit: float | None) -> None:
    inside = ("ip", "-n", host.namespace)
    _call(*inside, "addr", "add", f"{host.address}/24", "dev", host.device)
    _call(*inside, "link", "set", "lo", "up")
    _call(*inside, "link", "set", host.device, "up")
    if rate_mbit is not None:
        shape = ("tbf", "rate", f"{rate_mbit:g}mbit", "burst", "1mb", "latency", "50ms")
        _call("tc", "-n", host.namespace, "qdisc", "add", "dev", host.device, "root", *shape)


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None) -> int:
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed
        if all(code == 0 for code in codes):
            return 0
        if deadline is not None and time.monotonic() > deadline:
            return 124
        time.sleep(_POLL_S)


def clean_up_on_sigterm() -> None:
    """Make SIGTERM an exception, so that what was started and made is ended and removed."""
    signal.signal(signal.SIGTERM, _exit_on_signal)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Run a command on each of two hosts joined by a shaped link.")
    parser.add_argument("--rate", type=float, default=None, help="Mbit/s in each direction (default: no limit)")
    parser.add_argument("--probe", action="store_true", help="measure the link and print it over the rate asked for")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: program and arguments")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command and not arguments.probe:
        parser.error("nothing to run: give a command after --, or --probe")
    clean_up_on_sigterm()
    with two_hosts(arguments.rate) as hosts:
        if arguments.probe:
            rate = probe_mbit(hosts)
            share = f", {rate / arguments.rate:.3f} of the {arguments.rate:g} asked for" if arguments.rate else ""
            print(f"link: {rate:.1f} Mbit/s{share}", flush=True)
        return run_on(hosts, command) if command else 0


if __name__ == "__main__":
    sys.exit(main())
