"""The parts of the local supervisor that need no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer import local_table
from peer.local_table import bound_log, letters, parse_peers
from swarm.errors import ConfigError


def test_peers_as_people_write_them() -> None:
    assert parse_peers("0:2,1:2,2:2") == {0: 2, 1: 2, 2: 2}
    assert parse_peers(" 1:3 , 0:1 ") == {0: 1, 1: 3}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not a stage and a number"),
        ("2", "not a stage and a number"),
        ("0:2,", "not a stage and a number"),
        ("a:1", "'a:1' is not"),
        ("0:-1", "not a stage and a number"),
        ("0:2;1:2", "not a stage and a number"),
        ("0:²", "not a stage and a number"),
        ("0:0", "stage 0 needs at least one"),
        ("0:1,0:2", "stage 0 is named twice"),
        ("0:1000000", "more than 256"),
        pytest.param("0:" + "9" * 5000, "not a stage and a number", id="digits"),
    ],
)
def test_nonsense_is_refused_in_a_line(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        parse_peers(text)
    assert "\n" not in str(caught.value)


def test_names_go_on_after_z() -> None:
    assert [letters(n) for n in (0, 1, 25, 26, 27, 701, 702)] == [
        "a", "b", "z", "aa", "ab", "zz", "aaa",
    ]  # fmt: skip


def test_a_log_is_bounded_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_table, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(local_table, "KEPT_LOG_BYTES", 100)
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as log:
        log.write(b"x" * 990)
        bound_log(path)
        assert path.stat().st_size == 990
        log.write(b"y" * 99 + b"\n")
        bound_log(path)
        log.write(b"z\n")
    assert path.read_bytes() == b"z\n"
    assert (tmp_path / "log.1").read_bytes() == b"y" * 99 + b"\n"
    bound_log(tmp_path / "none")
