"""The programs of a whole model, of its draft loop and of verification are what their texts say."""

import pytest
import torch

from lychee.compiler import parse
from lychee.models.compiled import CompiledLlama
from lychee.models.constant_names import constant_names
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from lychee.runtime.acceptance import Rule
from lychee.runtime.draft_loop import DraftLoop
from lychee.runtime.nodes import DraftPlan
from lychee.runtime.tree import TreeShape
from lychee.runtime.verifier import Verifier
from tests.compiler.test_parse import same

from .families import VOCAB, save_family


@pytest.fixture(params=[(None, torch.float32), ("int4", torch.int8)], ids=["fp32", "int4"])
def model(request, tmp_path):
    quant, kv_dtype = request.param
    save_family(tmp_path, "Qwen3ForCausalLM", max_position_embeddings=400, hidden_size=64)
    llama = Llama.load(tmp_path, "cpu", torch.float32, quant)
    return llama, KVCache.allocate(llama.config, 8, 8, kv_dtype, "cpu")


def test_programs_are_read_back_from_their_texts(model):
    compiled = CompiledLlama(*model)
    names = constant_names(*model)
    plan = DraftPlan.of((TreeShape.widths((2, 2)), TreeShape.chain(3)))
    whole, loop = plan.segment(0, len(plan.levels)), DraftLoop(*model, VOCAB)
    programs = [
        compiled.every_row,
        compiled.some_rows,
        loop.program(whole.key, 0, True, False, False),
        loop.program(whole.key, 0, False, True, False),
        loop.program(plan.segment(1, 2).key, 1, True, True, True),
        Verifier(compiled, VOCAB, Rule()).program,
    ]
    for program in programs:
        text, constants = program.text(names), program.constants(names)
        again = parse(text, constants, "cpu")
        same(program, again)
        assert again.text(names) == text


def test_weights_and_caches_have_their_names(model):
    text = CompiledLlama(*model).every_row.text(constant_names(*model))
    assert "@layers.1.down)" in text
    assert "@layers.0.q_norm, eps=" in text
    assert ", @layers.0.keys, @layers.0.values, " in text
    assert "@embed" in text
    assert not any(f"@{number}" in text for number in range(10))
