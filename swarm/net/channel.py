"""Many calls at once over one stream between two peers, with heartbeats.

One stream per pair of peers rather than one per call: its end fails every call to a dead peer at
once, one heartbeat covers them all, and a call costs no dial. Either side may call. A frame is
either `hello` (first, both ways), `call`, `reply`, `error` or `ping`; what calls mean is not known
here. Orders overtake bulk data that is still waiting to be sent.

Bytes from the other side are hostile (DESIGN, I8): a method must be known and its tensors accepted
by the method's `check` before anything is allocated, calls in progress are bounded (one is until
its answer has been sent, or who asks and never reads would fill our memory with answers), as are
those that wait for an answer from there, and any breach ends the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.errors import (
    DeviceError,
    RefusedError,
    StageFailedError,
    StreamClosedError,
    SwarmError,
    WireError,
)
from swarm.net.transport import Buffer, Stream
from swarm.tasks import TaskSet
from swarm.wire.codecs import TensorMeta, WireTensor, allocate_bytes
from swarm.wire.frames import encode_frame, no_tensors, read_frame

HEARTBEAT_S = 1.0
SILENCE_S = 5.0
GAPS = 2.0  # times the longest silence of late that a silence may last
GAPS_FADE_S = 60.0  # until that one counts half
LONGEST_SILENCE = 6.0  # times the silence of an even line, whatever the gaps
SLIGHT_S = 0.001  # so that a look at the limit comes after it
MAX_CALLS_IN_PROGRESS = 1024
UNANSWERED = 2  # times as many calls that wait here: who is asked reads none, or answers none
BULK_QUEUE_BYTES = 64 << 20
MAX_INCARNATION_CHARS = 160
MAX_HELLO_BYTES = 4096

log = logging.getLogger(__name__)

Header = dict[str, Any]
Check = Callable[[Header, Sequence[TensorMeta]], None]


class CallFailedError(SwarmError):
    """The other side answered a call with an error.

    `kind` is "refused", "failed" (its computation raised), "nonfinite" (it gave what is not
    finite), "unreachable" (it lost the next hop) or the leader's own "timeout"; `detail` holds
    plain values that say where.
    """

    def __init__(self, kind: str, message: str, /, **detail: Any) -> None:
        super().__init__(message)
        self.kind, self.detail = kind, detail


@dataclass(slots=True)
class Message:
    """A call or a reply: a msgpack-able body and tensors in wire form."""

    body: Header
    tensors: Sequence[WireTensor] = ()


Handle = Callable[["Channel", Message], Awaitable[Message | None]]


@dataclass(frozen=True, slots=True)
class Method:
    """How incoming calls of one name are checked (before allocation) and answered."""

    handle: Handle
    check: Check


async def read_hello(stream: Stream) -> Header:
    """The first frame of a channel. Raises StreamClosedError, or WireError if it is no hello."""
    frame = await read_frame(
        stream, no_tensors, max_header_bytes=MAX_HELLO_BYTES, max_payload_bytes=0
    )
    if frame.header.get("kind") != "hello":
        raise WireError(f"{stream.peer} did not greet")
    return frame.header


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[Message]
    check: Check = field(default=no_tensors)


class Channel:
    """One open stream to one incarnation of a peer.

    `run` must be awaited by its owner; it returns when the channel has ended, and `ended` then
    says why. Every call waiting at that moment raises StreamClosedError. `allocate` gives the uint8
    memory that received tensors land in.

    Silence ends it after `silence_s`, on a line that has been even. A full and lossy uplink is not:
    what lives there falls silent for seconds and goes on, so twice the longest gap of late is
    allowed.
    """

    def __init__(
        self,
        stream: Stream,
        methods: dict[str, Method],
        hello: Header,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        allocate: Callable[[int], torch.Tensor] = allocate_bytes,
    ) -> None:
        self._allocate = allocate
        self.peer = stream.peer
        self.remote: Header = {}
        self.ended: StreamClosedError | None = None
        self.last_heard = 0.0
        self._gap_s = 0.0  # the longest silence so far, fading
        self._stream, self._methods, self._hello = stream, methods, hello
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self._urgent: deque[tuple[list[Buffer], bool]] = deque()  # and whether it is an answer
        self._bulk: deque[tuple[list[Buffer], bool, int]] = deque()  # and its bytes
        self._bulk_bytes = 0
        self._to_send = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks = TaskSet()
        self._calls_in_progress = 0
        self.closed = asyncio.Event()

    @property
    def incarnation(self) -> str:
        """Who is at the other end, as it said in its hello and the transport verified."""
        return str(self.remote.get("incarnation", ""))

    @property
    def sending(self) -> bool:
        """Whether tensors wait to be sent, or are being sent."""
        return self._bulk_bytes > 0

    async def greet(self, to: str = "") -> None:
        """As the one who dialled: exchange hellos, asking for the incarnation `to` if it is one.

        Raises StreamClosedError, or WireError when they make no sense.
        """
        await self._stream.send(encode_frame({"kind": "hello", **self._hello, "to": to}))
        self._meet(await read_hello(self._stream))

    async def answer(self, hello: Header) -> None:
        """As the one who was dialled, with this hello: the same. Raises as `greet`."""
        await self._stream.send(encode_frame({"kind": "hello", **self._hello}))
        self._meet(hello)

    def _meet(self, hello: Header) -> None:
        incarnation = hello.get("incarnation")
        if (
            not isinstance(incarnation, str)
            or len(incarnation) > MAX_INCARNATION_CHARS
            or not incarnation.isascii()  # one character is one byte where names are added up
            or incarnation.split("#")[0] != self.peer
        ):
            raise WireError(f"{self.peer} calls itself {str(incarnation)[:80]!r}")
        self.remote = {"run": hello.get("run"), "incarnation": incarnation}
        self.last_heard = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Serve the channel until it ends."""
        send = self._tasks.spawn(self._send_loop(), "channel-send")
        watch = self._tasks.spawn(self._watch(), "channel-watch")
        try:
            await self._receive_loop()
        except (StreamClosedError, WireError) as error:
            self.end(str(error))
        except DeviceError as error:  # no memory for what came in
            log.error("channel to %s: %s", self.peer, error)
            self.end(str(error))
        except Exception as error:
            # A defect here, brought out by what came in: no call may wait for ever because of it.
            log.error("channel to %s: %r", self.peer, error)
            log.debug("traceback", exc_info=True)
            self.end(f"{type(error).__name__}: {error}")
        finally:
            self.end("closed")
            send.cancel()
            watch.cancel()
            await self._tasks.aclose()

    def end(self, why: str) -> None:
        """End the channel at once; the first reason stays. Idempotent."""
        if self.ended is not None:
            return
        self.ended = StreamClosedError(f"connection to {self.peer[-8:]} ended: {why}")
        self._stream.abort()
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(self.ended)
        self._pending.clear()
        self._room.set()
        self.closed.set()

    async def call(
        self,
        method: str,
        body: Header,
        tensors: Sequence[WireTensor] = (),
        *,
        check_reply: Check = no_tensors,
    ) -> Message:
        """Call `method` there and wait for its answer, as long as the channel lives.

        Raises StreamClosedError when the channel ends first (the call may or may not have been
        carried out), CallFailedError when the other side says no. A cancelled call is not undone
        there; its answer is dropped.
        """
        self._next_id += 1
        call_id = self._next_id
        pending = _Pending(asyncio.get_running_loop().create_future(), check_reply)
        if len(self._pending) >= UNANSWERED * MAX_CALLS_IN_PROGRESS:
            self.end(f"{len(self._pending)} calls without an answer")
        if self.ended:
            raise self.ended
        self._pending[call_id] = pending
        try:
            try:
                await self._enqueue(
                    {"kind": "call", "id": call_id, "method": method, "body": body}, tensors
                )
            except BaseException:
                self._pending.pop(call_id, None)
                raise
            # When cancelled it stays in `_pending`: its answer is still to come, and is checked.
            return await pending.future
        finally:
            if pending.future.done() and not pending.future.cancelled():
                pending.future.exception()  # seen, also by a caller that did not wait for it

    async def _enqueue(
        self, header: Header, tensors: Sequence[WireTensor] = (), *, answers: bool = False
    ) -> None:
        parts = encode_frame(header, tensors)
        if not tensors:
            self._urgent.append((parts, answers))
        else:
            while self._bulk_bytes > BULK_QUEUE_BYTES and not self.ended:
                self._room.clear()
                await self._room.wait()
            num_bytes = sum(tensor.meta.nbytes for tensor in tensors)
            self._bulk.append((parts, answers, num_bytes))
            self._bulk_bytes += num_bytes
        if self.ended:
            raise self.ended
        self._to_send.set()

    async def _send_loop(self) -> None:
        try:
            while True:
                while self._urgent or self._bulk:
                    if self._urgent:
                        parts, answers = self._urgent.popleft()
                        await self._stream.send(parts)
                        self._calls_in_progress -= answers
                        continue
                    parts, answers, num_bytes = self._bulk.popleft()
                    await self._stream.send(parts)
                    self._calls_in_progress -= answers
                    self._bulk_bytes -= num_bytes
                    self._room.set()
                self._to_send.clear()
                await self._to_send.wait()
        except StreamClosedError as error:
            self.end(str(error))

    def silent_s(self) -> float:
        """Seconds since anything came, at most a heartbeat too many."""
        return asyncio.get_running_loop().time() - self.last_heard

    @property
    def patience_s(self) -> float:
        """The silence that ends it."""
        return self._silence_s * self.unevenness

    @property
    def unevenness(self) -> float:
        """How many times longer than on an even line silences last here, of late; at least 1."""
        return min(max(GAPS * self._gap_s / self._silence_s, 1.0), LONGEST_SILENCE)

    async def _watch(self) -> None:
        """Ping while there is silence from us, end the channel after silence from there."""
        loop = asyncio.get_running_loop()
        heard_bytes = self._stream.received_bytes
        self.last_heard = checked_at = loop.time()
        while True:
            pause = min(self._heartbeat_s, max(self.patience_s - self.silent_s(), 0.0) + SLIGHT_S)
            silent_s = self.silent_s()
            await asyncio.sleep(pause)
            now = loop.time()
            self._gap_s *= 0.5 ** (pause / GAPS_FADE_S)
            # A process that was itself stopped must not take its own silence for the peer's.
            overslept = now - checked_at - pause
            if overslept > self._heartbeat_s:
                self.last_heard += overslept
            if self._stream.received_bytes != heard_bytes:  # parts of a frame, some time since
                heard_bytes = self._stream.received_bytes
                self.last_heard = max(self.last_heard, checked_at)
                self._gap_s = max(self._gap_s, silent_s)
            checked_at = now
            if self.silent_s() >= self.patience_s:
                self.end(f"silent for {self.silent_s():.0f} s")
                return
            if not self._urgent and not self._bulk:
                self._urgent.append((encode_frame({"kind": "ping"}), False))
                self._to_send.set()

    def _check(self, header: Header, metas: Sequence[TensorMeta]) -> None:
        kind, call_id = header.get("kind"), header.get("id")
        body = header.get("body", {})
        if not isinstance(body, dict):
            raise WireError("a body that is no map")
        if kind == "call":
            method = self._methods.get(str(header.get("method")))
            if method is None or not isinstance(call_id, int):
                raise WireError(f"unknown method {str(header.get('method'))[:40]!r}")
            if self._calls_in_progress >= MAX_CALLS_IN_PROGRESS:
                raise WireError("too many calls at once")
            method.check(body, metas)
        elif kind == "reply" and isinstance(call_id, int):
            pending = self._pending.get(call_id)
            if pending is not None:
                pending.check(body, metas)
            else:
                raise WireError("an answer nobody asked for")
        elif kind in ("error", "ping"):
            no_tensors(header, metas)
            if not isinstance(body.get("detail", {}), dict):
                raise WireError("an error whose detail is no map")
        else:
            raise WireError(f"unknown kind of frame {str(kind)[:40]!r}")

    async def _receive_loop(self) -> None:
        while True:
            frame = await read_frame(self._stream, self._check, allocate=self._allocate)
            self.last_heard = asyncio.get_running_loop().time()
            header = frame.header
            kind = header["kind"]
            if kind == "call":
                self._calls_in_progress += 1
                message = Message(header.get("body", {}), frame.tensors)
                self._tasks.spawn(self._answer(header, message), f"answer {header['method']}")
            elif kind in ("reply", "error"):
                call_id = header.get("id")
                pending = self._pending.pop(call_id, None) if isinstance(call_id, int) else None
                if pending is None or pending.future.done():
                    continue
                if kind == "reply":
                    pending.future.set_result(Message(header.get("body", {}), frame.tensors))
                else:
                    body = header.get("body", {})
                    detail = {str(key)[:40]: value for key, value in body.get("detail", {}).items()}
                    pending.future.set_exception(
                        CallFailedError(
                            str(body.get("error"))[:20], str(body.get("message"))[:500], **detail
                        )
                    )

    async def _answer(self, header: Header, message: Message) -> None:
        method = self._methods[header["method"]]
        reply: Header = {"kind": "reply", "id": header["id"]}
        tensors: Sequence[WireTensor] = ()
        try:
            answer = await method.handle(self, message)
            if answer is not None:
                reply["body"], tensors = answer.body, answer.tensors
        except CallFailedError as error:
            reply = self._error(header["id"], error.kind, error.message, error.detail)
        except StageFailedError as error:
            reply = self._error(header["id"], "failed", error.message, {})
        except (RefusedError, WireError) as error:
            reply = self._error(header["id"], "refused", error.message, {})
        except SwarmError as error:
            reply = self._error(header["id"], "unreachable", str(error), {})
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not the answer was given up, but what it waited for.
            reply = self._error(header["id"], "refused", "given up here", {})
        except Exception as error:
            # A defect here must not leave the caller waiting for ever.
            log.error("%s of %s: %r", header["method"], self.peer, error)
            log.debug("traceback", exc_info=True)
            reply = self._error(header["id"], "failed", f"{type(error).__name__}: {error}", {})
        with contextlib.suppress(StreamClosedError):  # nobody is left to answer
            try:
                await self._enqueue(reply, tensors, answers=True)
            except WireError as error:
                what = f"the answer to {header['method']} cannot be sent: {error.message}"
                log.warning("%s", what)
                await self._enqueue(self._error(header["id"], "failed", what, {}), answers=True)

    @staticmethod
    def _error(call_id: int, kind: str, message: str, detail: Header) -> Header:
        body = {"error": kind, "message": message[:500], "detail": detail}
        return {"kind": "error", "id": call_id, "body": body}
