"""Data: the same batch for the same (seed, step, index), every sample once per epoch, no surprises
in the bytes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swarm.data import (
    DataStamps,
    byte_tokenizer,
    default_cache_dir,
    language_batch_spec,
    prepare_data,
    sources,
)
from swarm.data import build_dataset as build
from swarm.data.order import permuted
from swarm.data.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    _pieces,
    load_pretrained,
    load_tokenizer_file,
    train_bpe,
)
from swarm.errors import DataError, StorageError
from swarm.spec import token_dtype

TEXT = "".join(f"line {i} of a small text, naïve and plain \U0001f600\n" for i in range(400))


def run_config(**data: Any) -> Any:
    fields = {
        "source": "text",
        "path": None,
        "tokenizer": "bytes",
        "vocab_size": 256,
        "sequence": 32,
        "train_sha256": None,
        "validation_sha256": None,
    }
    return SimpleNamespace(
        run=SimpleNamespace(seed=7),
        model=SimpleNamespace(pipeline=None),
        data=SimpleNamespace(**(fields | data)),
        batch=SimpleNamespace(microbatches=3, microbatch_size=4),
        validation=SimpleNamespace(every=10),
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


# ---- order ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 10), st.integers(1, 700))
def test_order_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    numbers = permuted(seed, epoch, size, np.arange(size))
    assert sorted(numbers.tolist()) == list(range(size))


def test_order_varies_with_seed_and_epoch_and_mixes() -> None:
    positions = np.arange(1000)
    orders = [permuted(seed, epoch, 1000, positions) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    for order in orders:
        assert abs(np.corrcoef(positions, order)[0, 1]) < 0.15
        assert (np.abs(np.diff(order)) == 1).mean() < 0.02


def test_order_is_the_same_on_every_machine_and_for_huge_sets() -> None:
    assert permuted(7, 0, 10, np.arange(10)).tolist() == KNOWN_ORDER
    far = permuted(7, 3, 10**12, np.array([0, 10**12 - 1]))
    assert (far >= 0).all()
    assert (far < 10**12).all()


KNOWN_ORDER = [3, 5, 7, 1, 0, 8, 6, 4, 2, 9]


# ---- batches ----------------------------------------------------------------------------------


def test_batches_have_the_promised_form(text: Path, cache: Path) -> None:
    config = run_config(path=str(text))
    dataset = build(config, cache)
    batch = dataset.batch(5, 2)
    assert dataset.batch_spec == language_batch_spec(config)
    assert list(batch) == list(dataset.batch_spec) == ["tokens", "targets"]
    for name, array in [*batch.items(), *dataset.validation_batch(0).items()]:
        assert (array.shape, str(array.dtype)) == ((4, 32), "uint8")
        assert dataset.batch_spec[name].shape == array.shape
        assert array.flags.c_contiguous
        assert array.flags.owndata
        assert array.flags.writeable
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    for row in batch["tokens"]:
        assert bytes(row) in TEXT.encode()
    for step, index in ((-1, 0), (0, 3), (0, -1)):
        with pytest.raises(ValueError, match="no microbatch"):
            dataset.batch(step, index)


def test_same_batches_from_another_instance_and_process(text: Path, cache: Path) -> None:
    config = run_config(path=str(text))
    first, second = build(config, cache), build(config, cache / "other", shard_bytes=1000)
    assert first.fingerprint == second.fingerprint
    wanted = hashlib.sha256()
    for step, index in ((9, 1), (0, 0), (200, 2)):  # any order, across shards, later epochs
        assert same(first.batch(step, index), second.batch(step, index))
        assert same(first.validation_batch(step), second.validation_batch(step))
        wanted.update(first.batch(step, index)["tokens"].tobytes())
    code = (
        "import sys, hashlib, pathlib; sys.path.insert(0, sys.argv[1]);"
        "import test_data as t; c = t.run_config(path=sys.argv[2]);"
        "d = t.build(c, pathlib.Path(sys.argv[3])); h = hashlib.sha256();"
        "[h.update(d.batch(*k)['tokens'].tobytes()) for k in ((9, 1), (0, 0), (200, 2))];"
        "print(h.hexdigest())"
    )
    arguments = [str(Path(__file__).parent), str(text), str(cache / "third")]
    done = python(code, *arguments)
    assert done.communicate()[0].strip() == wanted.hexdigest()


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "PYTHONHASHSEED": "random"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_an_epoch_sees_every_window_once(text: Path, cache: Path) -> None:
    config = run_config(path=str(text))
    dataset = build(config, cache)
    size = dataset.num_samples
    seen: list[bytes] = []
    step = 0
    while len(seen) < 2 * size:
        for index in range(3):
            seen += [bytes(row) for row in dataset.batch(step, index)["tokens"]]
        step += 1
    first, second = Counter(seen[:size]), Counter(seen[size : 2 * size])
    assert first == second
    assert seen[:size] != seen[size : 2 * size]
    content = TEXT.encode()[: dataset.stamps.num_train - 1]
    windows = [content[i : i + 32] for i in range(0, 32 * size, 32)]
    assert first == Counter(windows)


def test_seed_changes_the_order(text: Path, cache: Path) -> None:
    config = run_config(path=str(text))
    one = build(config, cache)
    config.run.seed = 8
    two = build(config, cache)
    assert one.fingerprint == two.fingerprint
    assert not same(one.batch(0, 0), two.batch(0, 0))
    assert same(one.validation_batch(0), two.validation_batch(0))


# ---- sources and split ------------------------------------------------------------------------


def test_a_text_is_cut_once_at_a_line(text: Path, cache: Path) -> None:
    dataset = build(run_config(path=str(text)), cache)
    stamps = dataset.stamps
    assert stamps.num_train + stamps.num_validation == len(TEXT.encode()) + 2  # two ends
    assert 0.03 < stamps.num_validation / stamps.num_train < 0.07
    head = dataset.validation_batch(0)["tokens"][0]
    assert bytes(head).startswith(b"line 38")


def test_a_path_in_the_home(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(text.parent))
    here, there = (build(run_config(path=str(p)), cache) for p in (text, f"~/{text.name}"))
    assert here.stamps == there.stamps
    with pytest.raises(DataError, match="no data at ~nobody-here/corpus"):
        build(run_config(path="~nobody-here/corpus"), cache)


def test_texts_in_a_directory_are_each_cut_and_order_is_by_name(
    tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("b" * 2000)
    (folder / "sub" / "a.txt").write_text("é" * 1000, encoding="utf-8")
    (folder / "ignored.md").write_text("#" * 1000)
    files = sources.list_files("text", folder)
    assert [f.name for f in files] == ["b.txt", "a.txt"]
    dataset = build(run_config(path=str(folder)), cache)
    assert dataset.stamps.num_train + dataset.stamps.num_validation == 4000 + 4
    for i in range(3):
        for row in dataset.validation_batch(i)["tokens"]:
            assert set(bytes(row)) <= set("bé\0".encode())


def test_a_directory_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files must not be left out of the data without a word."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("a")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"cannot read \S+/sub: Permission denied - make it readab"):
        sources.list_files("text", tmp_path)


def test_links_to_files_are_read_and_links_to_directories_are_not_followed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "texts"
    for each in (elsewhere, folder, folder / "directory.txt"):
        each.mkdir()
    for path in (elsewhere / "a.txt", folder / ".txt", folder / "b.txt"):
        path.write_text("a")
    (folder / "linked.txt").symlink_to(elsewhere / "a.txt")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (tmp_path / "root").symlink_to(folder)
    for root in (folder, tmp_path / "root"):
        found = [path.relative_to(root) for path in sources.list_files("text", root)]
        assert list(map(str, found)) == [".txt", "b.txt", "linked.txt"]
    (folder / "broken.txt").symlink_to(elsewhere / "b.txt")  # as of a disk that is not mounted
    with pytest.raises(DataError, match=r"cannot read .*broken\.txt: No such file"):
        sources.list_files("text", folder)


def test_large_files_pass_in_blocks_that_cut_no_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 50)
    for content in (TEXT, TEXT.replace("\n", " "), "\U0001f600" * 500, "é" + "x" * 1000):
        path = tmp_path / "t.txt"
        path.write_bytes(content.encode())
        file = sources.SourceFile(path, "0" * 64, path.stat().st_size)
        blocks = list(sources.read_blocks("text", [file], 0.05))
        assert b"".join(block.data for block in blocks) == content.encode()
        assert max(len(block.data) for block in blocks) <= 100
        assert "".join(block.data.decode() for block in blocks) == content
        assert [b.validation for b in blocks] == sorted(b.validation for b in blocks)
        assert sum(block.last for block in blocks) == 2


def write_json_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in texts) + "\n")
    return path


def test_json_lines_split_by_content_so_copies_stay_together(tmp_path: Path, cache: Path) -> None:
    texts = [f"document {i % 150} " + "word " * 20 for i in range(300)]
    path = write_json_lines(tmp_path / "d.jsonl", texts)
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    files = [sources.SourceFile(path, "", path.stat().st_size)]
    for block in sources.read_blocks("jsonl", files, 0.05):
        parts[block.validation].append(block.data)
    assert not set(parts[True]) & set(parts[False])
    assert sorted(parts[True] + parts[False]) == sorted(t.encode() for t in texts)
    assert parts[True]
    stamps = build(run_config(source="jsonl", path=str(path)), cache).stamps
    assert stamps.num_validation == sum(len(t) + 1 for t in parts[True])


def test_few_documents_still_give_validation(tmp_path: Path, cache: Path) -> None:
    texts = [f"{i} " + "word " * 50 for i in range(4)]
    path = write_json_lines(tmp_path / "d.jsonl", texts)
    stamps = build(run_config(source="jsonl", path=str(path)), cache).stamps
    assert (stamps.num_train, stamps.num_validation) == (3 * 253, 253)


def test_a_sole_document_is_not_enough(tmp_path: Path, cache: Path) -> None:
    path = write_json_lines(tmp_path / "d.jsonl", ["word " * 50])
    with pytest.raises(DataError, match=r"went to the validation part - give more documents"):
        build(run_config(source="jsonl", path=str(path)), cache)


def test_other_fields_of_a_json_line_may_hold_any_number(tmp_path: Path, cache: Path) -> None:
    lines = [f'{{"text": "{i} {"word " * 50}", "id": {"9" * 5000}}}\n' for i in range(4)]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(lines))
    assert build(run_config(source="jsonl", path=str(path)), cache).stamps.num_train == 3 * 253


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{oops", "line 3: it is not JSON"),
        (b'{"txt": "a"}', 'line 3: it has no field "text"'),
        (b'["text"]', 'line 3: it has no field "text"'),
        (b'{"text": "\xff"}', "line 3: it is not JSON"),
        (b"[" * 100_000, "line 3: it is not JSON"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, cache: Path, line: bytes, why: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=why) as caught:
        build(run_config(source="jsonl", path=str(path)), cache)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    assert not list((cache / "data").glob("*.tmp-*"))


def test_stdlib_is_real_text_without_tests_or_installed_packages() -> None:
    files = sources.list_files("stdlib", None)
    parts = {part for file in files for part in file.parts[-3:]}
    assert len(files) > 300
    assert {"asyncio", "ast.py"} <= parts
    assert not parts & {"test", "tests", "site-packages"}
    assert files == sources.list_files("stdlib", None)


def test_custom_arrays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm.model import definition

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 3)).astype(np.float32), np.arange(50)
    samples = SimpleNamespace(
        train={"x": x[:40], "y": y[:40]}, validation={"x": x[40:], "y": y[40:]}
    )
    pipeline: Any = definition.Pipeline(
        layers={"a": nn.Identity},
        inputs=lambda batch: (batch["x"],),
        loss=lambda outputs, batch: outputs[0].sum(),
        weight=lambda batch: 1,
        data=lambda: samples,
        below={"y": 50},
    )
    monkeypatch.setattr(definition, "load_pipeline", lambda name: pipeline)
    config = run_config(source="pipeline")
    config.model.pipeline = "some.module:object"
    dataset = build(config, cache)
    batch = dataset.batch(0, 1)
    assert [dataset.batch_spec[n].shape for n in batch] == [(4, 3), (4,)]
    assert [dataset.batch_spec[n].below for n in batch] == [None, 50]
    assert np.array_equal(batch["x"], x[batch["y"]])
    assert dataset.validation_batch(2)["y"].tolist() == [48, 49, 40, 41]
    assert dataset.tokenizer is None
    assert dataset.stamps.num_train == 40
    samples.train["y"] = samples.train["y"][::-1]
    config.data.train_sha256 = dataset.stamps.train_sha256
    with pytest.raises(DataError, match="train data here hash to"):
        build(config, cache)


# ---- errors -----------------------------------------------------------------------------------


def test_other_bytes_than_the_run_names(text: Path, cache: Path) -> None:
    config = run_config(path=str(text))
    stamps = prepare_data(config, cache)
    config.data.train_sha256 = stamps.train_sha256
    config.data.validation_sha256 = stamps.validation_sha256
    assert build(config, cache).fingerprint["train"] == stamps.train_sha256
    text.write_text(TEXT.replace("small", "large"), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        build(config, cache)
    assert "the train data here hash to" in caught.value.message
    assert "corpus.txt" in caught.value.remedy
    assert prepare_data(config, cache) != stamps
    config.data = SimpleNamespace(**{**vars(config.data), "source": "stdlib"})
    with pytest.raises(DataError, match="this is Python 3"):
        build(config, cache)


def test_missing_or_too_little_data(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DataError, match="no data at"):
        build(run_config(path=str(tmp_path / "nothing")), cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.txt files"):
        build(run_config(path=str(tmp_path / "empty")), cache)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(DataError, match="too few for one sequence of 32"):
        build(run_config(path=str(short)), cache)
    short.write_text("long enough to train on, but not to validate with, by far")
    config = run_config(path=str(short))
    with pytest.raises(DataError, match="validation part"):
        build(config, cache)
    config.validation.every = 0
    dataset = build(config, cache)
    assert dataset.num_samples == 1
    assert len({bytes(row) for row in dataset.batch(0, 0)["tokens"]}) == 1
    with pytest.raises(DataError, match="validation part"):
        dataset.validation_batch(0)


def test_a_cache_that_cannot_be_written(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        build(run_config(path=str(text)), tmp_path / "file" / "cache")


# ---- cache ------------------------------------------------------------------------------------


def test_cache_is_used_and_damage_is_repaired(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(path=str(text))
    said: list[str] = []
    before = build(config, cache, said.append).batch(0, 0)
    assert len(said) == 1
    assert same(build(config, cache, said.append).batch(0, 0), before)
    assert len(said) == 1
    (shard,) = (cache / "data").glob("*/train-00000.bin")
    damaged = bytearray(shard.read_bytes())
    damaged[10] ^= 1
    shard.write_bytes(damaged)
    os.utime(shard, ns=(1, 1))
    assert same(build(config, cache, said.append).batch(0, 0), before)
    assert len(said) == 2
    next((cache / "data").glob("*/index.json")).write_text("{")
    assert same(build(config, cache, said.append).batch(0, 0), before)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert default_cache_dir() == cache / "swarm-parallel"


def test_left_overs_of_a_killed_process_are_cleared(text: Path, cache: Path) -> None:
    config = run_config(path=str(text))
    build(config, cache)
    (folder,) = (p.parent for p in (cache / "data").glob("*/index.json"))
    (folder / "index.json").unlink()
    for name in (folder.name, "other-data", "being-built"):
        (cache / "data" / f"{name}.tmp-killed").mkdir()
    with (cache / "data" / "being-built.lock").open("a") as file:  # by a process that lives
        fcntl.flock(file, fcntl.LOCK_EX)
        build(config, cache)
    assert [p.name for p in (cache / "data").glob("*.tmp-*")] == ["being-built.tmp-killed"]


def test_files_are_hashed_again_only_after_a_change(text: Path, cache: Path) -> None:
    config = run_config(path=str(text))
    os.utime(text, (1e9, 1e9))
    stamps = prepare_data(config, cache)
    assert len(list((cache / "data").glob("files-*.json"))) == 1
    assert prepare_data(config, cache) == stamps
    text.write_text(TEXT + "more\n", encoding="utf-8")
    assert prepare_data(config, cache) != stamps
    assert len(list((cache / "data").glob("files-*.json"))) == 1  # too young to be remembered


def test_two_processes_prepare_at_once(text: Path, cache: Path) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import test_data as t; lines = [];"
        "d = t.build(t.run_config(path=sys.argv[2], tokenizer='bpe', vocab_size=300),"
        " pathlib.Path(sys.argv[3]), lines.append);"
        "print(len(lines), d.stamps.train_sha256)"
    )
    arguments = [str(Path(__file__).parent), str(text), str(cache)]
    running = [python(code, *arguments) for _ in range(2)]
    said = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted(lines for lines, _ in said) == ["0", "2"]  # one built it, one waited
    assert len({digest for _, digest in said}) == 1
    assert not list((cache / "data").glob("*.tmp-*"))


# ---- tokenizers -------------------------------------------------------------------------------

SMALL_BPE = train_bpe(iter([TEXT.encode()]), 320)
any_text = st.text(max_size=60) | st.just(f"a{END_OF_TEXT}b\0\r\n  ")


@settings(max_examples=60, deadline=None)
@given(any_text)
def test_tokenizers_round_trip(text: str) -> None:
    assert byte_tokenizer().encode(text) == list(text.encode())
    for tokenizer in (byte_tokenizer(), SMALL_BPE):
        ids = tokenizer.encode(text)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text


def test_a_tokenizer_is_known_by_the_ids_it_gives(tmp_path: Path) -> None:
    """Trained, saved or saved anew; one of the same size that other text has made is another."""
    learned = [SMALL_BPE, train_bpe(iter([b"other words, other merges " * 99]), 320)]
    for index, one in enumerate([*learned, byte_tokenizer()]):
        directory = tmp_path / str(index)
        one.save_tokenizer(directory)
        saved = load_tokenizer_file(directory / TOKENIZER_FILE, one.vocab_size)
        (directory / TOKENIZER_FILE).write_text(
            json.dumps(json.loads((directory / TOKENIZER_FILE).read_text()), indent=2)
        )
        spaced = load_tokenizer_file(directory / TOKENIZER_FILE, one.vocab_size)
        for other in (one, saved, spaced):
            assert one.encodes_as(other)
            assert not any(each.encodes_as(other) for each in learned if each is not one)


def test_token_dtypes_are_the_narrowest() -> None:
    sizes = (2, 256, 257, 65536, 65537)
    assert [token_dtype(n) for n in sizes] == ["uint8", "uint8", "uint16", "uint16", "int32"]


def test_bpe_is_trained_once_and_cached(text: Path, cache: Path) -> None:
    config = run_config(path=str(text), tokenizer="bpe", vocab_size=300)
    said: list[str] = []
    first = build(config, cache, said.append)
    assert said == ["preparing 1 files of text data", "training a tokenizer of 300 tokens"]
    second = build(config, cache, said.append)
    assert len(said) == 2
    assert first.batch_spec["tokens"].dtype == str(first.batch(0, 0)["tokens"].dtype) == "uint16"
    assert same(first.batch(1, 1), second.batch(1, 1))
    assert first.tokenizer is not None
    assert first.tokenizer.decode(first.batch(0, 0)["tokens"][0].tolist()).strip("\ufffd") in TEXT
    assert first.stamps.num_train < len(TEXT.encode()) * 0.6
    assert isinstance(prepare_data(config, cache), DataStamps)
    (damaged,) = (cache / "data").glob("*/tokenizer.json")
    damaged.write_text("{}")
    assert build(config, cache, said.append).fingerprint == first.fingerprint
    with pytest.raises(DataError, match="256 bytes"):
        build(run_config(path=str(text), tokenizer="bpe", vocab_size=100), cache)


def test_a_tokenizer_learns_from_what_is_unbroken_for_long_in_pieces() -> None:
    """Learning takes the square of a word's length. Of all else nothing is cut."""
    for text, pieces in (
        ("abc\n abc", ["abc\n abc"]),
        ("a abcd b", ["a abcd b"]),
        ("a abcdefghi b", ["a abcd", "efgh", "i b"]),
        ("a     b", ["a    ", " b"]),
        ("", [""]),
    ):
        assert list(_pieces(text, 4)) == pieces


def test_saved_tokenizers_load_in_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    samples = [TEXT[:200], "  tabs\t\tand \r\n\0 ends ", "Ā ġ € \U0001f600 , . 's"]
    for tokenizer in (byte_tokenizer(), SMALL_BPE):
        folder = tmp_path / tokenizer.kind
        tokenizer.save_tokenizer(folder)
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        for sample in samples:
            ids = loaded(sample)["input_ids"]
            assert ids == tokenizer.encode(sample)
            assert loaded.decode(ids) == sample
    assert loaded.eos_token_id == SMALL_BPE.eos_id == 0


def pretrained_tokenizer(directory: Path, **settings: Any) -> Path:
    """A directory as others save it: another end, a start token that it puts before every text."""
    import tokenizers

    SMALL_BPE.save_tokenizer(directory)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(8)
    backend.enable_padding()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_the_tokenizer_of_a_pretrained_directory(text: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = pretrained_tokenizer(tmp_path / "model", eos_token="</s>")
    tokenizer = load_pretrained(directory, 400)
    end = tokenizer.eos_id
    assert end == SMALL_BPE.vocab_size + 1
    assert tokenizer.encode(TEXT[:300]) == SMALL_BPE.encode(TEXT[:300])  # no start, all of it
    assert end not in tokenizer.encode("it says </s> here")
    config = run_config(path=str(text), tokenizer="pretrained", vocab_size=400)
    config.model.pretrained = str(directory)
    cache = tmp_path / "cache"
    dataset = build(config, cache)
    assert dataset.tokenizer is not None
    assert dataset.tokenizer.eos_id == end
    first = dataset.stamps
    template = "{{ messages }}"
    (directory / "chat_template.jinja").write_text(template)
    copy = tmp_path / "copy"
    load_pretrained(directory, 400).save_tokenizer(copy)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (copy / name).read_bytes() == (directory / name).read_bytes()
    loaded = AutoTokenizer.from_pretrained(copy)
    assert loaded.chat_template == template
    assert prepare_data(config, cache) == first
    pretrained_tokenizer(directory, eos_token={"content": END_OF_TEXT})
    assert prepare_data(config, cache).train_sha256 != first.train_sha256  # documents end otherwise


def test_a_pretrained_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    directory = pretrained_tokenizer(tmp_path / "model")
    with pytest.raises(DataError, match="names no end of text"):
        load_pretrained(directory, 400)
    for wrong in ("-1", "[]", "[-1]", str(2**40), "true", "1.5"):
        (directory / "config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(DataError, match="names no end of text"):
            load_pretrained(directory, 400)
    (directory / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_pretrained(directory, 400).eos_id == 3
    with pytest.raises(DataError, match=f"set data.vocab_size = {SMALL_BPE.vocab_size + 2}$"):
        load_pretrained(directory, SMALL_BPE.vocab_size)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokenizer"):
        load_pretrained(directory, 400)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="save_pretrained"):
        load_pretrained(directory, 400)
