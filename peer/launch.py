"""From a `run.toml` to a run: what is stamped where it is started, and the parts built from it.

Everything that both a leader and a replica build from the run config is built here, so that they
cannot disagree.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peer.cli.checks import check_device_name
from peer.training import Plan
from swarm.averaging.plan import contribution_bytes
from swarm.config import (
    OptimizerSection,
    RunConfig,
    with_data_hashes,
    with_pretrained_hash,
    with_trainers,
)
from swarm.data import prepare_data
from swarm.errors import DeviceError
from swarm.model import ModelPipeline, build_pipeline
from swarm.net.directory import DhtDirectory
from swarm.net.identity import Identity
from swarm.net.libp2p import Libp2pTransport
from swarm.net.link import farthest_first
from swarm.optim import numerics_fingerprint
from swarm.schedule import Schedule
from swarm.wire.boundaries import BACKWARD, FORWARD, BoundaryCodecs

log = logging.getLogger(__name__)
ANNOUNCE_S = 20.0
ANNOUNCEMENT_TTL_S = 60.0

# Of the built-in optimizers that with all operations, and what IEEE 754 makes of its fingerprint.
HARDEST = OptimizerSection(name="adamw", nesterov=True)
BITS_OF_HARDEST = "ea7aae05c2e3e31429a1022230e4bf5ccd165fb85f9c8d8a9658ac86ffc4a79b"


def stamp(config: RunConfig, trainer: str, cache_dir: Path | None = None) -> RunConfig:
    """The config as it is hashed: data, pretrained weights and trainers written in.

    Raises DataError when the file names other data than this machine has, PipelineError when the
    model cannot be cut as asked.
    """
    config = with_pretrained_hash(config)
    stamps = prepare_data(config, cache_dir)
    config = with_data_hashes(config, stamps.train_sha256, stamps.validation_sha256)
    if not config.run.trainers:
        config = with_trainers(config, [trainer])
    build_pipeline(config).check()
    return config


def plan_of(config: RunConfig) -> Plan:
    """The part of a config a leader or the baseline acts on."""
    return Plan(
        num_microbatches=config.batch.microbatches,
        num_steps=config.schedule.steps,
        lr=Schedule.of(config).lr,
        clip_norm=config.optimizer.clip_norm,
        validation_every=config.validation.every,
        validation_microbatches=config.validation.microbatches,
        optimizer=config.optimizer,
        ahead=config.ahead,
        accumulate=config.update.accumulate,
        gradient_bytes=(
            contribution_bytes(64, config.update.accumulate, config.wire.gradients) / 64,
            contribution_bytes(64, "float32", config.wire.gradients) / 64,
        ),
    )


def steps_to_train(config: RunConfig, steps: int | None) -> int:
    """The run's steps, or fewer where `--steps` stops earlier."""
    return min(config.schedule.steps if steps is None else steps, config.schedule.steps)


def whole_model(config: RunConfig) -> ModelPipeline:
    """The same model as one stage, for the baseline."""
    model = config.model.model_copy(update={"stages": 1, "cut": None})
    return build_pipeline(config.model_copy(update={"model": model}))


def has_portable_optimizer(config: RunConfig) -> bool:
    """Whether the optimizer gives the same bits on unlike machines (`swarm.optim`)."""
    return config.optimizer.name in ("adamw", "sgd")


def what_rounds(config: RunConfig) -> list[str]:
    """Settings with which a swarm may have other bits than one process (I6)."""
    codecs = BoundaryCodecs.of(config)
    wire = {
        codecs.name(boundary, direction)
        for boundary in range(config.model.stages - 1)
        for direction in (FORWARD, BACKWARD)
    }
    rounded = sorted({*wire, config.wire.gradients} - {"float32", "float32+zstd"})
    if config.update.accumulate != "float64":
        rounded.append(f'update.accumulate = "{config.update.accumulate}"')
    return rounded


def numerics_of(config: RunConfig, device: str) -> str:
    """What a replica must share with its twins to take part (I5); empty for portable optimizers.

    Raises DeviceError where those are not: the state would differ from the stage's at every commit,
    and be fetched anew for ever.
    """
    if not has_portable_optimizer(config):
        return numerics_fingerprint(config.optimizer, device)
    if numerics_fingerprint(HARDEST, device) != BITS_OF_HARDEST:
        raise DeviceError(
            f"{device} does not add, multiply, divide or take roots as IEEE 754 has it, so no "
            "other peer would have its bits",
            "serve on another device (--device), or try another version of torch",
        )
    return ""


def best_first(addresses: Sequence[str]) -> list[str]:
    """Addresses as a link should name them: those of this machine alone only if there are no
    others."""
    distant = [each for each in addresses if not each.startswith(("/ip4/127.", "/ip6/::1/"))]
    return distant or list(addresses)


def choose_device(wanted: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:i` as torch names it. Raises DeviceError."""
    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return "cpu"
    check_device_name(wanted)
    number = wanted.partition(":")[2]
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= available:
        raise DeviceError(
            f"there is no {wanted} here ({available} GPUs found)", "use --device cpu or auto"
        )
    return f"cuda:{number or 0}"


def be_exact(device: str, threads: int | None) -> None:
    """Settings under which equal inputs give equal bits (docs/determinism.md)."""
    if threads is not None:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # It would fill all new memory, on the CPU too; none is read before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False


def keep_freed_memory() -> None:
    """Let this process reuse the memory it frees instead of giving it back to the kernel.

    A microbatch allocates and frees the same hundred large blocks as the one before. By default
    glibc unmaps them, and the kernel clears every page again at its next use: 1 to 4 % of a stage's
    time on a CPU. One arena, because those of further threads are unmapped whatever is set. Call it
    before threads start; other C libraries are left as they are.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_threshold, 32 << 20)  # the most that it accepts
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
        libc.mallopt(m_top_pad, 64 << 20)
        libc.mallopt(m_arena_max, 1)


@dataclass
class Node:
    """A process on the network: its identity, transport and directory."""

    identity: Identity
    transport: Libp2pTransport
    directory: DhtDirectory

    @classmethod
    async def open(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        bootstrap: Sequence[str] = (),
        connections: int = 1,
    ) -> Node:
        """Raises ListenError, StorageError, ConfigError, JoinError (no bootstrap peer answers)."""
        transport = await Libp2pTransport.create(
            identity_path=identity.path,
            listen=listen,
            announce=announce,
            connections=connections,
        )
        try:
            directory = await DhtDirectory.create(transport, identity, bootstrap)
        except BaseException:
            await transport.close()
            raise
        return cls(identity, transport, directory)

    async def announce(self, key: str, **facts: object) -> None:
        """Say in the directory where this process is, for ANNOUNCEMENT_TTL_S. What cannot be said
        is logged: whoever announces goes on, since nobody finds a peer that has ceased to."""
        record = {"addresses": farthest_first(self.transport.addresses), **facts}
        try:
            await self.directory.publish(key, record, ANNOUNCEMENT_TTL_S)
        except ValueError as error:
            log.warning("cannot announce this process: %s", error)

    async def close(self) -> None:
        await self.directory.close()
        await self.transport.close()
