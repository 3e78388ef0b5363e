"""`lychee run`: what it prints is what it reports, and what it cannot use it refuses in a sentence."""

import io
import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from lychee import SamplingParams, __main__, demo, prompts, run, sampling_options
from tests.runtime.pairs import PROMPT, K, completion, greedy, model_dir, seeded, shared_llm

TOTALS = {
    "tokens_per_second", "mean_emitted_per_round", "acceptance_rate", "wasted_fraction", "acceptance_by_depth",
    "rounds", "rounds_native", "rounds_by_tree", "drafted", "accepted", "trunk_drafted", "trunk_accepted", "emitted",
    "draft_s", "verify_s", "other_s", "prefix_cache_queries", "prefix_cache_hits", "peak_memory_bytes",
}  # fmt: skip
REQUEST = {
    "text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "e2e_s",
    "rounds", "rounds_native", "drafted", "accepted", "trunk_drafted", "trunk_accepted", "emitted",
}  # fmt: skip


def pair(draft="near", kind="sentencepiece"):
    return [model_dir("T", kind), "--draft-model", model_dir(draft, kind)]


def texts(report, name):
    return [request["text"] for request in report["runs"][name]["requests"]]


# what is printed and reported


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
@pytest.mark.parametrize("options", [[], ["--temperature", 0.8, "--seed", 3, "--top-p", 0.9, "--top-k", 50]])
def test_streamed_text_is_the_reports_and_the_librarys(lychee, kind, options):
    code, out, err, report = lychee(*pair("near", kind), "--prompt", PROMPT, "--max-tokens", 20, *options)
    assert code == 0
    (request,) = report["runs"]["speculative"]["requests"]
    assert out == PROMPT + request["text"] + "\n"
    params = greedy(max_tokens=20, ignore_eos=False)
    if options:
        params = seeded(max_tokens=20, ignore_eos=False, temperature=0.8, seed=3, top_p=0.9, top_k=50)
    expected = completion(shared_llm(kind=kind), PROMPT, params)
    assert (request["text"], request["token_ids"]) == (expected.text, list(expected.token_ids))
    assert "tokens/s" in err


@pytest.mark.parametrize("mode", ["draft", "no draft", "native"])
def test_the_report_has_the_run_made_and_every_field(lychee, mode):
    models = [*pair(), "--tree", "chain"] if mode == "draft" else [model_dir()]  # `auto` may find that none pays
    native = ["--native"] if mode == "native" else []
    code, _, _, report = lychee(*models, "--prompt", PROMPT, "--max-tokens", 24, "--ignore-eos", *native)
    assert code == 0
    assert report.keys() == {"runs", "speedup", "identical"}
    name = "speculative" if mode == "draft" else "native"
    assert report["runs"].keys() == {name}
    assert (report["speedup"], report["identical"]) == (None, None)
    check_run(report["runs"][name], 24, speculative=mode == "draft")


def check_run(made, num_tokens, speculative, num_requests=1):
    assert made.keys() == {"totals", "requests"}
    totals, requests = made["totals"], made["requests"]
    assert totals.keys() == TOTALS
    assert len(requests) == num_requests
    for request in requests:
        assert request.keys() == REQUEST
        assert request["finish_reason"] == "length"
        assert len(request["token_ids"]) == request["output_tokens"] == request["emitted"] == num_tokens
        assert isinstance(request["text"], str)
        assert 0 < request["ttft_s"] < request["e2e_s"]
        assert request["prompt_tokens"] > 0
        assert 0 <= request["accepted"] <= request["drafted"]
        assert (request["drafted"] > 0) == speculative
        assert request["rounds"] + request["accepted"] == num_tokens - 1  # a prefill emits the first
    assert totals["tokens_per_second"] > 0
    for key in REQUEST & TOTALS:
        assert totals[key] == sum(request[key] for request in requests)
    rounds, accepted, drafted = (totals[key] for key in ("rounds", "accepted", "drafted"))
    by_tree = [entry["rounds"] for entry in totals["rounds_by_tree"]]
    assert sum(by_tree) + totals["rounds_native"] == rounds
    assert by_tree == sorted(by_tree, reverse=True)
    assert totals["mean_emitted_per_round"] == pytest.approx(1 + accepted / rounds)
    if speculative:
        assert totals["acceptance_rate"] == pytest.approx(accepted / drafted)
        assert totals["wasted_fraction"] == pytest.approx(1 - accepted / drafted)
        assert len(totals["acceptance_by_depth"]) > 0
        assert all(0 <= share <= 1 for share in totals["acceptance_by_depth"])
        assert totals["draft_s"] > 0
    else:
        assert totals["acceptance_rate"] is totals["wasted_fraction"] is None
        assert totals["acceptance_by_depth"] == []
    assert min(totals["draft_s"], totals["verify_s"], totals["other_s"]) >= 0
    assert totals["peak_memory_bytes"] > 2**16


def test_the_report_and_the_table_say_which_trees_ran(lychee):
    tree = [*pair(), "--prompt", PROMPT, "--max-tokens", 40, "--ignore-eos", "--tree", "2,2,1"]
    _, _, err, report = lychee(*tree)
    totals = report["runs"]["speculative"]["totals"]
    most = totals["rounds_by_tree"][0]
    assert most["tree"] == "2,2,1"
    assert f"{most['tree']} ({most['rounds'] / totals['rounds']:.0%})" in next(
        line for line in err.splitlines() if line.startswith("most frequent tree")
    )
    assert totals["drafted"] > totals["trunk_drafted"] > 0
    _, _, err, report = lychee(model_dir(), "--prompt", PROMPT, "--max-tokens", 10, "--ignore-eos")
    totals = report["runs"]["native"]["totals"]
    assert totals["rounds"] == totals["rounds_native"] == 9
    assert totals["rounds_by_tree"] == []
    assert "none (100%)" in err


@pytest.mark.parametrize("options", [["--temperature", 0], ["--temperature", 0.9, "--seed", 4]])
@pytest.mark.parametrize("batch", [[], ["--batch-size", 2]])
def test_compare_runs_both_ways_to_identical_tokens(lychee, tmp_path, options, batch):
    file = tmp_path / "prompts.txt"
    file.write_text("Hello world\nThe quick brown fox\na\n")
    code, out, _, report = lychee(
        *pair(), "--compare", "--prompt-file", file, "--max-tokens", 16, "--num-speculative-tokens", K, *options, *batch
    )
    assert code == 0
    assert report.keys() == {"runs", "speedup", "identical"}
    assert report["runs"].keys() == {"native", "speculative"}
    assert report["identical"] is True
    assert report["speedup"] > 0
    assert texts(report, "native") == texts(report, "speculative")
    for name, made in report["runs"].items():
        check_run(made, 16, speculative=name == "speculative", num_requests=3)
    assert f"speedup: {report['speedup']:.2f}" in out
    assert "identical: true" in out


def test_compare_says_null_where_only_the_distribution_is_promised(lychee):
    code, out, _, report = lychee(
        *pair(), "--compare", "--prompt", PROMPT, "--max-tokens", 8, "--temperature", 1, "--verify", "rejection"
    )
    assert code == 0
    assert report["identical"] is None
    assert "identical: null" in out


def test_compare_says_which_prompt_differs_and_where(lychee, monkeypatch):
    class Careless:
        """Breaks speculation: the third token of every completion is another."""

        def __init__(self, generate):
            self.generate = generate

        def __call__(self, llm, prompts, params=None, *, native=False):
            outputs = self.generate(llm, prompts, params, native=native)
            if native:
                return outputs
            return [self.spoilt(output) for output in outputs]

        def spoilt(self, output):
            (made,) = output.outputs
            ids = (*made.token_ids[:2], 0 if made.token_ids[2] else 1, *made.token_ids[3:])
            return replace(output, outputs=(replace(made, token_ids=ids),))

    careless = Careless(run.LLM.generate)
    monkeypatch.setattr(run.LLM, "generate", lambda llm, *args, **kwargs: careless(llm, *args, **kwargs))
    code, out, _, report = lychee(*pair(), "--compare", "--prompt", PROMPT, "--max-tokens", 8)
    assert code == 0
    assert report["identical"] is False
    assert "prompt 1 differs from token 3" in out


# where prompts come from


@pytest.mark.parametrize("batch", [[], ["--batch-size", 1], ["--batch-size", 2]])
def test_a_prompt_file_has_a_prompt_a_line(lychee, tmp_path, batch):
    file = tmp_path / "prompts.txt"
    given = ["Hello world", "a\u2028b\x0cc\x85d", "  The quick brown fox", "日本語"]
    file.write_bytes(f"{given[0]}\n\n{given[1]}\r\n{given[2]}\n  \n{given[3]}".encode())
    code, out, _, report = lychee(*pair(), "--prompt-file", file, "--max-tokens", 6, *batch)
    assert code == 0
    spoken = texts(report, "speculative")
    assert out == "".join(
        f"[{i + 1}] {prompt}{text}\n" for i, (prompt, text) in enumerate(zip(given, spoken, strict=True))
    )
    llm = shared_llm()
    assert spoken == [completion(llm, prompt, greedy(max_tokens=6, ignore_eos=False)).text for prompt in given]


def test_prompts_may_be_given_one_by_one(lychee):
    given = ["Hello world", "The quick brown fox"]
    code, out, _, report = lychee(*pair(), "--prompt", given[0], "--prompt", given[1], "--max-tokens", 6)
    assert code == 0
    spoken = texts(report, "speculative")
    assert out == "".join(f"[{i}] {p}{t}\n" for i, p, t in zip((1, 2), given, spoken, strict=True))


@pytest.mark.parametrize("how", [[], ["--batch-size", 1], ["--compare"]])
def test_a_prompt_that_does_not_fit_is_named_and_the_others_are_answered(lychee, tmp_path, how):
    file = tmp_path / "prompts.txt"
    file.write_text(f"Hello world\n{'a ' * 300}\nThe quick brown fox\n")
    code, out, err, report = lychee(*pair(), "--prompt-file", file, "--max-tokens", 6, *how)
    assert code == 2
    assert "lychee run: prompt 2: prompt has " in err
    for made in report["runs"].values():
        first, refused, third = made["requests"]
        assert refused.keys() == {"error"}
        assert "must leave room below max_model_len=256" in refused["error"]
        assert first["text"] == completion(shared_llm(), "Hello world", greedy(max_tokens=6)).text
        assert third["text"] == completion(shared_llm(), "The quick brown fox", greedy(max_tokens=6)).text
    if not how:
        assert out == f"[1] Hello world{first['text']}\n[3] The quick brown fox{third['text']}\n"


def test_where_no_prompt_fits_each_is_named_and_nothing_runs(lychee, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"{'a ' * 300}\n" * 2)
    code, out, err, report = lychee(*pair(), "--prompt-file", file, "--max-tokens", 6)
    assert (code, out, report) == (2, "", None)
    assert [line.split(": prompt has")[0] for line in err.splitlines()] == [f"lychee run: prompt {i}" for i in (1, 2)]


def test_a_text_that_the_context_ends_is_said(lychee):
    code, _, err, report = lychee(model_dir(), "--prompt", PROMPT, "--max-tokens", 1000, "--ignore-eos")
    assert code == 0
    (request,) = report["runs"]["native"]["requests"]
    room = 256 - request["prompt_tokens"]
    assert (request["finish_reason"], request["output_tokens"]) == ("length", room)
    assert f"lychee run: max_tokens is 1000, and max_model_len=256 leaves room for {room} after the prompt" in err


def test_no_progress_bar_is_drawn_where_standard_error_is_no_terminal(lychee, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Hello world\na\n")
    _, _, err, _ = lychee(*pair(), "--compare", "--prompt-file", file, "--max-tokens", 4)
    assert "\r" not in err
    assert "comparing" not in err


def test_a_whole_prompt_file_is_one_prompt(lychee, tmp_path):
    file, text = tmp_path / "prompt.txt", "def add(first, second):\n\n    return"
    file.write_text(text)
    code, out, _, report = lychee(*pair(), "--prompt-file", file, "--prompt-file-whole", "--max-tokens", 6)
    assert code == 0
    assert out == text + texts(report, "speculative")[0] + "\n"
    assert texts(report, "speculative") == [completion(shared_llm(), text, greedy(max_tokens=6, ignore_eos=False)).text]


def feed(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_without_a_prompt_standard_input_is_the_prompt(lychee, monkeypatch):
    text = "The quick\nbrown fox 日本"
    feed(monkeypatch, text.encode())
    code, out, _, report = lychee(*pair(), "--max-tokens", 6)
    assert code == 0
    assert out == text + texts(report, "speculative")[0] + "\n"


@pytest.mark.parametrize(("data", "message"), [(b"", "no prompt: give"), (b"a \xff b", "standard input is not UTF-8")])
def test_standard_input_without_text_is_refused(lychee, monkeypatch, data, message):
    feed(monkeypatch, data)
    code, _, err, _ = lychee(*pair(), "--max-tokens", 6)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("silent", ["no input", "a pipe that stays open"])
def test_without_arguments_the_packaged_pair_completes_its_own_prompt(lychee, monkeypatch, silent):
    ours, theirs = os.pipe()
    monkeypatch.setattr(prompts, "STDIN_WAIT_S", 0.01)
    with os.fdopen(ours) as reader:
        monkeypatch.setattr(sys, "stdin", None if silent == "no input" else reader)
        code, out, _, report = lychee("--max-tokens", 3)
    os.close(theirs)
    assert code == 0
    assert out == demo.PROMPT + texts(report, "speculative")[0] + "\n"


def test_chat_takes_each_prompt_as_a_users_message(lychee, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Hello world\nHow many lychees?\n")
    code, out, _, report = lychee(*pair(), "--chat", "--prompt-file", file, "--max-tokens", 6)
    assert code == 0
    llm = shared_llm()
    expected = [
        llm.chat([{"role": "user", "content": text}], greedy(max_tokens=6, ignore_eos=False)).outputs[0].text
        for text in ("Hello world", "How many lychees?")
    ]
    assert texts(report, "speculative") == expected
    assert out == "".join(f"[{i + 1}] {text}\n" for i, text in enumerate(expected))


def test_chat_may_begin_with_the_systems_message(lychee):
    code, _, _, report = lychee(*pair(), "--chat", "--system", "Be brief", "--prompt", "Hello", "--max-tokens", 6)
    assert code == 0
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    expected = shared_llm().chat(messages, greedy(max_tokens=6, ignore_eos=False)).outputs[0].text
    assert texts(report, "speculative") == [expected]
    assert expected != shared_llm().chat(messages[1:], greedy(max_tokens=6, ignore_eos=False)).outputs[0].text


OPTIONS = {
    "max_tokens": (["--max-tokens", 3], 3),
    "min_tokens": (["--min-tokens", 2], 2),
    "temperature": (["--temperature", 0.5], 0.5),
    "top_p": (["--top-p", 0.9], 0.9),
    "top_k": (["--top-k", 7], 7),
    "min_p": (["--min-p", 0.1], 0.1),
    "seed": (["--seed", 5], 5),
    "presence_penalty": (["--presence-penalty", 0.5], 0.5),
    "frequency_penalty": (["--frequency-penalty", -0.5], -0.5),
    "repetition_penalty": (["--repetition-penalty", 1.2], 1.2),
    "stop": (["--stop", "a", "--stop", "b"], ("a", "b")),
    "stop_token_ids": (["--stop-token-id", 5, "--stop-token-id", 6], (5, 6)),
    "ignore_eos": (["--ignore-eos"], True),
    "logit_bias": (["--logit-bias", "5=-inf", "--logit-bias", "6=1.5"], {5: float("-inf"), 6: 1.5}),
    "bad_words": (["--bad-word", "x"], ("x",)),
    "skip_special_tokens": (["--show-special-tokens"], False),
    "include_stop_str_in_output": (["--stop", "a", "--include-stop-str-in-output"], True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_sampling_parameter_of_a_text_is_an_option(name):
    argv, value = OPTIONS[name]
    args = run.parser().parse_args([str(arg) for arg in argv])
    assert getattr(sampling_options.sampling_params(args), name) == value
    assert getattr(sampling_options.sampling_params(run.parser().parse_args([])), name) != value


def test_no_sampling_parameter_is_forgotten():
    assert OPTIONS.keys() == {field.name for field in fields(SamplingParams)} - {"n", "logprobs"}


def test_penalties_and_stops_reach_the_engine(lychee):
    base = [*pair(), "--prompt", PROMPT, "--max-tokens", 20]
    _, plain, _, _ = lychee(*base)
    _, penalised, _, _ = lychee(*base, "--repetition-penalty", 1.5, "--presence-penalty", 1)
    params = greedy(max_tokens=20, ignore_eos=False, repetition_penalty=1.5, presence_penalty=1.0)
    assert penalised == PROMPT + completion(shared_llm(), PROMPT, params).text + "\n" != plain
    stop = plain.removeprefix(PROMPT)[4:6]
    _, stopped, _, _ = lychee(*base, "--stop", stop)
    assert stopped == PROMPT + plain.removeprefix(PROMPT).partition(stop)[0] + "\n"


def test_native_gives_the_tokens_of_speculation(lychee):
    _, fast, _, _ = lychee(*pair(), "--prompt", PROMPT, "--max-tokens", 30)
    code, slow, _, report = lychee(model_dir(), "--native", "--prompt", PROMPT, "--max-tokens", 30)
    assert (code, slow) == (0, fast)
    assert report["runs"].keys() == {"native"}


@pytest.mark.parametrize(
    ("options", "length"),
    [
        (["--num-speculative-tokens", 3], 3),
        (["--speculative-config", '{"num_speculative_tokens": 2}'], 2),
        (["--speculative-config", '{"adaptive": false}', "--max-draft-len", 5], 5),
        (["--max-draft-len", 0], 0),
    ],
)
def test_speculation_options_reach_the_engine(lychee, options, length):
    code, _, _, report = lychee(*pair("same"), "--prompt", PROMPT, "--ignore-eos", "--max-tokens", 13, *options)
    assert code == 0
    assert len(report["runs"]["speculative"]["totals"]["acceptance_by_depth"]) == length
    assert report["runs"]["speculative"]["requests"][0]["rounds"] == -(-12 // (length + 1))


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--draft-model", "--prompt-file-whole", "--compare", "--num-speculative-tokens", "--report"):
        assert option in shown


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [([], 0, "usage: lychee"), (["--version"], 0, "lychee 0."), (["walk"], 2, "'walk' is not a command, must be run")],
)
def test_the_first_word_names_the_command(monkeypatch, capsys, argv, code, said):
    monkeypatch.setattr(sys, "argv", ["lychee", *argv])
    assert __main__.main() == code
    out, err = capsys.readouterr()
    assert said in (err if code else out)


def test_lychee_run_is_the_run_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lychee", "run", str(model_dir()), "--prompt", PROMPT, "--max-tokens", "3"])
    assert __main__.main() == 0
    assert capsys.readouterr().out.startswith(PROMPT)


def test_a_lossy_run_is_labelled_on_the_terminal_and_in_the_report(lychee):
    lossy = ["--speculative-config", '{"fallback_sampling": false}', "--prompt", PROMPT, "--max-tokens", "6"]
    code, out, err, report = lychee(*pair(), *lossy, "--temperature", "1", "--compare")
    assert code == 0
    assert "lychee run: fallback_sampling=False is lossy" in err
    assert "speculative (lossy)" in out
    assert "identical: null (lossy" in out
    assert report["identical"] is None
    assert report["runs"]["speculative"]["lossy"] is True
    assert "lossy" not in report["runs"]["native"]
    code, out, err, report = lychee(*pair(), *lossy, "--temperature", "0")
    assert "lossy" not in out + err
    assert "lossy" not in report["runs"]["speculative"]


def test_an_interrupted_run_reports_what_it_emitted(lychee, monkeypatch):
    shown = []

    def interrupt(self, index, text, ended):
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("lychee.run.Printer.show", interrupt)
    code, _, err, report = lychee(model_dir(), "--prompt", PROMPT, "--max-tokens", "20", "--ignore-eos")
    assert code == 130
    (request,) = report["runs"]["native"]["requests"]
    assert request["finish_reason"] == "abort"
    assert 2 <= request["emitted"] < 20
    assert "tokens/s" in err


def test_a_reader_that_goes_away_ends_the_run_quietly():
    command = [sys.executable, "-m", "lychee.run", "--max-tokens", "30", "--prompt", "The dialog"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        process.stdout.read(3)
        process.stdout.close()
        lines = process.stderr.read().splitlines()
        assert [line for line in lines if b"warm-up took" not in line] == []  # a slow machine says so
        assert process.wait(60) == 141


@pytest.mark.parametrize("options", [[], ["--no-prefix-cache"]])
def test_a_prompt_that_comes_again_is_found_unless_the_prefix_cache_is_off(lychee, tmp_path, options):
    file = tmp_path / "prompts"
    file.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps in the sun.\n" * 2)
    code, _, _, report = lychee(*pair(), "--prompt-file", file, "--batch-size", 1, "--max-tokens", 4, *options)
    assert code == 0
    first, second = report["runs"]["speculative"]["requests"]
    assert (first["cached_tokens"], second["cached_tokens"] > 0) == (0, not options)
    assert report["runs"]["speculative"]["totals"]["prefix_cache_hits"] == second["cached_tokens"]
