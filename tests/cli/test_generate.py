"""`joma generate`: text, table, run folder, and what is refused."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from joma.models import load
from joma.report.cache_cost import read_costs
from joma.runs import Run
from tests.cli._command import joma, sentence
from tests.cli._tiny import TEXT, WORDS, make_model, make_tokenizer

PROMPT = " ".join(TEXT.split()[:40])


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def model(original) -> str:
    """A folder of its own, named as a user would."""
    shutil.copytree(original, "model")
    return "model"


def generate(*arguments: str, rounds: str = "2", prompt: str = PROMPT):
    given = ("--prompt", prompt, "--max-new-tokens", "16", "--rounds", rounds, *arguments)
    return joma("generate", "model", *given)


def record(*arguments: str, **more) -> dict:
    result = generate(*arguments, "--json", **more)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def reference(new: int = 16) -> tuple[list[int], list[float]]:
    """The greedy continuation with transformers alone, without any cache, and its nats."""
    loaded = load("model")
    tokens, nats = loaded.encode(PROMPT), []
    for _ in range(new):
        with torch.no_grad():
            shares = loaded.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        shares = shares.log_softmax(-1)
        tokens.append(int(shares.argmax()))
        nats.append(-float(shares.max()))
    return tokens[40:], nats


class TestText:
    def test_full_cache_gives_the_models_own_text(self):
        tokens, _ = reference()
        expected = " ".join(WORDS[token - 1] for token in tokens)
        result = generate("--no-compare")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.split() == expected.split()
        # A limit that is never reached changes nothing.
        for cache in ("window:n=60", "heavy-hitter:heavy=30,recent=30", "streaming:window=60"):
            assert record("--cache", cache, "--no-compare")["text"].split() == expected.split()

    def test_chunks_do_not_change_what_positions_decide(self):
        whole = record("--cache", "streaming:window=8,sinks=2", "--no-compare")["text"]
        parts = record("--cache", "streaming:window=8,sinks=2", "--no-compare", "--chunk", "7")
        assert parts["text"] == whole
        assert whole != record("--no-compare")["text"]

    def test_samples_follow_from_the_seed(self):
        drawn = [
            record("--temperature", "2", "--no-compare", "--seed", seed)["text"]
            for seed in ("1", "1", "2")
        ]
        assert drawn[0] == drawn[1] != drawn[2]

    def test_a_text_ends_where_the_model_ends_it(self):
        tokens, _ = reference()
        end = tokens[5]
        path = Path("model/config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": end}))
        made = record("--no-compare")["text"].split()
        assert made == [WORDS[token - 1] for token in tokens[: tokens.index(end)]]

    def test_the_first_token_is_that_of_training(self):
        """A tokenizer that begins texts with a token, and ends them with one."""
        path = Path("model/tokenizer_config.json")
        more = {"bos_token": "<unk>", "add_bos_token": True}
        more |= {"eos_token": "<unk>", "add_eos_token": True}  # which no prompt ends with
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
        assert record("--no-compare")["prompt_tokens"] == 41

    def test_chat(self):
        assert "has no chat template" in sentence(generate("--chat"))
        path = Path("model/tokenizer_config.json")
        template = "cat {% for turn in messages %}{{ turn['content'] }}{% endfor %} dog"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        assert record("--chat", "--no-compare")["prompt_tokens"] == 42


class TestTable:
    def test_numbers_against_transformers_alone(self):
        found = record("--cache", "window:n=6", "--scored", "20")
        full, window = found["caches"]
        tokens, nats = reference()
        assert full["reply_tokens"] == window["reply_tokens"] == 16
        assert full["reply_nll"] == pytest.approx(sum(nats) / 16, abs=1e-5)
        assert (full["text_tokens"], full["seen"]) == (20, 56)
        loaded = load("model")
        whole = torch.tensor([loaded.encode(PROMPT) + tokens])
        with torch.no_grad():  # each query sees six keys before it, and itself
            place = torch.arange(56)
            near = place[:, None] - place
            mask = torch.where((near >= 0) & (near <= 6), 0.0, -torch.inf)[None, None]
            shares = loaded.model(whole, attention_mask=mask).logits[0, :-1].log_softmax(-1)
        expected = -shares.gather(1, whole[0, 1:, None])[:, 0]
        assert window["text_nll"] == pytest.approx(float(expected[19:39].mean()), abs=1e-5)
        assert window["reply_nll"] == pytest.approx(float(expected[39:].mean()), abs=1e-5)
        assert window["reply_cost"] == pytest.approx(window["reply_nll"] - full["reply_nll"])
        same = shares[39:].argmax(-1) == whole[0, 40:]
        assert window["agreement"] == pytest.approx(float(same.float().mean()))
        # Two layers, two heads of four numbers in float32, for key and value.
        assert full["bytes"] == 56 * 2 * 2 * 2 * 4 * 4
        assert window["bytes"] < 0.2 * full["bytes"]
        assert window["timed"] == 2 * 14
        assert window["ms"] > 0
        assert window["speed_low"] <= window["speed"] <= window["speed_high"]

    def test_a_sweep_has_a_row_for_each(self):
        result = generate("--sweep", "25,50%", "--out", "swept", "--rounds", "0")
        assert result.exit_code == 0, result.stderr
        rows = read_costs(Run.open("swept"))
        assert [row["cache"] for row in rows[:5]] == [
            "full",
            "window:n=14",
            "streaming:window=10",
            "heavy-hitter:heavy=7,recent=7",
            "random:n=14,recent=7",
        ]
        assert [row["keys"] for row in rows[5:]] == [28.0] * 4
        assert all(math.isnan(row["speed"]) for row in rows)
        assert "window:n=14" in result.stderr
        assert "times" not in result.stderr  # no speed was measured
        named = record("--sweep", "8", "--cache", "random", "--cache", "window", rounds="0")
        assert [row["policy"] for row in named["caches"]] == ["full", "random", "window"]

    def test_names_break_between_arguments_in_a_narrow_window(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        said = generate("--cache", "heavy-hitter:heavy=6,recent=6,score=mean").stderr
        lines = [line.split() for line in said.splitlines()]
        begins = [line[0] for line in lines if line]
        at = begins.index("heavy-hitter:")
        assert begins[at : at + 4] == ["heavy-hitter:", "heavy=6,", "recent=6,", "score=mean"]
        assert all(len(line) <= 80 for line in said.splitlines() if "Run folder" not in line)

    def test_budgets_of_layers(self):
        found = record("--budget", "mass:25%", rounds="0")["caches"][1]
        assert (found["cache"], found["keys"]) == ("heavy-hitter:mass=14", 14.0)
        plain = record("--budget", "25%", rounds="0")["caches"][1]
        assert plain["cache"] == "heavy-hitter:heavy=7,recent=7"

    @pytest.mark.parametrize("rule", ["auto", "mass", "entropy"])
    def test_budgets_of_layers_may_exceed_the_prompt(self, rule):
        """Attention is measured on the prompt; the text that the cache reads is longer."""
        options = ("--budget", f"{rule}:60", "--max-new-tokens", "100", "--scored", "0")
        found = record(*options, rounds="0")
        assert found["prompt_tokens"] < 60
        assert found["caches"][1]["keys"] == 60.0

    def test_a_short_prompt_is_not_scored(self):
        found = record("--cache", "window:n=4", rounds="0", prompt="the cat runs")
        assert [row["text_tokens"] for row in found["caches"]] == [0, 0]
        assert found["caches"][1]["text_cost"] is None


class TestRunFolder:
    def test_what_is_left(self):
        result = generate("--cache", "window:n=8", "--out", "here")
        assert result.exit_code == 0, result.stderr
        run = Run.open("here")
        assert run.config["cache"] == ["window:n=8"]
        assert PROMPT.startswith(run.config["prompt"])
        text = run.read_json("text")
        assert text["prompt"] == PROMPT
        assert text["generated"].split() == result.stdout.split()
        assert run.read_json("outcome")["finding"].startswith("window:n=8 holds")
        shown = joma("runs", "show", "here")
        assert "What a smaller cache would cost" in shown.stdout
        assert "window:n=8" in shown.stdout
        page = joma("report", "here")
        assert page.exit_code == 0, page.stderr
        assert "window:n=8 holds" in Path("here/report.html").read_text(encoding="utf-8")

    def test_dry_run(self):
        plan = record("--cache", "window:n=8", "--dry-run")
        assert plan["prompt_tokens"] == 40
        full, window = plan["caches"]
        measured = record("--cache", "window:n=8", rounds="0")["caches"]
        assert window["bytes"] == measured[1]["bytes"]
        assert full["bytes"] == pytest.approx(measured[0]["bytes"], rel=0.1)  # with its notes
        assert not list(Path("runs").glob("generate*-dry*"))
        said = generate("--cache", "window:n=8", "--dry-run")
        assert "window:n=8" in said.stdout

    def test_ctrl_c_while_caches_are_compared(self, monkeypatch):
        from joma.analysis.generation import Comparison

        read, left = Comparison._read, [3]

        def interrupted(*given):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return read(*given)

        monkeypatch.setattr(Comparison, "_read", interrupted)
        result = generate("--cache", "window:n=8", "--out", "cut")
        assert result.exit_code == 130
        full, window = read_costs(Run.open("cut"))
        assert (full["text_tokens"], full["reply_tokens"]) == (20, 16)
        assert (window["text_tokens"], window["reply_tokens"]) == (20, 0)
        assert window["text_cost"] != 0
        assert "window:n=8" in result.stderr


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--cache", "sliding:n=8"), "--cache must be one of full, window:n=N"),
            (("--cache", "window"), "--cache must be written window:n=N"),
            (
                ("--cache", "window:n=0"),
                "--cache 'window:n=0' is impossible: n must be a whole number",
            ),
            (("--cache", "window:n=8", "--budget", "8"), "--cache must be a policy's name alone"),
            (("--budget", "0"), "--budget must leave each head one key or more"),
            (("--budget", "150%"), "--budget must be above 0% and at most 100%"),
            (("--budget", "much"), "--budget must be a number of keys such as 64"),
            (("--budget", "4", "--cache", "streaming"), "--budget must be 5 keys or more"),
            (("--sweep", "5,,10"), "--sweep must be budgets with commas"),
            (("--sweep", "5,x%"), "--sweep must be a number of keys such as 64"),
            (("--sweep", "4", "--dry-run"), "--sweep must be 5 keys or more for streaming"),
            (("--budget", "auto", "--cache", "window"), "--cache must be heavy-hitter"),
            (("--temperature", "-1"), "it must be 0 or a positive number"),
        ],
    )
    def test_in_one_sentence(self, arguments, words):
        assert words in sentence(generate(*arguments))
        assert not Path("runs").exists()

    def test_before_the_model_is_read(self):
        said = sentence(joma("generate", "no-such-model", "--prompt", "x", "--cache", "window"))
        assert "--cache must be written window:n=N" in said

    def test_no_prompt(self):
        assert "got neither" in sentence(joma("generate", "model"))
        assert "at least one token" in sentence(joma("generate", "model", "--prompt", ""))
        assert "which is none" in sentence(joma("generate", "model", "--prompt-file", "no.txt"))

    def test_learned_positions_end(self):
        import transformers

        with torch.random.fork_rng():
            config = transformers.GPT2Config(
                vocab_size=len(WORDS) + 1, n_positions=48, n_embd=8, n_layer=1, n_head=2
            )
            transformers.GPT2LMHeadModel(config).save_pretrained("learned")
        make_tokenizer(Path("learned"))
        given = ("generate", "learned", "--prompt", PROMPT, "--cache", "window:n=8")
        said = sentence(joma(*given, "--max-new-tokens", "9"))
        assert "--max-new-tokens may be 8 at most" in said
        assert joma(*given, "--max-new-tokens", "8", "--rounds", "0").exit_code == 0

    def test_a_model_without_a_head(self):
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        with torch.random.fork_rng():
            transformers.LlamaModel(config).save_pretrained("body")
        make_tokenizer(Path("body"))
        said = sentence(joma("generate", "body", "--prompt", "the cat"))
        assert "cannot continue a text" in said

    def test_help_names_what_there_is(self):
        from joma.inference.policies import POLICIES, usage

        result = joma("generate", "any", "--cache", "help")
        assert result.stdout.split() == list(map(usage, POLICIES))


@pytest.mark.slow
def test_a_real_chat_model():
    folder = os.environ.get("JOMA_MODELS")
    path = Path(folder or "", "SmolLM2-135M-Instruct.Q4_1.gguf")
    if folder is None or not path.is_file():
        pytest.skip("JOMA_MODELS names no folder with SmolLM2-135M-Instruct.Q4_1.gguf")
    asked = ("--prompt", "What is the capital of France?", "--chat", "--max-new-tokens", "24")
    result = joma("generate", str(path), *asked, "--cache", "heavy-hitter", "--budget", "50%")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == "The capital of France is Paris."
    assert "heavy-hitter:heavy=16,recent=15 holds" in result.stderr


def test_a_model_that_no_cache_can_serve():
    import transformers

    with torch.random.fork_rng():
        config = transformers.MambaConfig(
            vocab_size=len(WORDS) + 1, hidden_size=8, state_size=4, num_hidden_layers=1
        )
        transformers.MambaForCausalLM(config).save_pretrained("mamba")
    make_tokenizer(Path("mamba"))
    said = sentence(joma("generate", "mamba", "--prompt", PROMPT))
    assert "mamba" in said
    assert not Path("runs").exists()
