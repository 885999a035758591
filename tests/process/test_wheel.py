"""The built wheel: what is in it, and that what is installed from it alone can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.process.forks import toml

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


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a directory of its own, away from the sources: what it lacks shows there."""
    place = tmp_path_factory.mktemp("installed") / "site"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*pip, "--no-deps", "--no-index", "--target", str(place), str(wheel), cwd=place.parent)
    return place


def test_installed_alone_it_runs(site: Path, tmp_path: Path) -> None:
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


def test_installed_alone_it_writes_a_run_and_trains(site: Path, tmp_path: Path) -> None:
    """Help and imports show no module that a command imports when it is already at work."""

    def swarm(*args: str) -> str:
        command = (sys.executable, str(site / "bin" / "swarm"), *args)
        homes = {name: str(tmp_path / name) for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME")}
        return run(*command, cwd=tmp_path, PYTHONPATH=str(site), **homes)

    swarm("init", "first.toml")
    assert "[model.config]" in (tmp_path / "first.toml").read_text()
    tiny = toml(tmp_path / "tiny.toml", steps=9)
    one_step = ("--steps", "1", "--device", "cpu", "--threads", "1")
    said = swarm("baseline", str(tiny), *one_step, "--report", "report")
    lines = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    assert [line.get("step") for line in lines[:-1]] == [0]
    assert f"1 steps, sha256 {lines[-1]['sha256']}" in said
    whole = swarm("up", str(tiny), *one_step, "--plain", "--peers", "0:1,1:1,2:1")
    assert lines[-1]["sha256"] in whole, whole


def test_installed_alone_it_shows_the_page(site: Path, tmp_path: Path) -> None:
    """All that the page names, as `swarm dashboard` serves it."""
    code = """
import pathlib, re, web
from fastapi.testclient import TestClient
from web.app import create_app
from web.board import Board
from web.broadcast import Broadcast
from web.store import Store
print(pathlib.Path(web.__file__).parent)
with TestClient(create_app(Board(Store(":memory:"), "0" * 32), Broadcast())) as client:
    page = client.get("/")
    assert page.status_code == 200, page.text
    for name in re.findall(r'(?:src|href)="(static/[^"]+)"', page.text):
        assert client.get("/" + name).status_code == 200, name
        print(name.partition("?")[0])
"""
    said = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert said[0] == str(site / "web")
    assert {"static/style.css", "static/app.js"} <= set(said[1:])


def test_nothing_imports_a_top_level_examples() -> None:
    """py-libp2p installs a package of that name; ours is a folder, not a package."""
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "import examples" not in text, path
            assert "from examples" not in text, path
