"""No model file ends in a traceback, or takes memory or time that its size does not explain.

Every case runs in a process of its own, forked from one that has everything imported.
"""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers

from tests.models.hostile import QUICK, Case, Valid, cases
from tests.models.tiny import VOCABULARY, tiny

pytest.importorskip("gguf", reason="GGUF files are read by the gguf package")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux tells it")

MEMORY, SECONDS = 2 * 2**30, 20
TEXT = "w1 w2 w3 w4 " * 30


def valid_files(place: Path) -> Valid:
    """Writes the files from which hostile ones are made."""
    from tests.models.tiny_gguf import write_gguf

    folder = place / "valid"
    tiny("llama").save_pretrained(folder)
    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(VOCABULARY - 3))]
    fast = Fast(models.WordLevel({word: index for index, word in enumerate(words)}, "<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", bos_token="<s>"
    ).save_pretrained(folder)
    llama2c = place / "valid.bin"
    dim, hidden, layers, heads, words_, length = 8, 12, 2, 2, 300, 16
    numbers = words_ * dim + layers * (2 * dim + 4 * dim * dim + 3 * dim * hidden) + dim
    numbers += 2 * length * (dim // heads // 2)
    header = struct.pack("<7i", dim, hidden, layers, heads, heads, words_, length)
    pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    pieces += [b"%c" % (97 + index % 26) * (1 + index // 26) for index in range(41)]
    tail = b"".join(struct.pack("<fi", 0.0, len(piece)) + piece for piece in pieces)
    llama2c.write_bytes(header + bytes(4 * numbers) + struct.pack("<i", 9) + tail)
    return Valid(folder, write_gguf(place / "valid.gguf"), llama2c)


def attempt(source: Path) -> str:
    """Loads a model, cuts windows of text for it, and takes its fingerprint."""
    from joma.analysis.probing import text_windows
    from joma.errors import JomaError, printable
    from joma.models import load
    from joma.models.series import fingerprint

    said = []
    for step in (lambda: text_windows(load(source), TEXT, 8, 2), lambda: fingerprint(source)):
        try:
            step()
            said.append("done")
        except (JomaError, OSError) as error:
            message = str(error)
            if isinstance(error, JomaError) and "\n" in message:
                return f"lines: {message}"
            if len(printable(message)) > 3000 or any(ord(c) < 32 for c in printable(message, 500)):
                return f"unprintable: {message!r}"
            said.append(f"refused: {message[:300]}")
    return " | ".join(said)


def run(case: Case, place: Path) -> dict[str, Any]:
    """Runs a case in a forked process; returns what became of it, with CPU seconds and bytes."""
    place.mkdir(parents=True)
    name, make = case
    source = make(place)
    reader, writer = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(source, reader, writer)
    os.close(writer)
    ended: dict[str, Any] = {"said": "killed", "bytes": 0}
    while True:
        gone, _, used = os.wait4(child, os.WNOHANG)
        if gone:
            break
        if time.monotonic() - start > 10 * SECONDS:  # of a machine that may have much to do
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    with os.fdopen(reader, "rb") as message:
        if content := message.read():
            ended = json.loads(content)
    return {**ended, "name": name, "seconds": used.ru_utime + used.ru_stime}


def _in_child(source: Path, reader: int, writer: int) -> None:
    """Never returns."""
    try:
        os.close(reader)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is used now
        used = _memory("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * MEMORY, used + 3 * MEMORY))
        before = _memory("VmRSS")
        try:
            said = attempt(source)
        except BaseException as error:
            said = f"traceback: {type(error).__name__}: {str(error)[:300]}"
        content = {"said": said, "bytes": _memory("VmHWM") - before}
        os.write(writer, json.dumps(content).encode()[:60_000])
    finally:
        os._exit(0)


def _memory(entry: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {entry}")


def main(place: Path, which: str) -> None:
    """Runs the cases, all or the quick, and prints a line of JSON for each."""
    import shutil

    place.mkdir(parents=True, exist_ok=True)
    valid = valid_files(place)
    for source in (valid.folder, valid.gguf, valid.llama2c):  # imports all there is to import
        said = attempt(source)
        assert said.startswith("done"), said
    chosen = [it for it in cases(valid) if it[0] in QUICK or which == "all"]
    assert {name for name, _ in chosen} >= QUICK
    for number, case in enumerate(chosen):
        print(json.dumps(run(case, place / str(number))), flush=True)
        shutil.rmtree(place / str(number), ignore_errors=True)
    assert not (place / "trapped").exists(), "a payload was run"
    print(json.dumps({"finished": True}), flush=True)


def _check(place: Path, which: str, least: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    environment["HF_HUB_OFFLINE"] = "1"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.models.test_hostile_files", str(place), which],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert results, ended.stderr[-3000:]
    assert results.pop() == {"finished": True}, ended.stderr[-3000:]
    assert len(results) >= least
    bad = [one for one in results if not one["said"].startswith(("done", "refused"))]
    bad += [one for one in results if one["bytes"] > MEMORY or one["seconds"] > SECONDS]
    assert bad == []
    refused = sum("refused" in one["said"] for one in results)
    assert refused > 0.5 * len(results)


def test_a_few_hostile_files(tmp_path):
    _check(tmp_path, "quick", len(QUICK))


@pytest.mark.slow
def test_every_hostile_file(tmp_path):
    _check(tmp_path, "all", 400)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
