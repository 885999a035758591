"""The picture as Prometheus reads it (text exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from web.health import WORDS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = (
    ("step", "step", "Steps committed."),
    ("num_steps", "steps_planned", "Steps of the run."),
    ("loss", "loss", "Training loss of the last step."),
    ("validation_loss", "validation_loss", "Last validation loss."),
    ("tokens_per_s", "tokens_per_second", "Tokens trained a second."),
    ("serving", "replicas_serving", "Replicas that take part."),
    ("peers", "replicas", "Replicas that the leader knows."),
    ("raw_bps", "boundary_raw_bytes_per_second", "Activations forward, before the codec."),
    ("wire_bps", "boundary_wire_bytes_per_second", "Activations forward, on the wire."),
    ("utilisation", "utilisation_ratio", "Share of time that replicas compute."),
    ("heard_at", "heard_timestamp_seconds", "When the leader last answered."),
    ("notes", "malformed_total", "Records and answers that made no sense."),
)


def metrics(picture: Mapping[str, Any], viewers: int) -> str:
    """All of it. Values that are not known are left out."""
    return "".join(f"{line}\n" for line in _lines(picture, viewers))


def _lines(picture: Mapping[str, Any], viewers: int) -> Iterator[str]:
    head = picture.get("head", {})
    for key, name, text in _GAUGES:
        if head.get(key) is not None:
            kind = "counter" if name.endswith("_total") else "gauge"
            yield f"# HELP swarm_{name} {text}"
            yield f"# TYPE swarm_{name} {kind}"
            yield f"swarm_{name} {head[key]}"
    yield "# HELP swarm_health Whether the run is in this state."
    yield "# TYPE swarm_health gauge"
    for state in WORDS:
        yield f'swarm_health{{state="{state}"}} {int(state == head.get("state"))}'
    yield "# HELP swarm_stage_replicas_serving Replicas of a stage that take part."
    yield "# TYPE swarm_stage_replicas_serving gauge"
    for stage in picture.get("stages", ()):
        yield f'swarm_stage_replicas_serving{{stage="{stage["stage"]}"}} {stage["serving"]}'
    yield "# HELP swarm_dashboard_viewers Pages that are open."
    yield "# TYPE swarm_dashboard_viewers gauge"
    yield f"swarm_dashboard_viewers {viewers}"
