"""Peers with a fate: they die, lie, forget or are shy where the test says, in their own process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from peer import witness
from peer.local import LocalProcess
from peer.witness import Witness
from swarm.net.identity import load_identity
from tests.process.paced import pace
from tests.process.stoppable import Stoppable

FATE = "fate"
PROBED = {  # moments that the replica's own probe passes
    "waiting downstream": "sent",
    "averaging": "average",
    "prepared": "prepared",
    "committing": "commit",
}
MOMENTS = ("queued", "in forward", "in backward", *PROBED, "joining")
DONOR = "serving a snapshot"
LIAR = "lying"  # as a donor
LIED = "lied"  # a lying one touches this in its directory
SHY = "shy"  # as a donor it has nothing for anybody, while this is in the directory of all peers
THRIFTY = "thrifty"  # as a donor it gives one small chunk for each commit; see `NOTES`
NOTES = "notes.jsonl"  # of a thrifty one: donors, chunks it asks for and keeps, states it reports
FORGETFUL = "forgetful"  # it keeps no answer that it has counted
REGRETTED = "regretted"  # it dies when the forgetful one has evicted what it was sent
FORGETFUL_PEER = "0a"
RECOMPUTED = "recomputed"  # a forgetful one writes here what it computes again


class Doomed(Stoppable):
    """`add_doomed` starts a peer with a fate."""

    peer_target = "tests.process.doomed:peer"
    fates: ClassVar[Mapping[str, str]] = {}  # of the first ones, by name

    def _new_peer(self, stage: int | None, threads: int | None) -> LocalProcess:
        process = super()._new_peer(stage, threads)
        _doom(process, self.fates.get(process.name, ""))
        return process

    async def add_doomed(self, stage: int, fate: str) -> LocalProcess:
        process = self._new_peer(stage, None)
        _doom(process, fate)
        await self._start_peer(process)
        return process


def _doom(process: LocalProcess, fate: str) -> None:
    process.data_dir.mkdir(parents=True, exist_ok=True)
    (process.data_dir / FATE).write_text(fate)


class Forgetful(Doomed):
    """The only peer of stage 0 keeps no answer."""

    fates: ClassVar = {FORGETFUL_PEER: FORGETFUL}


class Shy(Doomed):
    """The first peer of stage 1 is a shy donor; `shy` is what makes it so."""

    fates: ClassVar = {"1a": SHY}

    @property
    def shy(self) -> Path:
        return self.run_dir / "peers" / SHY


class Thrifty(Doomed):
    """Both peers of stage 1 are thrifty donors."""

    fates: ClassVar = {"1a": THRIFTY, "1b": THRIFTY}

    def peer_id(self, name: str) -> str:
        return load_identity(self.processes[name].data_dir / "identity.key").peer_id

    def notes(self, name: str, point: str) -> list[dict[str, Any]]:
        path = self.processes[name].data_dir / NOTES
        return [line for line in witness.lines_of(path) if line["point"] == point]

    def reported(self, name: str, step: int) -> str:
        """The fingerprint of its state of that step, as it told the leader."""
        reports = self.notes(name, "reported")
        return str(next(line["fingerprint"] for line in reports if line["step"] == step))


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def peer(arguments: Any, tell: Any) -> int:
    pace()
    data_dir = Path(arguments["data_dir"])
    fate = (data_dir / FATE).read_text()
    if fate in PROBED:
        return witness.peer(arguments, tell, _dying_at(PROBED[fate]))
    if fate:
        {
            "queued": _die_queued,
            "in forward": _die_in_forward,
            "in backward": _die_in_backward,
            "joining": _die_joining,
            DONOR: _die_as_donor,
            LIAR: _lie,
            SHY: _be_shy,
            THRIFTY: _be_thrifty,
            FORGETFUL: _forget,
            REGRETTED: _die_regretted,
        }[fate](data_dir)
    return witness.peer(arguments, tell)


def _dying_at(point: str) -> Any:
    """Not before it has counted a microbatch, so that something is lost with it."""
    from peer.member import Member
    from peer.run_peer import PeerProcess

    counted = False

    def probe(passed: str, **facts: Any) -> None:
        nonlocal counted
        counted |= passed == "counted"
        if passed == point and counted:
            die()

    class DyingMember(Member):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "probe": probe})

    class DyingPeer(PeerProcess):
        member_type = DyingMember

    return DyingPeer


def _die_queued(data_dir: Path) -> None:
    """With a microbatch here that waits for a slot."""
    from peer.slots import Slots

    Slots.acquire = die  # type: ignore[method-assign]


def _die_in_forward(data_dir: Path) -> None:
    """When the outputs are computed, and nobody has them yet."""
    from peer.stage_tasks import StageTasks

    run: Callable[..., Any] = StageTasks.forward

    def last(self: StageTasks, *args: Any) -> Any:
        run(self, *args)
        die()

    StageTasks.forward = last  # type: ignore[method-assign]


def _die_in_backward(data_dir: Path) -> None:
    """When its gradients are added up, and it has told nobody."""
    from peer.stage_tasks import StageTasks

    run: Callable[..., Any] = StageTasks.backward

    def last(self: StageTasks, *args: Any, **options: Any) -> Any:
        run(self, *args, **options)
        die()

    StageTasks.backward = last  # type: ignore[method-assign]


def _die_joining(data_dir: Path) -> None:
    """With the first chunk of the state here."""
    from peer.downloads import Download

    Download._keep = die  # type: ignore[method-assign]


def _die_as_donor(data_dir: Path) -> None:
    """When it is asked for a chunk."""
    from peer.snapshots import Donor

    Donor._chunk = die  # type: ignore[method-assign]


def _lie(data_dir: Path) -> None:
    """Every chunk that it gives has other bytes than it has described."""
    from peer.snapshots import Donor
    from swarm.net.channel import Message
    from swarm.wire.codecs import decode, encode

    chunk: Callable[..., Any] = Donor._chunk

    async def lie(self: Donor, *args: Any) -> Any:
        message = await chunk(self, *args)
        (data_dir / LIED).touch()
        return Message(
            message.body, [encode(decode(each) + 1.0, "raw") for each in message.tensors]
        )

    Donor._chunk = lie  # type: ignore[method-assign]


def _be_shy(data_dir: Path) -> None:
    """While it is, a joiner has only others to ask, whatever step they are at."""
    from peer.snapshots import Donor
    from swarm.errors import RefusedError

    snapshot: Callable[..., Any] = Donor._snapshot

    async def refuse(self: Donor, *args: Any) -> Any:
        if (data_dir.parent / SHY).exists():
            raise RefusedError("not now")
        return await snapshot(self, *args)

    Donor._snapshot = refuse  # type: ignore[method-assign]


def _be_thrifty(data_dir: Path) -> None:
    """So a download lasts for steps however fast they are, and ends only if they go on."""
    from peer import snapshots
    from peer.donors import Donors
    from peer.downloads import Download
    from peer.orders import Orders
    from swarm.net.links import peer_of

    chunk: Callable[..., Any] = snapshots.Donor._chunk
    fetch: Callable[..., Any] = Download._fetch
    keep: Callable[..., None] = Download._keep
    commit: Callable[..., Any] = Orders._commit
    describe: Callable[..., Any] = Donors.describe
    books, one_by_one = Witness(data_dir / NOTES), asyncio.Lock()

    async def give(self: snapshots.Donor, channel: Any, message: Any) -> Any:
        if "since" in message.body:  # a joiner's, not the leader's for its last checkpoint
            async with one_by_one:
                await self.server.parts.advanced.wait()
        return await chunk(self, channel, message)

    async def choose(self: Donors, *args: Any) -> Any:
        described, donors = await describe(self, *args)
        books.write("donors", donors=[peer_of(each) for each in donors])
        return described, donors

    async def ask(self: Download, channel: Any, index: int, *args: Any) -> Any:
        books.write("asked", index=index)
        return await fetch(self, channel, index, *args)

    def note(self: Download, index: int, part: Any, donor: str, *args: Any) -> None:
        books.write("kept", index=index, donor=donor)
        keep(self, index, part, donor, *args)

    async def report(self: Orders, *args: Any) -> Any:
        answer = await commit(self, *args)
        facts = {name: answer.body[name] for name in ("step", "fingerprint")}
        books.write("reported", **facts)
        return answer

    snapshots.CHUNK = 1 << 12
    snapshots.Donor._chunk = give  # type: ignore[method-assign]
    Download._fetch = ask  # type: ignore[method-assign]
    Download._keep = note  # type: ignore[method-assign]
    Orders._commit = report  # type: ignore[method-assign]
    Donors.describe = choose  # type: ignore[method-assign]


def _die_regretted(data_dir: Path) -> None:
    """With something counted. An early order to average comes to its stage before the stage before
    has counted all; that one's own order runs once it has, and its books, which is all of another
    process that can be seen here, are read until they say so."""
    from peer.orders import Orders

    prepare: Callable[..., Any] = Orders._prepare
    books = data_dir.parent / FORGETFUL_PEER / witness.FILE

    async def last(self: Orders, ballot: Any, *args: Any) -> Any:
        while self.server.parts.ledger.counted:
            for line in witness.lines_of(books):
                if line["point"] == "prepare" and line["ballot"][1] == ballot.step:
                    die()
            await asyncio.sleep(0.02)
        return await prepare(self, ballot, *args)

    Orders._prepare = last  # type: ignore[method-assign]


def _forget(data_dir: Path) -> None:
    from peer.kept import KeptAnswers
    from peer.stage_server import StageServer

    init: Callable[..., None] = KeptAnswers.__init__
    recompute: Callable[..., Any] = StageServer._recompute
    books = Witness(data_dir / RECOMPUTED)

    def no_room(self: KeptAnswers, limit_bytes: int) -> None:
        init(self, 1)

    async def again(self: StageServer, part: Any, work: Any, *args: Any) -> Any:
        books.write(RECOMPUTED, index=work.index)
        return await recompute(self, part, work, *args)

    KeptAnswers.__init__ = no_room  # type: ignore[method-assign]
    StageServer._recompute = again  # type: ignore[method-assign]
