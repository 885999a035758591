"""One member of `benchmarks/all_reduce.py`, a process of its own: does what stdin says, answers.

Sides: `ours`, over one or several `connections` to each member; `bare`: the same bytes over the
same streams in the same chunks, nobody summing and nobody waiting for a sum; `gloo`; and, in
processes of their own because it forks, `hivemind`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swarm.net.stream_limit import StreamLimit
from swarm.net.striped import Gathering, dial_striped

SUM, END = b"\x01", b"\x02"
BARE = "/swarm-parallel/bench/bare"
GROUP_TIMEOUT_S, GROUP_TRIALS = 30, 2
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def ask() -> dict[str, Any]:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if not line:
        raise SystemExit
    told: dict[str, Any] = json.loads(line)
    return told


class BareStreams:
    """What a round sends, over the streams a round opens."""

    def __init__(self, transport: Any, addresses: dict[str, Any]) -> None:
        self.transport, self.addresses = transport, addresses
        self.rounds: dict[int, list[asyncio.Task[None]]] = {}
        self.plan: Any = None
        self.ready = asyncio.Event()
        self.served = asyncio.Semaphore(0)
        self.endings: list[asyncio.Task[None]] = []  # nobody waits for them, as in ours
        transport.serve(BARE, Gathering(self.greet, self.accept, StreamLimit("bare", 1000, 1000)))

    def prepare(self, plan: Any, local: torch.Tensor, out: torch.Tensor) -> None:
        self.plan, self.me = plan, plan.members.index(self.transport.peer_id)
        self.itemsize = local.element_size()
        self.local = local.numpy().data.cast("B")
        self.out = out.numpy().data.cast("B")
        self.ready.set()

    def given(self, owner: int) -> list[tuple[int, int]]:
        size = self.itemsize
        return [(c.start * size, c.stop * size) for c in self.plan.chunks(owner)]

    def sums(self, owner: int) -> list[tuple[int, int]]:
        return [(c.start * 4, c.stop * 4) for c in self.plan.replies(owner)]

    async def greet(self, stream: Any) -> None:
        """What comes first here is data already."""

    async def accept(self, stream: Any, first: None, num_stripes: int) -> None:
        await self.ready.wait()
        scratch = memoryview(bytearray(self.plan.chunk_elements * self.itemsize))

        async def take() -> None:
            for start, stop in self.given(self.me):
                await stream.receive_into(scratch[: stop - start])

        async def give() -> None:
            for start, stop in self.sums(self.me):
                await stream.send([SUM, self.out[start:stop]])

        await asyncio.gather(take(), give())
        await stream.send([SUM])  # all is here, so that nothing is under way when the stream ends
        self.served.release()
        await stream.receive_exactly(1)

    async def run(self) -> None:
        async def exchange(member: int, peer: str) -> None:
            addresses, stripes = self.addresses[peer], self.plan.num_stripes(member)
            stream = await dial_striped(self.transport, peer, BARE, addresses, stripes)

            async def give() -> None:
                for start, stop in self.given(member):
                    await stream.send([self.local[start:stop]])

            async def take() -> None:
                for start, stop in self.sums(member):
                    await stream.receive_exactly(1)
                    await stream.receive_into(self.out[start:stop])

            await asyncio.gather(give(), take())
            self.endings.append(asyncio.create_task(end(stream)))

        async def end(stream: Any) -> None:
            await stream.receive_exactly(1)
            await stream.close()

        await asyncio.gather(*self.endings)  # of the round before
        self.endings.clear()
        others = [(i, p) for i, p in enumerate(self.plan.members) if i != self.me]
        await asyncio.gather(*(exchange(i, p) for i, p in others))
        for _ in others:
            await self.served.acquire()
        self.ready.clear()


class First:
    """A transport that uses the first `connections` of all that another has."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.connections = transport, 1
        self.peer_id, self.addresses = transport.peer_id, transport.addresses
        self.serve, self.close = transport.serve, transport.close

    async def dial(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = (), *, connection: int = 0
    ) -> Any:
        number = connection % self.connections
        return await self.transport.dial(peer_id, protocol, addresses, connection=number)


async def streams_member() -> None:
    from swarm.averaging import GroupAllReduce
    from swarm.averaging.plan import make_plan
    from swarm.net.identity import load_identity
    from swarm.net.libp2p import Libp2pTransport

    listen, connections = sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        identity = load_identity(Path(folder) / "identity.key")
        transport = First(
            await Libp2pTransport.create(
                identity.path, listen=[f"/ip4/{listen}/tcp/0"], connections=connections
            )
        )
    answer(end=[transport.peer_id, transport.addresses])
    told = await ask()
    rank, addresses = told["rank"], told["addresses"]
    members = sorted(addresses)
    index = members.index(transport.peer_id)
    dist.init_process_group("gloo", init_method=told["gloo"], rank=rank, world_size=len(members))
    reducer = GroupAllReduce(transport, addresses=addresses.__getitem__)
    reducer.serve()
    bare = BareStreams(transport, addresses)
    answer(ready=True)
    count = 0
    while True:
        told = await ask()
        side, num = told["side"], told["num_elements"]
        dtype = DTYPES[told["accumulate"]]
        local = torch.full((num,), rank + 0.5, dtype=dtype)
        local[:: rank + 3] = 0.1
        out = torch.zeros(num)
        bare.prepare(make_plan(members, num, told["accumulate"]), local, out)
        transport.connections = max(1, told["connections"])
        answer(ready=True)
        await ask()
        count += 1
        came: Sequence[int] = ()
        begun = time.perf_counter()
        if side == "ours":
            came = await reducer.all_reduce(
                str(count), members, local, out, shares=told.get("shares")
            )
        elif side == "bare":
            await bare.run()
        else:
            out = local
            dist.all_reduce(out)
        seconds = time.perf_counter() - begun
        digest = hashlib.sha256(out.numpy().data).hexdigest()
        answer(seconds=seconds, sha256=digest, index=index, came=list(came))


def find_group(averager: Any) -> Any:
    """A step of hivemind's averager that has ended its matchmaking and waits for its trigger.

    Matchmaking gets stuck now and then, in all members alike; they look again. Where it ended
    without a group, hivemind looks again once triggered: that round is slow, and medians leave it.
    """
    from hivemind.averaging.control import AveragingStage

    for _ in range(GROUP_TRIALS):
        control = averager.step(
            wait=False, require_trigger=True, allow_retries=True, timeout=2 * GROUP_TIMEOUT_S
        )
        give_up = time.monotonic() + GROUP_TIMEOUT_S
        while not control.done() and time.monotonic() < give_up:
            if control.stage == AveragingStage.AWAITING_TRIGGER:
                return control
            time.sleep(0.01)
        control.cancel()
    raise SystemExit(f"hivemind found no group in {GROUP_TRIALS} x {GROUP_TIMEOUT_S} s")


def hivemind_member() -> None:
    import hivemind

    told = json.loads(sys.stdin.readline())
    dht = hivemind.DHT(initial_peers=told["peers"], start=True)
    answer(addresses=[str(a) for a in dht.get_visible_maddrs()])
    told = json.loads(sys.stdin.readline())
    averagers: dict[int, Any] = {}
    for num in told["sizes"]:
        averagers[num] = hivemind.DecentralizedAverager(
            [torch.full((num,), told["rank"] + 0.5)],
            dht,
            start=True,
            prefix=f"bench{num}",
            target_group_size=told["members"],
            min_group_size=told["members"],
            min_matchmaking_time=2.0,
            request_timeout=1.0,  # shorter than the line above, or members wait for each other
        )
    answer(ready=True)
    try:
        for line in sys.stdin:
            told = json.loads(line)
            control = find_group(averagers[told["num_elements"]])
            answer(ready=True)  # matchmaking is not part of the time
            sys.stdin.readline()
            begun = time.perf_counter()
            control.allow_allreduce()
            control.result()
            answer(seconds=time.perf_counter() - begun, sha256="")
    finally:  # these have processes of their own
        for averager in averagers.values():
            averager.shutdown()
        dht.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "streams":
        asyncio.run(streams_member())
    else:
        hivemind_member()
