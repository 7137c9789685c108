"""What each window has around it, for tokenizers of several kinds."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, processors

from joma.analysis.probing import text_windows
from joma.errors import JomaError
from joma.models import load, load_tokenizer
from joma.models.tokenizers import ByteTokenizer, note_no_special_tokens
from tests.models.tiny import tiny

WORDS = ["<unk>", "<s>", "</s>", "[CLS]", "[SEP]", *(f"w{index}" for index in range(50))]
TEXT = " ".join(f"w{index % 50}" for index in range(90))
PLAIN = [5 + index % 50 for index in range(90)]

KINDS = {
    "none": (None, (), ()),
    "bos": ("<s> $A", (1,), ()),
    "eos": ("$A </s>", (), (2,)),
    "cls sep": ("[CLS] $A [SEP]", (3,), (4,)),
    "two before": ("[CLS] <s> $A </s>", (3, 1), (2,)),
}


def _tokenizer(template, **options):
    fast = Fast(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if template is not None:
        special = [(word, WORDS.index(word)) for word in template.split() if word != "$A"]
        fast.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=template, pair=f"{template} $B", special_tokens=special
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", KINDS)
def test_every_window_has_what_the_tokenizer_adds(folder, kind):
    template, before, after = KINDS[kind]
    _tokenizer(template).save_pretrained(folder)
    loaded = load(folder)
    special = loaded.special_tokens
    assert (special.before, special.after) == (before, after)
    assert special.names == tuple(WORDS[token] for token in before + after)
    assert loaded.encode("w0 w1") == [*before, 5, 6, *after]
    assert loaded.encode("w0 w1", special=False) == [5, 6]
    read, note = text_windows(loaded, TEXT, window=10, count=4)
    size = 10 - special.count
    assert note is None
    assert read.shape == (4, 10)
    for row, window in enumerate(read.tolist()):
        inside = PLAIN[row * size : (row + 1) * size]
        assert window == [*before, *inside, *after]


@pytest.mark.parametrize("kind", KINDS)
def test_the_special_tokens_are_said(folder, kind):
    template, before, after = KINDS[kind]
    _tokenizer(template).save_pretrained(folder)
    said = load(folder).special_tokens.describe()
    assert ("begins with" in said) == bool(before)
    assert ("ends with" in said) == bool(after)
    assert all(WORDS[token] in said for token in before + after)


def test_settings_may_ask_for_what_the_tokenizer_does_not_add(folder):
    _tokenizer(None).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    for asked, expected in (
        ({"add_bos_token": True}, [1, 5]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 5, 2]),
        ({"add_bos_token": False}, [5, 2]),
    ):
        settings.write_text(json.dumps(json.loads(settings.read_text()) | asked))
        assert load_tokenizer(folder).encode("w0") == expected


def test_a_model_trained_here_reads_text_as_it_was_trained_to(folder):
    """Its training text had no special tokens, whatever the tokenizer would add."""
    _tokenizer("<s> $A").save_pretrained(folder)
    note_no_special_tokens(folder)
    assert load(folder).special_tokens.count == 0
    assert load(folder).encode("w0") == [5]


def test_a_short_text_is_read_whole_with_its_special_tokens(folder):
    _tokenizer("[CLS] $A [SEP]").save_pretrained(folder)
    read, note = text_windows(load(folder), "w0 w1 w2")
    assert read.tolist() == [[3, 5, 6, 7, 4]]
    assert note is not None
    assert "3 tokens" in note


def test_windows_without_a_place_for_text_are_refused(folder):
    _tokenizer("[CLS] $A [SEP]").save_pretrained(folder)
    loaded = load(folder)
    with pytest.raises(JomaError, match=r"window must be at least 3, for each begins with \[CLS\]"):
        text_windows(loaded, TEXT, window=2)
    assert text_windows(loaded, TEXT, window=3, count=1)[0].tolist() == [[3, 5, 4]]
    with pytest.raises(JomaError, match="window must be at most 5, as many tokens as the text has"):
        text_windows(loaded, "w0 w1 w2", window=6)


def test_bytes_have_no_special_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.special_tokens.count == 0
    assert tokenizer.special_tokens.describe() == ""


MODELS = os.environ.get("JOMA_MODELS")
GEMMA = "gemma-3-270m-q4_k_m.gguf"


@pytest.mark.slow
@pytest.mark.skipif(
    MODELS is None or not Path(MODELS, GEMMA).is_file(), reason=f"JOMA_MODELS has no {GEMMA}"
)
def test_gemma_reads_text_as_it_was_trained_to():
    """Its perplexity over these windows is that of transformers with <bos> before each."""
    from joma.data.text import read_text

    assert MODELS is not None
    loaded = load(Path(MODELS, GEMMA))
    assert loaded.special_tokens.names == ("<bos>",)
    text = read_text("embedded")
    own = transformers.AutoTokenizer.from_pretrained(MODELS, gguf_file=GEMMA)
    tokens = own.encode(text[:20_000], add_special_tokens=False)
    expected = [[own.bos_token_id, *tokens[at : at + 255]] for at in range(0, 4 * 255, 255)]
    read, _ = text_windows(loaded, text, window=256, count=4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(MODELS, gguf_file=GEMMA).eval()
    reference = _perplexity(theirs, torch.tensor(expected))
    assert _perplexity(loaded.model, read) == pytest.approx(reference, rel=0.02)
    without = torch.tensor(tokens[: 4 * 256]).reshape(4, 256)
    assert _perplexity(loaded.model, without) > 2 * reference


def _perplexity(model, windows):
    with torch.no_grad():
        logits = torch.cat([model(window[None]).logits for window in windows])
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten()
    )
    return math.exp(losses)
