"""What goes wrong is one line on stderr that says what and what to do; never a traceback.

Most commands fail in this process (`CliRunner`); those that need a network run as processes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from peer import lan, run_peer
from peer.cli import INTERRUPTED
from peer.cli.errors import READER_GONE, fail_in_one_line
from peer.cli.peer_program import peer_app
from peer.cli.swarm_program import app
from peer.run_peer import Speaker
from peer.serve import last_swarm
from swarm.data.tokenizer import byte_tokenizer, train_bpe
from swarm.errors import StorageError
from swarm.model.hf_carve import ForeignLayer, Reached
from swarm.net.directory import DhtDirectory
from swarm.net.identity import load_identity
from swarm.net.libp2p import Libp2pTransport
from swarm.net.link import format_link
from swarm.net.links import VERSION_PROTOCOL
from swarm.net.transport import Stream
from swarm.wire.frames import PROTOCOL_VERSION
from tests.process.forks import Command, Forks, toml
from tests.process.small_disk import fill, small_disk

CONFIG, DATA, JOIN, DEVICE, STORAGE, LISTEN = 2, 3, 4, 5, 6, 7
LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")
RUN_ID = "0123456789abcdef" * 2
PEER_ID = "12D3KooWRXfDmx5bTpMHYeQ9RTBtyHgyDMn2N6hdpJWARMZvhJFd"
DEAD = format_link(RUN_ID, [f"/ip4/127.0.0.1/tcp/9/p2p/{PEER_ID}"])
Fails = Callable[..., str]


def one_line(stderr: str) -> str:
    """The only line there is."""
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.endswith("\n"), stderr
    assert "Traceback" not in stderr
    return stderr.removeprefix("error: ").rstrip()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SWARM_JOIN", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def fails(code: int, *args: str | Path, program: str = "swarm", printed: str | None = None) -> str:
    """Run a command here; the line it fails with, once it has this exit code, and after what it
    has `printed`, unless that is no matter."""
    application = app if program == "swarm" else peer_app
    result = CliRunner().invoke(application, [str(each) for each in args])
    line = one_line(result.stderr)
    assert result.exit_code == code, (result.exit_code, line)
    assert printed in (None, result.stdout)
    return line


def command_of(*args: str) -> list[str]:
    """A `swarm` of its own, for what is wrong with its output."""
    return [sys.executable, "-c", "from peer.cli import main; main()", *args]


def ends(code: int, command: Command) -> str:
    """The same of a process."""
    assert command.code() == code, command
    return one_line(command.err)


# ---- run.toml and flags -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run\n", "not valid TOML"),
        ("[run]\nname = 'x'\n[modle]\n", "modle"),
        ("[run]\nname = 'x'\ncolour = 'red'\n", "colour"),
        ("[run]\nname = 'x'\nseed = 'many'\n", "run.seed"),
        ("\xff\xfe", "UTF-8"),
    ],
)
def test_bad_run_toml(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.toml").write_bytes(text.encode("latin-1"))
    for command in ("train", "up", "baseline"):
        assert said in fails(CONFIG, command, "run.toml")


def test_a_model_that_cannot_be_cut(tmp_path: Path) -> None:
    assert "stages" in fails(CONFIG, "baseline", toml(tmp_path / "run.toml", steps=1, stages=99))


@pytest.mark.parametrize("command", ["train", "up", "baseline"])
def test_a_family_that_cannot_be_cut(tmp_path: Path, command: str) -> None:
    """The reason is the family's, not that of whatever breaks first on the way to it."""
    run = toml(tmp_path / "run.toml", steps=1)
    before, _, rest = run.read_text().partition("[model.config]\n")
    rest = rest[rest.index("[data]") :]
    run.write_text(f'{before}[model.config]\nmodel_type = "t5gemma"\n{rest}')
    line = fails(CONFIG, command, run)
    assert "t5gemma" in line
    assert "is an encoder-decoder" in line
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_a_cut_that_changes_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts a run proves of its family that the cut is right; here it is not."""

    def ignore_source(self: ForeignLayer, hidden_states: Tensor, *args: object, **_: object) -> Any:
        if self.role == "sink":
            raise Reached(hidden_states)
        return hidden_states

    monkeypatch.setattr(ForeignLayer, "forward", ignore_source)
    line = fails(CONFIG, "baseline", toml(tmp_path / "run.toml", steps=1))
    assert line.startswith("gpt2 cannot be cut into stages: ")
    assert line.endswith(" - use another model, or [model] stages = 1")
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_files_that_are_not_there_or_there_already(tmp_path: Path) -> None:
    assert "swarm init" in fails(CONFIG, "up", "nowhere.toml")
    assert CliRunner().invoke(app, ["init"]).exit_code == 0
    assert "exists already" in fails(STORAGE, "init")
    assert ". is a directory - name a file in it" in fails(STORAGE, "init", "")
    spaced = CliRunner().invoke(app, ["init", "a b.toml"])
    assert spaced.stdout == "wrote a b.toml; now: swarm up 'a b.toml'\n"
    assert CliRunner().invoke(app, ["init", "no/such/directory/run.toml"]).exit_code == 0
    assert "name a file in a directory" in fails(STORAGE, "init", "run.toml/deeper/run.toml")
    assert "is a directory - name the run.toml in it" in fails(CONFIG, "up", tmp_path)
    run = toml(tmp_path / "small.toml", steps=1)
    long = "a" * 300  # what the system refuses to look at, as it does without permission
    for command in (["init", long], ["up", run, "--resume", long], ["export", long, "out"]):
        assert "File name too long - name another" in fails(STORAGE, *command)
    (tmp_path / "corpus.txt").unlink()
    assert "corpus.txt" in fails(DATA, "baseline", run)


@pytest.mark.parametrize("command", ["up", "baseline"])
def test_more_threads_than_any_machine_has(tmp_path: Path, command: str) -> None:
    run = toml(tmp_path / "small.toml", steps=1)
    result = CliRunner().invoke(app, [command, str(run), "--threads", "99999999999"])
    assert result.exit_code == CONFIG
    assert "--threads" in result.stderr
    assert "1024" in result.stderr


def test_scenarios_and_machines_that_are_not_there_or_no_toml(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    (tmp_path / "broken.toml").write_text("[[machines\n")
    for named, said in (("nowhere.toml", "no such file"), ("broken.toml", "is no TOML")):
        for command in (("simulate", named), ("plan", run, "--machines", named)):
            line = fails(CONFIG, *command)
            assert said in line
            assert "docs/simulate.md" in line
    assert "swarm init" in fails(CONFIG, "plan", "nowhere.toml", "--machines", "nowhere.toml")


@pytest.mark.parametrize("host", ["203.0.113.7", "x" * 70, "fe80::1%nowhere"])
def test_a_dashboard_at_no_address_of_this_machine(host: str) -> None:
    link = format_link(RUN_ID, [f"/ip4/127.0.0.1/tcp/9/p2p/{PEER_ID}"])
    line = fails(LISTEN, "dashboard", "--join", link, "--host", host)
    assert "name an address of this machine, as --host 127.0.0.1" in line


def test_a_dashboard_at_a_taken_port() -> None:
    link = format_link(RUN_ID, [f"/ip4/127.0.0.1/tcp/9/p2p/{PEER_ID}"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = fails(LISTEN, "dashboard", "--join", link, "--port", port)
    assert line.endswith("choose another --port")


def test_other_data_than_the_run_names(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    run.write_text(run.read_text().replace("[data]", f'[data]\ntrain_sha256 = "{"0" * 64}"'))
    for command in ("train", "up", "baseline"):
        assert "data.train_sha256" in fails(DATA, command, run)


def test_peers_that_do_not_fit_the_run(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    assert "'x' is not a stage and a number" in fails(CONFIG, "up", run, "--peers", "x")
    assert "has 0 to 2" in fails(CONFIG, "up", run, "--peers", "0:1,1:1")
    assert "'' is not a stage and a number" in fails(CONFIG, "up", run, "--peers", "")


@pytest.mark.parametrize(
    ("code", "flags", "said"),
    [
        (CONFIG, ("--stage", "first"), "--stage 'first'"),
        (DEVICE, ("--device", "tpu"), "no device is called 'tpu'"),
        (CONFIG, ("--allow-pipeline", "own_package"), "my_package:pipeline"),
        (CONFIG, ("--lan", "--join", DEAD), "--lan finds a run, --join names one"),
        (JOIN, ("--join", ""), "--join is empty - pass the link"),
        (CONFIG, ("--pretrained", "nowhere"), "nowhere holds no Hugging Face model"),
    ],
)
def test_flags_of_a_peer_are_checked_first(code: int, flags: tuple[str, ...], said: str) -> None:
    assert said in fails(code, *flags, program="swarm-peer")


def test_not_one_of_the_trainers(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    run.write_text(run.read_text().replace("[run]", f'[run]\ntrainers = ["{PEER_ID}"]'))
    for command in ("train", "up", "chaos"):
        assert "not one of the run's trainers" in fails(CONFIG, command, run, printed="")
    run.write_text(run.read_text().replace(PEER_ID, "abc"))
    for command in ("train", "up", "baseline"):
        said = fails(CONFIG, command, run)
        assert said.endswith("run.trainers[0] 'abc' is not a peer id - "
                             "`swarm id` prints the one of its machine")  # fmt: skip


def test_a_run_directory_with_a_damaged_config(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "run.json").write_text('{"run": 1}')
    for command in ("train", "up"):
        said = fails(STORAGE, command, run, "--resume", "before")
        assert "before/run.json cannot be read: run should be a table" in said
        assert said.endswith(" - it is damaged, or of another version of swarm-parallel")


def test_a_package_that_is_not_installed(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        '[run]\nname = "x"\n[model]\npipeline = "no_such_package:pipeline"\nstages = 1\n'
        '[data]\nsource = "pipeline"\n[batch]\nmicrobatches = 1\nmicrobatch_size = 2\n'
        "[schedule]\nsteps = 9\nwarmup_steps = 0\n"
    )
    assert "no_such_package" in fails(CONFIG, "train", run)
    assert "which is no language model" in fails(CONFIG, "eval", "model", "--run", run)


def test_no_gpu(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    assert "use --device cpu or auto" in fails(DEVICE, "baseline", run, "--device", "cuda:99")
    for command in ("baseline", "up"):
        assert "no device is called 'tpu'" in fails(DEVICE, command, run, "--device", "tpu")
    assert not (tmp_path / "runs").exists(), "nothing was started"
    link = format_link(RUN_ID, [f"/ip4/127.0.0.1/tcp/9/p2p/{PEER_ID}"])
    line = fails(DEVICE, "--join", link, "--device", "cuda:99", program="swarm-peer")
    assert "there is no cuda:99 here" in line


def test_the_extra_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libp2p" else find_spec(name)
    )
    assert "pip install" in fails(CONFIG, "--lan", program="swarm-peer")
    run = toml(tmp_path / "run.toml", steps=1)
    assert "pip install" in fails(CONFIG, "train", run, "--lan")


# ---- exports and status -------------------------------------------------------------------------


def test_what_is_no_model_and_no_run(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    assert "no directory runs/x" in fails(CONFIG, "export", "runs/x", "out")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    assert "no complete checkpoint" in fails(DATA, "export", "runs/x", "out")
    for directory in ("runs/x", "nowhere", "run.toml"):
        assert "no Hugging Face model" in fails(CONFIG, "generate", directory, "def ")
        assert "no Hugging Face model" in fails(CONFIG, "eval", directory, "--run", run)
        assert "no run directory" in fails(JOIN, "status", directory)
    assert "swarm status LINK" in fails(JOIN, "status")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"vocab_size": 100}, "needs 256 tokens, the model has 100 - name the run.toml"),
        ({"max_position_embeddings": 8}, "needs 32 positions, the model has 8 - name"),
    ],
)
def test_a_model_that_a_run_s_data_does_not_fit(
    tmp_path: Path, sizes: dict[str, int], said: str
) -> None:
    run = toml(tmp_path / "run.toml", steps=1)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(**{**small, **heads, **sizes})).save_pretrained("model")
    assert said in fails(CONFIG, "eval", "model", "--run", run)


def test_a_model_with_another_tokenizer(tmp_path: Path) -> None:
    """Its loss would be a number, of text that it never saw so."""
    run = toml(tmp_path / "run.toml", steps=1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=300))
    model.save_pretrained("model")
    byte_tokenizer().save_tokenizer("model")
    assert CliRunner().invoke(app, ["eval", "model", "--run", str(run)]).exit_code == 0
    train_bpe(iter([b"the quick brown fox jumps over the lazy dog " * 9]), 300).save_tokenizer(
        "model"
    )
    assert fails(CONFIG, "eval", "model", "--run", run) == (
        "the tokenizer in model is not the run's - "
        "name the run.toml that the model was trained with"
    )


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    """JSON has no NaN."""
    run = toml(tmp_path / "run.toml", steps=1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=256))
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    model.save_pretrained("model")
    done = CliRunner().invoke(app, ["eval", "model", "--run", str(run), "--json"])
    assert json.loads(done.stdout, parse_constant=pytest.fail)["loss"] is None


# ---- the disk -----------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "full", kib=64) as path:
        yield path


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    run = toml(tmp_path / "run.toml", steps=1)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert "set XDG_CACHE_HOME" in fails(STORAGE, "baseline", run)
    monkeypatch.delenv("XDG_DATA_HOME")
    assert "set HOME, or XDG_DATA_HOME and XDG_CACHE_HOME" in fails(STORAGE, "id")
    assert CliRunner().invoke(app, ["init", "other.toml"]).exit_code == 0, "it needs no home"


def test_what_does_not_fit_is_not_left_half(full_disk: Path) -> None:
    fill(full_disk)
    assert "No space left on device - free some space" in fails(
        STORAGE, "init", full_disk / "run.toml"
    )
    assert [path.name for path in full_disk.iterdir()] == ["ballast"]


def test_a_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would end the process with a line of its own."""
    run = toml(tmp_path / "run.toml", steps=1)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in (("baseline", run), ("status",), ("generate", tmp_path, "x")):
        assert fails(STORAGE, *command) == "the current directory is gone - cd to another one"
    monkeypatch.chdir(tmp_path)


def test_a_report_on_a_full_device(tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=2)
    line = fails(STORAGE, "baseline", run, "--device", "cpu", "--report", "/dev/full")
    assert "cannot write the report /dev/full: No space left on device" in line


def test_a_place_where_a_process_can_say_nothing(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "there" / "peers" / "leader" / "log").mkdir(parents=True)
    run = toml(tmp_path / "run.toml", steps=1)
    line = ends(STORAGE, forks.swarm("up", run, "--dir", "there"))
    assert line.startswith("cannot make there/peers/leader/log: is a directory - choose another")


def test_a_full_disk(tmp_path: Path, full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toml(tmp_path / "run.toml", steps=2)
    fill(full_disk)
    assert "No space left" in fails(STORAGE, "train", run, "--dir", full_disk / "run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(full_disk / "cache"))
    assert "o space left" in fails(STORAGE, "baseline", run)
    monkeypatch.setenv("XDG_DATA_HOME", str(full_disk / "home"))
    assert "no space left" in fails(STORAGE, "up", run)
    link = format_link(RUN_ID, [f"/ip4/127.0.0.1/tcp/9/p2p/{PEER_ID}"])
    said = fails(STORAGE, "--join", link, program="swarm-peer")
    assert "by XDG_DATA_HOME or the flag that names it" in said


@pytest.mark.parametrize("args", [("--version",), ("--help",), ("id",), ("init", "new.toml")])
def test_an_output_that_takes_nothing_is_one_line(args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command_of(*args), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == STORAGE
    assert one_line(done.stderr) == (
        "cannot write the output: No space left on device - free some space"
    )


def test_a_reader_that_has_gone_ends_it_without_a_word(tmp_path: Path) -> None:
    """As `swarm status runs/x | true`; but not as if all had been done, as `swarm chaos | head`
    could not tell then."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "status.json").write_text(json.dumps({"run": {"name": "x"}}))
    reads, writes = os.pipe()
    os.close(reads)
    for more in ((), ("--json",)):
        command = command_of("status", "x", *more)
        done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (READER_GONE, "")
    os.close(writes)


def test_a_reader_that_goes_later_ends_it_without_a_word() -> None:
    """Also from among the tasks of a server: `swarm dashboard | head -1`."""
    command = command_of("dashboard", "--join", DEAD, "--port", "0")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as dashboard:
        assert dashboard.stdout is not None
        assert dashboard.stdout.readline().startswith("dashboard: ")
        dashboard.stdout.close()
        assert dashboard.wait() == READER_GONE
        assert dashboard.stderr is not None
        assert dashboard.stderr.read() == ""


@pytest.mark.parametrize("module", ["numpy.linalg", "torch._ops", "torch.nn"])
@pytest.mark.parametrize("command", ["up", "train", "chaos"])
def test_ctrl_c_among_the_imports(tmp_path: Path, command: str, module: str) -> None:
    """Torch imports numpy from C, which loses an interrupt."""
    code = f"""
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from peer.cli import main
main()
"""
    run = toml(tmp_path / "run.toml", steps=1)
    args = [sys.executable, "-c", code, command, str(run)]
    done = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("error", ["BrokenPipeError()", "OSError(5, 'a terminal that is closed')"])
def test_last_words_that_nobody_hears_are_no_failure(error: str) -> None:
    """The line after a Ctrl-C, which a `tee` has had as well."""
    said = f"    try:\n        raise KeyboardInterrupt\n    finally:\n        raise {error}"
    code = f"from peer.cli.errors import fail_in_one_line\nwith fail_in_one_line(False):\n{said}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("where", ["gone", "full"])
def test_a_failure_that_cannot_be_said_is_one_all_the_same(where: str) -> None:
    if where == "full":
        writes = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, writes = os.pipe()
        os.close(reads)
    for args in (["bogus"], ["up", "nowhere.toml"]):
        assert subprocess.run(command_of(*args), stdout=writes, stderr=writes).returncode != 0
    os.close(writes)


def test_bytes_that_are_no_text_can_be_seen(tmp_path: Path) -> None:
    assert "\\udcff is no run directory" in fails(JOIN, "status", "\udcff")


# ---- joining ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("http://example.org", "is not a join link"),
        (f"swarm://{RUN_ID}", "no @ and address"),
        (f"swarm://{RUN_ID[1:]}@/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}", "is not a run id"),
        (f"swarm://{RUN_ID}@/ip4/127.0.0.1/tcp/1", "it must end in /p2p/PEER_ID"),
        (f"swarm://{RUN_ID}@/ip4/127.0.0.300/tcp/1/p2p/{PEER_ID}", "is not an IPv4 address"),
        (f"swarm://{RUN_ID}@/ip4/127.0.0.1/tcp/99999/p2p/{PEER_ID}", "is not a port"),
    ],
)
def test_a_wrong_link(link: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said in fails(JOIN, "--join", link, program="swarm-peer")
    if link.startswith("swarm:"):
        assert said in fails(JOIN, "status", link)
    monkeypatch.setenv("SWARM_JOIN", link)
    line = fails(JOIN, program="swarm-peer")
    assert said in line
    assert line.startswith("$SWARM_JOIN: ")


def test_the_variable_with_a_wrong_link_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_JOIN", "swarm://nonsense")
    for command in ("status", "dashboard"):
        assert fails(JOIN, command).startswith("$SWARM_JOIN: ")


def test_an_empty_link_is_not_another_swarm(tmp_path: Path) -> None:
    """As of `--join "$LINK"` where nothing set it."""
    run = toml(tmp_path / "run.toml", steps=1)
    remedy = "is empty - pass the link that `swarm train` printed"
    assert fails(JOIN, "status", "") == f"the run to show {remedy}"
    for command in (("train", run), ("dashboard",)):
        assert fails(JOIN, *command, "--join", " ") == f"--join {remedy}"
    assert fails(JOIN, "--join", "", program="swarm-peer") == f"--join {remedy}"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("named", "remedy"),
    [
        (True, "use the same run.toml and data as the other trainers"),
        (False, "list the `swarm id` of all in run.trainers, or help with swarm-peer --join LINK"),
    ],
)
def test_a_link_of_another_run(tmp_path: Path, named: bool, remedy: str) -> None:
    """Who starts a run.toml that names no trainers leads a run of its own."""
    run = toml(tmp_path / "run.toml", steps=1)
    if named:
        mine = CliRunner().invoke(app, ["id"]).stdout.strip()
        run.write_text(run.read_text().replace("[run]\n", f'[run]\ntrainers = ["{mine}"]\n', 1))
    line = fails(JOIN, "train", run, "--join", DEAD)
    assert line.startswith(f"the link is of run {RUN_ID}, this file and data make run ")
    assert line.endswith(remedy)


def test_of_several_swarms_nearby_none_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [DEAD, DEAD.replace(RUN_ID, RUN_ID[::-1])]

    async def find_on_lan(*_: object) -> list[str]:
        return links

    monkeypatch.setattr(lan, "find_on_lan", find_on_lan)
    line = fails(JOIN, "--lan", program="swarm-peer")
    assert line == (
        f"2 swarms are on the local network, as {links[0]} and {links[1]}"
        " - pass one's link with --join"
    )


def test_no_link(tmp_path: Path) -> None:
    for damaged in (b"\xff\x00 damaged", b"swarm://damaged", b""):
        (tmp_path / "last-swarm").write_bytes(damaged)
        line = fails(JOIN, "--data-dir", tmp_path, program="swarm-peer")
        assert line.startswith("no swarm to join")
    line = fails(JOIN, program="swarm-peer")
    assert line.startswith("no swarm to join - ask whoever leads a run for its link")


def test_a_dead_address_is_tried_again(forks: Forks) -> None:
    peer = forks.peer("--join", DEAD, *LOCAL)
    peer.says("(connection refused) - check that the leader runs")
    peer.says("trying again\n")
    assert peer.out.startswith("starting\nconnecting\n")
    line = ends(JOIN, forks.swarm("status", DEAD))
    assert "is the leader running?" in line
    assert peer.child.alive
    assert peer.out.count("trying again") == 1
    peer.signal(signal.SIGINT)
    assert peer.code() == 0, peer
    assert peer.out.endswith("left\n")


def test_a_dashboard_says_that_it_cannot_join(forks: Forks) -> None:
    """Its page says so too; it is not given up, for a leader may come back."""
    dashboard = forks.swarm("dashboard", "--join", DEAD, "--port", "0")
    dashboard.says("cannot join the swarm yet: no swarm answers at /ip4/127.0.0.1/tcp/9/p2p/")
    dashboard.signal(signal.SIGINT)
    assert dashboard.code() == INTERRUPTED, dashboard
    assert dashboard.out.count("\n") == 2, dashboard


def test_a_new_link_where_nobody_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_peer, "NEW_LINK_S", 0.5)
    line = fails(JOIN, "--join", DEAD, *LOCAL, program="swarm-peer")
    assert line.startswith("no swarm answers at /ip4/127.0.0.1/tcp/9/p2p/")
    assert line.endswith("port is open, or ask for a new join link")


@pytest.mark.parametrize("link", [DEAD, None])
def test_the_last_swarm_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str | None
) -> None:
    """Nor with an older link to the same run."""
    told = []

    class Process(run_peer.PeerProcess):
        async def run(self) -> None:
            told.append(self.options.give_up_s)

    monkeypatch.setattr(run_peer, "PeerProcess", Process)
    (tmp_path / "last-swarm").write_text(DEAD.replace("/tcp/9/", "/tcp/7/"))
    join = ("--join", link) if link else ()
    assert CliRunner().invoke(peer_app, [*join, "--data-dir", str(tmp_path)]).exit_code == 0
    other = DEAD.replace(RUN_ID, RUN_ID[::-1])
    CliRunner().invoke(peer_app, ["--join", other, "--data-dir", str(tmp_path)])
    assert told == [math.inf, run_peer.NEW_LINK_S]


def test_the_swarm_is_remembered_also_where_the_key_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory that would have the key is not there then."""

    class Process(run_peer.PeerProcess):
        async def run(self) -> None:
            self._remember_link(self.link.addresses)

    monkeypatch.setattr(run_peer, "PeerProcess", Process)
    joined = CliRunner().invoke(peer_app, ["--join", DEAD, "--identity", "mine.key"])
    assert joined.exit_code == 0, joined.output
    assert last_swarm() == DEAD


def test_a_path_that_is_no_text_is_printed_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.fsdecode(b"r\xff.toml")
    result = CliRunner().invoke(app, ["init", path])
    assert result.exit_code == 0, result.output
    assert result.stdout == "wrote r\\udcff.toml; now: swarm up 'r\\udcff.toml'\n"
    assert Path(path).is_file()
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # no file, and takes any name
    with fail_in_one_line(False):
        print(path)


def test_trouble_is_said_once_a_minute() -> None:
    now, said = 0.0, []

    async def main() -> None:
        nonlocal now
        asyncio.get_running_loop().time = lambda: now  # type: ignore[method-assign]
        say = Speaker(said.append)
        say("serving stage 1")
        for now in (0.0, 0.5, 30.0, 59.0, 61.0):
            say("lost the leader, looking for it")
            say.trouble(f"nobody answers at the address (reason {now})")
        say("serving stage 1")
        say("serving stage 1")

    asyncio.run(main())
    lost, reason = "lost the leader, looking for it", "nobody answers at the address (reason {})"
    trouble = [lost, reason.format(0.0), lost, reason.format(61.0)]
    assert said == ["serving stage 1", *trouble, "serving stage 1"]


def test_what_the_leader_refuses(forks: Forks, tmp_path: Path) -> None:
    """Another run, no such stage, a taken port, a second leader."""
    run = toml(tmp_path / "run.toml", steps=10)
    leader = forks.swarm("train", run, *LOCAL)
    address = leader.link.partition("@")[2]
    peers = [
        forks.peer("--join", format_link(RUN_ID, [address]), *LOCAL),
        forks.peer("--join", leader.link, *LOCAL, "--stage", "7"),
        forks.peer("--join", leader.link, "--listen", address.partition("/p2p/")[0]),
        forks.swarm("status", format_link(RUN_ID, [address])),
        forks.swarm("train", run, *LOCAL),
    ]
    lines = [ends(code, each) for code, each in zip((4, 4, 7, 4, 6), peers, strict=True)]
    assert f"not {RUN_ID} - check the join link" in lines[0]
    assert "the run's stages are 0 to 2, not 7" in lines[1]
    assert "port" in lines[2]
    assert f"not {RUN_ID}" in lines[3]
    assert "another process leads" in lines[4]
    assert "or another run with its identity - see with swarm status" in lines[4]
    assert leader.child.alive


def test_a_restart_that_fails_leaves_no_old_status(forks: Forks, tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=10)
    status = tmp_path / "run" / "status.json"
    status.parent.mkdir()
    former = {"state": "finished", "run": {"link": f"swarm://{RUN_ID}@/ip4/127.0.0.1/tcp/9"}}
    status.write_text(json.dumps(former))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        leader = forks.swarm("train", run, "--dir", status.parent, "--listen", listen)
        assert "address already in use" in ends(LISTEN, leader)
    now = json.loads(status.read_text())
    assert now["state"] == "failed"
    assert "address already in use" in now["reason"]
    assert now["run"]["link"] == former["run"]["link"]  # its port is where peers look
    assert "finished" not in leader.out
    assert "failed\n" in leader.out
    assert "address already in use" not in leader.out, "the reason is said twice"


def test_a_pipeline_that_is_not_allowed(forks: Forks, tmp_path: Path) -> None:
    run = own_package(tmp_path, OWN_PACKAGE)
    leader = forks.swarm("train", run, *LOCAL, PYTHONPATH=str(tmp_path))
    line = ends(CONFIG, forks.peer("--join", leader.link, *LOCAL))
    assert line.endswith("if you trust it, start with --allow-pipeline own_package:pipeline")
    allowed = ("--join", leader.link, *LOCAL, "--allow-pipeline", "own_package:pipeline")
    line = ends(CONFIG, forks.peer(*allowed))
    assert "own_package" in line
    assert "install the package" in line
    forks.peer(*allowed, PYTHONPATH=str(tmp_path)).says("serving stage 0")


def test_a_stage_that_cannot_be_built(forks: Forks, tmp_path: Path) -> None:
    """No retry would mend it, so the peer ends and says why."""
    run = own_package(tmp_path, TOO_LARGE)
    leader = forks.swarm("train", run, *LOCAL, PYTHONPATH=str(tmp_path))
    allowed = ("--join", leader.link, *LOCAL, "--allow-pipeline", "own_package:pipeline")
    line = ends(JOIN, forks.peer(*allowed, PYTHONPATH=str(tmp_path)))
    assert line.startswith("stage 0 cannot be built here: MemoryError: 1 TiB - free memory")


def test_a_model_that_raises_on_real_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = own_package(tmp_path, RAISING)
    monkeypatch.syspath_prepend(tmp_path)
    line = fails(1, "baseline", run)
    sys.modules.pop("own_package")
    assert line == "the model failed in step 0: ValueError: no ones - --debug shows where"


def own_package(folder: Path, source: str) -> Path:
    """Writes the package, and the run.toml that names its pipeline; returns that."""
    (folder / "own_package.py").write_text(source)
    run = folder / "run.toml"
    run.write_text(
        '[run]\nname = "own"\n[model]\nstages = 1\npipeline = "own_package:pipeline"\n'
        '[data]\nsource = "pipeline"\n[batch]\nmicrobatches = 1\nmicrobatch_size = 2\n'
        "[schedule]\nsteps = 9\nwarmup_steps = 0\n[validation]\nevery = 0\n"
    )
    return run


OWN_PACKAGE = """
from types import SimpleNamespace
import numpy as np
from torch import nn
from swarm.model import Pipeline

fields = {"x": np.ones((8, 4), np.float32), "y": np.zeros((8, 1), np.float32)}
pipeline = Pipeline(
    layers={"line": lambda: nn.Linear(4, 1)},
    inputs=lambda batch: batch["x"],
    loss=lambda outputs, batch: ((outputs[0] - batch["y"]) ** 2).sum(),
    weight=lambda batch: len(batch["y"]),
    data=lambda: SimpleNamespace(train=fields, validation=fields),
)
"""
TOO_LARGE = (
    OWN_PACKAGE.replace("lambda: nn.Linear(4, 1)", "lambda: line()")
    + """

def line():
    module = nn.Linear(4, 1)
    if module.weight.device.type != "meta":
        raise MemoryError("1 TiB")
    return module
"""
)

RAISING = (
    OWN_PACKAGE.replace('((outputs[0] - batch["y"]) ** 2).sum()', "loss(outputs[0], batch)")
    + """

def loss(outputs, batch):
    if batch["x"].any():
        raise ValueError("no ones")
    return outputs.sum()
"""
)


@pytest.mark.parametrize("difference", [1, -1])
def test_another_protocol_version(forks: Forks, tmp_path: Path, difference: int) -> None:
    identity = load_identity(tmp_path / "other.key")

    async def say_version(stream: Stream) -> None:
        await stream.send([(PROTOCOL_VERSION + difference).to_bytes(4, "big")])
        await stream.receive_exactly(1)

    async def open_node() -> tuple[Libp2pTransport, DhtDirectory]:
        transport = await Libp2pTransport.create(identity_path=identity.path)
        transport.serve(VERSION_PROTOCOL, say_version)
        return transport, await DhtDirectory.create(transport, identity)

    transport, directory = forks.run(open_node())
    try:
        link = format_link(RUN_ID, transport.addresses[:1])
        line = ends(JOIN, forks.peer("--join", link, *LOCAL))
        upgrade = "upgrade swarm-parallel" if difference > 0 else "ask them to upgrade"
        theirs = PROTOCOL_VERSION + difference
        assert f"speaks protocol version {theirs}, this program {PROTOCOL_VERSION}" in line
        assert line.endswith(upgrade)
    finally:
        forks.run(directory.close())
        forks.run(transport.close())


# ---- how errors are printed ---------------------------------------------------------------------


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["up", "nowhere.toml", "--debug"])
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "ConfigError"
    assert result.stderr == ""


def test_a_defect_and_a_group_of_errors_are_one_line_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, fail_in_one_line(False):
        raise ZeroDivisionError("what\nis\x1b[31m this")
    assert ended.value.code == 1
    line = one_line(capsys.readouterr().err)
    assert line.startswith("unexpected ZeroDivisionError: what is [31m this")
    with pytest.raises(SystemExit) as ended, fail_in_one_line(False):
        raise ExceptionGroup("of a task group", [ValueError(), StorageError("disk full", "wait")])
    assert ended.value.code == STORAGE
    assert one_line(capsys.readouterr().err) == "disk full - wait"
