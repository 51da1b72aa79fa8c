"""A policy as a graph for other programs: observation leaves and a state in; parameters of the
action, the greedy action, its log-probability and the next state out.

N observations, whose number is free; P parameters of all action parts
"""

import io
import logging
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from impala_async.algo.distributions import LOG_STD_RANGE, joint_of
from impala_async.errors import ConfigError
from impala_async.library.loaded_policy import OpenedPolicy
from impala_async.models.actor_critic import ActorCritic
from impala_async.schema import ArraySpec, Schema
from impala_async.user_code import UserCode

# With 1 a tracer would take it for the only number there is.
NUM_TRACED = 2
LEAST_TORCH = (2, 7)
ONNX_PACKAGES = ("onnx", "onnxscript")


class ActingGraph(nn.Module):
    """Acts greedily, on tensors alone: leaves in the order of the schema, then the state."""

    def __init__(self, model: ActorCritic, schema: Schema) -> None:
        super().__init__()
        self.model, self._schema = model, schema

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        schema, num_leaves = self._schema, len(self._schema.obs.leaves)
        names = [leaf.name for leaf in schema.obs.leaves]
        leaves = dict(zip(names, arrays[:num_leaves], strict=True))
        inputs = {leaf.name: leaves[leaf.name] for leaf in schema.inputs.leaves}
        parameters_NP, state = self.model.act(inputs, arrays[num_leaves:])
        legal = schema.action.legal
        legal_NP = None if legal is None else leaves[legal].flatten(1)
        joint = joint_of(schema.action.parts, parameters_NP, legal_NP)
        chosen = joint.mode()
        actions = [
            chosen[part.name].to(getattr(torch, part.array.dtype)) for part in schema.action.parts
        ]
        return self._bounded(parameters_NP), *actions, joint.log_prob(chosen), *state

    def _bounded(self, parameters_NP: Tensor) -> Tensor:
        """With the deviations by which it acts."""
        parts, found = self._schema.action.parts, list[Tensor]()
        pieces = parameters_NP.split([part.num_parameters for part in parts], -1)
        for part, piece in zip(parts, pieces, strict=True):
            if part.kind != "discrete":
                mean, log_std = piece.chunk(2, -1)
                piece = torch.cat([mean, log_std.clamp(*LOG_STD_RANGE)], -1)
            found.append(piece)
        return torch.cat(found, -1)


@dataclass(frozen=True)
class Graph:
    """The exported program, and what goes in and comes out, by name."""

    program: torch.export.ExportedProgram
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]


def check_needs(*, is_onnx: bool) -> None:
    """ConfigError where a package is missing, or too old, that writes such files."""
    # Before 2.7 what torch.export saves of some policies cannot be loaded.
    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ConfigError(
            f"export: needs torch {least} or newer, and {torch.__version__} is installed: pip "
            "install -U torch"
        )
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if is_onnx and missing:
        raise ConfigError(
            f"--onnx: needs {' and '.join(missing)}: pip install 'impala-async[export]'"
        )


def trace(opened: OpenedPolicy) -> Graph:
    """The graph of a policy. ConfigError for a network of a user's own that has none."""
    schema, model = opened.schema, opened.policy.model
    inputs = (
        *(_named("obs", leaf) for leaf in schema.obs.leaves),
        *(_named("state", array) for array in schema.state),
    )
    parts = schema.action.parts
    outputs = (
        ArraySpec("parameters", (sum(part.num_parameters for part in parts),), "float32"),
        *(_named("action", part.array) for part in parts),
        ArraySpec("log_prob", (), "float32"),
        *(_named("next_state", array) for array in schema.state),
    )
    arrays = tuple(
        torch.zeros((NUM_TRACED, *each.shape), dtype=getattr(torch, each.dtype)) for each in inputs
    )
    graph, free = ActingGraph(model, schema).eval(), ({0: torch.export.Dim.DYNAMIC},) * len(arrays)
    with torch.no_grad(), UserCode("the network", "to be exported", ConfigError):
        # Tensors that it makes once and keeps must not be those of the tracer, which are empty.
        graph(*arrays)
        # torch 2.7 would compile it if nothing is said.
        program = torch.export.export(graph, arrays, dynamic_shapes=(free,), strict=False)
    return Graph(program, inputs, outputs)


def as_onnx(graph: Graph) -> bytes:
    # It tells of packages that it could use, and uses functions that torch itself calls old.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    failed = UserCode("the network", "to be written as ONNX", ConfigError)
    with warnings.catch_warnings(), failed:
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.onnx.export(
            graph.program,
            (),
            input_names=[each.name for each in graph.inputs],
            output_names=[each.name for each in graph.outputs],
            verbose=False,
        )
        assert program is not None, "the exporter gives none only where it writes a file itself"
        return bytes(program.model_proto.SerializeToString())


def as_torch(graph: Graph) -> bytes:
    file = io.BytesIO()
    torch.export.save(graph.program, file)
    return file.getvalue()


def _named(what: str, array: ArraySpec) -> ArraySpec:
    name = f"{what}/{array.name}" if array.name else what
    return ArraySpec(name, array.shape, array.dtype)
