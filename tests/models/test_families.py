"""Every family's forward pass equals transformers': whole, in chunks, token by token and on every path of a tree."""

from functools import cache

import pytest
import torch
import transformers

from lychee.models.config import ModelConfig
from lychee.models.families import FAMILIES
from lychee.models.files import ModelError
from lychee.models.llama import Llama
from tests.models.families import CONFIGS, TINY, Run, close, random_tokens, save_family, theirs_on

SOME_LAYERS = {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 37}),
    "mistral_narrow": ("MistralForCausalLM", {"sliding_window": 5, "num_hidden_layers": 2}),
    "mistral_tile": ("MistralForCausalLM", {"sliding_window": 64, "num_key_value_heads": 4}),
    "mistral_full": ("MistralForCausalLM", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 64, "tie_word_embeddings": True}),
    "qwen2_some_layers": ("Qwen2ForCausalLM", SOME_LAYERS),
    "qwen2_layer_types": ("Qwen2ForCausalLM", {**SOME_LAYERS, "layer_types": LAYER_TYPES}),
    "qwen3": ("Qwen3ForCausalLM", {"hidden_size": 40, "head_dim": 20, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3_some_layers": ("Qwen3ForCausalLM", {**SOME_LAYERS, "attention_bias": True}),
}
WINDOWS = {
    "mistral": (37, 37, 37),
    "mistral_narrow": (5, 5),
    "mistral_tile": (64, 64, 64),
    "qwen2_some_layers": (0, 37, 37),
    "qwen2_layer_types": (37, 0, 37),
    "qwen3_some_layers": (0, 37, 37),
}
LENGTH = 100


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Ours and transformers' model of a shape, loaded once."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def pair(shape):
        architecture, config = SHAPES[shape]
        theirs = save_family(root / shape, architecture, **config)
        return Llama.load(root / shape), theirs

    return pair


@pytest.fixture(params=SHAPES)
def pair(request, models):
    return models(request.param)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layers_window_is_that_of_its_family(models, shape):
    config = models(shape)[0].config
    assert config.windows == WINDOWS.get(shape, (0,) * config.num_layers)


def test_prefill_in_chunks_of_any_size_equals_transformers(pair):
    ours, theirs = pair
    tokens = random_tokens(LENGTH)
    want = theirs_on(theirs, tokens)
    for chunk in (LENGTH, 7, 33):
        close(Run(ours, seed=chunk).prefill(tokens, chunk), want)


def test_decoding_token_by_token_equals_transformers(pair):
    ours, theirs = pair
    tokens, run = random_tokens(LENGTH), Run(ours)
    run.prefill(tokens[:60])
    close(torch.cat([run.decode(token) for token in tokens[60:]]), theirs_on(theirs, tokens)[60:])


@pytest.mark.parametrize("context", [0, 3, 61, 90])
def test_every_node_of_a_random_tree_equals_transformers_on_its_path(pair, context):
    ours, theirs = pair
    tokens, tree, run = random_tokens(context), random_tokens(14, seed=context + 1), Run(ours)
    generator = torch.Generator().manual_seed(context)
    # Half of the nodes follow the one before: paths grow longer than the narrow window.
    chosen = [int(torch.randint(max(0, node - 2), node, (), generator=generator)) for node in range(1, len(tree))]
    parents = [-1, *chosen]
    if context:
        run.prefill(tokens)
    got = run.tree(tree, parents)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else []), node])
        close(got[node], theirs_on(theirs, tokens + [tree[i] for i in paths[node]])[-1])


@pytest.mark.parametrize("shape", ["mistral", "mistral_narrow", "mistral_tile"])
def test_what_no_window_holds_is_never_read(models, shape):
    ours, theirs = models(shape)
    window = ours.config.windows[0]
    tokens, run = random_tokens(LENGTH), Run(ours)
    run.prefill(tokens[:70])
    run.forget(run.length + 1 - window)
    got = [run.prefill(tokens[70:80])]
    for at in range(80, 90):
        run.forget(run.length + 1 - window)
        got.append(run.decode(tokens[at]))
    run.forget(run.length + 1 - window)
    got.append(run.tree(tokens[90:], list(range(-1, 9))))
    close(torch.cat(got), theirs_on(theirs, tokens)[70:])


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_config_leaves_out_is_as_in_transformers(architecture):
    values = {**{key: TINY[key] for key in REQUIRED}, "num_attention_heads": 32, "hidden_size": 512}
    theirs = CONFIGS[architecture](**values)
    for given in ({"architectures": [architecture]}, {"model_type": theirs.model_type}):
        ours = ModelConfig.parse({**values, **given})
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
        assert ours.max_positions == theirs.max_position_embeddings
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert set(ours.windows) == {theirs.sliding_window or 0 if architecture == "MistralForCausalLM" else 0}
        with torch.device("meta"):
            layer = getattr(transformers, architecture)(theirs).model.layers[0]
        assert {n for n, module in layer.named_modules() if getattr(module, "bias", None) is not None} == ours.biased
        assert hasattr(layer.self_attn, "q_norm") == ours.qk_norm


@pytest.mark.parametrize("architecture", FAMILIES)
def test_whatever_transformers_itself_writes_is_known(architecture, tmp_path):
    CONFIGS[architecture](**TINY, architectures=[architecture]).save_pretrained(tmp_path)
    ModelConfig.load(tmp_path)


QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"architectures is \['Gemma.*, must be \[Llama.* or \[Qwen3For"),
        ({**MISTRAL, "model_type": "llama"}, "model_type is llama, must be mistral with MistralForCausalLM"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window is 0, must be an integer from 1"),
        ({**MISTRAL, "attention_bias": True}, "attention_bias is true, must be null or false"),
        (
            {**MISTRAL, "layer_types": ["full_attention"] * 3},
            "layer_types is .*, must be absent: it is no key of mistral",
        ),
        ({**QWEN, "attention_bias": True}, "attention_bias is true, must be null or false"),
        ({**QWEN, "use_sliding_window": "no"}, "use_sliding_window is no, must be true or false"),
        ({**QWEN, "max_window_layers": -1}, "max_window_layers is -1, must be an integer from 0 to 1024"),
        ({**QWEN, "layer_types": ["full_attention"]}, r"layer_types is .*, must be a list of num_hidden_layers \(3\)"),
        ({**QWEN, "layer_types": ["chunked_attention"] * 3}, "layer_types is .*, must be a list .* full_attention or"),
        ({**QWEN, "layer_types": LAYER_TYPES}, "layer_types is .*, must be full_attention alone where no sliding"),
        ({**QWEN, "use_mrope": True}, "use_mrope is true, must be null or false"),
        ({"use_sliding_window": True}, "use_sliding_window is true, must be null or false"),
        *(
            ({key: value}, rf"{key} is {value}, must be absent: it is no key of llama")
            for key, value in {
                "logit_scale": 0.5,
                "residual_multiplier": 0.2,
                "embedding_multiplier": 12,
                "num_local_experts": 8,
                "no_rope_layers": 4,
                "attention_multiplier": 0.1,
                "hidden_activation": "gelu",
                "parallel_attn": 1,
            }.items()
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(values, message):
    with pytest.raises(ModelError, match=f"^config.json: {message}"):
        ModelConfig.parse({**TINY, **values})


def test_keys_that_say_nothing_about_the_forward_pass_are_let_through():
    harmless = {"_name_or_path": "x", "use_cache": True, "rope_interleaved": False, "is_llama_config": True}
    more = {"transformers.js_config": {}, "mlp_bias": None, "logit_scale": None, "sliding_window": None}
    assert ModelConfig.parse({**TINY, **harmless, **more}) == ModelConfig.parse(TINY)
