"""What each window has around it, for tokenizers of several kinds."""

import json

import pytest
import transformers
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, processors

from joma.analysis.probing import text_windows
from joma.errors import JomaError
from joma.models import load, load_tokenizer
from joma.models.tokenizers import note_no_special_tokens
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
    said = special.describe()
    assert ("begins with" in said, "ends with" in said) == (bool(before), bool(after))
    assert all(WORDS[token] in said for token in before + after)
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
