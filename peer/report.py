"""The report of a run: a JSON line per step, and a last one with hashes of what was trained.

Two reports of one run config can be compared line by line: the last lines of a swarm and of its
baseline name the same `sha256` where they trained the same (docs/determinism.md). A report is asked
for by a flag, so, unlike events, not being able to write it is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from swarm.errors import StorageError
from swarm.model.layout import model_sha256

STEP_KEYS = ("step", "loss", "grad_norm", "tokens", "wall_s")


class ReportWriter:
    """Writes a new report to `path`; with None it does nothing. Every line is flushed.

    Raises StorageError here and in every method when the disk refuses.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._file: IO[str] | None = None
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("w", encoding="utf-8")
            except OSError as error:
                raise self._refused(error) from None

    def step(self, result: Any) -> None:
        """A committed step: a StepResult, or anything with its attributes or keys."""
        self._line(step_line(result))

    def finish(self, final: Mapping[str, Any]) -> None:
        """The last line; `final_report` makes one. Must name the model's `sha256`."""
        if "sha256" not in final:
            raise ValueError("the last line of a report names the sha256 of the model")
        self._line(final)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                raise self._refused(error) from None

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_finite(line), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write the report {self.path}: {error.strerror or error}",
            "free some space or name another file with --report",
        )


def step_line(result: Any) -> dict[str, Any]:
    """A step as it stands in a report; `validation_loss` only where it was measured."""
    get = result.get if isinstance(result, Mapping) else lambda key: getattr(result, key, None)
    line = {key: get(key) for key in STEP_KEYS}
    if get("validation_loss") is not None:
        line["validation_loss"] = get("validation_loss")
    return line


def final_report(
    key_order: Sequence[str],
    stages: Sequence[Mapping[str, str]],
    *,
    steps: int,
    tokens: int,
    wall_s: float,
    boundaries: Sequence[Mapping[str, Any]] = (),
    leader_per_token: float = 0.0,
) -> dict[str, Any]:
    """The last line: `stages` holds, per stage, the `tensor_hashes` of one replica.

    `boundaries` are rows `{boundary, raw_per_token, wire_per_token, …}`, as in the status.
    """
    hashes = {name: value for stage in stages for name, value in stage.items()}
    missing = [name for name in key_order if name not in hashes]
    if missing:
        raise ValueError(f"no hash of {missing[0]} and {len(missing) - 1} more parameters")
    return {
        "sha256": model_sha256(hashes, key_order),
        "stages": [model_sha256(stage, key_order) for stage in stages],
        "steps": steps,
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s if wall_s > 0 else 0.0,
        "bytes": {
            "boundaries": [dict(row) for row in boundaries],
            "leader_per_token": leader_per_token,
        },
    }


def _finite(value: Any) -> Any:
    """JSON has no inf and nan: null says that a number was none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
