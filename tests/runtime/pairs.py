"""What the behaviour tests share: tiny models made once a session, scripted drafters, and a target that says its lines.

T is a random two-layer Llama. A draft is "same" (T's weights), "near" (plus noise) or "far" (other weights).
"""

import atexit
import functools
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Fixed
from lychee.runtime.drafter import ScriptedDrafter
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.tree import TreeShape
from tests.conftest import DEVICE
from tests.factory import make_model_dir

K = 4  # tokens drafted in a round, unless a test says otherwise
PROMPT = "Hello world"
PROMPTS = [PROMPT, "The quick brown fox", "a", "def add(first, second):"]
KINDS = ("sentencepiece", "bpe")


@functools.cache
def root():
    path = Path(tempfile.mkdtemp(prefix="lychee-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def model_dir(name="T", kind="sentencepiece"):
    path = root() / f"{kind}-{name}"
    if name in ("T", "same"):
        return make_model_dir(path, tokenizer=kind)
    if name == "near":
        return make_model_dir(path, tokenizer=kind, noise_of=model_dir("T", kind), noise=0.05)
    return make_model_dir(path, tokenizer=kind, seed=9)


def make_llm(draft=None, kind="sentencepiece", target=None, config=None, **sizes):
    """An engine of its own. `draft` and `target` are names or directories; K tokens are drafted in every round."""
    sizes = {"num_blocks": 256, "device": DEVICE} | sizes
    target = target or model_dir("T", kind)
    if draft is None:
        return LLM(target, **sizes)
    path = model_dir(draft, kind) if isinstance(draft, str) else draft
    return LLM(target, path, config or SpeculativeConfig(num_speculative_tokens=K), **sizes)


shared_llm = functools.cache(make_llm)


def greedy(**given):
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | given)


def seeded(**given):
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.9, "seed": 7, "ignore_eos": True} | given)


def completion(llm, prompt, params, native=False):
    return llm.generate([prompt], params, native=native)[0].outputs[0]


def shown(output):
    """What a user sees of a completion, without the statistics that depend on speculation."""
    return output.text, output.token_ids, output.finish_reason, output.stop_reason


def streamed(llm, prompts, params, native=False):
    """Deltas of each prompt, and the outputs after the stream."""
    stream, deltas = llm.stream(prompts, params, native=native), [[] for _ in prompts]
    for chunk in stream:
        deltas[chunk.request_id].append(chunk.text)
    return deltas, stream.outputs()


@contextmanager
def drafting(llm, script, length=K, controller=None):
    """The engine of an LLM without a draft, with a scripted drafter in every round."""
    engine = llm.engine()
    engine.drafter, engine.controller = ScriptedDrafter(script, llm.vocab), controller or Fixed(TreeShape.chain(length))
    try:
        yield engine
    finally:
        engine.drafter, engine.controller = None, Fixed(TreeShape.chain(0))


def following(outputs):
    """A script that proposes what is known to follow each prompt, so that every chain is accepted whole."""
    known = {output.prompt_token_ids: output.outputs[0].token_ids for output in outputs}
    return lambda seq, length: known[seq.prompt][seq.num_emitted : seq.num_emitted + length]


class ForcedTarget:
    """A target that is certain of the token at each position; it computes nothing and stores no KV."""

    def __init__(self, tokens, vocab):
        self.tokens, self.vocab = torch.tensor(tokens), vocab

    binds = False

    def forward(self, rows):
        positions = torch.from_numpy(rows.positions if rows.logit_rows is None else rows.positions[rows.logit_rows])
        following = self.tokens[(positions.long() + 1).clamp(max=len(self.tokens) - 1)].to(DEVICE)
        logits = torch.zeros(len(positions), self.vocab, device=DEVICE)
        return logits.scatter_(1, following[:, None], 50.0)


@contextmanager
def forcing(llm, prompt_ids, tokens, length=K):
    """The target emits `tokens` after the prompt, and the drafter proposes them, `length` in a round."""
    script = lambda seq, wanted: tokens[seq.num_emitted : seq.num_emitted + wanted]  # noqa: E731
    with drafting(llm, script, length) as engine:
        before = engine.target, engine.verifier.target
        engine.target = engine.verifier.target = ForcedTarget([*prompt_ids, *tokens], llm.target.config.vocab_size)
        try:
            yield engine
        finally:
            engine.target, engine.verifier.target = before


def slow_llm(seconds=0.005, **given):
    """An LLM each of whose steps takes so long: what ends by a clock ends before the text does, on any machine."""
    llm = make_llm(**given)
    step = llm.engine().step
    llm.engine().step = lambda: time.sleep(seconds) or step()
    return llm
