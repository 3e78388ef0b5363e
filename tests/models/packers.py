"""GPTQ and AWQ files written from their published layouts, number by number, by nothing of lychee's.

AutoGPTQ's qlinear_cuda.py and GPTQModel's utils/model.py for the one, AutoAWQ's modules/linear/gemm.py for the other.
"""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def round_to_groups(weight, bits, group_size, sym, g_idx=None):
    """q [in, out], zeros [groups, out], scales [groups, out] of a float weight [out, in], as GPTQ's quantiser finds
    its grid: the range of each group, with zero in it."""
    w = weight.double().T.numpy()
    g_idx = np.arange(len(w)) // group_size if g_idx is None else g_idx
    most = 2**bits - 1
    zeros, scales = [], []
    for group in range(g_idx.max() + 1):
        members = w[g_idx == group]
        low, high = np.minimum(members.min(0), 0), np.maximum(members.max(0), 0)
        if sym:
            high = np.maximum(np.abs(low), high)
            low = -high
        scale = np.float16((high - low) / most).astype(np.float64)
        scales.append(scale)
        zeros.append(np.full_like(scale, (most + 1) / 2) if sym else np.round(-low / scale))
    zeros, scales = np.stack(zeros), np.stack(scales)
    q = np.clip(np.round(w / scales[g_idx]) + zeros[g_idx], 0, most)
    return q.astype(np.int64), zeros.astype(np.int64), torch.tensor(scales).half()


def dequantized(q, zeros, scales, g_idx):
    """[out, in] in float64."""
    return (scales.double() * 1)[g_idx].T * torch.tensor((q - zeros[g_idx]).T)


def int32(words):
    return torch.tensor(np.asarray(words, np.uint64).astype(np.uint32).view(np.int32))


def gptq_tensors(q, zeros, scales, g_idx, bits, version):
    """`version` "gptq" stores zeros less one."""
    per_int = 32 // bits
    qweight = np.zeros((len(q) // per_int, q.shape[1]), np.uint64)
    for i in range(len(q)):
        qweight[i // per_int] |= q[i].astype(np.uint64) << np.uint64(bits * (i % per_int))
    stored = zeros - (version == "gptq")
    qzeros = np.zeros((len(zeros), zeros.shape[1] // per_int), np.uint64)
    for j in range(zeros.shape[1]):
        qzeros[:, j // per_int] |= stored[:, j].astype(np.uint64) << np.uint64(bits * (j % per_int))
    return {
        "qweight": int32(qweight),
        "qzeros": int32(qzeros),
        "scales": scales,
        "g_idx": torch.tensor(g_idx, dtype=torch.int32),
    }


def awq_tensors(q, zeros, scales):
    def pack(numbers):
        words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint64)
        for column in range(words.shape[1]):
            for i in range(8):
                words[:, column] |= numbers[:, column * 8 + AWQ_ORDER[i]].astype(np.uint64) << np.uint64(4 * i)
        return int32(words)

    return {"qweight": pack(q), "qzeros": pack(zeros), "scales": scales}


def repack(path, settings, pack, **config):
    """Rewrite a model directory's projections by `pack(weight) -> (tensors, dequantised)`; returns the latter."""
    weights, tensors, expected = load_file(path / "model.safetensors"), {}, {}
    for name, weight in weights.items():
        base = name.removesuffix(".weight")
        if base.endswith(PROJECTIONS):
            parts, expected[name] = pack(weight)
            tensors |= {f"{base}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        else:
            tensors[name] = expected[name] = weight
    save_file(tensors, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text()) | {"quantization_config": settings} | config
    (path / "config.json").write_text(json.dumps(values))
    return expected


def gptq_packer(bits, group_size, sym, version, order=None):
    """`order` makes the g_idx of a number of in_features; None is i // group_size."""

    def pack(weight):
        size = weight.shape[1] if group_size == -1 else group_size
        g_idx = np.arange(weight.shape[1]) // size if order is None else order(weight.shape[1])
        q, zeros, scales = round_to_groups(weight, bits, size, sym, g_idx)
        return gptq_tensors(q, zeros, scales, g_idx, bits, version), dequantized(q, zeros, scales, g_idx)

    return pack


def awq_packer(group_size):
    def pack(weight):
        size = weight.shape[1] if group_size == -1 else group_size
        q, zeros, scales = round_to_groups(weight, 4, size, sym=False)
        return awq_tensors(q, zeros, scales), dequantized(q, zeros, scales, np.arange(len(q)) // size)

    return pack
