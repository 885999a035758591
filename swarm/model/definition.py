"""What a user says of a model of their own: its layers, loss and data (`swarm.Pipeline`).

How a run cuts and computes it is `swarm/model/custom.py`. Peers run no code from the network: the
pipeline is an installed `package.module:object`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from swarm.errors import ConfigError, DataError, PipelineError, SwarmError
from swarm.model.stage import Batch
from swarm.spec import ITEM_BYTES, TensorSpec

Tensors = Tensor | tuple[Tensor, ...]


class Samples(Protocol):
    """What `data` returns: arrays by field name, the first dimension counting samples."""

    train: Mapping[str, np.ndarray]
    validation: Mapping[str, np.ndarray]


class Pipeline:
    """A custom model, its loss and its data.

    `layers`: factories of modules by name, in order. `inputs(batch)`: the first layer's tensors.
    `loss(outputs, batch)`: the *sum* of the item losses from the last layer's tensors (a tuple).
    `weight(batch)`: how many items that sum has. `data()`: an object with `train` and `validation`.
    `below`: of integer fields that look something up, as labels do, the number that all are below
    (and none negative); whoever gets others refuses them, since on a GPU a label that the model has
    no class for costs the process its whole use of the device. Integers between layers are not
    looked at: a layer that looks something up by what another gave it should clamp that first.
    """

    def __init__(
        self,
        layers: Mapping[str, Callable[[], nn.Module]],
        inputs: Callable[[Batch], Tensors],
        loss: Callable[[tuple[Tensor, ...], Batch], Tensor],
        weight: Callable[[Mapping[str, Any]], int],
        data: Callable[[], Samples],
        below: Mapping[str, int] | None = None,
    ) -> None:
        if not isinstance(layers, Mapping):
            raise PipelineError("layers is no mapping", 'write layers={"first": MyLayer, ...}')
        for name, factory in layers.items():
            if not isinstance(name, str) or not name or "." in name:
                raise PipelineError(f"layer name {name!r} is empty or has a dot", "rename it")
            if isinstance(factory, nn.Module) or not callable(factory):
                raise PipelineError(
                    f"layer {name} is a {type(factory).__name__} and not what builds one",
                    f'write {{"{name}": lambda: ...}}',
                )
        if not layers:
            raise PipelineError("the pipeline has no layers", "give at least one")
        self.layers = dict(layers)
        self.inputs, self.loss, self.weight, self.data = inputs, loss, weight, data
        self.below = dict(below or {})
        for name, number in self.below.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PipelineError(
                    f"below of {name!r} is {number!r}",
                    "give the number that all its values are below",
                )

    def load_data(self) -> Samples:
        """The user's samples, checked. Raises DataError."""
        try:
            samples = self.data()
            self._check(samples)
        except SwarmError:
            raise
        except Exception as error:  # whatever the user's function does, and does not return
            raise DataError(
                f"the pipeline's data do not come: {type(error).__name__}: {error}",
                "data() returns an object whose train and validation are arrays by field name",
            ) from error
        return samples

    def batch_spec(self, samples: Samples, microbatch_size: int) -> dict[str, TensorSpec]:
        """One microbatch's fields, as checked where they arrive."""
        return {
            name: TensorSpec(
                (microbatch_size, *array.shape[1:]), str(array.dtype), self.below.get(name)
            )
            for name, array in samples.train.items()
        }

    def _check(self, samples: Samples) -> None:
        signatures = []
        for part in (samples.train, samples.validation):
            if not part or len({len(array) for array in part.values()}) != 1:
                raise DataError(
                    "the fields of the data differ in their number of samples",
                    "give every field one entry a sample",
                )
            for name, array in part.items():
                if not isinstance(name, str):
                    raise DataError(f"data field {name!r} has no name", "name fields by a text")
                if str(array.dtype) not in ITEM_BYTES:
                    raise DataError(f"data field {name} has dtype {array.dtype}", "convert it")
            signatures.append({n: (a.shape[1:], a.dtype) for n, a in part.items()})
        if signatures[0] != signatures[1]:
            raise DataError(
                "train and validation data differ in fields, shapes or dtypes",
                "give both the same fields",
            )
        for name, below in self.below.items():
            if name not in samples.train:
                raise DataError(f"below names {name}, which the data lack", "name a field of them")
            for array in (samples.train[name], samples.validation[name]):
                if array.dtype.kind not in "iu":
                    raise DataError(f"below names {name}, which is {array.dtype}", "leave it out")
                for found in (int(array.min()), int(array.max())) if array.size else ():
                    if not 0 <= found < below:
                        raise DataError(
                            f"data field {name} holds {found}, but below says 0 to {below - 1}",
                            "correct one of them",
                        )


def load_pipeline(name: str) -> Pipeline:
    """The Pipeline called `package.module:object`. Raises ConfigError with what to do."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"[model] pipeline = {name!r} is not of the form package.module:object",
            'write for example pipeline = "swarm_digits:pipeline"',
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"[model] pipeline: cannot import {module_name} ({error})",
            _remedy_for(error, module_name),
        ) from error
    except SwarmError:
        raise
    except Exception as error:  # whatever is wrong with the user's module
        raise ConfigError(
            f"[model] pipeline: {module_name} cannot be imported: {type(error).__name__}: {error}",
            "mend it; --debug shows where",
        ) from error
    pipeline = getattr(module, attribute, None)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"[model] pipeline: {attribute} in {module_name} is no swarm.Pipeline",
            "name the object that Pipeline(...) was assigned to",
        )
    return pipeline


def _remedy_for(error: ImportError, module_name: str) -> str:
    """What to do when `module_name` cannot be imported: it may itself import what is not there."""
    mine = module_name.partition(".")[0]
    missing, _, inner = (error.name or "").partition(".")
    if not isinstance(error, ModuleNotFoundError) or not missing:
        return "mend it; --debug shows where"
    if missing != mine:
        return f"install {'another ' if inner else ''}{missing} on this machine"
    if error.name == mine:
        return f"install the package that has it on this machine, e.g. pip install ./{mine}"
    return f"name a module that {mine} has, or mend it; --debug shows where"
