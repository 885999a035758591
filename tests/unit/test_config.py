"""run.toml: what loads, what is refused and how it is said, and what the run id stands for."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm.config import (
    MAX_CONFIG_BYTES,
    RunConfig,
    canonical_bytes,
    from_canonical,
    load_config,
    parse_config,
    parse_toml,
    run_id_of,
    with_data_hashes,
    with_pretrained_hash,
    with_trainers,
)
from swarm.config_text import default_toml, docs_markdown
from swarm.errors import ConfigError, DataError, JoinError
from swarm.wire.boundaries import BACKWARD, FORWARD, BoundaryCodecs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(
    {*(ROOT / "examples").rglob("*.toml")}
    - {*(ROOT / "examples").rglob("pyproject.toml")}
    - {*(ROOT / "examples/scenarios").rglob("*.toml")}  # of `swarm simulate`
)
SMALL = """
[model]
stages = 2
[model.config]
model_type = "llama"
num_hidden_layers = 4
[schedule]
steps = 10
"""
CUSTOM = """
[model]
pipeline = "my_package.stages:pipeline"
stages = 2
[data]
source = "pipeline"
[schedule]
steps = 10
"""


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_toml(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(old: str, new: str) -> str:
    text = default_toml()
    assert old in text
    return text.replace(old, new, 1)


def test_the_default_is_the_demo() -> None:
    config = parse_toml(default_toml())
    assert config.model.stages == 3
    assert config.data.source == "stdlib"
    assert config.update.accumulate == "float64"
    assert config.run.trainers == ()
    assert config.model.config is not None
    assert config.model.config["tie_word_embeddings"] is False


def test_docs_and_example_are_those_the_fields_make() -> None:
    remedy = "run `python -m swarm.config_text`"
    assert (ROOT / "docs/run.md").read_text(encoding="utf-8") == docs_markdown(), remedy
    assert (ROOT / "examples/demo.toml").read_text(encoding="utf-8") == default_toml(), remedy


def test_docs_and_template_name_every_field() -> None:
    docs, template = docs_markdown(), default_toml()
    for section, info in RunConfig.model_fields.items():
        assert f"## [{section}]" in docs
        for name, field in info.annotation.model_fields.items():
            assert field.description, f"{section}.{name} has no description"
            assert f"| `{name}` |" in docs
            assert f"\n{name} = " in template or f"\n# {name} = " in template or name == "config"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_loads(path: Path) -> None:
    assert load_config(path).run_id


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lr = 0.003", "learning_rate = 1", "unknown key optimizer.learning_rate - did you mean "
         "optimizer.lr?"),
        ("seed = 0", "sead = 0", "unknown key run.sead - did you mean run.seed?"),
        ("[batch]", "[bach]", "unknown key bach - did you mean batch?"),
        ("seed = 0", "clip_norm = 1", "unknown key run.clip_norm - did you mean "
         "optimizer.clip_norm?"),
        ("seed = 0", "zzz = 0", "unknown key run.zzz - docs/run.md"),
        ("lr = 0.003", "lr = -3", "optimizer.lr should be greater than 0, not -3"),
        ("lr = 0.003", 'lr = "3"', "optimizer.lr should be a valid number, not '3' - "
         "docs/run.md says what it may be"),
        ("eps = 1e-08", "eps = 1e-50", "optimizer.eps should be greater than or equal to 1e-37"),
        ("lr = 0.003", "lr = true", "optimizer.lr should be a valid number"),
        ("lr = 0.003", "lr = nan", "optimizer.lr should be a finite number"),
        ("seed = 0", "seed = 1.0", "run.seed should be a valid integer"),
        ("seed = 0", 'trainers = ["a", "a"]', "run.trainers names a peer twice"),
        ("seed = 0", 'trainers = ["a", "b c"]', "run.trainers[1] should be a peer id, not 'b c' - "
         "`swarm id` prints"),
        ('source = "stdlib"', f'source = "stdlib"\ntrain_sha256 = "{"A" * 64}"',
         "data.train_sha256 should be 64 lowercase hexadecimal digits, not 'AAA"),
        ("seed = 0", 'trainers = ["a","b","c","d","e","f"]', "run.trainers"),
        ('name = "demo"', 'name = "\\u001b[31m"', "run.name has characters"),
        ("betas = [0.9, 0.95]", "betas = [0.9, 1.5]", "optimizer.betas[1] should be less than 1"),
        ("betas = [0.9, 0.95]", "betas = [0.9]", "optimizer.betas"),
        ("betas = [0.9, 0.95]", "betas = [0.9, 0.9, 0.9]", "optimizer.betas should have at most 2 "
         "items, not [0.9, 0.9, 0.9]"),
        ("recompute = false", "recompute = 1", "model.recompute should be true or false, not 1"),
        ("stages = 3", "stages = true", "model.stages should be a valid integer, not true"),
        ("stages = 3", "", "model.stages is missing"),
        ("stages = 3", "stages = 3\ncut = [1, 5]", "model.cut lists 2 stages but model.stages is"),
        ("stages = 3", "cut = [1, 2, 2]", "model.cut adds up to 5 layers but model.config has 6"),
        ("stages = 3", "cut = [1, 0, 5]", "model.cut[1] should be greater than or equal to 1"),
        ("stages = 3", "stages = 3\nsubspace = 128", "model.subspace is 128 but the model's hidden "
         "size is 128 - set model.subspace to a number from 1 to 127, or leave it out"),
        ("stages = 3", "stages = 7", "model.stages is 7 but model.config has 6 layers"),
        ("stages = 3", 'stages = 3\npretrained = "x"', "exactly one of model.config"),
        ("stages = 3", 'stages = 3\npipeline = "os.system"', "model.pipeline should be of the form "
         "package.module:object, not 'os.system' - write for example pipeline = "),
        ("hidden_size = 128", "x = 1979-05-27", "model.config.x should be a number, text, true or "
         "false, a list or a table, not 1979-05-27 - Hugging Face's documentation of its"),
        ("hidden_size = 128", "x = { a = inf }", "model.config.x.a should be a finite number"),
        ("hidden_size = 128", "auto_map = { }", "model.config.auto_map is refused"),
        ('model_type = "llama"', "", "model.config needs model_type"),
        ("vocab_size = 256\ntie", "vocab_size = 200\ntie", "model.config.vocab_size is 200 but"),
        ("max_position_embeddings = 512", "max_position_embeddings = 64", "data.sequence is 128"),
        ('source = "stdlib"', 'source = "text"', 'data.source = "text" needs data.path'),
        ('source = "stdlib"', 'source = "stdlib"\npath = "x"', "data.path has no meaning"),
        ('source = "stdlib"', 'source = "pipeline"', "needs model.pipeline"),
        ('tokenizer = "bytes"', 'tokenizer = "bpe"', "data.vocab_size must be above 256"),
        ('name = "adamw"', 'name = "RAdamm"', "neither adamw, sgd nor a class of torch.optim"),
        ('name = "adamw"', 'name = "LBFGS"', "cannot run from dense gradients"),
        ('name = "adamw"', 'name = "Muon"', "takes matrices only"),
        ("warmup_steps = 20", "warmup_steps = 301", "schedule.warmup_steps is 301, above"),
        ('activations = "float32"', 'activations = "int9"', "wire.activations should be 'float32'"),
        ('rounding = "nearest"', 'boundaries = [{ boundary = 2, forward = "int8" }]',
         "boundary 2, but 3 stages have 2, counted from 0 - name one from 0 to 1"),
        ('rounding = "nearest"', 'boundaries = [{ boundary = 0, forward = "int8" }, '
         '{ boundary = 0, backward = "int8" }]', "boundary 0 twice - "
         "give it one entry, with forward and backward"),
        ('rounding = "nearest"', 'boundaries = [{ boundary = 0, forwrd = "int8" }]', "unknown key "
         "wire.boundaries[0].forwrd - did you mean wire.boundaries[0].forward?"),
        ('rounding = "nearest"', 'boundaries = [{ boundary = 0, codec = "int8" }]',
         "wire.boundaries[0].codec - a table there has boundary, forward, backward"),
        ('rounding = "nearest"', 'boundaries = [{ boundary = 0 }]',
         "wire.boundaries[0] names no codec - give it forward, backward or both"),
        ('rounding = "nearest"', 'rounding = "stochastic"', 'wire.rounding = "stochastic" has no '
         "meaning where no boundary has int8 or int4 - let a boundary have one of them, or"),
        ('rounding = "nearest"', 'boundaries = "x"', "wire.boundaries should be a list, not 'x'"),
        ('rounding = "nearest"', 'boundaries = [1]', "wire.boundaries[0] should be a table, not 1"),
        ('policy = "exact"', 'policy = "diloco"', "update.policy should be 'exact'"),
        ("ahead = 0.25", "ahead = 0.0", "update.ahead should be greater than 0"),
        ("microbatches = 8", "microbatches = 0", "batch.microbatches should be greater than"),
        ("kept_mib = 512", "kept_mib = 0", "memory.kept_mib"),
        ("[run]", "[run", "not valid TOML"),
        ("seed = 0", "seed = 0\nseed = 1", "at line"),
    ],
)  # fmt: skip
def test_refused_in_one_line_that_names_the_key(old: str, new: str, said: str) -> None:
    assert said in error_of(changed(old, new))


@pytest.mark.parametrize(
    ("microbatches", "share", "ahead"),
    [
        (4, 0.9, 3),
        (4, 0.25, 1),
        (2, 0.99, 1),
        (16, 0.01, 1),
        (16, 0.5, 8),
        (6, 0.25, 2),
        (4, 1.0, 4),
        (1, 1, 1),
    ],
)
def test_all_of_a_step_is_ahead_only_where_that_was_asked_for(
    microbatches: int, share: float, ahead: int
) -> None:
    update = f'[batch]\nmicrobatches = {microbatches}\n[update]\npolicy = "delayed"\n'
    config = parse_toml(f"{SMALL}{update}ahead = {share}\n")
    assert config.ahead.microbatches == ahead


def test_a_share_of_one_microbatch_is_refused() -> None:
    one = SMALL + "[batch]\nmicrobatches = 1\n"
    said = error_of(one + '[update]\npolicy = "delayed"\n')
    assert "update.ahead is 0.25, but with batch.microbatches = 1 either all" in said
    assert "- set batch.microbatches to 2 or more" in said
    assert parse_toml(one).ahead.microbatches == 0


def test_a_remedy_can_be_followed_in_the_smallest_cases() -> None:
    one = SMALL.replace("stages = 2", "stages = 1")
    said = error_of(one + "[wire]\nboundaries = [{ boundary = 0, forward = 'int8' }]\n")
    assert said.endswith("counted from 0 - leave wire.boundaries out")
    narrow = SMALL.replace("stages = 2", "stages = 2\nsubspace = 1")
    said = error_of(narrow.replace("num_hidden", "hidden_size = 1\nnum_hidden"))
    assert said.endswith("hidden size is 1 - leave model.subspace out")
    with pytest.raises(ConfigError, match="the file should be a table, not"):
        parse_config([])  # type: ignore[arg-type]


def test_nesterov_needs_a_momentum() -> None:
    text = changed("nesterov = false", "nesterov = true")
    assert parse_toml(text).optimizer.nesterov, "adamw has one"
    said = error_of(text.replace('name = "adamw"', 'name = "sgd"'))
    assert "optimizer.nesterov needs optimizer.momentum above 0" in said


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Adam", "nesterov = true", "optimizer.nesterov has no meaning with optimizer.name = "
         '"Adam" - leave it out, or choose adamw or sgd'),
        ("Adam", "momentum = 0.9\nnesterov = true", "optimizer.nesterov has no meaning"),
        ("RMSprop", "momentum = 0.9\nnesterov = true", "optimizer.nesterov has no meaning"),
        ("NAdam", "momentum = 0.9", "optimizer.momentum has no meaning"),
        ("adamw", "momentum = 0.9", "optimizer.momentum has no meaning with optimizer.name = "
         '"adamw" - leave it out, or choose sgd'),
        ("RMSprop", "momentum = 0.9", ""),
        ("sgd", "momentum = 0.9\nnesterov = true", ""),
    ],
)  # fmt: skip
def test_momentum_is_refused_where_it_would_be_ignored(name: str, settings: str, said: str) -> None:
    text = f'{SMALL}[optimizer]\nname = "{name}"\n{settings}\n'
    if said:
        assert said in error_of(text)
    else:
        assert parse_toml(text).optimizer.momentum == 0.9


def test_missing_model_is_said() -> None:
    assert "model is missing" in error_of("[schedule]\nsteps = 1\n")


def test_several_errors_are_counted_and_the_unknown_key_comes_first() -> None:
    said = error_of(changed("lr = 0.003", "lr = -1\nlearning_rate = 1"))
    assert "optimizer.learning_rate (and 1 more)" in said


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(default_toml(), encoding="utf-8-sig")
    assert load_config(tmp_path / "run.toml") == parse_toml(default_toml())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*swarm init"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory - name the run"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 64 KiB"):
        load_config(tmp_path / "big.toml")
    with pytest.raises(ConfigError, match="larger than 64 KiB"):
        load_config("/dev/zero")  # it has neither size nor end
    for text in ("[" * 30_000, "1" * 5000):
        (tmp_path / "odd.toml").write_text("a = " + text)
        with pytest.raises(ConfigError, match="not valid TOML"):
            load_config(tmp_path / "odd.toml")


def test_stochastic_rounding_needs_a_boundary_that_rounds() -> None:
    def wire(text: str, stages: int = 2) -> str:
        model = SMALL.replace("stages = 2", f"stages = {stages}")
        return f'{model}[wire]\nrounding = "stochastic"\n{text}\n'

    other = 'boundaries = [{ boundary = 0, forward = "float32", backward = "bfloat16" }]'
    for text in (wire('backward = "int4+zstd"'), wire(f'activations = "int8"\n{other}', stages=3)):
        assert parse_toml(text).wire.rounding == "stochastic"
    for text in (wire(f'activations = "int8"\n{other}'), wire('activations = "int8"', stages=1)):
        assert "no meaning where no boundary has int8 or int4" in error_of(text)


def test_what_is_left_out_is_filled_in() -> None:
    config = parse_toml(SMALL.replace("stages = 2", "cut = [1, 3]"))
    assert config.model.stages == 2
    assert config.model.config is not None
    assert config.model.config["vocab_size"] == 256
    assert config.model.config["tie_word_embeddings"] is False
    assert parse_toml(CUSTOM).model.config is None


def test_built_in_optimizers_in_any_case_others_by_class_name() -> None:
    for name, kept in (("AdamW", "adamw"), ("SGD", "sgd"), ("RAdam", "RAdam")):
        config = parse_toml(changed('name = "adamw"', f'name = "{name}"'))
        assert config.optimizer.name == kept


def test_codecs_of_boundaries() -> None:
    codecs = BoundaryCodecs.of(
        parse_toml(
            changed(
                'activations = "float32"',
                """
activations = "bfloat16"
backward = "int8"
boundaries = [{ boundary = 1, forward = "int4" }]
""",
            ).replace('"nearest"', '"stochastic"')
        )
    )
    assert [codecs.name(b, d) for b in (0, 1) for d in (FORWARD, BACKWARD)] == [
        "bfloat16", "int8", "int4", "int8",
    ]  # fmt: skip
    assert codecs.seed == 0
    one_way = changed(
        'activations = "float32"',
        'forward = "int8"\nboundaries = [{ boundary = 0, backward = "int4" }]',
    )
    codecs = BoundaryCodecs.of(parse_toml(one_way))
    assert [codecs.name(0, d) for d in (FORWARD, BACKWARD)] == ["int8", "int4"]
    simple = BoundaryCodecs.of(
        parse_toml(changed('activations = "float32"', 'activations = "int4"'))
    )
    assert simple == BoundaryCodecs("int4", "int4")


def test_frozen() -> None:
    config = parse_toml(SMALL)
    with pytest.raises(ValidationError):
        config.run.seed = 3  # type: ignore[misc]


def test_run_id_is_of_the_content_not_of_the_text() -> None:
    config = parse_toml(SMALL)
    reordered = "[schedule]\nsteps = 10 # ten\n[model]\nstages = 2\n[model.config]\n"
    reordered += 'num_hidden_layers = 4\nmodel_type = "llama"\n[run]\nseed = 0\n'
    assert parse_toml(reordered).run_id == config.run_id
    assert parse_toml(SMALL + "[optimizer]\nlr = 1\n").run_id == (
        parse_toml(SMALL + "[optimizer]\nlr = 1.0\n").run_id
    )
    assert parse_toml(SMALL.replace("10", "11")).run_id != config.run_id
    assert len(config.run_id) == 32


def test_canonical_form_is_golden() -> None:
    """A file keeps its run id; if that must change, the protocol version rises."""
    canonical = canonical_bytes(parse_toml(CUSTOM))
    assert canonical.startswith(b'{"batch":{"microbatch_size":8,"microbatches":16},"checkpoint":')
    assert run_id_of(canonical) == "fa66917bcf4097d395a565141b928e36"


@given(
    st.floats(1e-300, 1e300),
    st.integers(0, 2**63 - 1),
    st.text(min_size=1, max_size=100).filter(str.isprintable),
)
@settings(max_examples=50, deadline=None)
def test_canonical_round_trip(lr: float, seed: int, name: str) -> None:
    data = {**tomllib.loads(SMALL), "optimizer": {"lr": lr}, "run": {"seed": seed, "name": name}}
    config = parse_config(data)
    canonical = canonical_bytes(config)
    again = from_canonical(canonical, config.run_id)
    assert again == config
    assert canonical_bytes(again) == canonical


def test_the_callers_dict_stays_as_it_is() -> None:
    data = tomllib.loads(SMALL)
    parse_config(data)
    assert data == tomllib.loads(SMALL)


def join_error(data: bytes, run_id: str | None = None) -> str:
    with pytest.raises(JoinError) as caught:
        from_canonical(data, run_id_of(data) if run_id is None else run_id)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_strangers_config_is_checked() -> None:
    config = parse_toml(SMALL)
    good = canonical_bytes(config)
    assert "not that of run" in join_error(good.replace(b"10", b"11"), config.run_id)
    assert "larger than" in join_error(b" " * (MAX_CONFIG_BYTES + 1))
    assert "not in canonical form" in join_error(b" " + good)
    assert "not valid JSON" in join_error(b"\xff\xfe")
    assert "not valid JSON" in join_error(b"[" * 60_000)
    assert "run config received" in join_error(b"[]")
    tampered = json.loads(good)
    tampered["run"]["extra"] = 1
    said = join_error(json.dumps(tampered, sort_keys=True, separators=(",", ":")).encode())
    assert "unknown key run.extra" in said


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_never_escape_as_another_error(data: bytes) -> None:
    with pytest.raises(JoinError):
        from_canonical(data, run_id_of(data))


def test_the_pretrained_directory_is_stamped_and_checked(tmp_path: Path) -> None:
    text = f'[model]\npretrained = "{tmp_path}"\nstages = 2\n[schedule]\nsteps = 1\n'
    config = parse_toml(text)
    with pytest.raises(DataError, match="there is no directory"):
        with_pretrained_hash(parse_toml(text.replace(str(tmp_path), f"{tmp_path}/nowhere")))
    with pytest.raises(DataError, match="no safetensors"):
        with_pretrained_hash(config)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(DataError, match=r"cannot read .*config\.json"):
        with_pretrained_hash(config)
    (tmp_path / "config.json").write_text("{}")
    stamped = with_pretrained_hash(config)
    assert stamped.run_id != config.run_id
    assert with_pretrained_hash(stamped) == stamped
    index = tmp_path / "model.safetensors.index.json"  # may have others of the files read
    index.write_text('{"weight_map": {}}')
    with pytest.raises(DataError, match=r"model\.pretrained_sha256"):
        with_pretrained_hash(stamped)
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(DataError, match=r"model\.pretrained_sha256"):
        with_pretrained_hash(stamped)
    plain = parse_toml(SMALL)
    assert with_pretrained_hash(plain) is plain


def test_a_home_is_expanded_where_it_is_used_and_not_in_what_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_toml('[model]\npretrained = "~/model"\nstages = 2\n[schedule]\nsteps = 1\n')
    run_ids = set()
    for home in (tmp_path / "one", tmp_path / "two"):
        (home / "model").mkdir(parents=True)
        (home / "model" / "model.safetensors").write_bytes(b"weights")
        (home / "model" / "config.json").write_text("{}")
        monkeypatch.setenv("HOME", str(home))
        run_ids.add(with_pretrained_hash(config).run_id)
    assert len(run_ids) == 1
    nobody = config.model.model_copy(update={"pretrained": "~nobody-here/model"})
    with pytest.raises(DataError, match="there is no directory ~nobody-here/model"):
        with_pretrained_hash(config.model_copy(update={"model": nobody}))


def test_a_pretrained_tokenizer_is_hashed_with_its_model(tmp_path: Path) -> None:
    plain = f'[model]\npretrained = "{tmp_path}"\nstages = 2\n[schedule]\nsteps = 1\n'
    own = plain + '[data]\ntokenizer = "pretrained"\nvocab_size = 300\n'
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot read .*tokenizer\.json"):
        with_pretrained_hash(parse_toml(own))
    (tmp_path / "tokenizer.json").write_text("{}")
    stamped = with_pretrained_hash(parse_toml(own))
    without = with_pretrained_hash(parse_toml(plain))
    (tmp_path / "tokenizer.json").write_text("{ }")
    with pytest.raises(DataError, match=r"model\.pretrained_sha256"):
        with_pretrained_hash(stamped)
    assert with_pretrained_hash(without) == without  # its tokens are bytes
    with pytest.raises(ConfigError, match=r"needs model\.pretrained"):
        parse_toml(SMALL + '[data]\ntokenizer = "pretrained"\n')


def test_stamps_change_the_id_and_conflicts_are_refused() -> None:
    config = parse_toml(SMALL)
    led = with_trainers(config, ["12D3KooWabc"])
    assert led.run.trainers == ("12D3KooWabc",)
    assert led.run_id != config.run_id
    a, b = "a" * 64, "b" * 64
    stamped = with_data_hashes(led, a, b)
    assert (stamped.data.train_sha256, stamped.data.validation_sha256) == (a, b)
    assert with_data_hashes(stamped, a, b) == stamped
    with pytest.raises(DataError, match=r"data\.validation_sha256"):
        with_data_hashes(stamped, a, a)
    with pytest.raises(ConfigError, match=r"run\.trainers"):
        with_trainers(config, ["no id"])
    assert from_canonical(canonical_bytes(stamped), stamped.run_id) == stamped
