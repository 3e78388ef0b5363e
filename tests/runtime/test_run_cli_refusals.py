"""`lychee run` refuses what is wrong, and what it would have to ignore, in one sentence and with exit code 2."""

from enum import Enum

import pytest

from tests.factory import make_model_dir, save_tokenizer
from tests.runtime.pairs import PROMPT, model_dir, root

# stand for paths made when the tests run
TARGET, DRAFT, OTHER, MUTE, NOWHERE, ROOT, WEIGHTS, EMPTY = Enum("Place", "T D O M N R W E")
BOTH, SAID = [TARGET, "--draft-model", DRAFT], ["--prompt", PROMPT]
REFUSED = [
    ([*BOTH, *SAID, "--max-tokens", 0], "max_tokens is 0"),
    ([*BOTH, *SAID, "--max-tokens", "1.5"], "argument --max-tokens: invalid int value: '1.5'"),
    ([*BOTH, *SAID, "--temperature", "-1"], "temperature is -1.0"),
    ([*BOTH, *SAID, "--temperature", "nan"], "temperature is nan"),
    ([*BOTH, *SAID, "--temperature", "warm"], "argument --temperature: invalid float value: 'warm'"),
    ([*BOTH, *SAID, "--top-p", 0], "top_p is 0.0"),
    ([*BOTH, *SAID, "--top-p", 1.5], "top_p is 1.5"),
    ([*BOTH, *SAID, "--top-k", -2], "top_k is -2"),
    ([*BOTH, *SAID, "--min-p", 2], "min_p is 2.0"),
    ([*BOTH, *SAID, "--seed", 2**64], "seed is 18446744073709551616"),
    ([*BOTH, *SAID, "--max-draft-len", 33], "max_draft_len is 33"),
    ([*BOTH, *SAID, "--num-speculative-tokens", -1], "num_speculative_tokens is -1"),
    ([*BOTH, *SAID, "--verify", "hope"], "argument --verify: invalid choice: 'hope'"),
    ([*BOTH, *SAID, "--speculative-config", "{"], "speculative_config is not JSON"),
    ([*BOTH, *SAID, "--speculative-config", "[]"], "speculative_config is []"),
    ([*BOTH, *SAID, "--speculative-config", '{"lenght": 3}'], "speculative_config has no 'lenght'"),
    ([*BOTH, *SAID, "--batch-size", 0], "--batch-size is 0"),
    ([*BOTH, *SAID, "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    (
        [*BOTH, *SAID, "--target-quant", "int3"],
        "target_quant is 'int3', must be None for what the files have, none for",
    ),
    ([*BOTH, *SAID, "--draft-quant", "int4-g16"], "draft_quant is 'int4-g16', must be None for"),
    ([*BOTH, *SAID, "--kv-cache-dtype", "int4"], "argument --kv-cache-dtype: invalid choice: 'int4'"),
    ([*BOTH, *SAID, "--device", "tpu"], "device is 'tpu'"),
    ([*BOTH, *SAID, "--loud"], "unrecognized arguments: --loud"),
    ([*BOTH, *SAID, "--temp", "1"], "unrecognized arguments: --temp"),
    ([*BOTH, *SAID, "--report", "/nowhere/at/all.json"], "--report is /nowhere/at/all.json"),
    ([*BOTH, *SAID, "--report", ROOT], "which is a directory"),
    ([*BOTH, "--prompt", ""], "prompt is ''"),
    ([*BOTH, "--prompt", "a \udcff b"], "lone surrogate U+DCFF"),
    ([*BOTH, "--chat", "--prompt", "a \udcff b"], "lone surrogate U+DCFF"),
    ([*BOTH, "--prompt", "a " * 300], "must leave room below max_model_len=256"),
    ([*BOTH, *SAID, "--num-blocks", 2], "need 9 KV blocks of 16; the pool has 2"),
    ([*BOTH, "--prompt-file", NOWHERE], "No such file or directory"),
    ([*BOTH, "--prompt-file", ROOT], "Is a directory"),
    ([*BOTH, "--prompt-file", WEIGHTS], "is not UTF-8"),
    ([*BOTH, "--prompt-file", EMPTY], "holds no prompt"),
    ([NOWHERE, *SAID], "lychee run: model is "),
    ([TARGET, "--draft-model", NOWHERE, *SAID], "lychee run: draft_model is "),
    ([TARGET, "--draft-model", OTHER, *SAID], " does not fit the model: draft tokenizer has"),
    ([MUTE, "--chat", *SAID], "has no chat template"),
    ([*BOTH, *SAID, "--logit-bias", "5"], "--logit-bias is '5', must be ID=X, a token id and a number"),
    ([*BOTH, *SAID, "--logit-bias", "999=1"], "logit_bias id is 999, must be a token id below 384"),
    ([*BOTH, *SAID, "--repetition-penalty", 0], "repetition_penalty is 0.0"),
    ([*BOTH, *SAID, "--stop", ""], "stop is ['']"),
    ([*BOTH, *SAID, "--min-tokens", 200], "min_tokens is 200, must be an integer in 0..128"),
    # would be ignored
    ([*BOTH, *SAID, "--system", "Be brief"], "--system needs --chat"),
    ([*BOTH, *SAID, "--include-stop-str-in-output"], "--include-stop-str-in-output needs a --stop"),
    ([*BOTH, *SAID, "--top-p", 0.9], "--top-p has no use at --temperature 0, which is greedy"),
    ([*BOTH, *SAID, "--temperature", 0, "--top-k", 3], "--top-k has no use at --temperature 0, which is greedy"),
    (
        [*BOTH, *SAID, "--tree", "auto", "--max-draft-len", 0],
        "tree is 'auto', must be left out where max_draft_len is 0",
    ),
    ([*BOTH, *SAID, "--prompt-file", "p.txt"], "argument --prompt-file: not allowed with argument --prompt"),
    ([*BOTH, *SAID, "--prompt-file-whole"], "--prompt-file-whole needs a --prompt-file"),
    ([TARGET, *SAID, "--max-draft-len", 4], "--max-draft-len has no use with no --draft-model"),
    ([TARGET, *SAID, "--num-speculative-tokens", 4], "--num-speculative-tokens has no use with no --draft-model"),
    ([TARGET, *SAID, "--draft-quant", "int8"], "--draft-quant has no use with no --draft-model"),
    ([TARGET, *SAID, "--verify", "coupled"], "--verify has no use with no --draft-model"),
    ([TARGET, *SAID, "--speculative-config", "{}"], "--speculative-config has no use with no --draft-model"),
    ([*BOTH, *SAID, "--native"], "--draft-model has no use with --native"),
    ([TARGET, *SAID, "--native", "--max-draft-len", 4], "--max-draft-len has no use with --native"),
    ([TARGET, *SAID, "--compare"], "--compare needs a --draft-model"),
    ([*BOTH, *SAID, "--compare", "--native"], "--native and --compare exclude each other"),
    (
        [*BOTH, *SAID, "--max-draft-len", 8, "--num-speculative-tokens", 3],
        "num_speculative_tokens and max_draft_len are both given",
    ),
    (
        [*BOTH, *SAID, "--max-draft-len", 8, "--speculative-config", '{"max_draft_len": 4}'],
        "speculative_config has max_draft_len, which is also given by itself",
    ),
    (
        [*BOTH, *SAID, "--speculative-config", '{"adaptive": true, "adaptive_max_draft_len": false}'],
        "adaptive_max_draft_len and adaptive are both given",
    ),
    ([*BOTH, *SAID, "--tree", "4,2", "--max-draft-len", 16], "max_draft_len is 16, must be left out where tree is"),
    (
        [*BOTH, *SAID, "--num-speculative-tokens", 5, "--speculative-config", '{"adaptive": true}'],
        "adaptive is True, must be left out where num_speculative_tokens is 5",
    ),
]


@pytest.fixture(scope="module")
def paths():
    mute = make_model_dir(root() / "mute")
    save_tokenizer(mute, "sentencepiece", chat_template=None)
    (root() / "empty.txt").write_text(" \n\n")
    return {
        TARGET: model_dir(),
        DRAFT: model_dir("near"),
        OTHER: model_dir("T", "bpe"),
        MUTE: mute,
        NOWHERE: root() / "nowhere",
        ROOT: root(),
        WEIGHTS: model_dir() / "model.safetensors",
        EMPTY: root() / "empty.txt",
    }


@pytest.mark.parametrize(("argv", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_bad_option_is_refused_in_one_sentence_with_exit_code_2(lychee, paths, argv, message):
    code, out, err, report = lychee(*(paths.get(arg, arg) for arg in argv), report="--report" not in argv)
    assert code == 2
    assert message in err
    assert err.startswith("lychee run: ")
    assert err.count("\n") == 1  # one line
    assert out == ""
    assert report is None
