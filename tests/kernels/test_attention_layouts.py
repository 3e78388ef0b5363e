"""On a GPU a row's bits also depend on how threads share a tile: both decode kernels must be compiled alike."""

import json
import os
import subprocess
import sys

# Prints, per kernel, the types of every dot and floating-point reduction, with layouts spelt out.
SCRIPT = """
import json, re, torch
from lychee.kernels import OPS, aot

op = OPS["attention"]
found = []
for capability in (80, 90):
    for dtype in (torch.float32, torch.bfloat16):
        kernels = []
        for window in (0, 1000) if (capability, dtype) == (90, torch.bfloat16) else (0,):
            inputs = op.sample(dtype, "cpu", **{**op.typical, "window": window})
            with aot._compiling(capability) as compiled:
                op.run(inputs, op.contract.check(inputs))
            kernels += [(window, kernel) for kernel in compiled]
        for window, kernel in kernels:
            text = kernel.asm["ttgir"]
            layouts = dict(re.findall(r"^(#\\w+) = (.*)$", text, re.MULTILINE))
            folds = re.findall(r"dot .* : (tensor.*) loc|}\\) : (\\(tensor<[^)]*f32.*) loc", text)
            spelt = {re.sub(r"#\\w+\\b(?!\\.)", lambda m: layouts.get(m[0], m[0]), a or b) for a, b in folds}
            found.append([f"{dtype} sm_{capability} {window}", kernel.name, sorted(spelt)])
print(json.dumps(found))
"""


def test_prefix_and_path_kernels_fold_tiles_in_the_same_layouts(tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd(), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    folds = {(target, kernel): types for target, kernel, types in json.loads(result.stdout)}
    assert len(folds) == 10
    for (target, kernel), types in folds.items():
        assert len(types) >= 3, (target, kernel, types)  # scores, output, and the reductions over a tile
        assert types == folds[target, "prefix_kernel"], target
