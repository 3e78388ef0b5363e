"""LLM: the Python interface. Loads a model (and a draft), then generates or streams."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from lychee.models.chat import ChatTemplate
from lychee.nouns import counted

from .checks import ParameterError, check_bool, check_names, refuse
from .config import EngineConfig, SpeculativeConfig
from .cost_table import CostTable
from .engine import Engine
from .engine_maker import EngineMaker
from .load_pair import load_pair
from .measure import MEASURED_FROM, measured
from .memory_plan import MemoryPlan
from .metrics import Metrics
from .outputs import Request, RequestOutput, Stream
from .planned import MAX_CHILDREN, Planned
from .requests import Prompt, RequestMaker
from .sampling_params import SamplingParams
from .sequence import Mode, Sequence
from .streamer import Chunk
from .warm_up import lowering, warm_up

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class LLM:
    """A target model, optionally with a draft model that makes it answer faster.

    model, draft_model: Hugging Face model directories, GGUF files, or names as of `lychee get`, which must have fetched
    them. speculative_config: a SpeculativeConfig or a
    mapping of its fields, which may name the draft as `model`. device: `cpu` or `cuda`; None takes CUDA where there is
    one. dtype: `float32`, `float16`, `bfloat16`; `auto` is the checkpoint's on CUDA and float32 on the CPU.
    target_quant, draft_quant: None leaves weights as the files have them, `none` makes a GGUF file's floats, and a
    format (`int8`, `int8-g32`, `int4`, `int4-g64-sym`, ...; see QuantFormat) quantises them as they are read.
    kv_cache_dtype: `auto` is the model's dtype, `int8` a scale per position and head. The other keywords are
    EngineConfig's. Raises ParameterError, or the loader's error, in a sentence that names what is wrong.

    As a context manager it is closed at the end of the block; see `close`.
    """

    def __init__(
        self,
        model: str | Path,
        draft_model: str | Path | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str = "auto",
        target_quant: str | None = None,
        draft_quant: str | None = None,
        kv_cache_dtype: str = "auto",
        **sizes: Any,
    ) -> None:
        if isinstance(speculative_config, Mapping):
            given = dict(speculative_config)
            named = given.pop("model", None)
            if named is not None and draft_model is not None and str(named) != str(draft_model):
                raise ParameterError(f"draft_model is {draft_model!r} where speculative_config names {named!r}")
            draft_model = named if draft_model is None else draft_model
            speculative_config = SpeculativeConfig.parse(given)
        if speculative_config is not None and draft_model is None:
            raise ParameterError("speculative_config is given without a draft_model")
        self.speculative_config = speculative_config or SpeculativeConfig()
        if not isinstance(self.speculative_config, SpeculativeConfig):
            raise refuse("speculative_config", speculative_config, "a SpeculativeConfig or a mapping of its fields")
        own = inspect.signature(LLM).parameters.keys() - {"sizes"}
        check_names("LLM", sizes, own | inspect.signature(EngineConfig).parameters.keys())
        self.sizes = EngineConfig(**sizes)
        self.device = device_of(device)
        if dtype not in ("auto", *DTYPES):
            raise refuse("dtype", dtype, "auto, " + ", ".join(DTYPES))
        kind = DTYPES.get(dtype) or (torch.float32 if self.device.type == "cpu" else None)
        if kv_cache_dtype not in ("auto", "int8"):
            raise refuse("kv_cache_dtype", kv_cache_dtype, "auto (the model's dtype) or int8")
        pair = load_pair(model, draft_model, self.device, kind, target_quant, draft_quant)
        self.tokenizer, self.target, self.draft, self.vocab = pair.tokenizer, pair.target, pair.draft, pair.vocab
        self.notes = pair.notes
        self._path = pair.path
        self._chat_template: ChatTemplate | None = None
        limit = self.target.config.max_positions
        self.max_model_len = self.sizes.max_model_len or limit
        if self.max_model_len > limit:
            raise refuse("max_model_len", self.max_model_len, f"at most the model's {limit}")
        eos_ids = self.target.config.eos_token_ids.union(
            () if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        )
        self.maker = RequestMaker(
            self.tokenizer, self.vocab, self.max_model_len, eos_ids, self.speculative_config.verify
        )
        int8_cache, config = kv_cache_dtype == "int8", self.speculative_config
        self._engine_maker = EngineMaker(
            self.target, self.draft, self.vocab, config, self.sizes, self.max_model_len, int8_cache, self.device
        )
        self._engines: dict[bool, Engine] = {}
        self._lock = Lock()  # one step at a time, whichever thread asks for it
        self._inboxes: dict[int, deque[Chunk]] = {}
        self._next_id = 0
        self._warned_of_length = False

    def close(self) -> None:
        """Give back KV, compiled passes and weights, as far as nothing else refers to them.

        Requests that go on end, with the finish_reason `abort`. Closing again does nothing; any other use raises
        RuntimeError.
        """
        with self._lock:
            if "_engines" not in vars(self):
                return
            for native in self._engines:
                self._engines[native].abort_all()
            on_cuda, lock = self.device.type == "cuda", self._lock
            vars(self).clear()
            self._lock = lock  # streams that are open ask for it
        gc.collect()  # an engine's parts refer to each other
        if on_cuda:
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What is asked for is not there: nothing is, once this is closed."""
            if vars(self).keys() == {"_lock"}:
                raise RuntimeError("this LLM is closed, so it cannot be used; make another")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        native: bool = False,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts together, as one batch. `native` decodes without the draft model.

        cache_salt: KV of prefixes is shared with requests of the same salt alone, so that nobody else can tell from the
        time to the first token that a text has been seen before.
        """
        stream = self.stream(prompts, sampling_params, native=native, cache_salt=cache_salt)
        for _ in stream:
            pass
        return stream.outputs()

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        native: bool = False,
        cache_salt: str | None = None,
    ) -> Stream:
        """As `generate`, but an iterator over chunks, each yielded when its round ends.

        The requests start when the first chunk is asked for. Several streams, of several threads too, share the rounds.
        """
        check_bool("native", native)
        with self._lock:
            engine = self.engine(native)
            requests = self._requests(prompts, sampling_params, native or self.draft is None, cache_salt)
        return Stream(requests, self._run(engine, [seq for r in requests for seq in r.seqs]))

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, native: bool = False) -> None:
        """Raises ParameterError where `generate` would refuse the prompt."""
        with self._lock:
            self._sequences(self.engine(native), prompt, sampling_params or SamplingParams())

    def chat(
        self,
        messages: Seq[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        native: bool = False,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Complete a conversation through the model's chat template."""
        ids = self.encode_chat(messages)
        return self.generate([ids], sampling_params, native=native, cache_salt=cache_salt)[0]

    def encode_chat(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the assistant's turn."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate.load(self._path, self.tokenizer)
        return self.tokenizer.encode_chat(self._chat_template.render(messages))

    def engine(self, native: bool = False) -> Engine:
        """The engine that runs with the draft model, or natively; made on first use."""
        native = native or self.draft is None
        if native not in self._engines:
            self._engines[native] = self._engine_maker.make(native)
        return self._engines[native]

    def renew_engine(self, native: bool = False) -> Engine:
        """A new engine in place of one that failed. Its requests are lost; metrics and measured costs are kept."""
        native = native or self.draft is None
        with self._lock:
            old = self._engines.pop(native)
            metrics, controller = old.metrics, old.controller
            del old  # its KV storage is freed before the new one's is allocated
            engine = self.engine(native)
            engine.metrics, engine.scheduler.num_preemptions = metrics, metrics.preemptions
            if isinstance(controller, Planned) and isinstance(engine.controller, Planned):
                engine.controller.costs = controller.costs
            return engine

    def warm_up(self, sampling_params: SamplingParams | None = None, *, native: bool = False) -> None:
        """Compile and load what generation needs, so that the first request does not wait for it.

        Resets the engine's metrics. Raises RuntimeError while requests are running.
        """
        with self._lock:
            engine = self.engine(native)
            if not engine.idle:
                raise RuntimeError("warm_up: requests are running")
            warm_up(engine)
        params = replace(sampling_params or SamplingParams(), min_tokens=0, n=1, ignore_eos=True)
        pool = engine.scheduler.pool
        room = min(self.max_model_len, pool.num_blocks * pool.block_size) - 2  # after a prompt of two tokens
        if isinstance(engine.controller, Planned) and room >= MEASURED_FROM:
            engine.controller.costs = self._measured(engine, engine.controller, params, room)
        for shape in engine.shapes:
            wanted = max(4, shape.depth + 2)  # a token of prefill, and a round that nothing cuts
            if wanted <= room:
                with lowering(engine, shape):
                    stream = self.stream([[0, 0]], replace(params, max_tokens=wanted), native=native)
                    deque(islice(stream, 2), 0)  # the prompt, and a round
                    stream.close()
        self.reset_metrics(native)

    def _measured(self, engine: Engine, planned: Planned, params: SamplingParams, room: int) -> CostTable:
        """What rounds of such requests cost on this machine, as far as there is room for them."""
        endless = replace(params, stop=(), stop_token_ids=())

        def request(max_tokens: int) -> Sequence:
            self._next_id += 1
            return self.maker.sequences([0, 0], replace(endless, max_tokens=max_tokens), self._next_id - 1)[0]

        widths = [width for width in planned.buckets.widths if width <= MAX_CHILDREN]
        return measured(engine, planned.max_depth, widths, request, room)

    def memory_plan(self, native: bool = False, config: SpeculativeConfig | None = None) -> MemoryPlan:
        """What an engine that is made now, with `config`, will own. Raises ParameterError where no pool fits."""
        maker = self._engine_maker if config is None else replace(self._engine_maker, config=config)
        return maker.memory_plan(native)

    def mode(self, params: SamplingParams) -> Mode:
        """How proposals for such a request are accepted."""
        return self.maker.mode(params)

    def metrics(self, native: bool = False) -> Metrics:
        """The metrics of an engine since it was made or its metrics were reset."""
        engine = self.engine(native)
        engine.metrics.peak_memory_bytes = self._engine_maker.memory(engine)
        return engine.metrics

    def reset_metrics(self, native: bool = False) -> None:
        engine = self.engine(native)
        engine.metrics = Metrics()
        engine.scheduler.num_preemptions = engine.scheduler.pool.max_used = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _run(self, engine: Engine, seqs: Seq[Sequence]) -> Generator[Chunk, None, None]:
        """Step the engine until these sequences end. Chunks of other callers' sequences go to their inboxes."""
        mine = deque[Chunk]()
        added: list[Sequence] = []
        try:
            with self._lock:
                inboxes = self._inboxes
                for seq in seqs:
                    engine.add(seq)
                    added.append(seq)
                    inboxes[seq.request_id] = mine
            while mine or not all(seq.finished for seq in seqs):
                while mine:
                    yield mine.popleft()
                with self._lock:
                    if not mine and not all(seq.finished for seq in seqs):
                        for chunk in engine.step():
                            inboxes[chunk.request_id].append(chunk)
        finally:
            with self._lock:
                for seq in added:
                    engine.abort(seq)
                    inboxes.pop(seq.request_id, None)

    def _requests(
        self,
        prompts: Prompt | Seq[Prompt],
        given: SamplingParams | Seq[SamplingParams] | None,
        native: bool,
        cache_salt: str | None = None,
    ) -> list[Request]:
        many = _prompts(prompts)
        if not many:
            raise refuse("prompts", prompts, "at least one prompt")
        params: Any = given
        if given is None or isinstance(given, SamplingParams):
            params = [given or SamplingParams()] * len(many)
        if not isinstance(params, Seq) or not all(isinstance(p, SamplingParams) for p in params):
            raise refuse("sampling_params", params, "SamplingParams, or a list of them")
        if len(params) != len(many):
            raise ParameterError(
                f"sampling_params has {counted(len(params), 'element')} for {counted(len(many), 'prompt')}"
            )
        requests = []
        for number, (prompt, sampling) in enumerate(zip(many, params, strict=True), 1):
            try:
                seqs = self._sequences(self.engine(native), prompt, sampling, cache_salt)
            except ParameterError as error:
                if len(many) == 1:
                    raise
                raise type(error)(f"prompt {number}: {error}") from error
            self._next_id += len(seqs)
            self._warn_of_length(seqs[0])
            lossy = not native and not self.speculative_config.fallback_sampling and seqs[0].mode is Mode.REJECTION
            if lossy:
                warnings.warn("fallback_sampling=False is lossy: text follows another distribution", stacklevel=4)
            requests.append(Request(prompt if isinstance(prompt, str) else None, tuple(seqs), lossy))
        return requests

    def _sequences(
        self, engine: Engine, prompt: Prompt, params: SamplingParams, cache_salt: str | None = None
    ) -> list[Sequence]:
        """Of a prompt, checked against the model and the pool."""
        seqs = self.maker.sequences(prompt, params, self._next_id, cache_salt)
        engine.check(seqs[0])
        return seqs

    def _warn_of_length(self, seq: Sequence) -> None:
        """Say, the first time, that the context ends a text before max_tokens."""
        room, wanted = seq.limit - seq.num_prompt, seq.params.max_tokens
        if room < wanted and not self._warned_of_length:
            self._warned_of_length = True
            warnings.warn(
                f"max_tokens is {wanted}, and max_model_len={self.max_model_len} leaves room for {room} after the "
                "prompt: the text ends there, with finish_reason 'length'",
                stacklevel=5,
            )


def _prompts(given: Any) -> list[Prompt]:
    """One prompt (a string or token ids) or several, as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise refuse("prompts", given, "a prompt or a list of prompts, each of them text or token ids")
    many: list[Any] = list(given)
    return [many] if many and isinstance(many[0], Integral) else many


def device_of(given: str | torch.device | None) -> torch.device:
    """What LLM takes for `device`. Raises ParameterError."""
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = str(given)
    if name != "cpu" and name.partition(":")[0] != "cuda":
        raise refuse("device", name, "cpu, cuda, or cuda:N")
    if name != "cpu" and not torch.cuda.is_available():
        raise ParameterError(f"device is {name!r}, but torch finds no CUDA device")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise refuse("device", name, "cpu, cuda, or cuda:N") from error
