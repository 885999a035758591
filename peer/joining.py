"""Reaching the state of a swarm that goes on training: a snapshot, and what was committed since.

While a snapshot is on its way, the averaged gradient of every commit is fetched too, from donors
that keep it for as long as somebody reads a copy. Loaded, the snapshot is brought up to date by
applying those in order, each checked against the sha256 in its record, the records against each
other by their chain of hashes, and the chain against the leader's newest record. So a step may be
much shorter than the download. What cannot be mended: a connection on which one averaged gradient
takes longer than a step.

What is here stays when the leader, or every donor, is lost for a while: verified chunks, gradients,
and the state itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from peer.commits import Commits, Prepared, left_behind
from peer.donors import Donors
from peer.downloads import Download
from peer.following import Following
from peer.snapshots import Snapshot, digest
from peer.stage_server import StageServer
from swarm.averaging.policy import Update
from swarm.compute import Kind
from swarm.errors import RefusedError, WireError
from swarm.net.channel import Channel
from swarm.net.links import Links
from swarm.stage_state import GradientFacts
from swarm.tasks import TaskSet
from swarm.terms import Record

log = logging.getLogger(__name__)
MAX_SNAPSHOTS = 3  # in a row, before there is a pause
STARVED_S = 20.0  # without a chunk, while gradients come: that is said
SAY_AGAIN_S = 60.0
NEWS_S = 30.0  # without a gradient that the leader says is committed: look around anew


class CatchUp:
    """Brings one `StageServer` to the swarm's state, as often as it falls behind."""

    def __init__(
        self,
        server: StageServer,
        commits: Commits,
        links: Links,
        rng: random.Random,
        *,
        say: Callable[[str], None] = lambda line: None,
        first_weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.server, self.commits = server, commits
        self.say, self._first_weights = say, first_weights
        commits.before_commit = self._before_commit
        self.tasks = TaskSet()
        self._replaying = asyncio.Lock()
        self.download: Download | None = None
        self.donors = Donors(
            server, links, rng, self.tasks, begun=self._begun, asking=self._begin_describing
        )
        self.updates = Following(
            server,
            self.tasks,
            trusted=self.donors.trusts,
            blame=self.donors.blame,
            arrived=self._say_starved,
        )
        self._newest_epoch = 0
        self._distrusted_epoch = -1
        self.most_share = 0.0  # of a state that has been here, however often one is begun anew
        self.resumed = 0  # chunks that were here when a download went on
        self._snapshots = 0
        self._told_percent = -1
        self._told_behind = self._most_behind = 0
        self._chunk_at = 0.0  # when the last chunk came, or the download began
        self._told_slow_at = -math.inf

    async def reach(self, step: int, record: Record | None, donors: Sequence[str]) -> None:
        """Hold the state of `step` (whose predecessor is `record`) or a later one.

        Raises RefusedError when that cannot be done now; what was fetched stays for the next time.
        """
        server, commits = self.server, self.commits
        if record is not None:
            self._newest_epoch = record.epoch
            await self._change_epoch(record)
        self.check(record)
        missed = (
            record is not None and not record.restores and record.step == server.parts.ledger.step
        )
        if record is not None and missed and commits.valid and not self.following:
            await commits.commit(record)  # a commit that was missed: its members have it
        if commits.valid and 0 < server.parts.ledger.step < step:
            if not self.updates.covers(server.parts.ledger.step):
                self.updates.begin(await self.donors.channels(donors), commits.record)
            await self._replay(step)
        while server.parts.ledger.step < step or not commits.valid:
            if self._snapshots >= MAX_SNAPSHOTS:
                self._snapshots = 0
                update_mb = 4 * server.state.layout.total / 1e6
                raise RefusedError(
                    "this connection is too slow for this stage: each step brings an update of "
                    f"{update_mb:.1f} MB, and they came faster than they were fetched"
                )
            channels = await self.donors.channels(donors)
            if not channels:
                raise RefusedError(f"nobody has the state of stage {server.stage}")
            await self._fetch_state(channels)
            await self._replay(step)
        self.check(record)

    async def _change_epoch(self, newest: Record) -> None:
        """If the run went back to where this state does not lead: drop it, begin as the run did."""
        commits, mine = self.commits, self.commits.record
        if mine is not None and left_behind(mine, newest) and mine.position < newest.position:
            self.say(f"the run went back to step {newest.base}")
            commits.invalidate()
            self._drop()
        distrusted = newest.epoch == self._distrusted_epoch
        if newest.restores and newest.step < 0 and commits.record is None and not distrusted:
            await self._begin_again(newest)

    def distrust_first_weights(self) -> None:
        """The leader says that the state here differs from its twins'. If it was that of step 0,
        what is drawn here differs (kinds of CPU do): in this epoch it is to be fetched."""
        self._distrusted_epoch = self._newest_epoch

    async def _begin_again(self, opening: Record) -> None:
        """With the weights that every run has at step 0."""
        server, commits = self.server, self.commits
        pristine = commits.valid and server.state.updates == 0
        async with commits.lock:
            weights = self._first_weights

            def begin() -> None:
                if not pristine and weights is not None:
                    server.state.load(weights(), 0)
                for version in server.state.live:  # what was counted is of the epoch before
                    version.clear()

            commits.valid = False
            await server.compute.run(Kind.UPDATE, begin)
            commits.record, commits.committed, commits.prepared = opening, None, None
            server.parts.advance(0)
            commits.valid = True

    @property
    def following(self) -> bool:
        """Whether what is committed is being collected."""
        return self.updates.running

    def arrived(self, step: int) -> None:
        """The leader agrees that this is the state of its `step`, or will be at once."""
        self._snapshots = self._told_behind = self._most_behind = 0
        self.donors.late.clear()
        if self.server.parts.ledger.step < step:
            self.tasks.spawn(self._replay(step), "last commit")

    def committed(self, record: Record) -> None:
        """A commit was applied. Who took part in it has its result, and needs nobody's any more."""
        if self.server.links.incarnation not in record.members.get(self.server.stage, ()):
            return
        self.updates.drop()
        self.donors.release()

    async def _before_commit(self, record: Record) -> None:
        """The leader tells of a commit while this state still follows: apply what came before it,
        and the commit itself with the gradient that is on its way."""
        if self.following and self.server.links.incarnation not in record.members.get(
            self.server.stage, ()
        ):
            try:
                await self._replay(record.step + 1)
            except RefusedError as error:
                log.debug("cannot follow: %s", error)

    def check(self, newest: Record | None) -> None:
        """The leader's newest record must continue, or be, the last one applied here.

        Raises RefusedError, and gives the state up, when it does not.
        """
        mine = self.commits.record
        if newest is None or mine is None or not self.commits.valid:
            return
        other = newest.position == mine.position and newest.hash != mine.hash
        apart = newest.position == (mine.epoch, mine.step + 1) and newest.predecessor != mine.hash
        gone = newest.position > mine.position and left_behind(mine, newest)
        if other or apart or gone:
            self.commits.invalidate()
            self._drop()
            raise RefusedError("what the donors told is not what the leader committed")

    def _drop(self) -> None:
        self.updates.drop()
        self.download = None

    # ---- the snapshot ---------------------------------------------------------------------------

    def _begun(self) -> int | None:
        return None if self.download is None else self.download.described.step

    def _begin_describing(self, channels: Mapping[str, Channel], step: int) -> None:
        """Describing takes a while: what is committed is collected from now on."""
        if self._begun() != step:
            self._drop()
        self.updates.begin(channels, None, step)

    async def _fetch_state(self, channels: Mapping[str, Channel]) -> None:
        """Download a snapshot, collecting what is committed meanwhile, and load it."""
        described, names = await self.donors.describe(channels)
        if self.download is None or self.download.described != described:
            self.download = Download(described)
        else:
            self.resumed += self.download.verified
        self._told_percent = -1
        self._chunk_at = asyncio.get_running_loop().time()
        download = self.download
        who = {name: channels[name] for name in names}
        # Donors of the snapshot keep what comes after it; the others may have it by chance.
        following = self.updates.begin({**who, **channels}, None, described.step)
        fetching = self.tasks.spawn(
            download.run(
                who,
                digest=self._digest,
                blame=lambda donor: self.donors.blame(donor, "chunk"),
                progress=self._say_share,
                since=lambda: described.step + len(self.updates.ahead),
            ),
            "download",
        )
        try:
            await asyncio.wait((following, fetching), return_when=asyncio.FIRST_COMPLETED)
            if following.done() and following.result() and not fetching.done():
                self._snapshots += 1  # it could not be caught up from any more
                self._say_slow(f"beginning anew: {download.share:.0%} of the state was here")
                self._drop()
                return
            await fetching
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            self.donors.late |= download.late
        self.download = None
        self._snapshots += 1
        await self._load(download.snapshot(), names)

    async def _digest(self, part: Tensor) -> bytes:
        return (await self.server.compute.run(Kind.BACKGROUND, lambda: digest(part))).value

    async def _load(self, snapshot: Snapshot, donors: Sequence[str]) -> None:
        server, commits = self.server, self.commits
        async with commits.lock:

            def load() -> str:
                server.state.load(snapshot.tensors, snapshot.updates)
                return server.state.fingerprint()

            commits.valid = False
            mark = (await server.compute.run(Kind.UPDATE, load)).value
            if mark != snapshot.fingerprint:
                for donor in donors:
                    self.donors.blame(donor, "state")
                self.updates.ahead.clear()
                raise WireError("the state that arrived is not the one that was announced")
            commits.record, commits.committed, commits.prepared = snapshot.record, None, None
            server.parts.advance(snapshot.step)
            commits.valid = True

    # ---- what is committed meanwhile ------------------------------------------------------------

    async def _replay(self, until: int) -> None:
        """Apply what was committed since this state, until `until` at least and as far as is here.

        Returns early when the next gradient is nowhere: then only another snapshot helps.
        """
        async with self._replaying:
            await self._apply_until(until)

    async def _apply_until(self, until: int) -> None:
        server, commits = self.server, self.commits
        while commits.valid:
            step = server.parts.ledger.step
            if step not in self.updates.ahead:
                if step >= until or not self.updates.covers(step):
                    return
                self.updates.news.clear()
                try:
                    async with asyncio.timeout(NEWS_S):
                        await self.updates.news.wait()
                except TimeoutError:
                    raise RefusedError(f"no donor has committed step {step}") from None
                continue
            self._say_behind(max(until, step + len(self.updates.ahead)) - step)
            record, gradient = self.updates.take(step)
            if commits.record is not None and record.predecessor != commits.record.hash:
                log.warning("the record of step %d does not continue the state", step)
                self._drop()
                return
            facts = GradientFacts(record.gradients[server.stage], [], record.outcome == "applied")
            commits.prepared = Prepared(record.ballot, Update(gradient, facts))
            await commits.commit_next(record)
            if server.parts.ledger.step != step + 1:
                return

    # ---- for people -----------------------------------------------------------------------------

    def _say_starved(self) -> None:
        """A gradient has come: is it all that comes?"""
        now, download = asyncio.get_running_loop().time(), self.download
        if download is not None and now - self._chunk_at > STARVED_S:
            self._say_slow(f"{download.share:.0%} of the state is here, and no more of it comes")

    def _say_slow(self, what: str) -> None:
        """At most once a minute, however often it happens."""
        now = asyncio.get_running_loop().time()
        if now - self._told_slow_at >= SAY_AGAIN_S:
            self._told_slow_at = now
            update_mb = 4 * self.server.state.layout.total / 1e6
            self.say(f"{what}; this connection also carries {update_mb:.1f} MB for every step")

    def _say_share(self, share: float) -> None:
        self._chunk_at = asyncio.get_running_loop().time()
        self.most_share = max(self.most_share, share)
        percent = int(share * 100)
        if percent // 10 > self._told_percent // 10:
            self._told_percent = percent
            self.say(f"downloading {percent} %")

    def _say_behind(self, steps: int) -> None:
        """At most every tenth of the most it has been."""
        if steps > 1.1 * self._most_behind or self._told_behind - steps > self._most_behind / 10:
            self._most_behind = max(self._most_behind, steps)
            self._told_behind = steps
            if steps > 1:
                self.say(f"catching up, {steps} steps behind")
