"""The safetensors files of a Hugging Face directory: what their headers say, and their tensors.

All headers are read at once: they are small, and a copy that is damaged or not whole is then told
before anything is begun with it. Of weights in one file and an index of shards the one file counts,
as it does for transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swarm.errors import ConfigError

FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them; others need scales or lose bits
COPY_AGAIN = "copy the directory again"
SAVE_AGAIN = "save it with save_pretrained"


@dataclass(frozen=True, slots=True)
class Header:
    """Of one tensor: where it is, its dtype as safetensors calls it, its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a directory, read when they are asked for. Raises ConfigError."""

    def __init__(self, directory: Path) -> None:
        index, single = (directory / f"model.safetensors{suffix}" for suffix in (".index.json", ""))
        if single.is_file():
            self.headers = _headers(single)
        elif index.is_file():
            self.headers = _indexed(index)
        else:
            raise ConfigError(f"no model.safetensors in {directory}", SAVE_AGAIN)

    def check_floating(self, names: Iterable[str]) -> None:
        """Raises ConfigError unless these are numbers that training can go on from."""
        for name in names:
            header = self.headers[name]
            if header.dtype not in FLOATS:
                raise ConfigError(
                    f"{header.path}: {name} is stored as {header.dtype}",
                    "use weights in float32, bfloat16 or float16, not quantized ones",
                )

    def __getitem__(self, name: str) -> Tensor:
        with _opened(self.headers[name].path) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def _indexed(index: Path) -> dict[str, Header]:
    """Headers of the tensors that an index names, each of the shard that it names for it."""
    weight_map = _weight_map(index)
    shards: dict[str, dict[str, Header]] = {}
    for file in dict.fromkeys(weight_map.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):  # others are not hashed
            raise ConfigError(f"{index} names {file!r}, no safetensors file beside it", SAVE_AGAIN)
        shards[file] = _headers(index.parent / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            what = f"{index} says that {name} is in {file}, where it is not"
            raise ConfigError(what, COPY_AGAIN)
    return {name: shards[file][name] for name, file in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ConfigError(f"{index} does not say which file holds what", SAVE_AGAIN)
    return found


def _headers(path: Path) -> dict[str, Header]:
    with _opened(path) as file:
        names: list[str] = file.keys()
        slices = zip(names, map(file.get_slice, names), strict=True)
        return {
            name: Header(path, each.get_dtype(), tuple(each.get_shape())) for name, each in slices
        }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a name that is no text
        reason = "it is not there" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(f"cannot read {path}: {reason}", COPY_AGAIN) from None
