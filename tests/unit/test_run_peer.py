"""What a peer builds from a config that came over the network, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer.launch import Node
from peer.run_peer import ANSWER_S, PeerOptions, PeerProcess, Speaker
from swarm.config import RunConfig, canonical_bytes, parse_config, with_pretrained_hash
from swarm.errors import ConfigError, DataError, JoinError, ListenError, UnreachableError
from swarm.net.link import parse_link
from swarm.sim.virtual_time import run

PEER = "12D3KooWCiirNx5T6fYSJhXZwZzKQVSvvFrAB6M5VGcZzSQZpcvs"
JOIN: Any = SimpleNamespace(run_id="0" * 32, addresses=(), by_peer={})


def pretrained(directory: Path, seed: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    small = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(small).save_pretrained(directory)
    return directory


def config_of(directory: Path) -> RunConfig:
    return with_pretrained_hash(
        parse_config(
            {
                "run": {},
                "model": {"pretrained": str(directory), "stages": 2},
                "data": {"sequence": 16},
                "schedule": {"steps": 2},
            }
        )
    )


def build(config: RunConfig, copy: Path | None) -> Any:
    return PeerProcess(JOIN, JOIN, PeerOptions(pretrained=copy))._build_pipeline(config)


def test_pretrained_weights_are_this_machines_own_copy_with_the_runs_bytes(tmp_path: Path) -> None:
    config = config_of(pretrained(tmp_path / "begun", 1))
    copy, other = pretrained(tmp_path / "copy", 1), pretrained(tmp_path / "other", 2)
    (tmp_path / "begun").rename(tmp_path / "elsewhere")  # the path of the config is never opened
    assert build(config, copy).num_stages == 2
    with pytest.raises(ConfigError, match="--pretrained DIR"):
        build(config, None)
    with pytest.raises(DataError, match="hash"):
        build(config, other)


class Answers:
    """Links to peers that answer as they are told, None not at all."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers = answers

    async def channel(self, peer: str, addresses: object) -> Any:
        answer = self.answers[peer].pop(0)
        if isinstance(answer, Exception):
            raise answer

        async def call(method: str, body: object) -> Any:
            if answer is None:
                await asyncio.Event().wait()
            return SimpleNamespace(body={"config": answer})

        return SimpleNamespace(call=call)


def fetch(
    config: RunConfig, answers: dict[str, list[Any]], give_up_at: float = math.inf
) -> RunConfig:
    by_peer = {peer: [f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"] for peer in answers}
    link: Any = SimpleNamespace(run_id=config.run_id, addresses=(), by_peer=by_peer)
    process = PeerProcess(link, link, PeerOptions())
    process.say = Speaker(lambda line: None)
    process._give_up_at = give_up_at
    links: Any = Answers(answers)
    return run(process._fetch_config(links), limit_s=100)


@pytest.fixture
def config() -> RunConfig:
    return parse_config(
        {
            "model": {"config": {"model_type": "llama"}, "stages": 1},
            "schedule": {"steps": 2},
        }
    )


def test_who_answers_pings_and_says_no_config_keeps_nobody_from_the_next(config: RunConfig) -> None:
    """The last one is tried again too."""
    data = canonical_bytes(config)
    assert fetch(config, {"leader": [None], "met": [data]}) == config
    assert fetch(config, {"leader": [None, data]}) == config


def test_who_was_met_long_ago_and_is_of_another_run_now_ends_nothing(config: RunConfig) -> None:
    away, data = UnreachableError("no answer"), canonical_bytes(config)
    other = JoinError("it serves run X")
    later = {"leader": [away, data], "met": [other]}
    assert fetch(config, later) == config
    assert fetch(config, {"leader": [away, data], "met": [b"nonsense"]}) == config
    for answer in (other, b"nonsense"):
        with pytest.raises(JoinError):
            fetch(config, {"leader": [answer], "met": [data]})


def test_a_package_is_imported_only_if_it_was_named(tmp_path: Path) -> None:
    config = parse_config(
        {
            "run": {},
            "model": {"pipeline": "os:path", "stages": 1},
            "data": {"source": "pipeline"},
            "schedule": {"steps": 2},
        }
    )
    with pytest.raises(ConfigError, match="--allow-pipeline os:path"):
        build(config, None)


def test_a_swarm_that_says_no_config_is_given_up_in_time(config: RunConfig) -> None:
    away, data = UnreachableError("it is away"), canonical_bytes(config)
    answers = {"leader": [away, None, data], "met": [away, 7, away]}
    assert fetch(config, answers, give_up_at=ANSWER_S + 5) == config
    answers = {"leader": [away, None, data], "met": [away, 7, away]}
    with pytest.raises(JoinError, match="its answer is no run config"):
        fetch(config, answers, give_up_at=ANSWER_S)
    assert answers["leader"] == [data]


class Unlucky(PeerProcess):
    """Its network daemon dies again and again, the first time once it has served."""

    met = f"swarm://{'0' * 32}@/ip4/8.8.8.8/tcp/4001/p2p/{PEER}"

    def __init__(self, ends: list[Any]) -> None:
        self.released = 0
        self.ends, self.tried, self.said = ends, list[Any](), list[str]()
        identity: Any = SimpleNamespace(peer_id="me", release=self._release)
        super().__init__(JOIN, identity, PeerOptions(device="cpu"), say=self.said.append)

    def _release(self) -> None:
        self.released += 1

    async def _open(self) -> Any:
        assert not self.released, "another process could be the same peer"
        self.tried.append(self.link)

        async def close() -> None:
            pass

        return SimpleNamespace(close=close, transport=SimpleNamespace(lost=asyncio.Event()))

    async def _join(self, node: Any, device: str) -> None:
        self._remember_link([self.met.partition("@")[2]])
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        if not end:
            node.transport.lost.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("last", [True, JoinError("another run")])
def test_who_loses_its_network_daemon_comes_back_to_where_the_swarm_is_by_now(last: Any) -> None:
    process = Unlucky([False, False, last])

    async def serve() -> None:
        with contextlib.nullcontext() if last is True else pytest.raises(JoinError, match="other"):
            await process.run()

    run(serve(), limit_s=10)
    assert process.tried == [JOIN, *[parse_link(process.met)] * 2]
    assert process.released == 1
    assert process.said.count("the network daemon has died; starting it again") == 1, "a minute"


def test_who_has_served_does_not_ask_for_its_config_again(config: RunConfig) -> None:
    """Whoever is where the leader was may be of another run."""
    link: Any = SimpleNamespace(run_id=config.run_id, addresses=(), by_peer={"leader": ()})
    process = PeerProcess(link, link, PeerOptions())
    process.say = Speaker(lambda line: None)
    links: Any = Answers({"leader": [canonical_bytes(config), JoinError("it serves run X")]})
    for _ in range(2):
        assert run(process._fetch_config(links)) == config


@pytest.mark.parametrize("served", [False, True])
def test_a_daemon_that_does_not_start_ends_only_who_has_not_served(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = [ListenError("it did not start within 60 s"), None]

    async def opened(*_: Any, **__: Any) -> Any:
        if (error := tries.pop(0)) is not None:
            raise error
        return "a node"

    monkeypatch.setattr(Node, "open", opened)
    process = PeerProcess(JOIN, JOIN, PeerOptions())
    process.say, process._config = Speaker(lambda line: None), b"{}" if served else b""
    if served:
        assert run(process._open()) == "a node"
    else:
        with pytest.raises(ListenError):
            run(process._open())
