"""Speculation gives native decoding's tokens in other families too: past a window, and past the original length."""

import pytest

from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from tests.conftest import DEVICE
from tests.factory import make_model_dir

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 21}
CONFIGS = {
    "window": MISTRAL,
    "dynamic rope": {"max_position": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
}
PROMPTS = ["The quick brown fox jumps over", "a", "def add(first, second):"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", CONFIGS)
def test_speculation_equals_native_decoding(tmp_path, config, temperature):
    target = make_model_dir(tmp_path / "target", **CONFIGS[config])
    draft = make_model_dir(tmp_path / "draft", noise_of=target, noise=0.05, **CONFIGS[config])
    llm = LLM(target, draft, SpeculativeConfig(num_speculative_tokens=5), num_blocks=64, device=DEVICE)
    params = SamplingParams(max_tokens=70, temperature=temperature, seed=3, ignore_eos=True)
    reference, outputs = (llm.generate(PROMPTS, params, native=native) for native in (True, False))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in reference]
    assert all(len(o.outputs[0].token_ids) == 70 for o in outputs)
    assert sum(o.outputs[0].stats.accepted for o in outputs) > 0


def test_a_length_beyond_what_dynamic_rope_is_made_for_is_refused(tmp_path):
    target = make_model_dir(tmp_path, **CONFIGS["dynamic rope"])
    assert LLM(target, device=DEVICE).max_model_len == 128
    with pytest.raises(ValueError, match="max_model_len is 129, must be at most the model's 128"):
        LLM(target, device=DEVICE, max_model_len=129)
