"""What a leader tells people and the directory: status, events, and where it can be found."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from peer.leader import Leader
from peer.members import Member
from peer.training import Shape, StepResult

RECENT = 200


class Status:
    """Builds the status dict: what `swarm status`, the terminal view and the dashboard show."""

    def __init__(self, run_id: str, name: str, num_steps: int, shape: Shape) -> None:
        self.run_id, self.name, self.num_steps, self.shape = run_id, name, num_steps, shape
        self.leader: Leader | None = None  # None: another trainer leads, or is to
        self.link = ""
        self.parent: Mapping[str, Any] | None = None  # the run this one goes on from
        self._last: tuple[list[Mapping[str, Any]], dict[str, Any]] | None = None
        self.state, self.reason = "waiting", "waiting for peers"
        self.losses: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self.validation_loss: float | None = None
        self.tokens = 0
        self._tokens_before = 0  # those of terms before this one
        self.started_at = time.time()
        self._recent: deque[tuple[int, float]] = deque(maxlen=8)
        self._steps_elsewhere = 0

    def lead(self, leader: Leader) -> None:
        """This trainer leads now."""
        self.leader, self._tokens_before = leader, self.tokens
        self.state, self.reason = "waiting", "waiting for peers"

    def stand_by(self, reason: str) -> None:
        """Another trainer leads, or is to."""
        self.leader = None
        self.state, self.reason = "standing by", reason

    def note_step(self, result: StepResult) -> None:
        self.losses.append((result.step, result.loss))
        self.tokens += result.tokens
        self._recent.append((result.tokens, result.wall_s))
        if result.validation_loss is not None:
            self.validation_loss = result.validation_loss

    @property
    def tokens_per_s(self) -> float:
        """Over the last few steps."""
        seconds = sum(wall_s for _, wall_s in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds else 0.0

    @property
    def _tokens_of_term(self) -> int:
        """Replicas count their bytes from a term's begin on, too."""
        return max(self.tokens - self._tokens_before, 1)

    @property
    def leader_per_token(self) -> float:
        return self.leader.sent_bytes / self._tokens_of_term if self.leader else 0.0

    def boundaries(self) -> list[dict[str, Any]]:
        """Bytes per trained token over each boundary, before and after the codec: activations,
        and their gradients on the way back."""
        rows: list[dict[str, Any]] = []
        if self.leader is None:
            return rows
        for stage in range(self.shape.num_stages - 1):
            before, after = self.leader.traffic(stage), self.leader.traffic(stage + 1)
            tokens = self._tokens_of_term
            rows.append(
                {
                    "boundary": stage,
                    "raw_bytes": before.sent_raw,
                    "wire_bytes": before.sent,
                    "back_raw_bytes": after.returned_raw,
                    "back_wire_bytes": after.returned,
                    "raw_per_token": before.sent_raw / tokens,
                    "wire_per_token": before.sent / tokens,
                    "back_raw_per_token": after.returned_raw / tokens,
                    "back_wire_per_token": after.returned / tokens,
                }
            )
        return rows

    def as_dict(self) -> dict[str, Any]:
        leader = self.leader
        step = leader.step if leader else None
        if self.state == "training" and leader and leader.next_step >= self.num_steps:
            lacking = leader.restoring.not_held
            self.reason = self._waits_for(leader, lacking[0]) if lacking else ""
        elif self.state == "training" and step is not None:
            empty = step.empty_stages()
            self.reason = self._waits_for(leader, empty[0]) if empty and leader else ""
        return {
            "run": {"id": self.run_id, "name": self.name, "link": self.link},
            "state": "waiting" if self.reason.startswith("waiting") else self.state,
            "reason": self.reason,
            "step": leader.next_step if leader else self._steps_elsewhere,
            "num_steps": self.num_steps,
            "loss": self.losses[-1][1] if self.losses else None,
            "validation_loss": self.validation_loss,
            "losses": [list(each) for each in self.losses],
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "in_flight": len(leader.in_flight) if leader else 0,
            "microbatches": {
                "done": len(step.done) if step else 0,
                "of": leader.plan.num_microbatches if leader else 0,
            },
            "num_stages": self.shape.num_stages,
            "replicas": self.rows(),
            "placement": self.placement(),
            "bytes": {
                "boundaries": self.boundaries(),
                "leader_per_token": self.leader_per_token,
            },
            "started_at": self.started_at,
            "updated_at": time.time(),
            "parent": dict(self.parent) if self.parent else None,
            "epoch": leader.term.epoch if leader else 0,
            "term": leader.term.counter if leader else 0,
        }

    @staticmethod
    def _waits_for(leader: Leader, stage: int) -> str:
        if leader.restoring.trouble:
            return f"waiting: stage {stage} has lost its state, and {leader.restoring.trouble}"
        if leader.restoring.waiting_for is None:
            return f"waiting for a peer in stage {stage}"
        if leader.members.of_stage(stage):
            return f"waiting for who holds the state of stage {stage}, else for the last checkpoint"
        return f"waiting for a peer in stage {stage}, whose state is lost: then from the checkpoint"

    def finish(self) -> None:
        """The run is over: who served to the end, and what they reached, stays in the picture."""
        self._last = self.rows(), self.placement()
        self.state, self.reason = "finished", ""

    def finish_elsewhere(self, steps: int) -> None:
        """The run is over after so many steps; another trainer led it to its end."""
        self.state, self.reason = "finished", "another trainer led it to its end"
        self._steps_elsewhere = steps

    def rows(self) -> list[Mapping[str, Any]]:
        """One row a replica."""
        if self._last is not None:
            return self._last[0]
        leader = self.leader
        return [self._row(leader, member) for member in leader.members] if leader else []

    def placement(self) -> dict[str, Any]:
        """What each stage reaches, and where peers go."""
        if self._last is not None:
            return self._last[1]
        return self.leader.rebalancing.as_dict() if self.leader else {}

    @staticmethod
    def _row(leader: Leader, member: Member) -> Mapping[str, Any]:
        router, name = leader.router, member.incarnation
        known = name in router.replicas(member.stage)
        return {
            **member.row(),
            "service_s": router.service_s(name) if known else None,
            "outstanding": router.outstanding(name) if known else 0,
            "share": router.shares(member.stage).get(name, 0.0) if known else 0.0,
        }
