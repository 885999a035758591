"""A user's own modules: any tensors between layers, the same numbers whatever the cut."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.errors import ConfigError, DataError, PipelineError
from swarm.model import (
    CustomPipeline,
    ParameterLayout,
    Pipeline,
    backward,
    build_pipeline,
    load_pipeline,
    model_sha256,
    needs_gradient,
    sha256_of,
)


class Widen(nn.Module):
    """One tensor in, three out: a transposed view, an integer tensor, a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.dropout(self.linear(x).relu()).transpose(0, 1), ids, x.sum(0, keepdim=True)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(8, 8), nn.Embedding(8, 8)

    def forward(self, x: Tensor, ids: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(self.linear(x.transpose(0, 1)), 0.1) + row + self.embedding(ids), ids


def samples(**change: Any) -> SimpleNamespace:
    def part(count: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(count)
        fields = {
            "x": rng.normal(size=(count, 8)).astype("float32"),
            "y": rng.integers(0, 8, count).astype("int64"),
        }
        return fields | change

    return SimpleNamespace(train=part(32), validation=part(8))


def definition(**change: Any) -> Pipeline:
    parts: dict[str, Any] = {
        "layers": {"a": Widen, "b": Narrow, "c": Widen, "d": Narrow},
        "inputs": lambda batch: (batch["x"], batch["y"]),
        "loss": lambda outputs, batch: F.cross_entropy(outputs[0], batch["y"], reduction="sum"),
        "weight": lambda batch: len(batch["y"]),
        "data": samples,
    }
    return Pipeline(**(parts | change))


def cut_into(*cut: int, of: Pipeline | None = None, **more: Any) -> CustomPipeline:
    return CustomPipeline(
        of or definition(), seed=4, num_stages=len(cut), cut=cut, microbatch_size=4, **more
    )


def run(pipeline: CustomPipeline) -> tuple[str, float, str]:
    """Hashes of the first weights and of the gradients of one microbatch, and its loss."""
    stages = [pipeline.build_stage(k) for k in range(pipeline.num_stages)]
    batch = {"x": torch.linspace(-1, 1, 32).view(4, 8), "y": torch.tensor([1, 2, 3, 4])}
    weights: dict[str, str] = {}
    gradients: dict[str, str] = {}
    inputs, outputs = [], []
    between: tuple[Tensor, ...] = ()
    for k, stage in enumerate(stages):
        layout = ParameterLayout.of(stage)
        weights |= layout.tensor_sha256(layout.flatten(stage))
        stage.set_microbatch(3, 5)
        between = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in between)
        inputs.append(between)
        between = stage(between, batch)
        outputs.append(between)
        if k < len(stages) - 1:
            for tensor, spec in zip(between, pipeline.boundary(k), strict=True):
                assert tensor.is_contiguous()
                assert tensor.shape == spec.shape
                assert str(tensor.dtype) == f"torch.{spec.dtype}"
                assert tensor.is_floating_point() == needs_gradient(spec)
    answers: tuple[Tensor, ...] | None = None
    for stage in stages:
        stage.set_microbatch(0, 0)
    for k in reversed(range(len(stages))):
        answers = backward(inputs[k], outputs[k], answers)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            gradients[name] = sha256_of(parameter.grad)
    order = pipeline.key_order
    return model_sha256(weights, order), between[0].item(), model_sha256(gradients, order)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cut", [(1, 1, 1, 1), (2, 2), (1, 3), (3, 1)], ids=str)
def test_another_cut_gives_the_same_bits(cut: tuple[int, ...], recompute: bool) -> None:
    assert run(cut_into(*cut, recompute=recompute)) == run(cut_into(4))


class Cast(nn.Module):
    """As a LayerNorm under autocast: of another dtype on a GPU than on a CPU."""

    dtype = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def test_a_layout_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leads asks for it at every checkpoint, on the loop that everybody waits for."""
    pipeline, built = cut_into(2, 2), list[int]()
    build = pipeline.build_stage

    def build_stage(stage: int, device: str = "cpu") -> Any:
        built.append(stage)
        return build(stage, device)

    monkeypatch.setattr(pipeline, "build_stage", build_stage)
    layouts = [[pipeline.layout(stage) for stage in range(2)] for _ in range(2)]
    assert layouts[0] == layouts[1]
    assert built == [0, 1]


def test_what_leaves_a_layer_has_the_boundarys_dtype_on_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cast = definition(
        layers={"enter": Cast, "leave": lambda: nn.Linear(8, 8)},
        inputs=lambda batch: (batch["x"],),
    )
    pipeline = cut_into(1, 1, of=cast, dtype="bfloat16")
    assert pipeline.boundary(0)[0].dtype == "bfloat16"
    monkeypatch.setattr(Cast, "dtype", torch.float32)
    stage = pipeline.build_stage(0)
    stage.set_microbatch(0, 0)
    (sent,) = stage((), {"x": torch.ones(4, 8), "y": torch.ones(4)})
    assert sent.dtype == torch.bfloat16


def test_bfloat16_too() -> None:
    assert run(cut_into(2, 2, dtype="bfloat16")) == run(cut_into(4, dtype="bfloat16"))
    assert cut_into(1, 3, dtype="bfloat16").boundary(0)[0].dtype == "bfloat16"


def test_what_a_run_needs_to_know() -> None:
    pipeline = cut_into(2, 2)
    assert pipeline.key_order[:3] == ["a.linear.weight", "a.linear.bias", "b.linear.weight"]
    assert pipeline.batch_spec["x"].shape == (4, 8)
    assert pipeline.batch_spec["y"].dtype == "int64"
    assert pipeline.weight({"y": [1, 2, 3]}) == 3
    assert cut_into(1, 1, 1, 1).cut == (1, 1, 1, 1)
    assert next(iter(dict(cut_into(2, 2).build_stage(1).named_parameters()))) == "c.linear.weight"


def labelled(*y: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros((len(y), 8), "float32"), "y": np.array(y, "int64")}


def below(train: dict[str, np.ndarray], validation: dict[str, np.ndarray], **named: int) -> Any:
    data = SimpleNamespace(train=train, validation=validation)
    spec = cut_into(4, of=definition(data=lambda: data, below=named)).batch_spec
    return {name: each.below for name, each in spec.items()}


def test_labels_are_checked_by_what_the_pipeline_says_of_them() -> None:
    """And not by the data of a machine: a volunteer's may be others, of the same shapes."""
    assert below(labelled(0, 2), labelled(1), y=6) == {"x": None, "y": 6}
    assert below(labelled(0, 2), labelled(), y=3) == {"x": None, "y": 3}
    assert below(labelled(-100, 2), labelled(1)) == {"x": None, "y": None}


@pytest.mark.parametrize(
    ("train", "validation", "named", "error"),
    [
        ((0, 3), (1,), {"y": 3}, "data field y holds 3, but below says 0 to 2"),
        ((0, 2), (-1,), {"y": 3}, "data field y holds -1, but below says 0 to 2"),
        ((0,), (0,), {"z": 3}, "below names z, which the data lack"),
        ((0,), (0,), {"x": 3}, "below names x, which is float32"),
    ],
)
def test_data_that_contradict_it_are_one_line(
    train: Any, validation: Any, named: Any, error: str
) -> None:
    with pytest.raises(DataError, match=f"^{error}"):
        below(labelled(*train), labelled(*validation), **named)


@pytest.mark.parametrize("number", ["10", 0, True, 2.5])
def test_what_is_no_number_of_classes_is_one_line(number: Any) -> None:
    with pytest.raises(PipelineError, match=r"^below of 'y' is"):
        definition(below={"y": number})


def test_validation_has_no_dropout() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.dropout(x)

    stage = cut_into(1, of=definition(layers={"half": Half})).build_stage(0).eval()
    batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, dtype=torch.long)}
    assert stage((), batch)[0].item() == pytest.approx(4 * np.log(8))


def test_a_peer_builds_only_its_own_layers() -> None:
    built: list[str] = []

    def counted(name: str, module: type[nn.Module]) -> Any:
        return lambda: (built.append(name), module())[1]

    layers = {"a": counted("a", Widen), "b": counted("b", Narrow)}
    pipeline = cut_into(1, 1, of=definition(layers=layers))
    built.clear()
    pipeline.build_stage(1)
    assert built == ["b"]


class Norm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, **options)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.norm(x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.count += 1
        return x


class InPlace(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu_(), ids


SHARED = nn.Linear(8, 8)


class Shared(Widen):
    def __init__(self) -> None:
        super().__init__()
        self.linear = SHARED


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"n": Norm}, r"n.norm \(BatchNorm1d\) keeps running statistics"),
        ({"n": Counter}, "forward changes buffer n.count"),
        ({"i": InPlace}, "in place"),
        ({"a": Widen, "b": Narrow, "i": InPlace}, "in place"),
        ({"a": Shared, "b": Narrow, "c": Shared}, "layers a and c share a parameter"),
        ({"a": Shared}, "factory of layer a"),
        ({"a": Widen, "b": Widen}, "does not run"),
        ({"a": lambda: 3}, "no torch module"),
        ({"a": nn.Linear(8, 8)}, "layer a is a Linear and not what builds one"),
        ({"a.b": Widen}, "has a dot"),
        ({}, "no layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_is_no_function_of_parameters_and_inputs_is_refused(
    layers: dict[str, Any], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        cut_into(1, of=definition(layers=layers))


def grow(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return batch["x"].mul_(2), batch["y"]


def in_place(outputs: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[0].mul_(2), batch["y"], reduction="sum")


def detached(outputs: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    return outputs[0].detach().sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": grow}, "^inputs changes the batch in place"),
        ({"loss": in_place}, "the loss changes its input in place"),
        ({"loss": detached}, "^the loss depends on no parameter"),
        ({"loss": lambda outputs, batch: outputs[0].sum() * 1j}, "^loss must return one number"),
    ],
)
def test_functions_that_do_what_no_swarm_can_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        cut_into(1, of=definition(layers={"a": Widen, "b": Narrow}, **change))


@pytest.mark.parametrize("weight", [lambda batch: int((batch["y"] > 0).sum()), lambda batch: 4])
def test_a_loss_of_nothing_may_depend_on_nothing(weight: Any) -> None:
    """Data made up to find shapes may be all padding, where a user's loss stops early."""

    def loss(outputs: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
        real = batch["y"] > 0
        return outputs[0][real].sum() if real.any() else torch.zeros(())

    layers = {"a": Widen, "b": Narrow}
    cut_into(2, of=definition(layers=layers, loss=loss, weight=weight))


def test_what_inputs_adds_to_the_batch_is_its_own() -> None:
    """Only the first stage calls it: elsewhere the loss could not see that."""

    def inputs(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        batch["more"] = batch["x"]
        return batch.pop("x"), batch["y"]

    def loss(outputs: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
        assert sorted(batch) == ["x", "y"]
        return F.cross_entropy(outputs[0], batch["y"], reduction="sum")

    run(cut_into(4, of=definition(inputs=inputs, loss=loss)))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8, sparse=True)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.embedding(ids), ids


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(PipelineError, match="layer s has sparse gradients - leave out sparse=True"):
        cut_into(1, of=definition(layers={"s": Sparse}))


def test_layers_without_names_are_refused() -> None:
    with pytest.raises(PipelineError, match="layers is no mapping"):
        definition(layers=[Widen])


class Planes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm((4, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def test_a_stages_norm_over_planes_is_not_decayed() -> None:
    """It is told by its module, whatever the stage calls its parameters."""
    layout = cut_into(1, of=definition(layers={"a": Planes})).layout(0)
    assert layout.names == ("a.linear.weight", "a.norm.weight", "a.norm.bias", "a.linear.bias")
    assert layout.num_decayed == 64


def test_batch_norm_without_statistics_is_fine() -> None:
    layers = {"n": lambda: Norm(track_running_stats=False)}
    assert cut_into(1, of=definition(layers=layers)).num_stages == 1


def test_boundaries_are_found_without_memory_for_the_layers() -> None:
    """A peer has room for its own stage, not for all of them."""
    devices = set()

    class Large(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            devices.add(self.weight.device.type)

        def forward(self, x: Tensor, *_: Tensor) -> Tensor:
            return super().forward(x)

    pipeline = cut_into(1, 1, of=definition(layers={"a": Large, "b": Large}))
    assert devices == {"meta"}
    pipeline.build_stage(0)
    assert devices == {"meta", "cpu"}


def test_layers_without_a_meta_kernel_are_run_on_the_cpu() -> None:
    class Values(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x * (1.0 + x.sum().item())

    pipeline = cut_into(1, 1, of=definition(layers={"v": Values, "l": lambda: nn.Linear(8, 8)}))
    assert pipeline.boundary(0)[0].shape == (4, 8)


@pytest.mark.parametrize(
    ("cut", "stages", "message"),
    [([2, 1], 2, "does not divide 4 layers"), ([4, 0], 2, "divide"), (None, 5, "4 layers cannot")],
)
def test_cuts_that_do_not_fit_are_refused(cut: Any, stages: int, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        CustomPipeline(definition(), seed=0, num_stages=stages, cut=cut, microbatch_size=4)


def test_data_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="differ in their number of samples"):
        definition(data=lambda: samples(x=np.zeros((3, 8), "float32"))).load_data()
    with pytest.raises(DataError, match="field x has dtype complex64"):
        definition(
            data=lambda: samples(x=np.zeros((32, 8), "complex64"), y=np.zeros(32))
        ).load_data()
    nameless: dict[Any, Any] = {1: np.zeros(32)}
    with pytest.raises(DataError, match="data field 1 has no name"):
        definition(data=lambda: SimpleNamespace(train=nameless, validation=nameless)).load_data()
    for wrong in (lambda: {"train": {}}, lambda: 1 / 0, lambda: SimpleNamespace(train=3)):
        with pytest.raises(DataError, match=r"do not come: \w+Error: .* train and validation are"):
            definition(data=wrong).load_data()


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (lambda batch: len(batch["z"]), "weight does not run: KeyError: 'z' - return how many"),
        (lambda batch: None, "weight returned None - return a number of items, 0 or more"),
        (lambda batch: 0.5, "weight returned 0.5 - return a number of items, 0 or more"),
        (lambda batch: -1, "weight returned -1 - return a number of items, 0 or more"),
        (lambda batch: math.nan, "weight returned nan - return a number of items, 0 or more"),
        (lambda batch: 10**5000, "weight returned a huge number - return at most 1099511627776"),
        (lambda batch: -(10**5000), "weight returned a huge number - return at most"),
    ],
    ids=["raises", "none", "a share", "less than nothing", "nan", "huge", "tiny"],
)
def test_a_weight_that_is_no_number_is_refused(weight: Any, says: str) -> None:
    with pytest.raises(PipelineError) as refused:
        cut_into(1, of=definition(weight=weight))
    assert str(refused.value).startswith(says)


class Ragged(nn.Module):
    """Gives as many rows as there are labels above 3."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[ids > 3]


def test_shapes_that_depend_on_the_data_do_not_leave_a_stage() -> None:
    """Whoever gets them allocates before they come. Within a stage they are nobody's business."""
    layers = {"r": Ragged, "l": lambda: nn.Linear(8, 8)}
    ragged = definition(layers=layers, loss=lambda outputs, batch: outputs[0].sum())
    pipeline = cut_into(1, 1, of=ragged)
    assert pipeline.boundary(0)[0].shape == (0, 8)
    batch = {"x": torch.ones(4, 8), "y": torch.tensor([1, 5, 6, 7])}
    with pytest.raises(PipelineError) as refused:
        pipeline.build_stage(0)((), batch)
    assert str(refused.value) == (
        "layer r ends a stage and gave float32[3, 8], where float32[0, 8] was found when the run "
        "was made - give tensors of the same shapes for every microbatch, by padding for example"
    )
    (loss,) = cut_into(2, of=ragged).build_stage(0)((), batch)
    assert loss.shape == ()


class Typed(nn.Module):
    dtype = torch.complex64

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.to(self.dtype)


class Typed8(Typed):
    dtype = torch.float8_e4m3fn


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(torch.float32))


@pytest.mark.parametrize("typed", [Typed, Typed8])
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
def test_dtypes_that_cannot_be_sent_do_not_leave_a_stage(typed: type[Typed]) -> None:
    name = str(typed.dtype).removeprefix("torch.")
    layers = {"t": typed, "b": Back}
    with pytest.raises(PipelineError, match=f"layer t ends stage 0 and gives {name}, which cannot"):
        cut_into(1, 1, of=definition(layers=layers))
    cut_into(2, of=definition(layers=layers))


class Many(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return (x,) * 1023


class Deep(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.reshape(4, 8, *(1,) * 15)


class First(nn.Module):
    def forward(self, *given: Tensor) -> Tensor:
        return given[0].reshape(4, 8)


@pytest.mark.parametrize(
    ("many", "says"),
    [
        (Many, "gives 1023 tensors, more than the 1022 that can be sent - put some together, or"),
        (Deep, "gives 17 dimensions, more than the 16 there may be - flatten some, or"),
    ],
)
def test_what_no_frame_holds_does_not_leave_a_stage(many: type[nn.Module], says: str) -> None:
    layers = {"m": many, "f": First}
    with pytest.raises(PipelineError, match=f"layer m ends stage 0 and {says} choose another"):
        cut_into(1, 1, of=definition(layers=layers))
    cut_into(2, of=definition(layers=layers))


def test_parameters_that_no_peer_could_hold_are_refused_when_the_run_is_made() -> None:
    for layer, says in [
        (lambda: nn.LazyLinear(8), "layer a has parameters whose size is not known until it runs"),
        (lambda: nn.Linear(8, 8).double(), "parameter weight is float64 - make all parameters flo"),
    ]:
        layers = {"a": layer}
        with pytest.raises(PipelineError, match=says):
            cut_into(1, of=definition(layers=layers, inputs=lambda batch: batch["x"]))


def test_an_output_that_is_no_tensor_is_named() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Any:
            return x, None

    with pytest.raises(PipelineError, match="layer n returned NoneType as tensor 1 - return tens"):
        cut_into(1, of=definition(layers={"n": Nothing}))


def test_a_module_with_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_slip.py").write_text("pipeline = Pipelin()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"a_slip cannot be imported: NameError: .* --debug"):
        load_pipeline("a_slip:pipeline")


def test_what_a_module_imports_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, (line, remedy) in enumerate(
        [
            ("import not_here.at_all", "install not_here on this machine"),
            ("import torch.not_here", "install another torch on this machine"),
            ("from torch import not_here", "mend it; --debug shows where"),
            ("import my_package_3.other", "name a module that my_package_3 has, or mend it; "),
        ]
    ):
        (tmp_path / f"my_package_{number}").mkdir()
        (tmp_path / f"my_package_{number}" / "__init__.py").write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=f" - {remedy}"):
            load_pipeline(f"my_package_{number}:pipeline")
    with pytest.raises(ConfigError, match=r"install the package that has.* \./not_there$"):
        load_pipeline("not_there.stages:pipeline")


def test_a_pipeline_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_users_package")
    module.pipeline = definition()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_package", module)
    assert load_pipeline("a_users_package:pipeline") is module.pipeline
    config = SimpleNamespace(
        run=SimpleNamespace(seed=1),
        model=SimpleNamespace(
            pipeline="a_users_package:pipeline", stages=2, cut=None, recompute=False,
            dtype="float32",
        ),
        batch=SimpleNamespace(microbatch_size=4),
    )  # fmt: skip
    assert build_pipeline(config).num_stages == 2  # type: ignore[arg-type]
    for name, message in [
        ("no_such_package:pipeline", "install the package"),
        ("a_users_package:other", "no swarm.Pipeline"),
        ("a_users_package", "package.module:object"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_pipeline(name)
