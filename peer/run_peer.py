"""A volunteer's process: from a join link to serving stages, and back after every interruption."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.host import Host
from peer.launch import (
    ANNOUNCE_S,
    Node,
    be_exact,
    best_first,
    choose_device,
    keep_freed_memory,
    numerics_of,
)
from peer.measure import device_memory, device_speed
from peer.member import Member
from peer.observe import Activity, PeerObservations, version
from peer.status import ANSWER_S
from swarm.averaging import GroupAllReduce
from swarm.averaging.policy import POLICIES
from swarm.compute import Compute, ThreadCompute, WatchedCompute
from swarm.config import MAX_CONFIG_BYTES, RunConfig, from_canonical, with_pretrained_hash
from swarm.device import allocator
from swarm.errors import ConfigError, JoinError, ListenError, SwarmError, VersionError
from swarm.model import ModelPipeline, build_pipeline
from swarm.net.channel import Channel, Message, Method
from swarm.net.identity import Identity
from swarm.net.link import (
    MAX_ADDRESSES,
    MAX_LINK_CHARS,
    JoinLink,
    format_link,
    parse_link,
    wrong_with_address,
)
from swarm.net.links import Links
from swarm.net.records import leader_key, peers_key
from swarm.tasks import unless
from swarm.terms import new_incarnation
from swarm.wire.boundaries import BoundaryCodecs
from swarm.wire.frames import no_tensors
from swarm.words import clean

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
NEW_LINK_S = 60.0  # for which a link is tried that is not of the last swarm joined
SAY_EVERY_S = 60.0
LINK_S = 2.0  # after so long at most the saved link names who has come
BENCHMARK_S = 2.0  # for a first estimate of a stage's time on this device
_KIND_CHARS = 15
MAX_LINE_CHARS = 1000
TROUBLE = ("lost the leader", "looking for the leader")  # phases of a Member that are retries


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """The flags of `swarm-peer`: nothing here changes the numbers of the run."""

    stages: Sequence[int] = ()  # empty: the leader chooses one, and may move this peer
    may_move: bool = False  # also where stages are named
    device: str = "auto"
    threads: int | None = None
    memory_mib: int | None = None
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Sequence[str] = ()
    connections: int = 1
    allow_pipeline: str | None = None
    pretrained: Path | None = None
    name: str = ""  # shown in public with what this peer has done
    give_up_s: float = math.inf  # if until then nobody at the link has answered


class Speaker:
    """One line per phase for people. Trouble is retried, and each kind said once a minute."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last = ""
        self._troubles: dict[str, float] = {}

    def __call__(self, line: str) -> None:
        """A phase begins; said unless it was the last thing said."""
        if line.startswith(TROUBLE):
            self.trouble(line)
        elif line != self._last:
            self._say(line)

    def trouble(self, line: str) -> None:
        """Something does not work at the moment and is tried again."""
        now, kind = asyncio.get_running_loop().time(), line[:_KIND_CHARS]
        if now - self._troubles.get(kind, -SAY_EVERY_S) >= SAY_EVERY_S:
            self._troubles[kind] = now
            self._say(line)

    def _say(self, line: str) -> None:
        self._last = line
        self._write(clean(line, MAX_LINE_CHARS))  # some of it may be of another peer


class PeerProcess:
    """The replicas of one run on one device. `remember(link)` is told of every link that worked."""

    member_type = Member  # what serves a stage; one that keeps books may take its place

    def __init__(
        self,
        link: JoinLink,
        identity: Identity,
        options: PeerOptions,
        *,
        say: Callable[[str], None] = print,
        remember: Callable[[str], None] = lambda link: None,
    ) -> None:
        self.link, self.identity, self.options = link, identity, options
        self._write, self._remember = say, remember
        self.host: Host | None = None
        self._config = b""
        self._remembered = ""
        self._leaving = False
        self._give_up_at = math.inf

    async def run(self) -> None:
        """Serve until the run is finished, then give the identity back. Raises SwarmError for what
        a person must mend: another run or version, a wrong flag, a taken port, a link where nobody
        ever answered."""
        try:
            await self._run()
        finally:
            self.identity.release()

    async def _run(self) -> None:
        self.say = Speaker(self._write)
        clock = asyncio.get_running_loop().time
        self._give_up_at = clock() + self.options.give_up_s
        device = choose_device(self.options.device)
        be_exact(device, self.options.threads)
        keep_freed_memory()
        pause = FIRST_PAUSE_S
        while True:
            began = clock()
            self.say("connecting")
            node = await self._open()
            try:
                # Without its network daemon nobody could reach this process.
                if await unless(node.transport.lost, self._join(node, device)) is not None:
                    return
            finally:
                await node.close()
            if self._leaving:
                raise JoinError("the network daemon has died while leaving")
            self.say.trouble("the network daemon has died; starting it again")
            if self._remembered:  # the swarm may be elsewhere than where it was at the start
                self.link = parse_link(self._remembered)
            if clock() - began > SAY_EVERY_S:
                pause = FIRST_PAUSE_S
            pause = await self._rest(pause)

    async def _join(self, node: Node, device: str) -> None:
        links = Links(
            node.transport,
            self.link.run_id,
            new_incarnation(self.identity.peer_id),
            {"config": Method(self._give_config, no_tensors)},
            allocate=allocator(device),
        )
        links.serve()
        try:
            config = await self._fetch_config(links)
            self.say("checking config")
            pipeline = await asyncio.to_thread(self._build_pipeline, config)
            await self._serve(node, links, config, pipeline, device)
        finally:
            await links.aclose()

    async def drain(self, seconds: float) -> bool:
        """Leave politely; see `Member.drain`. Whether `run` now ends by itself; else cancel it."""
        self._leaving = True
        return self.host is not None and await self.host.drain(seconds)

    def open_device(self) -> Compute:
        """The queue of this peer's device; a paced one may take its place."""
        return ThreadCompute()

    async def _open(self) -> Node:
        """On the network and in the directory; tries again until somebody answers, or it is time
        to give up."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await Node.open(
                    self.identity,
                    listen=self.options.listen,
                    announce=self.options.announce,
                    connections=self.options.connections,
                    bootstrap=self.link.addresses,
                )
            except VersionError:
                raise
            except ListenError as error:
                if not self._config:  # nobody has served yet: for a person to mend
                    raise
                self.say.trouble(f"{error}; trying again")
            except JoinError as error:
                if "clock" in error.message or self._is_time_to_give_up():
                    raise
                self.say.trouble(f"{error}; trying again")
            pause = await self._rest(pause)

    def _is_time_to_give_up(self) -> bool:
        return asyncio.get_running_loop().time() >= self._give_up_at

    async def _rest(self, pause: float) -> float:
        """About this long, not beyond the time to give up; how long the next time."""
        left = self._give_up_at - asyncio.get_running_loop().time()
        await asyncio.sleep(min(pause * random.uniform(0.8, 1.2), left))
        return min(pause * 2, LONGEST_PAUSE_S)

    async def _fetch_config(self, links: Links) -> RunConfig:
        """The run config from anybody in the swarm; it must hash to the run id of the link.

        Raises JoinError when the first that the link names is of another run or version, and when
        it is time to give up. Those after the first may be peers that were met long ago
        (`_remember_link`), and prove nothing.
        """
        if self._config:
            return from_canonical(self._config, self.link.run_id)
        pause = FIRST_PAUSE_S
        while True:
            for number, (peer, addresses) in enumerate(self.link.by_peer.items()):
                try:
                    async with asyncio.timeout(ANSWER_S):
                        channel = await links.channel(peer, addresses)
                        data = (await channel.call("config", {})).body.get("config")
                    if isinstance(data, bytes) and len(data) <= MAX_CONFIG_BYTES:
                        config = from_canonical(data, self.link.run_id)
                        self._config, self._give_up_at = data, math.inf
                        self._remember_link(self.link.addresses)
                        return config
                except SwarmError as error:
                    if isinstance(error, JoinError) and number == 0:
                        raise
                    why = str(error)
                except TimeoutError:
                    why = f"no answer within {ANSWER_S:.0f} s"
                else:
                    why = "its answer is no run config"
                self.say.trouble(f"the swarm does not answer, trying again ({why})")
            if self._is_time_to_give_up():
                raise JoinError(f"the swarm does not answer ({why})", "ask for a new join link")
            pause = await self._rest(pause)

    def _build_pipeline(self, config: RunConfig) -> ModelPipeline:
        named = config.model.pipeline
        if named is not None and self.options.allow_pipeline != named:
            raise ConfigError(
                f"this run uses the installed Python package {named}",
                f"if you trust it, start with --allow-pipeline {named}",
            )
        if config.model.pretrained is not None:
            config = self._with_own_weights(config)
        return build_pipeline(config)

    def _with_own_weights(self, config: RunConfig) -> RunConfig:
        """The first weights from this machine's copy: a path from the network is never opened.

        Raises ConfigError when no copy was named, DataError when it holds other bytes.
        """
        if self.options.pretrained is None:
            sha256 = config.model.pretrained_sha256 or ""
            raise ConfigError(
                f"this run starts from a pretrained model (sha256 {sha256[:12]}…)",
                "get a copy and start with --pretrained DIR",
            )
        model = config.model.model_copy(update={"pretrained": str(self.options.pretrained)})
        return with_pretrained_hash(config.model_copy(update={"model": model}))

    async def _serve(
        self, node: Node, links: Links, config: RunConfig, pipeline: ModelPipeline, device: str
    ) -> None:
        run_id, trainers = config.run_id, config.run.trainers
        node.directory.prefer(run_id, trainers)
        numerics = numerics_of(config, device)
        compute = WatchedCompute(self.open_device())
        self.say("measuring this device")
        speed = await device_speed(compute, device)
        free_bytes = device_memory(device)
        reducer = GroupAllReduce(
            node.transport, links.incarnation, addresses=lambda peer: links.addresses.get(peer, ())
        )
        reducer.serve()

        led_at: list[str] = []  # addresses of trainers, as last heard

        async def find_leader() -> list[tuple[str, Sequence[str]]]:
            found: list[tuple[str, Sequence[str]]] = []
            for signer, record in (await node.directory.lookup(leader_key(run_id))).items():
                addresses = record.get("addresses")
                if signer in trainers and isinstance(addresses, list):
                    found.append((signer, tuple(str(each) for each in addresses[:MAX_ADDRESSES])))
            led_at[:] = [address for _, where in found for address in where]
            known = {signer for signer, _ in found}
            found += [
                (peer, where)
                for peer, where in self.link.by_peer.items()
                if peer in trainers and peer not in known
            ]
            return found

        kept_mib = config.memory.kept_mib
        if (most_mib := self.options.memory_mib) is not None:
            most = most_mib << 20
            free_bytes = most if free_bytes is None else min(free_bytes, most)
            kept_mib = min(kept_mib, max(most_mib // 4, 1))

        activity = Activity()
        pinned = bool(self.options.stages) and not self.options.may_move
        # One more than its stages: who may move serves the old one beside the new, or a second.
        sharers = max(len(self.options.stages), 1) + (not pinned)

        def make(own: Links, stage: int | None) -> Member:
            member = self.member_type(
                own,
                pipeline,
                compute,
                POLICIES[config.update.policy](reducer, config.wire.gradients, config.ahead),
                config.optimizer,
                trainers,
                find_leader,
                num_microbatches=config.batch.microbatches,
                stage=stage,
                accumulate=config.update.accumulate,
                codecs=BoundaryCodecs.of(config),
                kept_bytes=kept_mib << 20,
                device=device,
                numerics=numerics,
                benchmark_s=BENCHMARK_S,
                speed=speed,
                memory_bytes=free_bytes,
                sharers=sharers,
                pinned=pinned,
                say=self.say,
            )
            shown = PeerObservations(member, activity, self.options.name)
            own.methods["observe"] = Method(shown.answer, no_tensors)
            return member

        host = self.host = Host(
            make,
            links,
            reducer.lives,
            lambda: new_incarnation(self.identity.peer_id),
            say=self.say,
        )

        async def announce() -> None:
            met: Channel | None = None
            while True:
                leader = next((each.leader for each in host.members), None)
                if leader is not met:  # it was gone, and its part of the directory with it
                    with contextlib.suppress(SwarmError):
                        await node.directory.add_peers(self.link.addresses)
                        met = leader
                await node.announce(
                    peers_key(run_id),
                    incarnation=links.incarnation,
                    stage=next(iter(host.stages), -1),
                    version=version(),
                    name=self.options.name,
                )
                await asyncio.sleep(ANNOUNCE_S)

        async def keep_link() -> None:
            while True:
                self._remember_link([*led_at, *self.link.addresses, *_some_of(links.addresses)])
                await asyncio.sleep(LINK_S)

        announcing = asyncio.create_task(announce())
        keeping = asyncio.create_task(keep_link())
        watching = asyncio.create_task(activity.watch(host))
        host.begin(self.options.stages or (None,))
        try:
            await host.run()
            self.say("the run is finished" if not self._leaving else "handed over")
        finally:
            tasks = (announcing, keeping, watching)
            for task in tasks:
                task.cancel()
            self.host = None
            await asyncio.gather(*tasks, return_exceptions=True)
            await reducer.aclose()
            await host.aclose()
            await compute.aclose()

    def _remember_link(self, addresses: Sequence[str]) -> None:
        """For the next start: the link, and where others of the swarm are by now."""
        some = list(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        usable = [each for each in some if not wrong_with_address(each)]
        link = format_link(self.link.run_id, usable)
        if link != self._remembered and len(link) <= MAX_LINK_CHARS:
            self._remembered = link
            self._remember(link)

    async def _give_config(self, channel: Channel, message: Message) -> Message:
        return Message({"config": self._config})


def _some_of(addresses: Mapping[str, Sequence[str]]) -> list[str]:
    """One address of each peer: any of them leads to the others."""
    return [best_first(where)[0] for where in addresses.values() if where]
