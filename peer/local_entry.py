"""What the processes of a local swarm run: the fork server's imports, a leader, a peer.

Called by `peer.local_server` in the fork server (`preload`) and in its children (`leader`,
`peer`), with plain JSON from the supervisor (`peer.local`). A child tells the supervisor
`{"link": ...}`, `{"say": line}`, `{"step": ...}`, and last `{"report": ...}` or
`{"error": {"type", "message", "remedy"}}`; its exit code is the error's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.streams import forgive_lost_lines
from swarm.errors import SwarmError

if TYPE_CHECKING:
    from peer.run_leader import LeaderProcess
    from peer.run_peer import PeerProcess

Tell = Callable[[dict[str, Any]], None]


def preload(model_type: str | None) -> None:
    """Import what a leader and a peer need, with the model's own module for a Hugging Face run.

    It must start no CUDA, and no thread that a fork would lose: `peer.local_server` refuses then.
    """
    import torch

    from swarm.net.hivemind_quiet import import_hivemind

    import_hivemind()
    for module in ("hivemind.dht.node", "peer.run_leader", "peer.run_peer"):
        importlib.import_module(module)
    if model_type is not None:
        from transformers import AutoConfig, AutoModelForCausalLM

        importlib.import_module("swarm.model.huggingface")
        with contextlib.suppress(Exception):  # the leader says what is wrong with the model
            AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(model_type))]
    # Models are tried on the meta device, the first use of which imports for over a second.
    torch.nn.Linear(1, 1, device="meta")(torch.empty(1, 1, device="meta"))
    if torch.cuda.is_initialized():
        raise RuntimeError("the imports have started CUDA")


def leader(
    arguments: Mapping[str, Any], tell: Tell, make: type[LeaderProcess] | None = None
) -> int:
    """Lead a run, as `make` does it; tells the link and in the end the report."""

    async def main() -> None:
        from peer.report import step_line
        from peer.run_leader import LeaderProcess
        from swarm.config import parse_config
        from swarm.net.identity import claim_identity_file, load_identity
        from swarm.placement import MovePolicy

        identify = load_identity if arguments["claimed"] else claim_identity_file
        process = (make or LeaderProcess)(
            parse_config(arguments["config"]),
            Path(arguments["run_dir"]),
            identify(arguments["identity_path"]),
            steps=arguments["steps"],
            report=_path(arguments["report"]),
            start_with={int(stage): count for stage, count in arguments["start_with"].items()},
            deadline_s=arguments["deadline_s"],
            on_link=lambda link: tell({"link": link}),
            on_step=lambda result: tell({"step": step_line(result)}),
            cache_dir=_path(arguments["cache_dir"]),
            resume=_path(arguments["resume"]),
            moves=MovePolicy(second_share=arguments["second_stages"]),
            say=lambda line: tell({"say": line}),
        )
        tell({"report": await process.run(listen=arguments["listen"])})

    return run(main, tell, threads=arguments["threads"])


def peer(arguments: Mapping[str, Any], tell: Tell, make: type[PeerProcess] | None = None) -> int:
    """Serve a stage, as `make` does it.

    The first SIGTERM drains for `drain_s`, the second leaves at once, as SIGINT does.
    """
    process: Any = None

    async def main() -> None:
        nonlocal process
        from peer.run_peer import PeerOptions, PeerProcess
        from swarm.net.identity import claim_identity_file
        from swarm.net.link import parse_link

        options = PeerOptions(
            stages=() if arguments["stage"] is None else (arguments["stage"],),
            may_move=arguments["may_move"],
            device=arguments["device"],
            threads=arguments["threads"],
            listen=arguments["listen"],
            allow_pipeline=arguments["allow_pipeline"],
            pretrained=_path(arguments["pretrained"]),
        )
        data_dir = Path(arguments["data_dir"])

        def say(line: str) -> None:
            print(time.strftime("%H:%M:%S"), line)
            tell({"say": line})

        identity = claim_identity_file(data_dir / "identity.key")
        process = (make or PeerProcess)(parse_link(arguments["join"]), identity, options, say=say)
        await process.run()

    async def drain() -> bool:
        return process is not None and await process.drain(arguments["drain_s"])

    return run(main, tell, threads=arguments["threads"], drain=drain)


def run(
    main: Callable[[], Coroutine[Any, Any, None]],
    tell: Tell,
    *,
    threads: int,
    drain: Callable[[], Awaitable[bool]] | None = None,
) -> int:
    """Run `main` to its end, or until SIGTERM; returns the exit code. Never raises.

    `drain` leaves politely first, and tells whether `main` then ends by itself.
    """
    forgive_lost_lines()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    try:
        _settle(threads)
        asyncio.run(_until_told(main, drain))
        return 0
    except SwarmError as error:
        tell({"error": {"type": type(error).__name__,
                        "message": error.message, "remedy": error.remedy}})  # fmt: skip
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        tell({"error": {"type": "SwarmError", "remedy": "its log has the traceback",
                        "message": f"unexpected {type(error).__name__}: {error}"}})  # fmt: skip
        return 1


async def _until_told(
    main: Callable[[], Coroutine[Any, Any, None]], drain: Callable[[], Awaitable[bool]] | None
) -> None:
    task = asyncio.create_task(main())
    draining: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    async def leave() -> None:
        ends_itself = False
        try:
            ends_itself = drain is not None and await drain()
        finally:
            if not ends_itself:
                task.cancel()

    def drain_first() -> None:
        if not draining and drain is not None:
            draining.append(asyncio.create_task(leave()))
        else:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, drain_first)
    loop.add_signal_handler(signal.SIGINT, task.cancel)  # all end: there is nobody to hand over to
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
    finally:
        for each in draining:
            each.cancel()
        await asyncio.gather(*draining, return_exceptions=True)


def _settle(threads: int) -> None:
    """Make a forked interpreter one of its own: its threads, its random numbers."""
    import numpy as np
    import torch

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch.set_num_threads(threads)
    np.random.seed()
    torch.seed()


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
