"""A lab of homes on one machine: each host is a network namespace with a line of its own.

    with Lab("home", 7) as lab:
        lab.hosts[0].namespace      # what `_namespaces.enter` takes, or `ip netns exec`
        lab.hosts[0].address        # 10.77.0.1

Hosts of the profile `lan` hang on a bridge; all others on the hub (`_hub.py`). Whatever ends the
process ends the lab: the hub goes when its input closes, and namespaces that a killed lab left are
removed by the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from _namespaces import DEVICE, PREFIX, LabError, ip, remove_left_behind, require_root
from _profiles import PROFILES, Home

NETWORK = "10.77.0"
MAX_HOSTS = 254  # of one such network
MTU = 1500
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
HUB_END_S = 10.0
HUB = Path(__file__).with_name("_hub.py")
FORKED = HUB.with_name("_in_host.py")


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    address: str
    home: Home | None  # its line; None on a bridge


class Lab:
    """Use it as a context manager. Raises LabError where it cannot be built."""

    def __init__(
        self,
        profile: str,
        num_hosts: int,
        *,
        congestion: str = "cubic",
        keep_window: bool = False,
        bursts: bool = True,
        seed: int = 0,
    ) -> None:
        """Without `bursts` the kernel hands over, and counts, each packet by itself, as on a cable.
        With them it is faster, and counts one header for all that TCP sends at once."""
        self.profile, self.congestion, self.seed = PROFILES[profile], congestion, seed
        name = f"{PREFIX}{os.getpid()}-"
        self.hosts = [
            Host(f"{name}{n}", f"{NETWORK}.{n}", self.profile.of(n - 1))
            for n in range(1, num_hosts + 1)
        ]
        self._settings = [f"net.ipv4.tcp_congestion_control={congestion}"]
        if keep_window:  # of a connection that was idle: no new slow start at every step
            self._settings.append("net.ipv4.tcp_slow_start_after_idle=0")
        self._bursts = bursts
        self._bridge = f"{name}bridge"
        self._made: list[str] = []
        self._hub: subprocess.Popen[str] | None = None

    def __enter__(self) -> Lab:
        require_root()
        remove_left_behind()
        try:
            for host in self.hosts:
                self._make(host.namespace)
            if self.profile.emulated:
                self._start_hub()
            else:
                self._build_bridge()
            allow(self.congestion)
            for host in self.hosts:
                self._settle(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> dict[str, Any]:
        """End it; returns what the hub says of itself. Empty for a bridge, where the hub had to be
        killed, and where it had died."""
        said: dict[str, Any] = {}
        if self._hub is not None:
            hub, self._hub = self._hub, None
            try:
                out, _ = hub.communicate(timeout=HUB_END_S)
            except subprocess.TimeoutExpired:
                hub.kill()
                out, _ = hub.communicate()
            with contextlib.suppress(ValueError, IndexError):
                said = json.loads(out.splitlines()[-1])
        while self._made:
            ip("netns", "del", self._made.pop())
        return said

    def run(self, host: Host, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a host. Its files, and its Unix sockets, are this machine's."""
        return subprocess.Popen([sys.executable, str(FORKED), host.namespace, *command], **options)

    def plug(self, host: Host, *, connected: bool) -> None:
        """The cable of a host that hangs on the bridge; out of it, whatever is sent is lost."""
        port = f"port{self.hosts.index(host)}"
        ip("-n", self._bridge, "link", "set", port, "up" if connected else "down")

    def part(self, one: Host, other: Host) -> None:
        """From now on nothing of these two reaches the other."""
        for here, there in ((one, other), (other, one)):
            ip("-n", here.namespace, "route", "add", "blackhole", f"{there.address}/32")

    def _make(self, namespace: str) -> None:
        ip("netns", "add", namespace)
        self._made.append(namespace)
        ip("-n", namespace, "link", "set", "lo", "up")

    def _start_hub(self) -> None:
        pairs = [f"{host.namespace}={host.address}" for host in self.hosts]
        self._hub = subprocess.Popen(
            [sys.executable, str(HUB), self.profile.name, str(self.seed), *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_first_in_line,
        )
        out: IO[str] | None = self._hub.stdout
        if out is None or not out.readline():
            raise LabError("the hub did not start; its reason is above")

    def _build_bridge(self) -> None:
        self._make(self._bridge)
        ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self._bridge, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            ip("-n", self._bridge, "link", "add", port, "type", "veth",
               "peer", "name", DEVICE, "netns", host.namespace)  # fmt: skip
            ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")

    def _settle(self, host: Host) -> None:
        ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
        whole = [] if self._bursts else ["gso_max_segs", "1"]
        ip("-n", host.namespace, "link", "set", DEVICE, "mtu", str(MTU), *whole, "up")
        done = subprocess.run(
            ["ip", "netns", "exec", host.namespace, "sysctl", "-qw", *self._settings],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise LabError(f"cannot choose {self.congestion}: {done.stderr.strip()}")


def allow(congestion: str) -> None:
    """Only algorithms on this list, which is the whole machine's, may be chosen in a namespace."""
    # Never taken back: another lab, which found it allowed, may be about to choose it.
    allowed = ALLOWED.read_text().split()
    if congestion not in allowed:
        try:
            ALLOWED.write_text(" ".join([*allowed, congestion]))
        except OSError as error:
            raise LabError(f"this kernel does not have {congestion}: {error}") from None


def _first_in_line() -> None:
    """The hub's clock is the experiment's: it runs before what it carries. And Ctrl-C, which a
    terminal tells it too, is the lab's to answer: it ends when its input closes."""
    os.nice(-15)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # stays so over exec
