"""`(seed, step, index) -> batch`: what a microbatch holds, whoever asks and however often.

Why this way: replays, other replica counts and a new leader must see the same bytes, so a batch is a
pure function of the run config and of data whose hash is in the run config. Sample number
`(step * microbatches + index) * microbatch_size + j` counts through epoch after epoch; each epoch is
its own permutation of all samples (see `order.py`), so every sample is seen once per epoch. Only the
leader reads the data: batches travel in the call header, and peers need neither files nor cache.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from swarm.data.order import permuted
from swarm.data.prepare import Report, default_cache_dir, prepare_tokens
from swarm.data.shards import SHARD_BYTES, TokenReader
from swarm.data.tokenizer import Tokenizer
from swarm.errors import DataError
from swarm.local_path import expanded
from swarm.spec import TensorSpec, token_dtype

if TYPE_CHECKING:
    from swarm.config import RunConfig

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class DataStamps:
    """What goes into the run config, and how much data that is (tokens, or samples)."""

    train_sha256: str
    validation_sha256: str
    num_train: int
    num_validation: int


class Samples(Protocol):
    """One part of the data as numbered samples."""

    def __len__(self) -> int: ...

    def take(self, numbers: np.ndarray) -> Batch:
        """These samples, stacked, in fresh memory."""
        ...

    def close(self) -> None: ...


class TokenWindows:
    """Sequences cut one after the other from a token stream, each with its targets: the same
    tokens one further on. The odd rest at the end is left out."""

    def __init__(self, tokens: TokenReader, sequence: int, dtype: str) -> None:
        self._tokens, self._sequence, self._dtype = tokens, sequence, np.dtype(dtype)

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._sequence)

    def take(self, numbers: np.ndarray) -> Batch:
        rows = np.empty((len(numbers), self._sequence + 1), dtype=self._dtype)
        for row, number in zip(rows, numbers, strict=True):
            self._tokens.read_into(row, int(number) * self._sequence)
        return {"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}

    def close(self) -> None:
        self._tokens.close()


class Arrays:
    """Samples of a custom pipeline: arrays whose first dimension counts them."""

    def __init__(self, fields: Mapping[str, np.ndarray]) -> None:
        self._fields = {name: np.asarray(array) for name, array in fields.items()}

    def __len__(self) -> int:
        return min((len(array) for array in self._fields.values()), default=0)

    def take(self, numbers: np.ndarray) -> Batch:
        return {n: np.ascontiguousarray(a[numbers]) for n, a in self._fields.items()}

    def sha256(self) -> str:
        digest = hashlib.sha256(b"swarm arrays 1\n")
        for name, array in sorted(self._fields.items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            little = array.dtype.newbyteorder("<")
            for start in range(0, len(array), 1024):  # no second copy of it all
                digest.update(np.ascontiguousarray(array[start : start + 1024], little).tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        pass


class Dataset:
    """Batches of one run. Reading is thread-safe; a batch is the caller's own memory."""

    def __init__(
        self,
        train: Samples,
        validation: Samples,
        *,
        seed: int,
        microbatches: int,
        microbatch_size: int,
        batch_spec: dict[str, TensorSpec],
        stamps: DataStamps,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._train, self._validation = train, validation
        self._seed, self._microbatches, self._size = seed, microbatches, microbatch_size
        self.batch_spec = batch_spec
        self.stamps = stamps
        self.tokenizer = tokenizer

    @property
    def fingerprint(self) -> dict[str, str]:
        return {"train": self.stamps.train_sha256, "validation": self.stamps.validation_sha256}

    @property
    def num_samples(self) -> int:
        """Training samples in an epoch."""
        return len(self._train)

    @property
    def num_validation_samples(self) -> int:
        return len(self._validation)

    def batch(self, step: int, index: int) -> Batch:
        """The fields of microbatch (step, index), steps counted from 0."""
        if step < 0 or not 0 <= index < self._microbatches:
            raise ValueError(f"no microbatch {index} in step {step}")
        first = (step * self._microbatches + index) * self._size
        return self._train.take(self._numbers(first))

    def validation_batch(self, i: int) -> Batch:
        """The i-th batch of the validation part in its own order; starts over at the end.

        Raises DataError when the part has no sample at all.
        """
        if i < 0:
            raise ValueError(f"no validation batch {i}")
        if not len(self._validation):
            raise DataError(*_TOO_LITTLE_VALIDATION)
        first = i * self._size
        return self._validation.take(np.arange(first, first + self._size) % len(self._validation))

    def close(self) -> None:
        """Drop memory maps."""
        self._train.close()
        self._validation.close()

    def _numbers(self, first: int) -> np.ndarray:
        size = len(self._train)
        numbers = np.empty(self._size, dtype=np.int64)
        done = 0
        while done < self._size:  # a microbatch may reach into the next epoch
            epoch, position = divmod(first + done, size)
            count = min(self._size - done, size - position)
            positions = np.arange(position, position + count)
            numbers[done : done + count] = permuted(self._seed, epoch, size, positions)
            done += count
        return numbers


def language_batch_spec(config: RunConfig) -> dict[str, TensorSpec]:
    """A token batch's fields, without the data: what a peer checks headers against."""
    shape = (config.batch.microbatch_size, config.data.sequence)
    spec = TensorSpec(shape, token_dtype(config.data.vocab_size), config.data.vocab_size)
    return {"tokens": spec, "targets": spec}


def prepare_data(
    config: RunConfig, cache_dir: Path | None = None, report: Report = lambda line: None
) -> DataStamps:
    """Hashes of the data as they are here, whatever the config says they should be.

    Builds the token shards if the cache lacks them. Raises DataError, StorageError.
    """
    dataset = _open(config, cache_dir, report)
    dataset.close()
    return dataset.stamps


def build_dataset(
    config: RunConfig,
    cache_dir: Path | None = None,
    report: Report = lambda line: None,
    shard_bytes: int = SHARD_BYTES,
) -> Dataset:
    """The run's data, ready to draw from.

    Raises DataError when there are none, too few for one sequence, or not the bytes that the
    config names; StorageError when the cache cannot be written. Blocks: reads files.
    """
    dataset = _open(config, cache_dir, report, shard_bytes)
    wanted = {"train": config.data.train_sha256, "validation": config.data.validation_sha256}
    for part, found in dataset.fingerprint.items():
        named = wanted[part]
        if named and named != found:
            raise DataError(
                f"the {part} data here hash to {found[:12]} but the run's data.{part}_sha256 is "
                f"{named[:12]}",
                _other_bytes_remedy(config),
            )
    if not dataset.num_samples:
        raise DataError(*_too_little(config, dataset))
    if config.validation.every and not dataset.num_validation_samples:
        raise DataError(*_TOO_LITTLE_VALIDATION)
    return dataset


def _open(
    config: RunConfig, cache_dir: Path | None, report: Report, shard_bytes: int = SHARD_BYTES
) -> Dataset:
    data, batch = config.data, config.batch
    common: dict[str, Any] = {
        "seed": config.run.seed,
        "microbatches": batch.microbatches,
        "microbatch_size": batch.microbatch_size,
    }
    if data.source == "pipeline":
        train, validation, specs = _pipeline_arrays(config)
        sizes = len(train), len(validation)
        stamps = DataStamps(train.sha256(), validation.sha256(), *sizes)
        return Dataset(train, validation, batch_spec=specs, stamps=stamps, **common)
    own = config.model.pretrained if data.tokenizer == "pretrained" else None
    prepared = prepare_tokens(
        data.source,
        expanded(data.path) if data.path else None,
        data.tokenizer,
        data.vocab_size,
        cache_dir or default_cache_dir(),
        report,
        shard_bytes,
        expanded(own) if own else None,
    )
    windows = [
        TokenWindows(TokenReader(prepared.directory, part), data.sequence, part.dtype)
        for part in (prepared.train, prepared.validation)
    ]
    stamps = DataStamps(
        prepared.train.sha256,
        prepared.validation.sha256,
        prepared.train.tokens,
        prepared.validation.tokens,
    )
    return Dataset(
        windows[0],
        windows[1],
        batch_spec=language_batch_spec(config),
        stamps=stamps,
        tokenizer=prepared.tokenizer,
        **common,
    )


def _pipeline_arrays(config: RunConfig) -> tuple[Arrays, Arrays, dict[str, TensorSpec]]:
    from swarm.model.definition import load_pipeline  # torch, and the user's own package

    if config.model.pipeline is None:
        raise DataError('data.source is "pipeline" but the run has no model.pipeline', "set it")
    pipeline = load_pipeline(config.model.pipeline)
    samples = pipeline.load_data()
    specs = pipeline.batch_spec(samples, config.batch.microbatch_size)
    return Arrays(samples.train), Arrays(samples.validation), specs


_TOO_LITTLE_VALIDATION = (
    "the validation part of the data holds no whole sample",
    "give more data, a shorter data.sequence where there are sequences, or set validation.every "
    "to 0",
)


def _too_little(config: RunConfig, dataset: Dataset) -> tuple[str, str]:
    if config.data.source == "pipeline":
        return "the pipeline's training data are empty", "return at least one sample"
    if not dataset.stamps.num_train and dataset.stamps.num_validation:
        return (
            "all documents went to the validation part",
            "give more documents that are unlike each other: equal ones go to the same part",
        )
    return (
        f"{dataset.stamps.num_train} training tokens are too few for one sequence of "
        f"{config.data.sequence} and its targets",
        "give more data or a shorter data.sequence",
    )


def _other_bytes_remedy(config: RunConfig) -> str:
    new_run = "or leave both hashes out to start a new run"
    if config.data.source == "stdlib":
        return (
            f"this is Python {platform.python_version()}; use the version the run was started "
            f"with, {new_run}"
        )
    if config.data.source == "pipeline":
        return (
            f"install the version of {config.model.pipeline} the run was started with (its data() "
            f"has to give the same bytes at every call), {new_run}"
        )
    return f"put the run's own files at {config.data.path}, {new_run}"
