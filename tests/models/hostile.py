"""Model files made to do harm: damaged, lying about themselves, or far larger than they seem.

Every case writes files below a folder and returns what to load. The random ones are drawn from a
fixed seed, so that a case keeps its name and its bytes.
"""

import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Make = Callable[[Path], Path]
Case = tuple[str, Make]
GATE, NORM = "model.layers.1.mlp.gate_proj.weight", "model.norm.weight"
HUGE = (0, -1, 10**9, 2**31, 2**62, 10**400, 1e308, -1e308)
ODD = ("x", None, [], {}, True, [None], [["x"]], {"a": {}}, float("nan"), float("inf"))
RAW = (b"", b"{", b"[]", b"null", b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe", b"\0" * 99, b"3")
_QUICK = """
safetensors data_offsets 0, safetensors shape 9, safetensors dtype 0, safetensors name 0
safetensors header 4, safetensors tail 0, safetensors tail 1, weights NaN, weights complex
weights escapes, weights none, index 1, index 13, index 22, pickle calls 0, pickle expanded
pickle expanded a lot, config raw 1, config num_hidden_layers 2, config num_hidden_layers 5
config vocab_size 4, config hidden_size 8, config num_labels 2, config architectures 0
config raw 5, config default t5, config.json sparse, config.json folder, config.json pipe
tokenizer.json bomb 0, tokenizer.json raw 1, tokenizer.json padding 6, tokenizer_config.json 0
gguf header 0, gguf header 1, gguf llama.block_count 5, llama2.c field 0 5, llama2.c field 2 5
llama2.c field 5 5, llama2.c deep 200000
"""
QUICK = {name for line in _QUICK.split("\n") for name in line.split(", ") if name}
"""The few that are run every time: one of each kind."""


@dataclass(frozen=True)
class Valid:
    """Files that load: what hostile ones are made from.

    Attributes:
        folder: A model in Hugging Face layout with a tokenizer.
        gguf: A GGUF file.
        llama2c: A llama2.c checkpoint with its tokenizer behind the weights.
    """

    folder: Path
    gguf: Path
    llama2c: Path

    def replacing(self, file: str, write: Callable[[Path], Any], *, instead: str = "") -> Make:
        """Copy the folder, with one of its files written anew."""

        def make(place: Path) -> Path:
            folder = Path(shutil.copytree(self.folder, place / "model"))
            (folder / (instead or file)).unlink(missing_ok=True)
            write(folder / file)
            return folder

        return make

    def edited(self, file: str, content: Any) -> Make:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.replacing(file, lambda path: path.write_bytes(raw))


def cases(valid: Valid) -> Iterator[Case]:
    """Yield every case, the families one after the other."""
    for family in (_safetensors, _weights, _indexes, _pickles, _configurations, _tokenizers):
        yield from family(valid)
    for family in (_gguf, _llama2c, _odd_files):
        yield from family(valid)


def _numbered(name: str, makes: Iterator[Make]) -> Iterator[Case]:
    for number, make in enumerate(makes):
        yield f"{name} {number}", make


def _damaged(path: Path, head: int, flips: int, cuts: int) -> Iterator[bytes]:
    """Copies of a file with bytes of its first `head` changed, and copies cut short."""
    data = path.read_bytes()
    draw = random.Random(f"{path.name} {len(data)}")
    for _ in range(flips):
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(min(head, len(data)))
            changed[at] = draw.choice((0, 255, draw.randrange(256)))
        yield bytes(changed)
    for _ in range(cuts):
        yield data[: draw.randrange(len(data))]


def _single(name: str, content: bytes) -> Make:
    def make(place: Path) -> Path:
        (place / name).write_bytes(content)
        return place / name

    return make


def _safetensors(valid: Valid) -> Iterator[Case]:
    file = "model.safetensors"
    data = (valid.folder / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    first = next(name for name in header if name != "__metadata__")

    def with_header(content: Any, tail: bytes = rest) -> Make:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        return valid.edited(file, len(raw).to_bytes(8, "little") + raw + tail)

    shapes = ([-1], [0], [2**62, 2**62], [2**63], [1e300], ["1"], None, {}, [[1]], [1] * 10_000)
    entries: dict[str, tuple[Any, ...]] = {
        "data_offsets": ([0], [0, 1, 2], [1, 0], [-4, 0], [0, 2**64], None),
        "shape": shapes,
        "dtype": ("F4", "C64", "X", None, 3, "I128"),
    }
    for key, values in entries.items():
        changed = ({**header, first: {**header[first], key: value}} for value in values)
        yield from _numbered(f"safetensors {key}", map(with_header, changed))
    wrong = (None, [], 3, {}, [header[first]], {"a": header[first]})
    made = (with_header({**header, first: entry}) for entry in wrong)
    yield from _numbered("safetensors entry", made)
    names = ("\x1b[2J\x1b]0;x\x07", "", "a" * 100_000, "../x", "\ud800", "\u202e", "model\0norm")
    moved = ({(n if k == first else k): v for k, v in header.items()} for n in names)
    yield from _numbered("safetensors name", map(with_header, moved))
    metadata = ({**header, "__metadata__": it} for it in ([1], None, {"a": 1}))
    yield from _numbered("safetensors metadata", map(with_header, metadata))
    yield from _numbered("safetensors header", map(with_header, RAW))
    many = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(10**5)}
    yield "safetensors 100,000 empty tensors", with_header(many, b"")
    lengths = (size.to_bytes(8, "little") + data[8:] for size in (0, 7, 9, 2**31, 2**64 - 1))
    damaged = _damaged(valid.folder / file, 8 + length, 90, 20)
    for name, contents in (("tail", (data + b"\0", b"")), ("length", lengths), ("bytes", damaged)):
        made = (valid.edited(file, content) for content in contents)
        yield from _numbered(f"safetensors {name}", made)


def _weights(valid: Valid) -> Iterator[Case]:
    state = load_file(valid.folder / "model.safetensors")
    norm, gate = state[NORM], state[GATE]
    tensors = {
        "NaN": {NORM: torch.full_like(norm, torch.nan)},
        "infinite": {NORM: torch.full_like(norm, torch.inf)},
        "complex": {GATE: gate.to(torch.complex64)},
        "bool": {GATE: gate > 0},
        "float8": {GATE: gate.to(torch.float8_e4m3fn)},
        "three axes": {GATE: gate[None]},
        "transposed": {GATE: gate.T.contiguous()},
        "empty": {GATE: torch.zeros(0)},
        "a layer of 20 digits": {f"model.layers.{'9' * 20}.mlp.gate_proj.weight": gate},
        "escapes": {"model.layers.0.\x1b[31mred.weight": gate},
    }
    whole = {name: {**state, **change} for name, change in tensors.items()}
    for name, content in {**whole, "none": {}, "one": {NORM: norm}}.items():

        def write(path: Path, content: dict[str, torch.Tensor] = content) -> None:
            own = {key: tensor.clone() for key, tensor in content.items()}
            save_file(own, path, metadata={"format": "pt"})

        yield f"weights {name}", valid.replacing("model.safetensors", write)


def _indexes(valid: Valid) -> Iterator[Case]:
    names = list(load_file(valid.folder / "model.safetensors"))
    good = dict.fromkeys(names, "part.safetensors")

    def indexed(content: Any, kind: str = "model.safetensors") -> Make:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()

        def write(path: Path) -> None:
            shutil.copy(valid.folder / "model.safetensors", path.parent / "part.safetensors")
            path.write_bytes(raw)

        return valid.replacing(f"{kind}.index.json", write, instead="model.safetensors")

    files = ("../x", "/etc/passwd", "", "..", "a/b", "\0", "x" * 5000, "config.json")
    files = (*files, "missing.safetensors", "\x1b[2J.safetensors", "part.safetensors\n")
    maps: list[Any] = [[], {}, None, "x", {"a": None}, {"a": []}]
    maps += [{**good, names[0]: file} for file in files]
    maps += [{**good, "\x1b[2J": "part.safetensors"}, {names[0]: "part.safetensors"}]
    maps.append({f"t{n}": "part.safetensors" for n in range(10**5)})
    maps.append({f"t{n}": f"{n}.safetensors" for n in range(10**4)})
    contents = [*RAW, *({"weight_map": it} for it in maps)]
    yield from _numbered("index", map(indexed, contents))
    pickles = (indexed(content, "pytorch_model.bin") for content in contents[::4])
    yield from _numbered("index of pickles", pickles)


class _Calls:
    """Calls a function where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


def _pickles(valid: Valid) -> Iterator[Case]:
    state = load_file(valid.folder / "model.safetensors")
    one, gate = torch.ones(1), state[GATE]

    def written(write: Callable[[Path], Any]) -> Make:
        return valid.replacing("pytorch_model.bin", write, instead="model.safetensors")

    def raw(content: bytes) -> Make:
        return written(lambda path: path.write_bytes(content))

    def saved(content: Any) -> Make:
        return written(lambda path: torch.save(content, path))

    trap = str(valid.folder.parent / "trapped")
    calls = (
        _Calls(os.mkdir, trap),
        _Calls(os.system, f"mkdir {trap}"),
        _Calls(eval, f"__import__('os').mkdir({trap!r})"),
        _Calls(bytearray, 10**11),
        _Calls(torch.zeros, 10**10),
        _Calls(open, trap, "w"),
    )
    yield from _numbered("pickle calls", (saved({**state, "x": call}) for call in calls))
    yield from _numbered("pickle that is a call", (raw(pickle.dumps(call)) for call in calls))
    values: dict[str, Any] = {
        "expanded": one.expand(40, 24),
        "expanded a lot": one.expand(10**6, 10**6),
        "complex": gate.to(torch.complex64),
        "sparse": torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), one, (10**6, 10**6)),
        "meta": torch.empty(10**6, 10**6, device="meta"),
        "nested": {"a": {"b": gate}},
        "number": 3,
    }
    for name, value in values.items():
        yield f"pickle {name}", saved({**state, GATE: value})
    shared = {name: one.expand(tensor.shape) for name, tensor in state.items()}
    yield from _numbered("pickle of", map(saved, (shared, [], {}, None, "x", gate, {1: gate})))

    def compressed(path: Path) -> None:
        torch.save({**state, GATE: torch.zeros(5 * 10**7)}, path)
        with zipfile.ZipFile(path) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name, content in entries.items():
                new.writestr(name, content)

    yield "pickle compressed", written(compressed)
    good = valid.folder.parent / "good.bin"
    torch.save(state, good)
    raws = (b"", b"PK", b"\x80\x02.", b"\x80\x04" + b"(" * 10**5)
    yield from _numbered("pickle raw", map(raw, (*raws, *_damaged(good, 3000, 25, 8))))


def _configurations(valid: Valid) -> Iterator[Case]:
    config = json.loads((valid.folder / "config.json").read_text())
    sizes = """num_hidden_layers hidden_size intermediate_size num_attention_heads head_dim
        num_key_value_heads vocab_size max_position_embeddings num_labels rms_norm_eps
        rope_parameters tie_word_embeddings"""
    values: dict[str, tuple[Any, ...]] = dict.fromkeys(sizes.split(), (*HUGE, *ODD))
    values |= {
        "architectures": ([["x"]], [None], "x", 3, ["os"], ["\x1b[2J"], ["LlamaConfig"]),
        "model_type": ("", "\x1b[2J", "auto", "../x", 3, None, "x" * 10**5),
        "dtype": ("complex64", "int8", "x", "os.system", 3),
        "id2label": ({"a": "b"}, {str(n): "x" for n in range(10**5)}),
        "layer_types": (3, [], ["x"], ["full_attention"] * 10**5),
        "quantization_config": ({}, 3, {"quant_method": "x"}),
        "auto_map": ({"AutoConfig": "x.Y"}, 3, {"AutoModel": ["a", "b"]}),
        "pad_token_id": (2**62, -1, 10**6, "x"),
        "hidden_act": ("x", 3, "os.system", None),
        "text_config": (3, {}, {"model_type": "x"}),
        "attn_implementation": ("a/b", 3),
        "pruned_heads": ({"0": [0]}, 3, {"x": 3}),
    }
    for key, given in values.items():
        made = (valid.edited("config.json", {**config, key: value}) for value in given)
        yield from _numbered(f"config {key}", made)
    whole = json.dumps(config)
    raws = [*RAW, whole.encode("utf-16"), (whole + "x").encode()]
    raws += [b'{"a": ' + b"9" * 5000 + b"}", b"[" + b"[]," * 10**6 + b"[]]"]
    made = (valid.edited("config.json", content) for content in raws)
    yield from _numbered("config raw", made)
    # A few bytes whose default is a model of gigabytes.
    kinds = "gemma3 mixtral deepseek_v3 jamba gpt2 bert t5 whisper clip llava mamba encoder-decoder"
    for kind in kinds.split():
        yield f"config default {kind}", valid.edited("config.json", {"model_type": kind})
    deep = {"model_type": "mixtral", "num_hidden_layers": 1000, "num_local_experts": 1000}
    yield "config of many experts", valid.edited("config.json", deep)
    deep = {"model_type": "t5", "num_layers": 2000, "num_decoder_layers": 2000}
    yield "config of two deep stacks", valid.edited("config.json", deep)


def _tokenizers(valid: Valid) -> Iterator[Case]:
    file = "tokenizer.json"
    good = json.loads((valid.folder / file).read_text())

    def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    bombs = [replacing({"String": "w"}, "w" * size) for size in (100, 1000, 10**6, 10**7)]
    bombs += [replacing({"Regex": pattern}, "w" * 100) for pattern in ("", "w", "(w+)+$", "(")]
    bombs += [{"type": "Prepend", "prepend": "w" * 10**6}, {"type": "Precompiled"}]
    six = [{"type": "Sequence", "normalizers": [bomb] * 6} for bomb in bombs]
    made = (valid.edited(file, {**good, "normalizer": it}) for it in (*six, *bombs))
    yield from _numbered(f"{file} bomb", made)
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    patterns = ({"Regex": "(w+)+$"}, {"Regex": "("}, {"Regex": ""}, {"String": ""})
    special = {"<s>": {"id": "<s>", "ids": [2**31], "tokens": ["<s>"]}}
    template: list[Any] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 10**5
    template.append({"Sequence": {"id": "A", "type_id": 0}})
    post = {"type": "TemplateProcessing", "pair": [], "special_tokens": special}
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    indexes = (-1, 2**31, 2**32, 2**63, "x", None)
    own: dict[str, list[Any]] = {
        "pre_tokenizer": [{**split, "pattern": pattern} for pattern in patterns],
        "post_processor": [
            {**post, "single": template},
            {**post, "single": template[-2:], "special_tokens": {}},
        ],
        "padding": [padding],
        "added_tokens": [[{"id": n, "content": "w0", "special": True, **flags}] for n in indexes],
        "model": [{**good["model"], "vocab": {"w0": n, "<unk>": 0}} for n in indexes],
    }
    for key in (*own, "version", "truncation", "normalizer", "decoder"):
        values = (3, "x", [], {}, {"type": "x"}, [None], *own.get(key, []))
        made = (valid.edited(file, {**good, key: value}) for value in values)
        yield from _numbered(f"{file} {key}", made)
    contents = (*RAW, *_damaged(valid.folder / file, 10**6, 30, 10))
    yield from _numbered(f"{file} raw", (valid.edited(file, content) for content in contents))
    settings = json.loads((valid.folder / "tokenizer_config.json").read_text())
    changes: tuple[dict[str, Any], ...] = (
        {"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9},
        *({"tokenizer_class": value} for value in ("os.system", 3, "\x1b[2J")),
        *({"model_max_length": value} for value in (10**400, "x")),
        *({"added_tokens_decoder": {at: value}} for at, value in (("x", 3), ("9" * 9, {}))),
        *({"bos_token": value} for value in ({"x": 3}, 3)),
        *({key: 3} for key in ("extra_special_tokens", "add_bos_token", "chat_template")),
        {"auto_map": {"AutoTokenizer": ["x.Y", None]}, "padding_side": "x", "unk_token": None},
        {"special_tokens_map_file": "/etc/passwd"},
    )
    contents = (*({**settings, **change} for change in changes), *RAW)
    made = (valid.edited("tokenizer_config.json", content) for content in contents)
    yield from _numbered("tokenizer_config.json", made)
    for other in ("tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json"):
        yield from _numbered(other, (valid.edited(other, content) for content in RAW))


def _gguf(valid: Valid) -> Iterator[Case]:
    data = valid.gguf.read_bytes()

    def entry(name: bytes, kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value

    def header(tensors: int, entries: int, body: bytes = b"") -> bytes:
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + body

    named = entry(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")
    headers = [header(0, 1, named)]
    headers += [header(*counts) for counts in ((2**63, 0), (0, 2**63), (10**5, 0), (1, 1))]
    for kind, length in ((4, 2**60), (8, 2**60), (9, 2), (99, 1), (0, 10**6), (0, 10**7)):
        array = entry(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", kind, length))
        headers.append(header(0, 2, named + array + bytes(length if length == 10**7 else 0)))
    made = (_single("model.gguf", content) for content in headers)
    yield from _numbered("gguf header", made)
    sizes = "block_count context_length feed_forward_length attention.head_count"
    for key in (*(f"llama.{it}" for it in sizes.split()), "tokenizer.ggml.model"):
        at = data.index(key.encode()) + len(key)
        kinds = [data[at : at + 4] + struct.pack("<I", n) for n in (0, 1, 10**6, 2**31, 2**32 - 1)]
        kinds.append(struct.pack("<IQ", 10, 2**62))
        contents = (data[:at] + it + data[at + len(it) :] for it in kinds)
        made = (_single("model.gguf", content) for content in contents)
        yield from _numbered(f"gguf {key}", made)
    damaged = (_single("model.gguf", content) for content in _damaged(valid.gguf, 5500, 60, 20))
    yield from _numbered("gguf bytes", damaged)


def _llama2c(valid: Valid) -> Iterator[Case]:
    data = valid.llama2c.read_bytes()
    fields = list(struct.unpack("<7i", data[:28]))
    for place in range(7):
        values = (0, -1, 1, 3, 2**20, 2**31 - 1, -(2**31))
        changed = ([*fields[:place], value, *fields[place + 1 :]] for value in values)
        made = (_single("model.bin", struct.pack("<7i", *it) + data[28:]) for it in changed)
        yield from _numbered(f"llama2.c field {place}", made)
    for count in (2048, 200_000):

        def deep(place: Path, count: int = count) -> Path:
            with open(place / "model.bin", "wb") as file:
                file.write(struct.pack("<7i", 2, 1, count, 1, 1, 300, 4))
                file.truncate(28 + 4 * (300 * 2 + count * 26 + 2 + 2 * 4))
            return place / "model.bin"

        yield f"llama2.c deep {count}", deep
    tails = [b"\0", b"\0" * 10, b"\xff" * 1000]
    tails += [struct.pack("<ifi", 1, *entry) for entry in ((1.0, 2**31 - 1), (float("nan"), 1))]
    contents = [b"", b"x", b"\0" * 28, b"\xff" * 28, b"ak42" + bytes(60)]
    contents += [data + tail for tail in tails] + list(_damaged(valid.llama2c, 28, 10, 20))
    yield from _numbered("llama2.c bytes", (_single("model.bin", content) for content in contents))


def _odd_files(valid: Valid) -> Iterator[Case]:
    def sparse(path: Path) -> None:
        with open(path, "wb") as handle:
            handle.truncate(50 * 10**9)

    kinds: dict[str, Callable[[Path], Any]] = {
        "folder": Path.mkdir,
        "pipe": os.mkfifo,
        "loop": lambda path: path.symlink_to(path),
        "device": lambda path: path.symlink_to("/dev/zero"),
        "sparse": sparse,
    }
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        for name, write in kinds.items():
            yield f"{file} {name}", valid.replacing(file, write)
    yield "an empty folder", lambda place: place
    yield "a path too long", lambda place: place / ("x" * 5000)
    yield "a name of odd characters", lambda place: place / "\udcff\x1b[2J"
