"""The report of a run: a JSON line per step, and a last one with hashes of what was trained.

Two reports of one run config can be compared line by line: the last lines of a swarm and of its
baseline name the same `sha256` where they trained the same (docs/determinism.md). A report is asked
for by a flag, so, unlike events, not being able to write it is an error.

A run lives longer than its processes, and so does its report: a process that goes on with a run
goes on with the file. Every line begins with the run's id, which tells whose report a file is.
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
    """Writes the report of the run `run_id` to `path`; with None nothing. Every line is flushed.

    A report of this run that is there is gone on with: what it says of the steps before the first
    one written now stays, the rest goes; the same when the run goes back meanwhile. Until a line is
    written nothing changes. A file with anything else in it is refused.

    Raises StorageError here and in every method when the disk refuses.
    """

    def __init__(self, path: str | Path | None, run_id: str) -> None:
        self.path = None if path is None else Path(path)
        self.run_id = run_id
        self._file: IO[bytes] | None = None
        self._last: int | None = None  # step of the last line, once one is written
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # A pipe or device has no past.
                self._plain = self.path.is_file() or not self.path.exists()
                self._file = self.path.open("a+b" if self._plain else "wb")
                if self._plain:
                    self._check_whose(self._file)
            except OSError as error:
                raise self._refused(error) from None

    def step(self, result: Any) -> None:
        """A committed step: a StepResult, or anything with its attributes or keys."""
        line = step_line(result)
        self._go_on_at(line["step"])
        self._line(line)
        self._last = line["step"]

    def finish(self, final: Mapping[str, Any]) -> None:
        """The last line; `final_report` makes one. Must name the model's `sha256`."""
        if "sha256" not in final:
            raise ValueError("the last line of a report names the sha256 of the model")
        self._go_on_at(final["steps"])
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
            text = json.dumps(_finite({"run_id": self.run_id, **line}), ensure_ascii=False)
            self._file.write(text.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from None

    def _check_whose(self, file: IO[bytes]) -> None:
        """Raises StorageError unless the file is empty or a report of this run."""
        ours = json.dumps({"run_id": self.run_id})[:-1].encode()
        file.seek(0)
        first = file.readline(len(ours))
        if not ours.startswith(first):  # a killed writer may have left a part of it
            file.close()
            raise StorageError(
                f"{self.path} holds something else than a report of this run ({self.run_id[:8]})",
                "name another file with --report, or remove it",
            )

    def _go_on_at(self, step: int) -> None:
        """Cut off what the file says of `step` and later, of the end, and a torn line."""
        if self._file is None or not self._plain:
            return
        if self._last is not None and step > self._last:
            return
        try:
            kept = 0
            self._file.seek(0)
            for line in self._file:
                if not line.endswith(b"\n") or not _is_before(step, line):
                    break
                kept += len(line)
            self._file.truncate(kept)
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write the report {self.path}: {error.strerror or error}",
            "free some space or name another file with --report",
        )


def _is_before(step: int, line: bytes) -> bool:
    """Whether this line of a report is one of an earlier step."""
    try:
        return int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError):
        return False


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
