"""The ONNX graph of a module: traced, folded, checked."""
from __future__ import annotations

import inspect
import io
import os
import tempfile
import warnings
from typing import Any, Dict, List, Optional

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

from mapsage.inference.exported import threads

from .errors import ExportError
from .rewrites import rewritten
from .targets import Target

INPUT, OUTPUT, BATCH = 'image', 'scores', 'batch'
_MOST_BYTES = 2**31 - 2**20  # of a file of ONNX, with a little room for what is not a weight


def most_opset() -> int:
    """Return the highest opset that this PyTorch writes by tracing."""
    try:
        from torch.onnx import _constants
    except ImportError:  # before 1.13
        from torch.onnx import symbolic_helper
        return int(symbolic_helper._onnx_main_opset)  # type: ignore[attr-defined]
    names = ('ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET', 'ONNX_MAX_OPSET')  # since 2.6, and before
    return int(next(getattr(_constants, name) for name in names if hasattr(_constants, name)))


def trace(module: Any, target: Target, opset: int, batch: Optional[int]) -> onnx.ModelProto:
    """Return the graph of an :class:`mapsage.export.module.ImageToScores`.

    Constants are folded, and what pads in front of a convolution is put into it, which runtimes
    leave to the exporter.

    Args:
        module: Module in evaluation mode, on the CPU.
        target: Target of the file.
        opset: Opset of the graph.
        batch: Number of images in a batch, None for any.

    Raises:
        ExportError: If an operation has no ONNX form, the weights do not fit a file, or the graph
            is not what the target's readers take.
    """
    held = sum(tensor.numel() * tensor.element_size() for tensor in
               (*module.parameters(), *module.buffers()))
    if held > _MOST_BYTES:
        raise ExportError(f'the model has {held / 2**30:.1f} GiB of weights, and one ONNX file '
                          f'holds 2 GiB. Export a smaller model.')
    example = torch.rand(batch or 2, module.channels, module.window, module.window,
                         generator=torch.Generator().manual_seed(1))
    for constant_sides in (True, False):
        traced = traced_bytes(module, example, opset, batch is None, [OUTPUT], constant_sides)
        try:
            model = fold(onnx.load_from_string(traced))
        except Exception as error:  # the runtime's own kinds
            if batch is None and constant_sides:
                continue
            raise ExportError(f'ONNX Runtime cannot read what PyTorch {torch.__version__} wrote: '
                              f'{_beginning(error)}. With --batch 1 shapes are simpler.') from error
        if batch is not None or _takes_any_batch(model, example):
            break
    else:
        raise ExportError(f'what PyTorch {torch.__version__} wrote takes {len(example)} images at '
                          f'a time and no other number. Fix it with --batch 1.')
    with torch.no_grad():
        scores = int(module(example).shape[1])
    sides = [batch or BATCH, module.window, module.window]
    for value, channels in ((model.graph.input[0], module.channels),
                            (model.graph.output[0], scores)):
        _set_shape(value, [sides[0], channels, *sides[1:]])
    model.ir_version = target.ir
    model.producer_name = 'MapSage'
    check(model, target, opset)
    return model


def traced_bytes(module: nn.Module, example: torch.Tensor, opset: int, any_batch: bool,
                 outputs: List[str], constant_sides: bool = True) -> bytes:
    """Return a module as PyTorch's tracing exporter writes it.

    It is the one exporter that writes opset 13, and the only one before PyTorch 2.1.

    Raises:
        ExportError: If it cannot.
    """
    options: Dict[str, Any] = {}
    if 'dynamo' in inspect.signature(torch.onnx.export).parameters:
        options.update(dynamo=False)
    if any_batch:
        options.update(dynamic_axes={name: {0: BATCH} for name in (INPUT, *outputs)})
    file: Any = io.BytesIO()  # which every version of PyTorch takes, whatever its types say
    with torch.no_grad(), rewritten(
            module, example, any_batch, constant_sides), warnings.catch_warnings():
        # Of sides that become constants, which is meant; the proof finds what should not have.
        warnings.simplefilter('ignore')
        try:
            torch.onnx.export(module, (example, ), file, opset_version=opset,
                              input_names=[INPUT], output_names=outputs, **options)
        except Exception as error:  # PyTorch raises a dozen kinds, all of which name the operation
            raise ExportError(f'PyTorch {torch.__version__} cannot write this model in opset '
                              f'{opset}: {_beginning(error)}') from error
    return file.getvalue()


def open_session(model: bytes) -> onnxruntime.InferenceSession:
    """Return a session of ONNX Runtime on the CPU, with as many threads as in predict."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    options.log_severity_level = 4  # what goes wrong is raised
    return onnxruntime.InferenceSession(model, options, providers=['CPUExecutionProvider'])


def _takes_any_batch(model: onnx.ModelProto, example: torch.Tensor) -> bool:
    """Return whether one image gives the same scores alone as in the batch of the trace."""
    session = open_session(model.SerializeToString())
    try:
        alone, together = (session.run(None, {INPUT: images.numpy()})[0]
                           for images in (example[:1], example))
    except Exception:  # the runtime's own kinds; a shape that does not fit is among them
        return False
    return alone.shape == together[:1].shape and np.allclose(
        alone, together[:1], atol=1e-4, equal_nan=True)


def _beginning(error: Exception) -> str:
    """Return what an error of PyTorch says before it lists the whole graph."""
    return str(error).split('\nGraph:')[0].split('\ngraph(')[0].strip()[:500]


def fold(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with constants folded, by ONNX Runtime, and padding in its convolutions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'folded.onnx')
        options.optimized_model_filepath = path
        onnxruntime.InferenceSession(model.SerializeToString(), options,
                                     providers=['CPUExecutionProvider'])
        folded = onnx.load(path)
    for number in reversed(range(len(folded.opset_import))):
        if folded.opset_import[number].domain:  # those of the runtime, of which nothing is used
            del folded.opset_import[number]
    fuse_padding(folded.graph)
    return folded


def fuse_padding(graph: onnx.GraphProto) -> None:
    """Put each ``Pad`` with zeros that only a ``Conv`` reads into the ``Conv``."""
    constants = {each.name: each for each in graph.initializer}
    readers: Dict[str, List[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    shown = {value.name for value in graph.output}
    for pad in [node for node in graph.node if node.op_type == 'Pad']:
        after = readers.get(pad.output[0], [])
        pads = _zero_padding(pad, constants)
        if pads is None or pad.output[0] in shown or len(after) != 1 \
                or after[0].op_type != 'Conv' or after[0].input[0] != pad.output[0]:
            continue
        attribute = next((each for each in after[0].attribute if each.name == 'pads'), None)
        if attribute is None:
            attribute = after[0].attribute.add()
            attribute.CopyFrom(onnx.helper.make_attribute('pads', [0] * len(pads)))
        attribute.ints[:] = [old + more for old, more in zip(attribute.ints, pads)]
        after[0].input[0] = pad.input[0]
        graph.node.remove(pad)
    used = {name for node in graph.node for name in node.input}
    for tensor in [each for each in graph.initializer if each.name not in used]:
        graph.initializer.remove(tensor)


def _zero_padding(pad: onnx.NodeProto, constants: Dict[str, onnx.TensorProto]
                  ) -> Optional[List[int]]:
    """Return the pads along the sides of a ``Pad``, or None if it is not one of zeros there."""
    mode = next((each.s for each in pad.attribute if each.name == 'mode'), b'constant')
    names = [name for name in pad.input[1:] if name]
    if mode != b'constant' or not names or any(name not in constants for name in names):
        return None
    pads, *values = (numpy_helper.to_array(constants[name]) for name in names)
    half = len(pads) // 2
    if len(values) > 1 or np.any(values) or np.any(pads < 0) or pads[[0, 1, half, half + 1]].any():
        return None
    return [int(pad) for pad in (*pads[2:half], *pads[half + 2:])]


def check(model: onnx.ModelProto, target: Target, opset: int) -> None:
    """Look at what the target's readers stumble over.

    Raises:
        ExportError: If the graph has it.
    """
    found = {each.domain: each.version for each in model.opset_import}
    if found != {'': opset}:
        raise ExportError(f'the exporter wrote opsets {found}, expected {opset} alone, which is '
                          f'what {target.reader} reads.')
    branches = [node.name for node in model.graph.node if node.op_type in ('If', 'Loop', 'Scan')]
    if branches:
        raise ExportError(f'the graph has branches at {", ".join(branches[:4])}, which TensorRT '
                          f'and vendors\' runtimes reject: take decisions on values out of the '
                          f"model's forward.")
    foreign = sorted({f'{node.domain}::{node.op_type}' for node in model.graph.node if node.domain})
    if foreign:
        raise ExportError(f'the graph has {", ".join(foreign)}, which only some runtimes know.')
    onnx.checker.check_model(model)


def _set_shape(value: onnx.ValueInfoProto, sides: List[Any]) -> None:
    shape = value.type.tensor_type.shape
    del shape.dim[:]
    for side in sides:
        dim = shape.dim.add()
        if isinstance(side, str):
            dim.dim_param = side
        else:
            dim.dim_value = side
