"""The ONNX graph of a module: traced, folded, checked.

The graph comes from PyTorch's tracing exporter, because only that one writes opset 13, which
Enflame's runtimes need. A trace records one run: a shape that became a constant by mistake shows
up only with another batch size, so `trace` runs a graph with an open batch size before returning
it.
"""

from __future__ import annotations

import inspect
import io
import os
import tempfile
import warnings
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

from mapsage.maps.exported import threads
from mapsage.maps.file_inputs import BATCH

from .errors import ExportError
from .module import WindowToScores
from .rewrites import rewritten
from .targets import Target

OUTPUT = 'scores'
# Protobuf limits an ONNX file to 2 GiB. One MiB is left for everything that is not a weight.
_MAX_WEIGHT_BYTES = 2**31 - 2**20


def most_opset() -> int:
    """Return the highest opset that the tracing exporter of this PyTorch writes."""
    try:
        from torch.onnx import _constants
    except ImportError:
        # PyTorch before 1.13.
        from torch.onnx import symbolic_helper

        return int(symbolic_helper._onnx_main_opset)  # type: ignore[attr-defined]
    # PyTorch 2.6 and newer have the first name, older versions the second.
    names = ('ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET', 'ONNX_MAX_OPSET')
    constants = vars(_constants)
    return int(next(constants[name] for name in names if name in constants))


def trace(
    module: WindowToScores, target: Target, opset: int, batch: Optional[int]
) -> onnx.ModelProto:
    """Return the graph of a module.

    Constants are folded, and zero padding in front of a convolution becomes an attribute of the
    convolution, which runtimes do not do themselves.

    Args:
        module: Module in evaluation mode, on the CPU.
        target: Target of the file.
        opset: Opset of the graph.
        batch: Number of images in a batch; None for any number.

    Raises:
        ExportError: If an operation has no ONNX form, the weights exceed the limit of a file, or
            the target's readers do not support the graph.
    """
    weight_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*module.parameters(), *module.buffers())
    )
    if weight_bytes > _MAX_WEIGHT_BYTES:
        raise ExportError(
            f'the model has {weight_bytes / 2**30:.1f} GiB of weights, and one ONNX '
            f'file holds 2 GiB. Export a smaller model.'
        )
    names, example = list(module.inputs.shapes), module.example(batch or 2)
    # Constant sides make a smaller and faster graph. A model that moves its batch to another
    # dimension cannot be traced with them, and is traced a second time without.
    for constant_sides in (True, False):
        traced = traced_bytes(
            module, names, example, opset, batch is None, [OUTPUT], constant_sides
        )
        try:
            model = fold(onnx.load_from_string(traced))
        except Exception as error:
            # ONNX Runtime raises classes that share no base class with each other.
            if batch is None and constant_sides:
                continue
            raise ExportError(
                f'ONNX Runtime cannot read what PyTorch {torch.__version__} wrote: '
                f'{_first_lines(error)}. With --batch 1 shapes are simpler.'
            ) from error
        if batch is not None or _takes_any_batch(
            model, dict(zip(names, (values.numpy() for values in example)))
        ):
            break
    else:
        raise ExportError(
            f'the graph that PyTorch {torch.__version__} wrote takes '
            f'{len(example[0])} windows at a time and no other number. Fix it '
            f'with --batch 1.'
        )
    with torch.no_grad():
        scores = int(module(*example).shape[1])
    for value in model.graph.input:
        _set_shape(value, [batch or BATCH, *module.inputs.shapes[value.name]])
    _set_shape(model.graph.output[0], [batch or BATCH, scores, module.window, module.window])
    model.ir_version = target.ir
    model.producer_name = 'MapSage'
    check(model, target, opset)
    return model


def traced_bytes(
    module: nn.Module,
    inputs: List[str],
    example: Tuple[torch.Tensor, ...],
    opset: int,
    any_batch: bool,
    outputs: List[str],
    constant_sides: bool = True,
) -> bytes:
    """Return the bytes that PyTorch's tracing exporter writes for a module.

    Args:
        module: Module to trace, in evaluation mode.
        inputs: Names of the inputs.
        example: Inputs of the trace.
        opset: Opset of the graph.
        any_batch: Whether the batch size stays open.
        outputs: Names of the outputs.
        constant_sides: Whether shapes become numbers, see :func:`rewritten`.

    Raises:
        ExportError: If PyTorch cannot write the module.
    """
    options: Dict[str, Any] = {}
    if 'dynamo' in inspect.signature(torch.onnx.export).parameters:
        options.update(dynamo=False)
    if any_batch:
        options.update(dynamic_axes={name: {0: BATCH} for name in (*inputs, *outputs)})
    # Every version of PyTorch accepts a BytesIO, but the annotations of some do not.
    file: Any = io.BytesIO()
    with torch.no_grad(), rewritten(
        module, example, any_batch, constant_sides
    ), warnings.catch_warnings():
        # PyTorch warns about sides that become constants, which is intended here. If a value
        # becomes a constant by mistake, the proof finds it.
        warnings.simplefilter('ignore')
        try:
            torch.onnx.export(
                module,
                example,
                file,
                opset_version=opset,
                input_names=inputs,
                output_names=outputs,
                **options,
            )
        except Exception as error:
            # PyTorch raises a dozen classes here; the message of all of them names the operation.
            raise ExportError(
                f'PyTorch {torch.__version__} cannot write this model in opset '
                f'{opset}: {_first_lines(error)}'
            ) from error
    return file.getvalue()


def open_session(model: bytes) -> onnxruntime.InferenceSession:
    """Return an ONNX Runtime session on the CPU, with as many threads as in tools/predict.py."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    # Errors are raised as well, so the log would only repeat them.
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=['CPUExecutionProvider'])


def _takes_any_batch(model: onnx.ModelProto, inputs: Dict[str, np.ndarray]) -> bool:
    """Return whether a batch of one window gives the same scores as the batch of the trace."""
    session = open_session(model.SerializeToString())
    try:
        single, batch = (
            session.run(None, windows)[0]
            for windows in ({name: values[:1] for name, values in inputs.items()}, inputs)
        )
    except Exception:
        # ONNX Runtime raises classes that share no base class; a wrong shape is one of the reasons.
        return False
    return single.shape == batch[:1].shape and np.allclose(
        single, batch[:1], atol=1e-4, equal_nan=True
    )


def _first_lines(error: Exception) -> str:
    """Return the message of a PyTorch error without the listing of the whole graph."""
    return str(error).split('\nGraph:')[0].split('\ngraph(')[0].strip()[:500]


def fold(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with constants folded by ONNX Runtime, and padding put into convolutions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'folded.onnx')
        options.optimized_model_filepath = path
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=['CPUExecutionProvider']
        )
        folded = onnx.load(path)
    # ONNX Runtime adds imports of the domains it defines, although no node uses them.
    for number in reversed(range(len(folded.opset_import))):
        if folded.opset_import[number].domain:
            del folded.opset_import[number]
    fuse_padding(folded.graph)
    return folded


def fuse_padding(graph: onnx.GraphProto) -> None:
    """Move the zeros of a ``Pad`` into the ``Conv`` that is its only reader."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers: Dict[str, List[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    for pad in [node for node in graph.node if node.op_type == 'Pad']:
        pad_readers = readers.get(pad.output[0], [])
        pads = _zero_padding(pad, constants)
        if pads is None or pad.output[0] in outputs or len(pad_readers) != 1:
            continue
        conv = pad_readers[0]
        if conv.op_type != 'Conv' or conv.input[0] != pad.output[0]:
            continue
        attribute = next((entry for entry in conv.attribute if entry.name == 'pads'), None)
        if attribute is None:
            attribute = conv.attribute.add()
            attribute.CopyFrom(onnx.helper.make_attribute('pads', [0] * len(pads)))
        attribute.ints[:] = [old + more for old, more in zip(attribute.ints, pads)]
        conv.input[0] = pad.input[0]
        graph.node.remove(pad)
    used = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)


def _zero_padding(
    pad: onnx.NodeProto, constants: Dict[str, onnx.TensorProto]
) -> Optional[List[int]]:
    """Return the spatial pads of a ``Pad``; None unless it adds zeros along height and width."""
    mode = next((entry.s for entry in pad.attribute if entry.name == 'mode'), b'constant')
    names = [name for name in pad.input[1:] if name]
    if mode != b'constant' or not names or any(name not in constants for name in names):
        return None
    pads, *values = (numpy_helper.to_array(constants[name]) for name in names)
    half = len(pads) // 2
    if len(values) > 1 or np.any(values) or np.any(pads < 0) or pads[[0, 1, half, half + 1]].any():
        return None
    return [int(pad) for pad in (*pads[2:half], *pads[half + 2 :])]


def check(model: onnx.ModelProto, target: Target, opset: int) -> None:
    """Check that the target's readers support the graph.

    Raises:
        ExportError: If the graph has another opset, a branch, or an operator outside of ONNX.
    """
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets != {'': opset}:
        raise ExportError(
            f'the exporter wrote opsets {opsets}, expected {opset} only, which is '
            f'what {target.reader} reads.'
        )
    branches = [node.name for node in model.graph.node if node.op_type in ('If', 'Loop', 'Scan')]
    if branches:
        raise ExportError(
            f'the graph has branches at {", ".join(branches[:4])}, which TensorRT '
            f"and vendors' runtimes reject: take decisions on values out of the "
            f"model's forward."
        )
    foreign = sorted({f'{node.domain}::{node.op_type}' for node in model.graph.node if node.domain})
    if foreign:
        raise ExportError(f'the graph has {", ".join(foreign)}, which only some runtimes know.')
    onnx.checker.check_model(model)


def _set_shape(value: onnx.ValueInfoProto, sides: List[Union[int, str]]) -> None:
    shape = value.type.tensor_type.shape
    del shape.dim[:]
    for side in sides:
        dim = shape.dim.add()
        if isinstance(side, str):
            dim.dim_param = side
        else:
            dim.dim_value = side
