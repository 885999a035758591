"""The built wheel: what is in it, and that what is installed from it alone can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"swarm", "peer", "web"}


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), cwd=ROOT)
    [built] = out.glob("*.whl")
    return built


def test_it_holds_the_packages_and_nothing_beside_them(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/", 1)[0] for name in names}
    info = "swarm_parallel-0.1.0.dist-info"
    assert {"swarm", "peer", "web", info} <= tops <= PACKAGES | {info}
    assert {"swarm/py.typed", "peer/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    for file in (ROOT / "web").rglob("*"):  # the page comes with it
        if file.is_file() and "__pycache__" not in file.parts:
            assert file.relative_to(ROOT).as_posix() in names


def test_the_scripts_and_requirements_are_named(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    scripts = ConfigParser()
    scripts.read_string(archive.read("swarm_parallel-0.1.0.dist-info/entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == {
        "swarm": "peer.cli:main",
        "swarm-peer": "peer.cli:peer_main",
    }
    metadata = archive.read("swarm_parallel-0.1.0.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    libp2p = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: libp2p")]
    assert any("'lan'" in line for line in libp2p)
    assert all("extra ==" in line for line in libp2p), "libp2p must stay optional"


def test_installed_alone_it_runs(wheel: Path, tmp_path: Path) -> None:
    """In a directory of its own, away from the sources: a file left out of the wheel shows here."""
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*pip, "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    code = """
import importlib.metadata, pathlib, swarm, peer
from swarm.config import parse_toml
from swarm.config_text import default_toml
print(pathlib.Path(swarm.__file__).parent, pathlib.Path(peer.__file__).parent)
print(parse_toml(default_toml()).run_id)
for entry in importlib.metadata.distribution("swarm-parallel").entry_points:
    assert callable(entry.load()), entry
"""
    said = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert said[0] == f"{site / 'swarm'} {site / 'peer'}"
    assert len(said[1]) == 32
    assert {"swarm", "swarm-peer"} <= {path.name for path in (site / "bin").iterdir()}
    run(sys.executable, str(site / "bin" / "swarm"), "--help", cwd=tmp_path, PYTHONPATH=str(site))


def test_nothing_imports_a_top_level_examples() -> None:
    """py-libp2p installs a package of that name; ours is a folder, not a package."""
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "import examples" not in text, path
            assert "from examples" not in text, path
