"""The collector in memory, under virtual time: it finds the leader and believes nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm.config import canonical_bytes, parse_toml, with_trainers
from swarm.config_text import default_toml
from swarm.net.channel import Channel, Message, Method
from swarm.net.link import JoinLink
from swarm.net.links import Links
from swarm.net.memory import MemoryNetwork
from swarm.net.records import leader_key, peers_key
from swarm.sim.virtual_time import run
from swarm.wire.frames import no_tensors
from tests.unit.web_runs import NOW, answer, board, peer_ids, row
from web.collector import Collector

SECONDS = dict.fromkeys(("compute", "average", "move", "transfer", "wait"), 1.0)


class Records:
    """A directory with what it is given."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, dict[str, object]]] = {}
        self.preferred: tuple[str, list[str]] | None = None

    def prefer(self, run_id: str, trainers: Iterable[str]) -> None:
        self.preferred = (run_id, list(trainers))

    async def lookup(self, key: str) -> dict[str, dict[str, object]]:
        return self.found.get(key, {})


class Scene:
    """A leader, a replica and a stranger that answer `observe`, and a collector that looks on."""

    def __init__(self, folder: Path) -> None:
        self.leader, self.replica, self.stranger, me = peer_ids(folder, 4)
        config = with_trainers(parse_toml(default_toml()), [self.leader])
        self.config, self.run_id = canonical_bytes(config), config.run_id
        self.network = MemoryNetwork()
        self.records = Records()
        self.body: Any = answer([{**row(self.replica, 0), "replica": f"{self.replica}#01"}])
        self.asked: list[dict[str, Any]] = []
        self.board = board()
        self.links = {
            peer: self._serve(peer) for peer in (self.leader, self.replica, self.stranger)
        }
        mine = Links(self.network.transport(me), self.run_id, f"{me}#01", {})
        self.collector = Collector(
            JoinLink(self.run_id, tuple(map(self.address, (self.stranger, self.leader)))),
            mine,
            self.records,
            self.board,
            clock=lambda: NOW + asyncio.get_running_loop().time(),
        )

    @staticmethod
    def address(peer: str) -> str:
        return f"/ip4/10.0.0.1/tcp/1/p2p/{peer}"

    def _serve(self, peer: str) -> Links:
        async def observe(channel: Channel, message: Message) -> Message:
            if peer == self.replica:
                return Message({"seconds": SECONDS, "version": "1.2.3", "name": "Ada"})
            if peer == self.leader:
                self.asked.append(dict(message.body))
            return Message(self.body if peer == self.leader else answer([], step=99))

        async def give(channel: Channel, message: Message) -> Message:
            return Message({"config": self.config if peer == self.leader else b"another"})

        methods = {"observe": Method(observe, no_tensors), "config": Method(give, no_tensors)}
        links = Links(self.network.transport(peer), self.run_id, f"{peer}#01", methods)
        links.serve()
        return links

    async def look(self, seconds: float) -> None:
        """Collect for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.collector.run()

    async def close(self) -> None:
        for links in (*self.links.values(), self.collector.links):
            await links.aclose()


def test_only_trainers_are_believed_and_replicas_tell_of_themselves(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        try:
            await scene.look(20.0)
        finally:
            await scene.close()
        picture = scene.board.snapshot(NOW + 20)
        assert picture["head"]["step"] == 8, "the stranger's step is not believed"
        (shown,) = picture["replicas"].values()
        assert (shown["label"], shown["version"]) == ("Ada", "1.2.3")
        assert len(scene.asked) in range(15, 25), "once a second"
        assert scene.asked[0] == {"after": 0, "life": ""}
        assert scene.asked[1] == {"after": 3, "life": "ab12"}
        assert scene.records.preferred == (scene.run_id, [scene.leader])

    run(main())


def test_a_leader_that_is_gone_is_found_again(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        try:
            looking = asyncio.create_task(scene.look(200.0))
            await asyncio.sleep(10.0)
            heard = scene.board.heard_at
            scene.network.cut(scene.leader, scene.collector.links.transport.peer_id)
            await asyncio.sleep(60.0)
            assert scene.board.heard_at < heard + 10.0
            assert scene.board.health(NOW + 70).state == "silent"
            scene.network.heal(scene.leader, scene.collector.links.transport.peer_id)
            await asyncio.sleep(60.0)
            assert scene.board.heard_at > heard + 60.0
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        finally:
            await scene.close()

    run(main())


def test_a_full_address_book_forgets_the_oldest_but_no_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.collector.MAX_ADDRESSES", 3)

    async def main() -> None:
        scene = Scene(tmp_path)
        try:
            await scene.look(12.0)
            gone, *later = peer_ids(tmp_path / "more", 3)
            for peer in (gone, scene.leader, later[0], scene.replica, *later):
                scene.collector.note_record(peer, {"addresses": [scene.address(peer)]})
        finally:
            await scene.close()
        assert set(scene.collector._addresses) == {scene.leader, *later}

    run(main())


def test_nonsense_of_leader_and_directory_is_noted_and_survived(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        scene.records.found = {
            leader_key(scene.run_id): {scene.leader: {"addresses": "none"}},
            peers_key(scene.run_id): {
                scene.stranger: {"addresses": [scene.address(scene.leader)]},
                scene.replica: {
                    "addresses": [scene.address(scene.replica)],
                    "incarnation": f"{scene.stranger}#01",
                },
            },
        }
        try:
            await scene.look(12.0)
            assert scene.board.notes.total == 3
            before = scene.board.snapshot(NOW + 12)
            scene.body = {"status": [1, 2, 3], "life": "x"}
            await scene.look(5.0)
            after = scene.board.snapshot(NOW + 12)
        finally:
            await scene.close()
        assert after["head"].pop("notes") > before["head"].pop("notes")
        assert after == before

    run(main())
