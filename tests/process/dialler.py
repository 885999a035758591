"""A peer that dials another at a given moment: `python dialler.py ADDRESS`, told over stdin."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from swarm.net.libp2p import Libp2pTransport
from swarm.net.transport import Stream

PROTOCOL = "/swarm-parallel/test/dial"


async def main() -> None:
    transport = await Libp2pTransport.create(listen=[f"/ip4/{sys.argv[1]}/tcp/0"])
    heard = asyncio.Event()

    async def hear(stream: Stream) -> None:
        await stream.receive_exactly(1)
        heard.set()

    transport.serve(PROTOCOL, hear)
    print(json.dumps([transport.peer_id, transport.addresses]), flush=True)
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    peer, addresses, at = json.loads(line)
    await asyncio.sleep(max(0.0, at - time.time()))
    stream = await transport.dial(peer, PROTOCOL, addresses)
    await stream.send([b"x"])
    await heard.wait()
    print("met", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
