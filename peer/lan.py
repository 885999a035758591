"""Find a run on the local network by mDNS, and be found (`swarm-peer --lan`; extra `lan`).

hivemind's daemon has no mDNS, and py-libp2p cannot live in one process with hivemind (both define
the protobuf symbol `crypto.pb.KeyType`). So a small process of its own does it, this module run as
`python -m peer.lan`: it speaks JSON lines on stdout and ends when its stdin does, so it never
outlives its parent. The parent's side, the two coroutines below, imports nothing of the extra.

Records follow libp2p's mDNS specification (service `_p2p._udp.local.`, TXT `dnsaddr=/.../p2p/ID`),
with one more TXT entry, `swarm=RUN_ID`. What answers on a network is not to be believed: each peer
is dialled, which proves its peer id, and pinged, before it is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import ipaddress
import json
import logging
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from swarm.errors import ConfigError, JoinError
from swarm.net.link import MAX_ADDRESSES as MAX_LINK_ADDRESSES
from swarm.net.link import format_link, group_by_peer, parse_link, wrong_with_address

SERVICE = "_p2p._udp.local."
MAX_ADDRESSES = 8
GRACE_S = 1.0
_START_S = 30.0
_DIAL_S = 10.0
_MAX_LINE_BYTES = 64 << 10


def require_lan() -> None:
    """Raises ConfigError, saying what to install, when the extra is not there."""
    if any(importlib.util.find_spec(name) is None for name in ("libp2p", "zeroconf")):
        raise ConfigError(
            "--lan needs py-libp2p",
            "install the extra `lan`, as by pip install -c constraints.txt '.[lan]'",
        )


async def find_on_lan(
    run_id: str | None, timeout_s: float, *, interfaces: Sequence[str] = ()
) -> list[str]:
    """Join links of the runs announced on this network, each peer's identity checked.

    With a `run_id`, links of that run only. Returns soon after the first is found, and an empty
    list when it has looked for `timeout_s`. Raises ConfigError when the extra is missing. Leaves no
    process.
    """
    require_lan()
    command = ["find", *(["--run", run_id] if run_id else []), *_options("--interface", interfaces)]
    helper = await _start(command)
    found: dict[str, dict[str, None]] = {}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_S
    try:
        while (remaining := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(remaining):
                    message = await _read(helper)
            except TimeoutError:
                break
            if message is None:
                break
            if message.get("looking"):
                deadline = loop.time() + timeout_s
            if isinstance(message.get("run"), str) and isinstance(message.get("addresses"), list):
                with contextlib.suppress(JoinError):
                    link = parse_link(format_link(message["run"], map(str, message["addresses"])))
                    found.setdefault(link.run_id, {}).update(dict.fromkeys(link.addresses))
                    deadline = min(deadline, loop.time() + GRACE_S)
    finally:
        await _stop(helper)
    return [
        format_link(run, list(addresses)[:MAX_LINK_ADDRESSES])
        for run, addresses in sorted(found.items())
    ]


class Announcement:
    """A run announced on this network until `close()`, or until this process ends."""

    def __init__(self, helper: asyncio.subprocess.Process) -> None:
        self._helper = helper

    async def close(self) -> None:
        await _stop(self._helper)


async def announce_on_lan(
    run_id: str, addresses: Iterable[str], *, interfaces: Sequence[str] = ()
) -> Announcement:
    """Let `find_on_lan` of other machines find these addresses.

    Raises ConfigError when the extra is missing, JoinError when the network has no multicast.
    """
    require_lan()
    command = ["announce", "--run", run_id, *_options("--interface", interfaces)]
    helper = await _start([*command, *_options("--address", _worth_announcing(addresses))])
    try:
        async with asyncio.timeout(_START_S):
            message = await _read(helper)
    except BaseException as error:
        await _stop(helper)
        if isinstance(error, TimeoutError):
            raise JoinError("cannot announce on the local network", "no answer") from None
        raise
    if message is None or not message.get("announced"):
        await _stop(helper)
        reason = str((message or {}).get("error", "the helper ended"))
        raise JoinError("cannot announce on the local network", reason)
    return Announcement(helper)


def _options(name: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (name, value)]


def _worth_announcing(addresses: Iterable[str]) -> list[str]:
    """Addresses of this network; of this machine only if it has no other. No relays."""
    plain = [address for address in addresses if "/p2p-circuit" not in address]
    outside = [a for a in plain if not re.match(r"/ip4/127\.|/ip6/::1/", a)]
    return (outside or plain)[:MAX_ADDRESSES]


async def _start(arguments: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "peer.lan",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_MAX_LINE_BYTES,
        start_new_session=True,
    )


async def _read(helper: asyncio.subprocess.Process) -> dict[str, Any] | None:
    assert helper.stdout is not None
    try:
        message = json.loads(await helper.stdout.readline() or "null")
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


async def _stop(helper: asyncio.subprocess.Process) -> None:
    if helper.stdin is not None:
        helper.stdin.close()
    try:
        async with asyncio.timeout(3.0):
            await helper.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            helper.kill()
        await helper.wait()


# --- The helper process. ---


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def _end_with_stdin(done: threading.Event) -> None:
    """A parent that is gone, in whatever way, closes our stdin."""

    def watch() -> None:
        sys.stdin.buffer.read()
        done.set()

    threading.Thread(target=watch, daemon=True).start()


def _zeroconf(interfaces: Sequence[str]) -> Any:
    from zeroconf import InterfaceChoice, Zeroconf

    return Zeroconf(interfaces=list(interfaces) or InterfaceChoice.All)


def _announce(run_id: str, addresses: Sequence[str], interfaces: Sequence[str]) -> None:
    from zeroconf import ServiceInfo

    done = threading.Event()
    _end_with_stdin(done)
    properties: dict[str | bytes, str | bytes | None] = {"swarm": run_id}
    hosts: list[bytes] = []
    port = 0
    for number, address in enumerate(addresses):
        properties["dnsaddr" if number == 0 else f"dnsaddr{number + 1}"] = address
        match = re.match(r"/(ip[46])/([^/]+)/(?:tcp|udp)/(\d+)", address)
        if match:
            port = port or int(match[3])
            hosts.append(ipaddress.ip_address(match[2]).packed)
    name = secrets.token_hex(16)
    info = ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=port,
        properties=properties,
        server=f"{name}.local.",
        addresses=list(dict.fromkeys(hosts)),
    )
    try:
        zeroconf = _zeroconf(interfaces)
        zeroconf.register_service(info)
    except Exception as error:  # of many kinds; the parent shows this line
        _say({"announced": False, "error": str(error) or type(error).__name__})
        return
    _say({"announced": True})
    done.wait()
    zeroconf.close()


def _find(run_id: str | None, interfaces: Sequence[str]) -> None:
    import libp2p  # noqa: F401 - takes seconds, which are not to go off the search
    from zeroconf import ServiceBrowser, ServiceStateChange

    done = threading.Event()
    _end_with_stdin(done)
    names: queue.Queue[str] = queue.Queue()
    zeroconf = _zeroconf(interfaces)

    def changed(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if state_change is not ServiceStateChange.Removed:
            names.put(name)

    ServiceBrowser(zeroconf, SERVICE, handlers=[changed])
    _say({"looking": True})
    seen: dict[tuple[str, str], float] = {}
    while not done.is_set():
        try:
            name = names.get(timeout=0.1)
        except queue.Empty:
            continue
        info = zeroconf.get_service_info(SERVICE, name, timeout=2000)
        if info is None:
            continue
        run, addresses = _announced(info.properties)
        if not run or (run_id and run != run_id):
            continue
        for peer, where in group_by_peer(addresses).items():
            last = seen.get((run, peer))
            if last is not None and time.monotonic() - last < 5.0:
                continue
            seen[run, peer] = time.monotonic()
            if _is_who_it_says(peer, where):
                _say({"run": run, "peer": peer, "addresses": where})
    zeroconf.close()


def _announced(properties: dict[bytes, bytes | None]) -> tuple[str, list[str]]:
    """Run id and valid addresses in a TXT record that anyone may have written."""
    run = (properties.get(b"swarm") or b"").decode("ascii", "replace")
    if not re.fullmatch(r"[0-9a-f]{32}", run):
        return "", []
    addresses: list[str] = []
    for key, value in sorted(properties.items()):
        if key.startswith(b"dnsaddr") and value and len(addresses) < MAX_ADDRESSES:
            address = value.decode("ascii", "replace")
            if not wrong_with_address(address):
                addresses.append(address)
    return run, addresses


def _is_who_it_says(peer: str, addresses: Sequence[str]) -> bool:
    """Dial the peer, which proves that it holds the key of its id, and have it answer a ping."""
    import trio
    from libp2p import new_host
    from libp2p.custom_types import TProtocol
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from multiaddr import Multiaddr

    async def check() -> bool:
        host = new_host()
        with trio.move_on_after(_DIAL_S):
            async with host.run([]):
                plain = [Multiaddr(address.rpartition("/p2p/")[0]) for address in addresses]
                peer_id = ID.from_base58(peer)
                await host.connect(PeerInfo(peer_id, plain))
                stream = await host.new_stream(peer_id, [TProtocol("/ipfs/ping/1.0.0")])
                question = secrets.token_bytes(32)
                await stream.write(question)
                answer = b""
                while len(answer) < len(question):
                    part = await stream.read(len(question) - len(answer))
                    if not part:
                        break
                    answer += part
                return bool(answer == question)
        return False

    try:
        return trio.run(check)
    except Exception as error:  # whatever a stranger's host makes the library raise
        logging.getLogger("peer.lan").debug("%s does not answer: %r", peer, error)
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m peer.lan", description=__doc__)
    parser.add_argument("what", choices=["find", "announce"])
    parser.add_argument("--run")
    parser.add_argument("--interface", action="append", default=[])
    parser.add_argument("--address", action="append", default=[])
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    socket.setdefaulttimeout(_DIAL_S)
    if options.what == "announce":
        _announce(options.run, options.address, options.interface)
    else:
        _find(options.run, options.interface)


if __name__ == "__main__":
    main()
