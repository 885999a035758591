"""Commands told to people are taken by a shell as they are told."""

from __future__ import annotations

import shlex
from pathlib import Path

from peer.cli.command_line import command_line


def test_words_and_flags_are_quoted_where_a_shell_needs_it() -> None:
    run = Path("my runs/\u00e9.toml")
    told = command_line("swarm", "train", run, dir=Path("it's"), listen=["/a b", "/c"], lan=True)
    words = ["swarm", "train", str(run), "--dir", "it's", "--listen", "/a b", "--listen", "/c"]
    assert shlex.split(told) == [*words, "--lan"]


def test_what_was_not_given_is_not_told() -> None:
    none = {"steps": None, "listen": [], "plain": False, "identity": None}
    assert command_line("swarm", "up", "run.toml", **none) == "swarm up run.toml"
    assert command_line("x", second_stages=0.5, steps=3) == "x --second-stages 0.5 --steps 3"
