"""Group all-reduce over direct streams: reduce-scatter and all-gather, in parallel chunks; or, for
two and for little, a direct exchange.

Each member owns one part (`plan`), and dials every other one once per round. On a stream (where it
pays of several stripes: `swarm.net.striped`) it sends its contribution to the other's part, chunk
by chunk, and receives the sums on the same stream:

    dialler → owner   frame {round, from, to, plan, part, accumulate} · chunk 0 · chunk 1 · …
    owner → dialler   0x01 · sum 0 · 0x01 · sum 1 · …   or, instead of one, a notice:
                      0x00 · frame {failed, suspect}

Tensor bytes are little-endian; their number is known to both from the plan. The dialler ends the
stream when it has all sums. With a codec other than float32 both contributions and sums travel
encoded, each chunk by itself: the owner adds up what it decodes and its own exact contribution,
encodes the sums once, and takes for itself what everybody decodes (I4).

An owner sums a chunk as soon as all contributions to it are in, in the order of the members, rounds
once to float32 and sends it while the next ones arrive: one pass, a bounded number of chunks in
memory. Everybody, the owner included, takes the rounded sum, so all hold the same bytes (I4, I6).

In a round whose plan is direct (`plan.is_direct`) the part of each is the whole, and no sums come
back: one hop instead of two. All add the same terms in the same order: what they decode, their own
contribution like the others', so again all hold the same bytes. Who is done says 0x02 on the
streams that others have dialled. Nobody's round waits for that, but who dialled keeps the stream
open until then: libp2p may lose all of one that is ended before the other side has it.

Why not hivemind's averager: when a reducer dies it reports success with local values in that part,
so replicas diverge; and for the same bytes it takes longer (docs/results.md). Here a round has a
result at a member only if every part has come in; otherwise it raises, naming a suspect, and the
leader repeats it under another round id. The name matters: when one member dies, the others must
not accuse each other for giving up. So a member that gives up says why on every stream it owes sums
on, where nothing can be in the way, and a stream that just ends is not held against its peer until
that word has had time to arrive. Silence counts against whom the silent bytes depend on alone:
first against those that owe contributions, and only when all are in against those that owe sums.

The arithmetic runs on the event loop, a chunk at a time: 64 Ki additions per member, 0.15 ms for a
group of 16; a codec's, of 256 KiB each, is about as much. Handing it to a thread would cost about
as much again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from swarm.averaging.errors import RoundFailedError
from swarm.averaging.plan import CHUNK_ELEMENTS, EXACT, Plan, make_plan
from swarm.averaging.progress import Rates
from swarm.averaging.round import Limits, Round, refuse
from swarm.averaging.sums import DTYPES, byte_view, round_alone
from swarm.errors import StreamClosedError, WireError
from swarm.net.links import peer_of
from swarm.net.stream_limit import StreamLimit
from swarm.net.striped import Gathering, dial_striped
from swarm.net.transport import Buffer, Stream, Transport
from swarm.tasks import TaskSet
from swarm.wire.frames import no_tensors, protocol_name, read_frame

PROTOCOL = protocol_name("reduce")
MAX_HEADER_BYTES = 4096
MAX_ENDED = 256
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Parked:
    """A stream that came before the order to start its round."""

    header: dict[str, Any]
    num_stripes: int
    started: asyncio.Future[Round | None]  # None: it had to give way


class GroupAllReduce:
    """The averaging rounds of one process; serves `PROTOCOL` on its transport.

    `me` is this process's incarnation; of several, `lives` holds all, no two of them in one group.
    `addresses(peer_id)` gives multiaddrs to dial. Several rounds may run at once, each under
    an id of its own.
    """

    def __init__(
        self,
        transport: Transport,
        me: str = "",
        *,
        addresses: Callable[[str], Sequence[str]] = lambda peer_id: (),
        limits: Limits | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self.transport = transport
        self.lives = {me or transport.peer_id}
        self.limits = limits or Limits()
        self._addresses, self._chunk_elements = addresses, chunk_elements
        self._rounds: dict[str, Round] = {}
        self._ended: dict[str, RoundFailedError | None] = {}
        self._parked: dict[_Parked, str] = {}  # -> peer id
        self._unread = StreamLimit(
            "reduce", self.limits.max_unread_of_one, self.limits.max_unread, self._knows
        )
        self._lingering = TaskSet()  # streams of rounds that are over here and not there
        self._closed = False

    def serve(self) -> None:
        """Accept the streams of rounds from now on."""
        gathering = Gathering(self._read_header, self._serve, self._unread)
        self.transport.serve(PROTOCOL, gathering)

    async def all_reduce(
        self,
        round_id: str,
        members: Sequence[str],
        local: Tensor,
        out: Tensor,
        *,
        shares: Sequence[int] | None = None,
        codec: str = EXACT,
    ) -> Rates:
        """Sum `local` (flat, float64 or float32) over `members` into `out` (flat float32).

        Every member calls it with the same `round_id`, `members` (sorted incarnations, this one
        among them), length, dtype, `shares` and `codec`, within `limits.start_s` of the first. The
        sum is taken in the dtype of `local`, in the order of `members`, and rounded to float32
        once; whoever sums which part changes no bit, unless a lossy `codec` rounds what is sent.
        Returns how fast the contributions of each member came in here.

        After it returns, all members that return hold the same bytes in `out`. Raises
        RoundFailedError when a member fails or falls silent; then, and when cancelled, `out` holds
        anything, `local` is as it was (it is only read, and must not change meanwhile), all streams
        of the round are aborted and no task is left. A round id is used once: another attempt
        takes another id and may start at once. ValueError: arguments that make no round.
        """
        if round_id in self._rounds or round_id in self._ended:
            raise ValueError(f"round {round_id!r} has been used")
        me = next((name for name in members if name in self.lives), None)
        if me is None:
            raise ValueError(f"{sorted(self.lives)} is no member of {list(members)}")
        accumulate = next((n for n, d in DTYPES.items() if d == local.dtype), str(local.dtype))
        plan = make_plan(
            members,
            local.numel(),
            accumulate,
            shares=shares,
            chunk_elements=self._chunk_elements,
            codec=codec,
        )
        data, result = byte_view(local, local.dtype), byte_view(out, DTYPES["float32"])
        if out.numel() != local.numel():
            raise ValueError(f"out has {out.numel()} elements, local {local.numel()}")
        if len(members) == 1:
            await round_alone(local, out)
            return (0,)
        current = Round(round_id, me, plan, data, result, self.limits, self._lingering)
        self._rounds[round_id] = current
        for parked in [p for p in self._parked if p.header["round"] == round_id]:
            if not parked.started.done():
                parked.started.set_result(current)
        try:
            await current.run(partial(self._dial, plan))
            return current.rates()
        finally:
            del self._rounds[round_id]
            self._ended[round_id] = current.failure
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    async def _dial(self, plan: Plan, owner: int, first: Sequence[Buffer]) -> Stream:
        peer = peer_of(plan.members[owner])
        addresses = self._addresses(peer)
        count = plan.num_stripes(owner, self.transport.connections)
        return await dial_striped(self.transport, peer, PROTOCOL, addresses, count, first)

    async def _serve(self, stream: Stream, header: dict[str, Any], num_stripes: int) -> None:
        try:
            current = await self._find_round(stream, header, num_stripes)
            if current is not None:
                await current.serve(stream, header)
        except (StreamClosedError, WireError, TimeoutError) as error:
            log.debug("a reduce stream of %s ended: %s", stream.peer, error or "silent")

    async def _read_header(self, stream: Stream) -> dict[str, Any]:
        frame = await read_frame(
            stream, no_tensors, max_header_bytes=MAX_HEADER_BYTES, max_payload_bytes=0
        )
        header = frame.header
        kinds = {key: type(value) for key, value in header.items()}
        texts = dict.fromkeys(("round", "from", "to", "plan", "accumulate"), str)
        if kinds != {**texts, "part": int}:
            raise WireError(f"no reduce header: {sorted(header)}")
        if peer_of(header["from"]) != stream.peer:
            raise WireError("the sender is not the peer at the other end")
        return header

    async def _find_round(
        self, stream: Stream, header: dict[str, Any], num_stripes: int
    ) -> Round | None:
        """The round of a stream, waiting for it to start here; None after telling why not."""
        round_id: str = header["round"]
        if header["to"] not in self.lives:
            await refuse(stream, "that life of this peer is over", header["to"], self.limits)
            return None
        if round_id in self._ended:
            failure = self._ended[round_id]
            why = f"the round is over here: {failure.message if failure else 'completed'}"
            await refuse(stream, why, failure.peer if failure else "", self.limits)
            return None
        if round_id in self._rounds:
            return self._rounds[round_id]
        found = None
        if self._make_room(stream.peer, num_stripes) and not self._closed:
            parked = _Parked(header, num_stripes, asyncio.get_running_loop().create_future())
            self._parked[parked] = stream.peer
            try:
                async with asyncio.timeout(self.limits.start_s):
                    found = await parked.started
            except TimeoutError:
                why = "was not told to start the round"
                await refuse(stream, why, header["to"], self.limits)
                return None
            finally:
                self._parked.pop(parked, None)
        if found is None:
            await refuse(stream, "too many rounds wait here", "", self.limits)
        return found

    def _make_room(self, peer: str, num_stripes: int) -> bool:
        """Where too many wait, the oldest stream gives way. That of the same peer is most likely of
        an attempt that was given up here. Of all, it is that of a stranger, whose addresses the run
        does not know, and no stranger takes the place of another."""
        own = [each for each, owner in self._parked.items() if owner == peer]
        if len(own) >= self.limits.max_parked_per_peer:
            self._give_way(own[0])
        while self._num_parked() + num_stripes > self.limits.max_parked:
            strangers = [e for e, owner in self._parked.items() if not self._knows(owner)]
            waiting = (strangers or list(self._parked)) if self._knows(peer) else []
            if not waiting:
                return False
            self._give_way(waiting[0])
        return True

    def _knows(self, peer: str) -> bool:
        """Whether it is a peer of the run, not a stranger."""
        return bool(self._addresses(peer))

    def _num_parked(self) -> int:
        return sum(each.num_stripes for each in self._parked)

    def _give_way(self, parked: _Parked) -> None:
        del self._parked[parked]
        if not parked.started.done():
            parked.started.set_result(None)

    async def aclose(self) -> None:
        """Fail every round and refuse all further streams. Idempotent."""
        self._closed = True
        for parked in list(self._parked):
            if not parked.started.done():
                parked.started.set_exception(StreamClosedError("this member stops"))
        for current in list(self._rounds.values()):
            current.fail(RoundFailedError("this member stops", peer=current.me))
            await current.ended.wait()
        await self._lingering.aclose()


__all__ = ["PROTOCOL", "GroupAllReduce", "Limits", "RoundFailedError"]
