"""What a leader asks of the whole swarm between steps: validation loss, hashes, checkpoints.

Nobody watches devices then (`peer.watch`), and a step does not begin before the answers are there.
So whoever is asked is looked after here: a device that hangs must not stop the run.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from peer.downloads import download
from peer.leader import Leader
from peer.members import Member, Standing
from peer.snapshots import Snapshot
from swarm.delayed_state import PREVIOUS
from swarm.errors import RefusedError, SwarmError, WireError
from swarm.model.layout import fingerprint
from swarm.net.channel import Channel
from swarm.optim import make_optimizer
from swarm.stage_state import total

T = TypeVar("T")
log = logging.getLogger(__name__)
_HASH = re.compile(r"\S*:[0-9a-f]{64}")  # SHAPE:SHA256
TRIES = 5
PAUSE_S = 0.2
MAX_WAITS = 4  # for something to come of those who do not hang, each twice as long as the last


async def _answered(
    leader: Leader,
    replicas: Sequence[str],
    asking: Coroutine[Any, Any, T],
    progress: Callable[[], object] = lambda: None,
) -> T:
    """What `asking`, which waits for `replicas`, gives; raises what it raises.

    Raises RefusedError when a device of theirs hangs, TimeoutError when nothing has come for very
    long. `progress()` is another value whenever something has.
    """
    task, seen, waits = asyncio.ensure_future(asking), progress(), 0
    try:
        while waits < MAX_WAITS:
            await asyncio.wait({task}, timeout=leader.watch.overdue_s(replicas) * 2**waits)
            if task.done():
                return task.result()
            before, seen = seen, progress()
            if seen != before:
                waits = 0
                continue
            waits += 1
            for name in replicas:
                if await leader.watch.hangs(name):
                    leader.router.failed(name, "timeout", asyncio.get_running_loop().time())
                    raise RefusedError(f"the device of {name[-8:]} hangs")
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def validate(leader: Leader) -> float:
    """Mean validation loss at the newest commit, forward only. Raises SwarmError when it cannot be
    had.

    Microbatches are routed like those of training, several at once.
    """
    plan, step = leader.plan, leader.next_step
    width = asyncio.Semaphore(max(2, 2 * leader.pipeline.num_stages))

    async def one(index: int) -> tuple[float, int]:
        batch = leader.batches.validation_batch(index)
        async with width:
            loss = await _evaluate(leader, step, leader.microbatches.encode(batch))
        return loss, leader.pipeline.weight(batch)

    results = await asyncio.gather(
        *(one(index) for index in range(plan.validation_microbatches)), return_exceptions=True
    )
    measured = []
    for result in results:
        if isinstance(result, BaseException):
            if isinstance(result, TimeoutError):
                raise RefusedError("no answer") from result
            raise result
        measured.append(result)
    items = sum(weight for _, weight in measured)
    return total(loss for loss, _ in measured) / max(items, 1)


async def _evaluate(leader: Leader, step: int, tensors: list[Any]) -> float:
    loop = asyncio.get_running_loop()
    failure: SwarmError = RefusedError("no route")
    for _ in range(TRIES):
        # It takes no slot, so it goes to who is full of microbatches as well.
        stages = range(leader.pipeline.num_stages)
        drawn = leader.router.route(stages, (), loop.time(), patient=False)
        if drawn is not None:
            route = [choice.replica for choice in drawn]
            body = {"term": list(leader.term), "step": step, "route": route, "hop": 0}
            try:
                channel = await leader.links.channel(route[0])
                asking = channel.call("evaluate", body, tensors)
                loss = (await _answered(leader, route, asking)).body.get("loss")
                if isinstance(loss, float):
                    return loss
                failure = WireError("an evaluation without a loss")
            except SwarmError as error:
                failure = error
        await asyncio.sleep(PAUSE_S)
    raise failure


def _holders(leader: Leader, stage: int) -> list[Member]:
    """First those that are known to hold the newest state: others may have to be waited for."""
    serving = leader.members.of_stage(stage, Standing.SERVING)
    serving.sort(key=lambda member: -member.confirmed)
    return serving + leader.members.of_stage(stage, Standing.READY, Standing.EXPELLED)


def state_sizes(leader: Leader, stage: int) -> dict[str, int] | None:
    """The tensors of a stage's state and their elements; None when the plan names no optimizer."""
    if leader.plan.optimizer is None:
        return None
    layout = leader.pipeline.layout(stage)
    state = make_optimizer(leader.plan.optimizer, layout, "meta").state()
    sizes = {f"optimizer.{name}": tensor.numel() for name, tensor in state.items()}
    if leader.plan.ahead.steps_in_flight > 1:
        sizes[PREVIOUS] = layout.total
    return {"parameters": layout.total, **sizes}


async def stage_hashes(leader: Leader) -> list[dict[str, str]]:
    """Per stage, the sha256 of each parameter at the newest commit, by name.

    Raises SwarmError when some stage has nobody that answers rightly.
    """
    return [await _hashes_of(leader, stage) for stage in range(leader.pipeline.num_stages)]


async def held_hashes(leader: Leader) -> list[dict[str, str]]:
    """`stage_hashes` at the end of a run, where no step would notice that a stage is lost.

    Raises as `stage_hashes` where every stage has somebody, and what ends the term (`GoBack`).
    """
    while True:
        await leader.restoring.until_held()
        try:
            return await stage_hashes(leader)
        except SwarmError:
            if leader.restoring.all_held:
                raise


async def _hashes_of(leader: Leader, stage: int) -> dict[str, str]:
    names = set(leader.pipeline.layout(stage).names)

    async def ask(member: Member, channel: Channel) -> dict[str, str]:
        async with asyncio.timeout(leader.watch.patience_of(member.incarnation, updating=True)):
            answer = (await channel.call("hashes", {})).body
        if answer.get("step") != leader.next_step:
            raise RefusedError(f"stage {stage} is at step {str(answer.get('step'))[:20]}")
        hashes = answer.get("hashes")
        if not isinstance(hashes, dict) or hashes.keys() != names:
            raise WireError(f"stage {stage} has other parameters")
        for name, value in hashes.items():
            if not isinstance(value, str) or not _HASH.fullmatch(value):
                raise WireError(f"the hash of {name} makes no sense")
        return hashes

    return await _of_somebody(leader, stage, ask)


async def _of_somebody(
    leader: Leader, stage: int, ask: Callable[[Member, Channel], Awaitable[T]]
) -> T:
    """What the first replica of the stage that answers rightly says. Raises SwarmError."""
    failure: SwarmError = RefusedError(f"stage {stage} has no replica")
    for _ in range(TRIES):
        for member in _holders(leader, stage):
            channel = leader.links.open_channel(member.incarnation)
            if channel is None or member.step != leader.next_step:
                continue
            try:
                return await ask(member, channel)
            except TimeoutError:
                failure = RefusedError(f"a replica of stage {stage} does not answer")
            except SwarmError as error:
                log.debug("stage %d, %s: %s", stage, member.incarnation[-8:], error)
                failure = error
        await asyncio.sleep(PAUSE_S)
    raise failure


async def fetch_states(leader: Leader) -> list[Snapshot]:
    """Every stage's state right after the newest commit, for a checkpoint.

    The copies are made at once, between two steps; fetching may overlap the next step. Raises
    SwarmError when a stage could not be had.
    """

    step = leader.next_step

    async def one(stage: int) -> Snapshot:
        sizes = state_sizes(leader, stage)

        async def ask(member: Member, channel: Channel) -> Snapshot:
            shares = [0.0]
            fetching = download(channel, step, sizes, shares.append)
            name = member.incarnation
            snapshot = await _answered(leader, [name], fetching, lambda: len(shares))
            if snapshot.step != step:
                raise RefusedError(f"stage {stage} is at step {snapshot.step}")
            agreed = leader.admission.fingerprint(step - 1, stage)
            if agreed is not None and snapshot_mark(snapshot) != agreed:
                raise WireError(f"the state of stage {stage} is not what its replicas agreed on")
            return snapshot

        return await _of_somebody(leader, stage, ask)

    fetching = [asyncio.ensure_future(one(k)) for k in range(leader.pipeline.num_stages)]
    try:
        return list(await asyncio.gather(*fetching))
    finally:  # one stage that cannot be had is enough
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)


def snapshot_mark(snapshot: Snapshot) -> str:
    """The fingerprint of what has arrived, as `StageState.fingerprint` takes it."""
    tensors = dict(snapshot.tensors)
    first = tensors.pop("parameters", torch.empty(0))
    return f"{fingerprint(first, *(each for _, each in sorted(tensors.items()))):016x}"
