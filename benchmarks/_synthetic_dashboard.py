"""A dashboard of a made-up run whose numbers change every second: the server of `dashboard.py`.

Answers lines: `{"do": "cpu"}` with the CPU seconds it has used. The first line it prints has its
`port`.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import threading
import time
from typing import Any

from _helpers import serve_lines

from web.app import create_app
from web.board import Board
from web.broadcast import Broadcast
from web.intake import Observation, PeerReport, Replica, Sample
from web.limits import Limits
from web.serve import listen, publish, serve_app
from web.store import Store

STAGES = 4
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class MadeUp:
    """A run of so many replicas. Each second a third of them has something new to show."""

    def __init__(self, num_peers: int) -> None:
        self.random = random.Random(0)
        self.step = 0
        self.began = time.time()
        self.names = [
            f"12D3KooW{''.join(self.random.choices(BASE58, k=44))}#{number:08x}"
            for number in range(num_peers)
        ]
        self.rows = [self.row(number, 0) for number in range(num_peers)]

    def row(self, number: int, counted: int) -> Replica:
        draw = self.random
        return Replica(
            self.names[number], number % STAGES, "serving", self.step, "cpu", counted, "",
            draw.uniform(0.02, 0.2), draw.randrange(4), draw.random() / 10,
        )  # fmt: skip

    def observation(self, now: float) -> Observation:
        self.step += 1
        for number in self.random.sample(range(len(self.rows)), len(self.rows) // 3):
            self.rows[number] = self.row(number, self.rows[number].counted + 1)
        step = {"t": now, "event": "step", "step": self.step, "loss": 2 + 1 / self.step,
                "tokens": 4096, "wall_s": 1.0}  # fmt: skip
        left = {"t": now, "event": "joined", "replica": self.names[self.step % len(self.names)],
                "stage": 0}  # fmt: skip
        route = tuple(self.names[self.random.randrange(len(self.names))] for _ in range(STAGES))
        return Observation(
            life="ab", after=self.step, version="0.1.0", name="made up", state="training",
            reason="", step=self.step, num_steps=100_000, loss=2 + 1 / self.step,
            validation_loss=2.5, tokens=4096 * self.step, tokens_per_s=4096.0, in_flight=8,
            done=3, of=16, num_stages=STAGES, replicas=tuple(self.rows),
            boundaries=tuple((2_000_000 * self.step, 900_000 * self.step) for _ in range(3)),
            started_at=self.began, updated_at=now, epoch=0, term=1,
            events=(step, left) if self.step % 5 == 0 else (step,),
            samples=(Sample(now, 0.4, self.step, route),),
        )  # fmt: skip


async def serve(num_peers: int) -> None:
    limits = Limits(rate=1e9, burst=1e9, streams=10_000)
    board, broadcast = Board(Store(":memory:"), "0" * 32), Broadcast(limits.viewers)
    run = MadeUp(num_peers)
    app: Any = create_app(board, broadcast, limits=limits)
    with listen("127.0.0.1", 0) as listening:
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        serving = asyncio.create_task(serve_app(app, listening, broadcast.close))
        seconds = [0.0] * 5
        while not serving.done():
            now = time.time()
            board.leader(run.observation(now), now)
            seconds = [spent + part for spent, part in zip(seconds, (5, 1, 0, 1, 3), strict=True)]
            for name in run.names[:: max(1, num_peers // 64)]:
                board.peer(name, PeerReport("0.1.0", "", tuple(seconds)), now)
            publish(board, broadcast)
            await asyncio.sleep(max(1.0 - (time.time() - now), 0.1))


def main() -> None:
    threading.Thread(target=lambda: asyncio.run(serve(int(sys.argv[1]))), daemon=True).start()

    def answer(_: Any) -> dict[str, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu_s": used.ru_utime + used.ru_stime}

    serve_lines(answer)


if __name__ == "__main__":
    main()
