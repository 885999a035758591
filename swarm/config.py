"""The run's definition: `run.toml` as one frozen model, hashed into the run id.

Everything in it is hashed, so two machines with the same run id train the same numbers; whatever
does not change the numbers (ports, devices, threads, log levels) is a flag of a command and never a
field. What can only be known where the run is started (who leads, the bytes of the data) is
*stamped* in there (`with_trainers`, `with_data_hashes`) before the id is taken.

The hash is over canonical JSON (sorted keys, no spaces, every default written out) and not over the
file, so comments and order do not matter, and a peer can check what a stranger sends it against the
id in its join link (`from_canonical`). An unknown key is refused by name, because a misspelled one
that is silently ignored costs a day of training.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm.config_errors import describe
from swarm.config_fields import (
    BatchSection,
    CheckpointSection,
    DataSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    UpdateSection,
    ValidationSection,
    WireSection,
)
from swarm.errors import ConfigError, DataError, JoinError
from swarm.local_path import expanded
from swarm.run_id import canonical_bytes, run_id_of

__all__ = [
    "MAX_CONFIG_BYTES", "BatchSection", "CheckpointSection", "DataSection", "MemorySection",
    "ModelSection", "OptimizerSection", "RunConfig", "RunSection", "ScheduleSection",
    "UpdateSection", "ValidationSection", "WireSection", "canonical_bytes", "differences",
    "from_canonical", "load_config", "parse_config", "parse_toml", "run_id_of", "with_data_hashes",
    "with_pretrained_hash", "with_trainers",
]  # fmt: skip

MAX_CONFIG_BYTES = 64 * 1024
_MOST_KEYS = 5  # told at once


def load_config(path: str | Path) -> RunConfig:
    """Read a run.toml. Raises ConfigError: one line that names the key or the line at fault."""
    path = Path(path)
    try:
        with path.open("rb") as file:  # a device has no size that could be asked for
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_CONFIG_BYTES // 1024} KiB",
                "`swarm init` shows what belongs in it",
            )
        text = data.decode("utf-8-sig")  # some editors begin with a byte-order mark
    except FileNotFoundError:
        raise ConfigError(f"no file {path}", "`swarm init` writes a commented one") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", "save it as UTF-8") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory", "name the run.toml in it") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "name a run.toml that you may read"
        ) from None
    config = parse_toml(text, str(path))
    if config.run.trainers:
        from swarm.net.identity import is_peer_id

        for index, trainer in enumerate(config.run.trainers):
            if not is_peer_id(trainer):
                raise ConfigError(
                    f"{path}: run.trainers[{index}] {trainer!r} is not a peer id",
                    "`swarm id` prints the one of its machine",
                )
    return config


def parse_toml(text: str, name: str = "run.toml") -> RunConfig:
    """A run.toml's text, checked. Raises ConfigError; messages call it `name`."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # integers of 5,000 digits are no decode error
        raise ConfigError(
            f"{name} is not valid TOML: {error}", "`swarm init` shows the form"
        ) from None
    return parse_config(data, name)


def parse_config(data: dict[str, Any], name: str = "run.toml") -> RunConfig:
    """A config as nested dicts, checked. Raises ConfigError; messages call it `name`."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        message, remedy = describe(error, RunConfig)
        raise ConfigError(f"{name}: {message}", remedy) from None


def from_canonical(data: bytes, expected_run_id: str) -> RunConfig:
    """The config a stranger sent, if it is the one the run id names.

    Raises JoinError when it is too large, hashes to another id, or cannot be read by this version.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise JoinError(f"the run config is larger than {MAX_CONFIG_BYTES // 1024} KiB")
    if run_id_of(data) != expected_run_id:
        raise JoinError(
            f"the run config received is not that of run {expected_run_id[:32]!r}",
            "check the join link",
        )
    try:
        config = parse_config(json.loads(data), "the run config received")
        same = canonical_bytes(config) == data
    except (ConfigError, ValueError, RecursionError) as error:
        reason = getattr(error, "message", "it is not valid JSON")
        raise JoinError(reason, "the run may need another version of swarm-parallel") from None
    if not same:
        raise JoinError(
            "the run config received is not in canonical form",
            "the run may need another version of swarm-parallel",
        )
    return config


def differences(one: RunConfig, other: RunConfig) -> str:
    """The keys in which two configs differ, as `data.sequence, model.cut`; a few of them."""
    sections, others = (json.loads(canonical_bytes(each)) for each in (one, other))
    keys = [
        f"{section}.{key}"
        for section, values in sections.items()
        for key, value in values.items()
        if json.dumps(value) != json.dumps(others[section][key])  # 0 and 0.0 are unlike there
    ]
    return ", ".join(keys[:_MOST_KEYS]) + (", ..." if len(keys) > _MOST_KEYS else "")


def with_trainers(config: RunConfig, trainers: Sequence[str]) -> RunConfig:
    """The config with these peers as trainers. Raises ConfigError for ids that cannot be ones."""
    return _stamped(config, "run", trainers=tuple(trainers))


def with_data_hashes(config: RunConfig, train_sha256: str, validation_sha256: str) -> RunConfig:
    """The config with the hashes of the data as it is here.

    Raises DataError when run.toml names other bytes.
    """
    for key, named, found in (
        ("data.train_sha256", config.data.train_sha256, train_sha256),
        ("data.validation_sha256", config.data.validation_sha256, validation_sha256),
    ):
        _check_hash(key, named, found, "the data here")
    return _stamped(config, "data", train_sha256=train_sha256, validation_sha256=validation_sha256)


def with_pretrained_hash(config: RunConfig) -> RunConfig:
    """The config with the hash of `model.pretrained` as it is here; unchanged without one.

    A peer that builds a stage from its own copy of the directory calls it as a check. Raises
    DataError when the directory is missing, unreadable, or holds other bytes than run.toml says.
    """
    if config.model.pretrained is None:
        return config
    directory = expanded(config.model.pretrained)
    with_tokenizer = config.data.tokenizer == "pretrained"
    found = hash_directory(directory, with_tokenizer=with_tokenizer)
    named = config.model.pretrained_sha256
    _check_hash("model.pretrained_sha256", named, found, f"{directory} here")
    return _stamped(config, "model", pretrained_sha256=found)


def hash_directory(directory: Path, *, with_tokenizer: bool = False) -> str:
    """One sha256 over what training reads of a Hugging Face directory: config and weights, and
    the tokenizer if wanted."""
    digest = hashlib.sha256()
    if not directory.is_dir():
        raise DataError(
            f"there is no directory {directory}",
            "give one written by save_pretrained; nothing is downloaded",
        )
    try:
        paths = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
        if len(paths) == 1:
            raise DataError(f"no safetensors weights in {directory}", "give a local directory")
        index = directory / "model.safetensors.index.json"  # says which of them are read
        paths += [index] if index.is_file() else []
        if with_tokenizer:
            paths.append(directory / "tokenizer.json")
        for path in paths:
            with path.open("rb") as stream:
                digest.update(f"{path.name}\n".encode())
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()


def _check_hash(key: str, named: str | None, found: str, what: str) -> None:
    if named is not None and named != found:
        raise DataError(
            f"{what}: the bytes hash to {found[:12]}… but {key} is {named[:12]}…",
            "use the same bytes as the run, or leave the hash out to start a new run",
        )


def _stamped(config: RunConfig, section: str, **values: Any) -> RunConfig:
    data = config.model_dump()
    data[section].update(values)
    return parse_config(data, "the stamped config")
