"""What a local swarm's fork server imports, and with which environment: begun before all else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from peer.local_process import ForkServer
from swarm.config import RunConfig

PRELOAD = "peer.local_entry:preload"


def warm_up(config: RunConfig, threads: int = 1, preload: str = PRELOAD) -> ForkServer:
    """Begin to import what a swarm of this config needs, in a process of its own.

    For `LocalSwarm(server=...)`: while it imports, the caller can prepare data and stamp the
    config. If nothing comes of that, `close()` it.
    """
    arguments = {"model_type": _model_type(config)}
    return ForkServer(preload, arguments, environment=server_environment(threads))


def _model_type(config: RunConfig) -> str | None:
    """Of a Hugging Face model ("" where it cannot be told); None for the user's own modules."""
    if config.model.pipeline is not None:
        return None
    model = config.model.config
    if config.model.pretrained is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            model = json.loads((Path(config.model.pretrained) / "config.json").read_text())
    found = model.get("model_type") if isinstance(model, Mapping) else None
    return found if isinstance(found, str) else ""


def server_environment(threads: int) -> dict[str, str]:
    """Of a fork server, read when its imports load the libraries; numpy's BLAS would start its
    threads there and then."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs must not start CUDA before forks
    }
