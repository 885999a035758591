"""Checks of flags that need nothing heavy, so that a slip is told before anything is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from swarm.errors import ConfigError, DeviceError


def stage_numbers(text: str) -> tuple[int, ...]:
    """`--stage`: the stages named; none for auto. Raises ConfigError."""
    if text == "auto":
        return ()
    numbers = text.split(",")
    if not all(each.isascii() and each.isdigit() and len(each) < 10 for each in numbers):
        raise ConfigError(
            f"--stage {text!r} is neither auto nor a number", "try --stage auto, or --stage 0,2"
        )
    return tuple(dict.fromkeys(int(each) for each in numbers))


def check_addresses(listen: Sequence[str], announce: Sequence[str]) -> None:
    """`--listen`, `--announce`, as far as can be told without a network. Raises ConfigError."""
    for option, addresses in (("--listen", listen), ("--announce", announce)):
        for address in addresses:
            if not re.fullmatch(r"/[a-z0-9]+/[^/\s]+(/[^/\s]+)*", address):
                raise ConfigError(
                    f"{option} {address!r} is not a multiaddress",
                    "write it like /ip4/0.0.0.0/tcp/4001",
                )


def check_device_name(wanted: str) -> None:
    """`--device`, as far as it can be told without asking for GPUs. Raises DeviceError."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", wanted):
        raise DeviceError(f"no device is called {wanted!r}", "use auto, cpu, cuda or cuda:0")


def check_pipeline_name(named: str | None) -> None:
    """`--allow-pipeline`. Raises ConfigError."""
    if named is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", named):
        raise ConfigError(
            f"--allow-pipeline {named!r} names no object of a package",
            "write it as in --allow-pipeline my_package:pipeline",
        )


def check_pretrained_directory(path: Path | None) -> None:
    """`--pretrained`. Raises ConfigError."""
    if path is not None and not (path / "config.json").is_file():
        raise ConfigError(
            f"--pretrained {path} holds no Hugging Face model", "name a directory with config.json"
        )
