"""Drafts that share their target's embedding: their logits, the pairs that they make, and what is refused of them."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from lychee import LLM, ModelError, ParameterError, SamplingParams
from lychee.kernels.quantized import dequantize
from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from lychee.models.model_files import open_model
from tests.conftest import DEVICE
from tests.factory import make_model_dir, save_weights
from tests.models.shared_drafts import IDS, OWN, write_draft
from tests.runtime.pairs import PROMPTS, greedy, root, seeded

QUANTS = pytest.mark.parametrize("quant", [None, "int8", "int4"])
TIES = pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
REST = [i for i in range(384) if i not in IDS]


@cache
def target_dir(tie=True, seed=0):
    return make_model_dir(root() / f"shared-target-{tie}-{seed}", tie=tie, seed=seed)


@cache
def draft_dir(tie=True):
    return write_draft(root() / f"shared-draft-{tie}", target_dir(tie))


@cache
def llm_of(tie=True, **given):
    return LLM(target_dir(tie), draft_dir(tie), {"num_speculative_tokens": 4}, num_blocks=256, device=DEVICE, **given)


def logits_of(model, tokens, decode):
    kv = KVCache.allocate(model.config, 4, 16, model.weights.dtype, DEVICE)
    if not decode:
        return model.forward(Batch.prefill([tokens], [0], [[0, 1, 2, 3]], 16, DEVICE), kv)
    parents = list(range(-1, len(tokens) - 1))
    return model.forward(Batch.decode([tokens], [parents], [0], [[0, 1, 2, 3]], 16, DEVICE), kv)


def written_out(path, draft, embed, head):
    """A model of its own with the draft's layers and these matrices."""
    make_model_dir(path, tie=False, tokenizer=None)
    layers = {n: w.float() for n, w in load_file(draft / "model.safetensors").items() if n.startswith("model.")}
    floats = [weight if isinstance(weight, torch.Tensor) else dequantize(weight) for weight in (embed, head)]
    save_weights(path, layers | {n: w.float().cpu().clone() for n, w in zip(OWN, floats, strict=True)})
    return Llama.load(path, DEVICE)


@QUANTS
@TIES
def test_logits_are_those_of_the_layers_with_the_embedding_written_out(tmp_path, quant, tie):
    target = Llama.load(target_dir(tie), DEVICE, torch.float32, quant)
    draft, weights = Llama.of(open_model(draft_dir(tie)), DEVICE, torch.float32, target), target.weights
    alone = written_out(tmp_path / "alone", draft_dir(tie), weights.embed, weights.lm_head)
    assert draft.weights.embed is weights.embed
    tokens = torch.randint(0, 384, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for decode in (False, True):
        got, want = logits_of(draft, tokens, decode), logits_of(alone, tokens, decode)
        assert got.shape == (40, target.config.vocab_size)
        torch.testing.assert_close(got[:, list(IDS)], want[:, list(IDS)], rtol=1e-4, atol=1e-4)
        assert (got[:, REST] == -torch.inf).all()


@TIES
def test_a_padded_vocabulary_has_no_outputs_past_the_tokenizer(tmp_path, tie):
    target = make_model_dir(tmp_path / "target", vocab=400, tie=tie)
    draft = write_draft(tmp_path / "draft", target, ids=(0, 7, 383, 399))
    llm = LLM(target, draft, {"num_speculative_tokens": 3}, num_blocks=64, device=DEVICE)
    assert llm.vocab == 384
    assert results(llm, greedy(), False) == results(llm, greedy(), True)


def results(llm, params, native):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, native=native)]


@QUANTS
@TIES
@pytest.mark.parametrize("params", [greedy(), seeded(temperature=0.7)], ids=["greedy", "seeded"])
def test_the_pair_gives_the_tokens_of_native_decoding(quant, tie, params):
    llm = llm_of(tie, target_quant=quant, draft_quant=quant, kv_cache_dtype="int8" if quant else "auto")
    llm.reset_metrics()
    emitted = results(llm, params, native=False)
    assert emitted == results(llm, params, native=True)
    assert llm.metrics().totals()["acceptance_rate"] > 0.05


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
@TIES
def test_a_draft_of_the_targets_layers_and_all_outputs_is_always_accepted(tmp_path, quant, tie):
    target = make_model_dir(tmp_path / "target", tie=tie, dtype=torch.float16)
    draft = write_draft(tmp_path / "draft", target, noise=0.0, ids=range(384))
    quants = {"target_quant": quant, "draft_quant": quant}
    llm = LLM(target, draft, {"num_speculative_tokens": 4}, num_blocks=256, device=DEVICE, **quants)
    for params in (greedy(), SamplingParams(max_tokens=24, ignore_eos=True)):
        for output in llm.generate(PROMPTS, params):
            assert output.outputs[0].stats.accepted == output.outputs[0].stats.drafted > 12


@QUANTS
@pytest.mark.parametrize("params", [greedy(), seeded(), SamplingParams(max_tokens=40, ignore_eos=True)])
def test_no_token_without_an_output_is_proposed(quant, params, monkeypatch):
    llm, proposed = llm_of(target_quant=quant), []
    drafter = llm.engine().drafter
    propose = type(drafter).propose

    def recorded(batch, shapes, goes_on):
        made = propose(drafter, batch, shapes, goes_on)
        proposed.extend(token for tree in made.trees for token in tree.tokens[1:] if token >= 0)
        return made

    monkeypatch.setattr(drafter, "propose", recorded)
    outputs = llm.generate(PROMPTS, params)
    assert len(proposed) > 100
    assert set(proposed) <= set(IDS)
    emitted = {token for output in outputs for token in output.outputs[0].token_ids}
    assert emitted & set(REST)  # the target's own tokens


def test_the_rejection_test_runs_on_a_draft_without_all_tokens():
    llm = llm_of()
    llm.reset_metrics()
    outputs = llm.generate(PROMPTS * 2, SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 8
    assert 0 < llm.metrics().totals()["acceptance_rate"] < 1


def test_a_draft_alone_is_no_model():
    with pytest.raises(ParameterError, match="is a draft that shares its target's embedding: give it as draft_model"):
        LLM(draft_dir(), device=DEVICE)
    with pytest.raises(ModelError, match="cannot be loaded as a target"):
        Llama.load(draft_dir())


def replaced(**made):
    return lambda tensors: tensors.update({name: make(tensors[name]) for name, make in made.items()})


def swap(ids):
    return ids[[1, 0, *range(2, len(ids))]]


WRONG_TENSORS = [
    (replaced(output_ids=swap), "output_ids must be ascending token ids below vocab_size"),
    (replaced(output_ids=lambda ids: ids - 1), "output_ids must be ascending token ids"),
    (replaced(output_ids=lambda ids: ids + 1), "output_ids must be ascending token ids"),
    (replaced(output_ids=lambda ids: ids.clone().fill_(3)), "output_ids must be ascending token ids"),
    (replaced(output_ids=lambda ids: ids.int()), "output_ids has dtype I32, must be I64"),
    (replaced(output_ids=lambda ids: ids[:-1].clone()), r"output_ids has shape \[255\], must be \[256\]"),
    (replaced(embed_probe=lambda probe: probe.float()), "embed_probe has dtype F32, must be F16"),
    (replaced(embed_probe=lambda probe: probe.flip(0).contiguous()), r"embed_probe is 1\d\d% off the target's"),
    (replaced(embed_probe=lambda probe: probe * torch.nan), "embed_probe is nan% off the target's"),
    (lambda tensors: tensors.pop("output_ids"), "lacks the tensors output_ids"),
    (lambda tensors: tensors.pop("embed_probe"), "lacks the tensors embed_probe"),
    (lambda tensors: tensors.pop("model.norm.weight"), r"lacks the tensors model\.norm\.weight"),
    (
        lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(384, 64)}),
        r"tensors that the config does not ask for: model\.embed_tokens\.weight",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS, ids=[message for _, message in WRONG_TENSORS])
def test_wrong_tensors_are_refused(tmp_path, change, message):
    draft = write_draft(tmp_path / "draft", target_dir(), change=change)
    refused(target_dir(), draft, ModelError, message)


WRONG_KEYS = [True, [], "yes", {}, {"shares_embedding": True}, {"output_vocab": 256}, {"shares_embedding": False}]
WRONG_KEYS += [{"shares_embedding": given, "output_vocab": 256} for given in (False, None, 1)]
WRONG_KEYS += [{"shares_embedding": True, "output_vocab": given} for given in (0, -1, 385, True, 2.0, "256", None)]
WRONG_KEYS += [{"shares_embedding": True, "output_vocab": 256, "more": 1}]


@pytest.mark.parametrize("value", WRONG_KEYS, ids=str)
def test_a_malformed_config_key_is_refused(tmp_path, value):
    draft = write_draft(tmp_path / "draft", target_dir(), lychee_draft=value)
    refused(target_dir(), draft, ModelError, "lychee_draft is .* must be ")


def test_another_targets_embedding_is_refused():
    refused(target_dir(seed=5), draft_dir(), ModelError, r"embed_probe is 1\d\d% off the target's embedding")


@pytest.mark.parametrize(("key", "ours", "theirs"), [("vocab_size", 384, 400), ("hidden_size", 64, 32)])
def test_another_size_than_the_targets_is_refused(tmp_path, key, ours, theirs):
    draft = write_draft(tmp_path / "draft", target_dir(), head_dim=16, **{key: theirs})
    message = f"shares its target's embedding and has {key} {theirs} where the model has {ours}"
    refused(target_dir(), draft, ParameterError, message)


def refused(target, draft, kind, message):
    with pytest.raises(kind, match=message) as caught:
        LLM(target, draft, device=DEVICE)
    assert "\n" not in str(caught.value)
