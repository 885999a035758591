"""The example package with a custom pipeline: found by name, cut anywhere, without its data too."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from swarm.config import load_config
from swarm.data import build_dataset
from swarm.errors import ConfigError, WireError
from swarm.model import ParameterLayout, build_pipeline, load_pipeline, model_sha256
from swarm.wire.codecs import encode
from swarm.wire.frames import check_indices

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_its_run_can_be_cut_anywhere_and_learns() -> None:
    pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    config = load_config(EXAMPLE / "run.toml")
    pipeline = build_pipeline(config)
    assert len(pipeline.cut) == 3
    assert all(len(pipeline.boundary(k)) == 2 for k in range(2))
    hashes: dict[str, str] = {}
    for k in range(3):
        stage = pipeline.build_stage(k)
        layout = ParameterLayout.of(stage)
        hashes |= layout.tensor_sha256(layout.flatten(stage))
    one = config.model_copy(
        update={"model": config.model.model_copy(update={"stages": 1, "cut": None})}
    )
    whole = build_pipeline(one).build_stage(0)
    layout = ParameterLayout.of(whole)
    whole_hashes = layout.tensor_sha256(layout.flatten(whole))
    assert model_sha256(hashes, pipeline.key_order) == model_sha256(
        whole_hashes, pipeline.key_order
    )
    data = load_pipeline("swarm_digits:pipeline").load_data().train
    batch = {name: torch.from_numpy(array[:64]) for name, array in data.items()}
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        whole.set_microbatch(step, 0)
        (loss,) = whole((), batch)
        (loss / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / 64)
    assert losses[-1] < 0.7 * losses[0]


def test_a_label_of_no_digit_is_refused_in_one_line() -> None:
    """Before a device sees it."""
    pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    config = load_config(EXAMPLE / "run.toml")
    spec = build_pipeline(config).batch_spec
    with contextlib.closing(build_dataset(config)) as dataset:
        assert dataset.batch_spec == spec
        fields = {name: torch.from_numpy(each) for name, each in dataset.batch(0, 0).items()}
    specs = [spec[name] for name in sorted(fields)]

    def arrive() -> None:
        check_indices([encode(fields[name], "raw+zstd") for name in sorted(fields)], specs)

    arrive()
    for wrong in (10, 200):
        fields["label"][3] = wrong
        with pytest.raises(WireError) as refused:
            arrive()
        assert str(refused.value) == f"tensor 1 holds {wrong}, 0 to 9 expected"


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        load_pipeline("swarm_digits:pipeline").load_data()
