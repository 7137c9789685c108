"""llama2.c again, in NumPy and plain Python from the description of its format: the oracle."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write(path: Path, *, layers=2, heads=4, keys=2, head=6, hidden=20, vocabulary=300, tied=True):
    """Writes a random checkpoint and returns what is in it, by llama2.c's own names."""
    rng = np.random.default_rng(5)
    width, context = heads * head, 16

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype("<f4")

    kept: dict[str, np.ndarray] = {
        "embedding": draw(vocabulary, width),
        "rms_att": 1 + draw(layers, width),
        "wq": draw(layers, width, width),
        "wk": draw(layers, keys * head, width),
        "wv": draw(layers, keys * head, width),
        "wo": draw(layers, width, width),
        "rms_ffn": 1 + draw(layers, width),
        "w1": draw(layers, hidden, width),
        "w2": draw(layers, width, hidden),
        "w3": draw(layers, hidden, width),
        "rms_final": 1 + draw(width),
        "freq_cis": draw(2, context, head // 2),
    }
    if not tied:
        kept["wcls"] = draw(vocabulary, width)
    size = vocabulary if tied else -vocabulary
    header = struct.pack("<7i", width, hidden, layers, heads, keys, size, context)
    path.write_bytes(header + b"".join(table.tobytes() for table in kept.values()))
    return kept | {"heads": np.array(heads), "keys": np.array(keys)}


def logits(model: dict[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """The scores of every next token after each of `tokens`, one position at a time."""
    model = {name: table.astype(np.float64) for name, table in model.items()}
    heads, keys = int(model["heads"]), int(model["keys"])
    layers, width = model["rms_att"].shape
    head = width // heads
    cache: list[tuple[list, list]] = [([], []) for _ in range(layers)]
    rows = []
    for position, token in enumerate(tokens):
        x = model["embedding"][token].copy()
        for layer in range(layers):
            h = _norm(x, model["rms_att"][layer])
            q = _rotate((model["wq"][layer] @ h).reshape(heads, head), position)
            k = _rotate((model["wk"][layer] @ h).reshape(keys, head), position)
            cache[layer][0].append(k)
            cache[layer][1].append((model["wv"][layer] @ h).reshape(keys, head))
            past_k, past_v = (np.stack(part) for part in cache[layer])
            out = []
            for index in range(heads):
                group = index // (heads // keys)
                scores = past_k[:, group] @ q[index] / np.sqrt(head)
                weights = np.exp(scores - scores.max())
                out.append(weights / weights.sum() @ past_v[:, group])
            x += model["wo"][layer] @ np.concatenate(out)
            h = _norm(x, model["rms_ffn"][layer])
            gate = model["w1"][layer] @ h
            x += model["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (model["w3"][layer] @ h))
        rows.append(model.get("wcls", model["embedding"]) @ _norm(x, model["rms_final"]))
    return np.stack(rows)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt(np.mean(x * x) + 1e-5)


def _rotate(vectors: np.ndarray, position: int) -> np.ndarray:
    """Rotates the pairs (0, 1), (2, 3), … of each vector, the later the slower."""
    head = vectors.shape[-1]
    rotated = vectors.copy()
    for pair in range(0, head, 2):
        angle = position / 10000 ** (pair / head)
        first, second = vectors[:, pair], vectors[:, pair + 1]
        rotated[:, pair] = first * np.cos(angle) - second * np.sin(angle)
        rotated[:, pair + 1] = first * np.sin(angle) + second * np.cos(angle)
    return rotated


def vocabulary(extra: Sequence[str]) -> tuple[list[bytes], list[float]]:
    """Control tokens, the 256 bytes, and then pieces, the earlier the better."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    scores = [0.0] * len(pieces)
    pieces += [piece.encode() for piece in extra]
    scores += [-float(rank) for rank in range(len(extra))]
    return pieces, scores


def tokenizer_bytes(pieces: Sequence[bytes], scores: Sequence[float]) -> bytes:
    """The contents of a tokenizer.bin."""
    data = struct.pack("<i", max(map(len, pieces)))
    for piece, score in zip(pieces, scores, strict=True):
        data += struct.pack("<fi", score, len(piece)) + piece
    return data


def encode(pieces: Sequence[bytes], scores: Sequence[float], text: str) -> list[int]:
    """The naive way: of all neighbours in the whole text, merge the best, until none is left."""
    if not text:
        return [1]
    where = {piece: index for index, piece in reversed(list(enumerate(pieces))) if index >= 259}
    tokens = []
    for character in " " + text:
        data = character.encode()
        tokens += [where[data]] if data in where else [3 + byte for byte in data]
    while True:
        best = None
        for at in range(len(tokens) - 1):
            if min(tokens[at : at + 2]) < 259:
                continue
            merged = where.get(pieces[tokens[at]] + pieces[tokens[at + 1]])
            if merged is not None and (best is None or scores[merged] > scores[best[1]]):
                best = at, merged
        if best is None:
            return [1, *tokens]
        tokens[best[0] : best[0] + 2] = [best[1]]
