"""Deterministic batches over token shards whose sha256 is part of the run config.

`prepare_data` takes the hashes that are stamped into a new run; `build_dataset` checks them and
gives `Dataset.batch(step, index)`. See `dataset.py` for the promise, `prepare.py` for the cache.
"""

from swarm.data.dataset import (
    Batch,
    Dataset,
    DataStamps,
    build_dataset,
    language_batch_spec,
    prepare_data,
)
from swarm.data.prepare import default_cache_dir
from swarm.data.tokenizer import Tokenizer, byte_tokenizer

__all__ = [
    "Batch",
    "DataStamps",
    "Dataset",
    "Tokenizer",
    "build_dataset",
    "byte_tokenizer",
    "default_cache_dir",
    "language_batch_spec",
    "prepare_data",
]
