"""Every type of rope scaling in both schemas: logits equal transformers', within the original length and beyond."""

import json

import pytest
import torch
import transformers

from lychee.models.config import ModelConfig
from lychee.models.files import ModelError
from lychee.models.llama import Llama
from lychee.models.rope import RopeConfig, inverse_frequencies, rope_table
from tests.models.families import TINY, Run, close, random_tokens, save_family, theirs_on

ORIGINAL, LENGTH = 48, 110
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 8,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn_attention_factor": {"rope_type": "yarn", "factor": 2.5, "attention_factor": 1.4},
    "yarn_mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 2.0},
    "yarn_one_mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
}
THETA = 5000.0


def rope_keys(scaling, schema):
    """The rope keys of a config.json, in its older or newer schema."""
    if schema == "rope_parameters":
        return {"rope_parameters": {"rope_theta": THETA, **scaling}}
    kind = scaling["rope_type"]
    old = {"type": kind, **{key: value for key, value in scaling.items() if key != "rope_type"}}
    return {"rope_theta": THETA, "rope_scaling": None if kind == "default" else old}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("rope")
    save_family(path, "LlamaForCausalLM", num_hidden_layers=2)
    return path


@pytest.fixture(params=SCALINGS)
def scaling(request):
    return SCALINGS[request.param]


@pytest.fixture(params=["rope_scaling", "rope_parameters"])
def pair(request, saved, scaling):
    """Ours and transformers' model: one set of weights under every config."""
    file = saved / "config.json"
    values = {key: value for key, value in json.loads(file.read_text()).items() if not key.startswith("rope")}
    far = ORIGINAL if scaling["rope_type"] in ("dynamic", "yarn") else 256
    values = {**values, "max_position_embeddings": far, **rope_keys(scaling, request.param)}
    file.write_text(json.dumps(values))
    theirs = transformers.LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    return Llama.load(saved), theirs


@torch.no_grad()
def token_by_token(model, tokens):
    """Transformers' logits, decoding over its KV cache."""
    logits, past = [], None
    for token in tokens:
        out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_logits_equal_transformers_below_and_above_the_original_length(pair, scaling):
    """Above it dynamic scaling has the base of each token's own length, as transformers' decoding has."""
    ours, theirs = pair
    assert ours.config.max_positions >= LENGTH
    tokens = random_tokens(LENGTH)
    close(Run(ours).prefill(tokens[:ORIGINAL]), theirs_on(theirs, tokens[:ORIGINAL]))
    want = token_by_token(theirs, tokens) if scaling["rope_type"] == "dynamic" else theirs_on(theirs, tokens)
    close(Run(ours).prefill(tokens, chunk=40), want)
    run = Run(ours)
    run.prefill(tokens[:90])
    close(torch.cat([run.decode(token) for token in tokens[90:100]]), want[90:100])
    close(run.tree(tokens[100:], list(range(-1, 9))), want[100:])


def test_growing_theta_differs_from_one_forward_pass_only_above_the_original_length():
    """What transformers computes there depends on how a sequence was cut into passes; ours must not."""
    rope = RopeConfig("dynamic", THETA, 4.0, original_max_position_embeddings=ORIGINAL)
    plain = rope_table(RopeConfig(theta=THETA), 16, 2 * ORIGINAL)
    table = rope_table(rope, 16, 2 * ORIGINAL)
    torch.testing.assert_close(table[:ORIGINAL], plain[:ORIGINAL], rtol=0, atol=1e-5)
    assert (table[ORIGINAL:] - plain[ORIGINAL:]).abs().amax(1).min() > 1e-3
    grown = THETA * (4.0 * 90 / ORIGINAL - 3.0) ** (16 / 14)
    torch.testing.assert_close(table[89], rope_table(RopeConfig(theta=grown), 16, 90)[89], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 4}, 100),
        ({"rope_type": "dynamic", "factor": 2.5}, 250),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 80}, 320),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 20}, 100),
        ({"rope_type": "yarn", "original_max_position_embeddings": 25}, 100),
    ],
)
def test_positions_reach_as_far_as_the_scaling_is_made_for(scaling, positions):
    assert (
        ModelConfig.parse({**TINY, "max_position_embeddings": 100, "rope_scaling": scaling}).max_positions == positions
    )


def test_yarns_missing_factor_is_the_ratio_of_lengths():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    theirs = transformers.LlamaConfig(**TINY, rope_parameters={**scaling, "rope_theta": THETA})
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    rope = ModelConfig.parse({**TINY, "rope_theta": THETA, "rope_scaling": scaling}).rope
    assert rope.factor == 4.0
    assert rope.attention_factor == pytest.approx(module.attention_scaling)
    torch.testing.assert_close(inverse_frequencies(rope, 16), module.inv_freq, rtol=1e-6, atol=0)


YARN = {"rope_type": "yarn", "factor": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling.rope_type is longrope, must be default or linear or dyn",
        ),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.rope_type is mrope, must be"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type is proportional, must be"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling.rope_type is \['yarn'\], must be"),
        (
            {"rope_scaling": {**YARN, "type": "linear"}},
            r"rope_scaling: type is linear, must be absent beside rope_type, or the same \(yarn\)",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 1000}},
            "rope_scaling: alpha is 1000, must be absent with rope_type dynamic",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 32}},
            "rope_scaling: beta_fast is 32, must be absent with rope_type linear",
        ),
        ({"rope_scaling": {**YARN, "attn_factor": 1}}, "rope_scaling: attn_factor is 1, must be absent with .* yarn"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: full_attention is {}, must be absent with"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "beta_fast is 1.0, must be at least beta_slow"),
        ({"rope_scaling": {**YARN, "mscale": 0, "mscale_all_dim": 1}}, "mscale is 0, must be a number above 0"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate is 1, must be true or false"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0, must be above 1 with rope_type yarn"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 2.5}},
            "original_max_position_embeddings is 2.5",
        ),
        ({"rope_scaling": {**YARN, "factor": 1e300}}, "max_position_embeddings is 1000000000, must be at most 2097152"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2},
            "head_dim is 2, must be at least 4 with rope_type dynamic",
        ),
    ],
)
def test_scaling_that_cannot_be_computed_is_refused_naming_key_value_and_allowed(values, message):
    with pytest.raises(ModelError, match=f"^config.json: .*{message}"):
        ModelConfig.parse({**TINY, **values})
