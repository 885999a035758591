"""What `be_exact` sets for a GPU (docs/determinism.md). Settings alone: it needs none for that."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from peer.launch import be_exact

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
PLACES = (
    (torch.utils.deterministic, "fill_uninitialized_memory"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
)


def found() -> list[bool]:
    return [getattr(place, name) for place, name in PLACES]


@pytest.fixture
def loose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that makes results vary is on; put back as it was."""
    before, was_deterministic = found(), torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(WORKSPACE, "")  # so that what is set here is taken back
    monkeypatch.delenv(WORKSPACE)
    torch.use_deterministic_algorithms(False)
    for place, name in PLACES:
        setattr(place, name, True)
    yield
    torch.use_deterministic_algorithms(was_deterministic)
    for (place, name), value in zip(PLACES, before, strict=True):
        setattr(place, name, value)


@pytest.mark.usefixtures("loose")
def test_on_a_gpu_nothing_rounds_or_chooses_as_it_likes() -> None:
    be_exact("cuda:0", None)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "it would go on"
    assert found() == [False] * len(PLACES)
    assert os.environ[WORKSPACE] == ":4096:8"


@pytest.mark.usefixtures("loose")
def test_a_workspace_that_the_owner_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    be_exact("cuda:0", None)
    assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.usefixtures("loose")
def test_a_cpu_needs_none_of_it() -> None:
    threads = torch.get_num_threads()
    be_exact("cpu", None)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ
