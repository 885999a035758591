"""The planner's rules, under any sequence of joins, leaves and changes of speed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.placement import LoadTable, MovePolicy, PeerLoad, StageNeed, choose_stage, plan_moves

HYSTERESIS_S = 100.0
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "leave", "notice", "speed", "wait", "plan", "plan"]),
        st.integers(0, 10**6),
    ),
    max_size=60,
)


class Swarm:
    """Peers by name, carried along as a leader would: joins, plans, arrivals, deaths."""

    def __init__(self, stages: int, keeps_serving: bool) -> None:
        self.needs = tuple(
            StageNeed(cost=1.0 + stage % 2, memory_bytes=2 + stage % 3, download_bytes=20)
            for stage in range(stages)
        )
        self.policy = MovePolicy(hysteresis_s=HYSTERESIS_S, keeps_serving=keeps_serving)
        self.peers: dict[str, PeerLoad] = {}
        self.now_s = 0.0
        self.count = 0
        self.history: dict[str, list[tuple[float, int]]] = {}  # when it left which stage
        self.moves = 0

    @property
    def table(self) -> LoadTable:
        return LoadTable(self.needs, tuple(self.peers.values()))

    def happen(self, kind: str, number: int) -> None:
        names = sorted(self.peers)
        name = names[number % len(names)] if names else ""
        if kind == "join":
            self._join(number)
        elif kind == "wait":
            self._pass(float(number % 50))
        elif kind == "plan":
            self.plan()
        elif name and kind == "leave":
            del self.peers[name]
        elif name and kind == "notice":
            self.peers[name] = replace(self.peers[name], leaves_s=self.now_s + number % 40)
        elif name:
            self.peers[name] = replace(self.peers[name], speed=0.25 * (1 + number % 12))

    def _join(self, number: int) -> None:
        self.count += 1
        joiner = PeerLoad(
            f"p{number % 7}-{self.count}",
            speed=0.5 * (1 + number % 4),
            memory_bytes=2 + number % 6,
            download_bytes_per_s=1.0 + number % 3,
            pinned=number % 11 == 0,
            lifetime_s=1000.0,
        )
        stage = choose_stage(self.table, joiner, self.now_s).stage
        assert stage is not None
        assert self.table.fits(joiner, stage)
        arrives_s = self.now_s + self.table.download_s(joiner, stage)
        self.peers[joiner.peer] = replace(joiner, arriving=stage, arrives_s=arrives_s)

    def plan(self) -> None:
        table, before = self.table, self.table.replicas()
        plan = plan_moves(table, self.now_s, self.policy)
        shuffled = LoadTable(self.needs, tuple(reversed(table.peers)))
        assert plan_moves(shuffled, self.now_s, self.policy) == plan
        assert len({move.peer for move in plan.moves}) == len(plan.moves)
        for move in plan.moves:
            peer = self.peers[move.peer]
            assert not peer.pinned
            assert peer.arriving is None
            assert peer.stages == (move.from_stage,)
            assert table.fits(peer, move.to_stage)
            if move.keeps_serving:
                assert table.fits(peer, move.from_stage, move.to_stage)
            for left_s, stage in self.history.get(move.peer, []):
                assert stage != move.to_stage or self.now_s - left_s >= HYSTERESIS_S
            self.history.setdefault(move.peer, []).append((self.now_s, move.from_stage))
            self.peers[move.peer] = replace(
                peer,
                stages=peer.stages if move.keeps_serving else (),
                arriving=move.to_stage,
                arrives_s=self.now_s + move.download_s,
                moved_s=self.now_s,
                left_stage=move.from_stage,
            )
        for stage in {move.from_stage for move in plan.moves}:
            leavers = [move for move in plan.moves if move.from_stage == stage]
            if before[stage] > len(leavers):
                continue
            # All go: then somebody comes, and one of them serves here until then.
            assert any(move.to_stage == stage for move in plan.moves), "a plan emptied a stage"
            assert any(move.keeps_serving for move in leavers), "a plan emptied a stage"
        assert all(now for now, was in zip(self.table.replicas(), before, strict=True) if was)
        self.moves += len(plan.moves)
        if plan.moves:
            assert plan.reason
            assert plan.after >= plan.before

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        for name, peer in list(self.peers.items()):
            if peer.leaves_s <= self.now_s:
                del self.peers[name]
            elif peer.arriving is not None and peer.arrives_s <= self.now_s:
                stages = (peer.arriving, *peer.stages)
                self.peers[name] = replace(peer, stages=stages, arriving=None)
        for name, peer in list(self.peers.items()):
            for old in peer.stages[1:]:  # the leader lets it go there once another serves
                if self.table.replicas()[old] > 1:
                    self.peers[name] = replace(peer, stages=peer.stages[:1])


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.integers(1, 5), st.booleans(), EVENTS)
def test_no_sequence_of_events_breaks_a_rule_and_then_it_comes_to_rest(
    stages: int, keeps_serving: bool, events: list[tuple[str, int]]
) -> None:
    swarm = Swarm(stages, keeps_serving)
    for kind, number in events:
        swarm.happen(kind, number)
    # Constant conditions: within a few rounds of everybody's rest, nobody moves any more.
    quiet = 0
    for _ in range(60):
        moves = swarm.moves
        swarm.happen("wait", 49)
        swarm.plan()
        quiet = quiet + 1 if swarm.moves == moves else 0
    assert quiet >= 20
