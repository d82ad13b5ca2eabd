#!/bin/sh
# onnxruntime 1.32.0 with onnx 1.23.2: the optimizer for transformers raises IndexError on a model
# whose layer norm has no bias, as ModernBERT's norms, where it fuses the norm with the sum before it.
# A bias is optional in the operator LayerNormalization, and the runtime itself computes the model.
#
# Seen: IndexError from optimize_model; with a bias of zeros, or with the fusion switched off, the
# model is optimized. Expected: the norm fused, or left alone.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 sympy==1.14.0
FOLDER=$folder "$folder/venv/bin/python" - <<'PY'
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

WIDTH, FOLDER = 8, Path(os.environ["FOLDER"])


def saved(bias):
    """A model of a sum and its norm."""
    weights = {"scale": np.ones(WIDTH, np.float32)}
    if bias:
        weights["bias"] = np.zeros(WIDTH, np.float32)
    shape = [1, 4, WIDTH]
    tokens = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xyz"]
    nodes = [
        helper.make_node("Add", ["x", "y"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", *weights], ["z"], axis=-1),
    ]
    arrays = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "norm", tokens[:2], tokens[2:], arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    path = FOLDER / f"bias{bias}.onnx"
    onnx.save(model, path)
    return str(path)


def optimized(path, **options):
    """The operators after optimization, or the error."""
    fusions = FusionOptions("bert")
    for name, value in options.items():
        setattr(fusions, name, value)
    sizes = {"model_type": "bert", "num_heads": 2, "hidden_size": WIDTH, "opt_level": 0}
    try:
        model = optimize_model(path, optimization_options=fusions, **sizes)
    except IndexError as error:
        return f"IndexError: {error}"
    return [node.op_type for node in model.model.graph.node]


plain, biased = saved(False), saved(True)
x = np.arange(4 * WIDTH, dtype=np.float32).reshape(1, 4, WIDTH)
session = onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"])
(z,) = session.run(None, {"x": x, "y": x**2})
print("the runtime's norms:", z.std(-1).round(3).tolist())
print("without a bias:", optimized(plain))
print("with a bias:", optimized(biased))
print("without the fusion:", optimized(plain, enable_skip_layer_norm=False))
assert np.allclose(z.std(-1), 1, atol=1e-3)
assert optimized(plain) == "IndexError: list index out of range"
assert optimized(biased) == ["SkipLayerNormalization"]
assert optimized(plain, enable_skip_layer_norm=False) == ["Add", "LayerNormalization"]
PY
