"""A checkpoint of a run as a model directory: `swarm export`.

The checkpoint holds the run's config, so nothing but the run directory is needed, except where the
model starts from a local pretrained directory or a BPE was not kept with the checkpoint: then those
files are read where the config says they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from peer import checkpoints, run_dirs
from swarm.config import (
    RunConfig,
    canonical_bytes,
    parse_config,
    run_id_of,
    with_pretrained_hash,
)
from swarm.data.tokenizer import byte_tokenizer, load_pretrained, load_tokenizer_file
from swarm.errors import ConfigError, DataError
from swarm.local_path import expanded
from swarm.model import build_pipeline
from swarm.model.export import SavedTokenizer, export_model


class _ChangedError(DataError):
    """What the run began with is not here as it was: no other of its checkpoints would help."""


def export_checkpoint(
    source: str | Path,
    out: str | Path,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the model of one checkpoint to `out`; of a run directory, of the newest that is whole.

    `say` gets a line for each that is passed over, as are those of another run than the
    directory's.

    Returns the checkpoint's manifest. Raises DataError (no or a damaged checkpoint, another
    pretrained model than the run's), ConfigError (PipelineError), StorageError; `out` is as it was
    then.
    """
    if run_dirs.is_checkpoint(source):
        return _export(Path(source), out, cache_dir)
    refused: DataError | None = None
    passed: list[str] = []

    def pass_over(line: str) -> None:
        passed.append(line)
        say(line)

    run_dir = run_dirs.run_dir_of(source)
    for path in run_dirs.newest_first(run_dir, pass_over, run_dirs.run_id_in(run_dir)):
        try:
            return _export(path, out, cache_dir)
        except _ChangedError:
            raise
        except DataError as error:
            say(run_dirs.passed_over(path, error))
            refused = refused or error
    raise refused or DataError(
        f"{source} holds no complete checkpoint",
        "the lines above say what is wrong with those it has; use a copy, if there is one"
        if passed
        else "set [checkpoint] every in run.toml, or let a run reach its end",
    )


def _export(directory: Path, out: str | Path, cache_dir: Path | None) -> dict[str, Any]:
    manifest = checkpoints.load_manifest(directory)
    config = config_of(manifest, directory)
    try:
        with_pretrained_hash(config)
    except DataError as error:
        raise _ChangedError(error.message, "it must be there as the run began with it") from None
    tensors = read_model(directory, manifest)
    pipeline = build_pipeline(config)
    if missing := [name for name in pipeline.key_order if name not in tensors]:
        raise DataError(f"{directory} lacks {len(missing)} parameters, as {missing[0]}")
    tokenizer = _tokenizer(config, directory, manifest, cache_dir)
    try:
        export_model(pipeline, tensors, out, tokenizer)
    except RuntimeError as error:  # load_state_dict: shapes that are not the model's
        raise DataError(f"{directory} does not fit its config: {error}") from None
    return manifest


def config_of(manifest: Mapping[str, Any], directory: Path) -> RunConfig:
    """The run config a checkpoint holds, if it is the one its run id names. Raises DataError."""
    remedy = "it is damaged, or export with the version of swarm-parallel that wrote it"
    try:
        config = parse_config(manifest["config"], f"the config in {directory}")
    except ConfigError as error:
        raise DataError(error.message, remedy) from None
    if run_id_of(canonical_bytes(config)) != manifest.get("run_id"):
        run_id = str(manifest.get("run_id"))[:12]
        raise DataError(f"the config in {directory} is not that of run {run_id}…", remedy)
    return config


def read_model(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """All parameters of a checkpoint by whole-model name. Raises DataError."""
    tensors: dict[str, Tensor] = {}
    for entry in manifest["stages"]:
        part = checkpoints.read_stage_parameters(directory, entry["stage"])
        if twice := sorted(part.keys() & tensors.keys()):
            raise DataError(f"{directory} has two stages with {twice[0]}", "use another checkpoint")
        tensors.update(part)
    return tensors


def _tokenizer(
    config: RunConfig, directory: Path, manifest: Mapping[str, Any], cache_dir: Path | None
) -> SavedTokenizer | None:
    if config.data.source == "pipeline":
        return None
    if config.data.tokenizer == "bytes":
        return byte_tokenizer()
    if config.data.tokenizer == "pretrained":
        assert config.model.pretrained is not None
        return load_pretrained(expanded(config.model.pretrained), config.data.vocab_size)
    if "tokenizer" in manifest:
        path = directory / checkpoints.TOKENIZER
        try:
            return load_tokenizer_file(path, config.data.vocab_size)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}") from None
    from swarm.data import build_dataset

    return build_dataset(config, cache_dir).tokenizer
