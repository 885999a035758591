"""The join link: `swarm://RUN_ID@MULTIADDR[,MULTIADDR...]`, all a volunteer needs to know.

The run id is the hash of the run config, so the link itself says which config is the right one;
the addresses carry the peer id (`/p2p/ID`), so nobody can answer in the place of that peer.
People paste links from chats and terminals: whatever is wrong with one is said in one line.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.errors import JoinError
from swarm.net.identity import is_peer_id

SCHEME = "swarm://"
MAX_LINK_CHARS = 8192
MAX_ADDRESSES = 32  # of a peer: no more are told, or read; a directory record has room for 180
_REMEDY = "a join link looks like swarm://RUN_ID@/ip4/1.2.3.4/tcp/4001/p2p/PEER_ID"
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_DNS_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
                       r"(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?")  # fmt: skip
_FLAGS = ("quic", "quic-v1", "ws", "wss", "tls", "webtransport")


@dataclass(frozen=True)
class JoinLink:
    """A parsed link. `str(link)` is the link again."""

    run_id: str
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return format_link(self.run_id, self.addresses)

    @property
    def by_peer(self) -> dict[str, list[str]]:
        """Addresses by the peer id they end in, in the link's order."""
        return group_by_peer(self.addresses)


def format_link(run_id: str, addresses: Iterable[str]) -> str:
    return f"{SCHEME}{run_id}@{','.join(addresses)}"


def parse_link(text: str) -> JoinLink:
    """Raises JoinError, one line, on anything that is not a join link."""
    text = text.strip()
    if len(text) > MAX_LINK_CHARS:
        raise JoinError(f"the join link is longer than {MAX_LINK_CHARS} characters", _REMEDY)
    if not text.startswith(SCHEME):
        raise JoinError(f"{_shown(text)} is not a join link", _REMEDY)
    run_id, separator, rest = text[len(SCHEME) :].partition("@")
    if not separator:
        raise JoinError(f"the join link {_shown(text)} has no @ and address", _REMEDY)
    if not _RUN_ID.fullmatch(run_id):
        raise JoinError(f"{_shown(run_id)} is not a run id (32 hex digits)", _REMEDY)
    addresses = tuple(dict.fromkeys(rest.split(",")))
    if len(addresses) > MAX_ADDRESSES:
        raise JoinError(f"the join link has more than {MAX_ADDRESSES} addresses", _REMEDY)
    for address in addresses:
        why = wrong_with_address(address)
        if why:
            raise JoinError(f"bad address {_shown(address)} in the join link: {why}", _REMEDY)
    return JoinLink(run_id, addresses)


def peer_of_address(address: str) -> str:
    """The peer id at the end of a valid address."""
    return address.rpartition("/p2p/")[2]


def group_by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for address in addresses:
        groups.setdefault(peer_of_address(address), []).append(address)
    return groups


def addresses_of(peer: str, addresses: Iterable[str]) -> list[str]:
    """Of what a peer says about itself: where it, and nobody else, can be dialled."""
    end = f"/p2p/{peer}"
    return [each for each in addresses if each.endswith(end) and not wrong_with_address(each)]


def farthest_first(addresses: Iterable[str]) -> list[str]:
    """Names and public addresses, then those of local networks, through relays, and what is of this
    machine alone or unknown; MAX_ADDRESSES at most, for the last are the least loss."""
    return sorted(addresses, key=_nearness)[:MAX_ADDRESSES]


def _nearness(address: str) -> int:
    parts = address.split("/")
    if "p2p-circuit" in parts:
        return 2
    match parts[1:3]:
        case ["dns" | "dns4" | "dns6" | "dnsaddr", _]:
            return 0
        case ["ip4" | "ip6", value]:
            try:
                ip = ipaddress.ip_address(value)
            except ValueError:
                return 3
            return 3 if ip.is_loopback else 0 if ip.is_global else 1
    return 3


def wrong_with_address(address: str) -> str:
    """Why this is not a dialable multiaddress that ends in `/p2p/PEER_ID`; empty if it is one."""
    parts = address.split("/")
    if len(address) > 1024 or parts[0] or len(parts) < 2 or not address.isascii():
        return "not a multiaddress"
    del parts[0]
    seen: list[str] = []
    while parts:
        name = parts.pop(0)
        seen.append(name)
        if name in _FLAGS or name == "p2p-circuit":
            continue
        value = parts.pop(0) if parts else ""
        why = _wrong_with_value(name, value)
        if why:
            return why
    if seen[-1] != "p2p":
        return "it must end in /p2p/PEER_ID"
    if seen[0] not in ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr", "p2p"):
        return "it must begin with /ip4, /ip6 or /dns"
    if seen[0] == "p2p" and "p2p-circuit" not in seen:
        return "it has no network address"
    if seen[0] in ("ip4", "ip6", "dns", "dns4", "dns6") and not {"tcp", "udp"} & set(seen):
        return "it has no port, as in /tcp/4001"
    return ""


def _wrong_with_value(name: str, value: str) -> str:
    if name in ("ip4", "ip6"):
        if "%" in value:
            return f"{_shown(value)} has a zone, which no multiaddress can have"
        try:
            (ipaddress.IPv4Address if name == "ip4" else ipaddress.IPv6Address)(value)
        except ValueError:
            return f"{_shown(value)} is not an {name[:2].upper()}v{name[2]} address"
    elif name in ("dns", "dns4", "dns6", "dnsaddr"):
        if not _DNS_NAME.fullmatch(value):
            return f"{_shown(value)} is not a host name"
    elif name in ("tcp", "udp"):
        if not re.fullmatch(r"[0-9]{1,5}", value) or not 1 <= int(value) <= 65535:
            return f"{_shown(value)} is not a port"
    elif name == "p2p":
        if not is_peer_id(value):
            return f"{_shown(value)} is not a peer id"
    else:
        return f"unknown part {_shown(name)}"
    return ""


def _shown(text: str) -> str:
    """The text on one line, short, with nothing a terminal would act on."""
    shown = ascii(text)
    return shown if len(shown) <= 80 else shown[:76] + "...'"
