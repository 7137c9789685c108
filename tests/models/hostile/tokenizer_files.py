"""Files of tokenizers: text that grows, settings of the wrong kind, damage."""

import json
from collections.abc import Iterator
from typing import Any

from tests.models.hostile.base import Case, Make, Valid, damaged, edited


def tokenizer_files(valid: Valid) -> Iterator[Case]:
    """Yields the cases."""
    good = json.loads((valid.folder / "tokenizer.json").read_text())

    def changed(**changes: Any) -> Make:
        return edited(valid, "tokenizer.json", json.dumps({**good, **changes}).encode())

    def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    letter = {"String": "w"}
    bombs: list[dict[str, Any]] = [
        replace(letter, "w" * size) for size in (100, 1000, 10**6, 10**7)
    ]
    bombs += [replace({"Regex": pattern}, "w" * 100) for pattern in ("", "w", ".", "(w+)+$", "(")]
    bombs += [{"type": "Prepend", "prepend": "w" * 10**6}, {"type": "NFKC"}, {"type": "x"}, {}]
    bombs += [
        {"type": "Precompiled", "precompiled_charsmap": value} for value in ("", "AAAA", "x", 3)
    ]
    for number, bomb in enumerate(bombs):
        yield Case(f"normalizer {number}", changed(normalizer=bomb))
        six = {"type": "Sequence", "normalizers": [bomb] * 6}
        yield Case(f"six normalizers {number}", changed(normalizer=six), number == 0)
    splits = (
        {"Regex": "(w+)+$"},
        {"Regex": "("},
        {"Regex": ""},
        {"String": ""},
        {"Regex": "(?<=w)"},
    )
    for number, pattern in enumerate(splits):
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        yield Case(f"pre-tokenizer {number}", changed(pre_tokenizer=split))
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 10**5
    template.append({"Sequence": {"id": "A", "type_id": 0}})  # type: ignore[dict-item]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    post = {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": special}
    yield Case("a hundred thousand special tokens", changed(post_processor=post))
    post = {**post, "single": template[-2:], "special_tokens": {}}
    yield Case("special tokens that are none", changed(post_processor=post))
    special = {"<s>": {"id": "<s>", "ids": [2**31], "tokens": ["<s>"]}}
    yield Case("special token 2**31", changed(post_processor={**post, "special_tokens": special}))
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
               "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    yield Case("padding to a billion", changed(padding=padding), True)
    for key in ("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                "post_processor", "decoder", "model"):  # fmt: skip
        for number, value in enumerate((3, "x", [], {}, {"type": "x"}, [None])):
            yield Case(f"tokenizer.json {key} {number}", changed(**{key: value}))
    for number, index in enumerate((-1, 2**31, 2**32, 2**63, "x", None)):
        token = {"id": index, "content": "w0", "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": True}  # fmt: skip
        yield Case(f"added token {number}", changed(added_tokens=[token]))
        vocabulary = {**good["model"], "vocab": {"w0": index, "<unk>": 0}}
        yield Case(f"vocabulary {number}", changed(model=vocabulary))
    for number, raw in enumerate(
        (b"", b"{", b"[" * 10**5, b"\xff", b"null", b"{}", b"3", b"\0" * 99)
    ):
        yield Case(
            f"tokenizer.json raw {number}", edited(valid, "tokenizer.json", raw), number == 1
        )
        yield Case(f"tokenizer_config raw {number}", edited(valid, "tokenizer_config.json", raw))
    settings = json.loads((valid.folder / "tokenizer_config.json").read_text())
    for number, change in enumerate(
        ({"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9}, {"tokenizer_class": "os.system"},
         {"tokenizer_class": 3}, {"tokenizer_class": "\x1b[2J"}, {"model_max_length": 10**400},
         {"model_max_length": "x"}, {"added_tokens_decoder": {"x": 3}}, {"bos_token": {"x": 3}},
         {"added_tokens_decoder": {"1000000000": {"content": "x"}}}, {"bos_token": 3},
         {"extra_special_tokens": 3}, {"add_bos_token": "x"}, {"chat_template": 3},
         {"auto_map": {"AutoTokenizer": ["x.Y", None]}}, {"padding_side": "x"},
         {"unk_token": None}, {"special_tokens_map_file": "/etc/passwd"})
    ):  # fmt: skip
        raw = json.dumps({**settings, **change}).encode()
        yield Case(f"tokenizer settings {number}", edited(valid, "tokenizer_config.json", raw),
                   number in (0, 2))  # fmt: skip
    for file in ("tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json"):
        for number, raw in enumerate((b"", b"\xff" * 99, b"{" * 10**4, b"3")):
            yield Case(f"{file} {number}", edited(valid, file, raw))
    for name, content in damaged(valid.folder / "tokenizer.json", "tokenizer.json", 10**6, 30, 10):
        yield Case(name, edited(valid, "tokenizer.json", content))
