"""Checkpoints: what is loaded is what was saved, bit for bit, or nothing."""

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from joma.runs import Checkpoints, GivenUpError
from tests.runs._failing import STEPS_OF_A_WRITE, every_kill, fill_disk, visible

ARRAYS = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array(7)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def file_of(step: int) -> str:
    return f"step-{step:09d}.safetensors"


def latest_step(checkpoints: Checkpoints) -> int | None:
    found = checkpoints.latest().checkpoint
    return None if found is None else found.step


def test_what_is_saved_with_the_arrays(checkpoints: Checkpoints):
    rng = np.random.default_rng(3)
    about = {"rng": rng.bit_generator.state, "best": np.inf, "Δ": [np.float32(0.5), None, "x"]}
    checkpoints.save(5, {}, about)
    found = checkpoints.latest().checkpoint
    assert found is not None
    assert found.arrays == {}
    assert found.about == {"rng": rng.bit_generator.state, "best": np.inf, "Δ": [0.5, None, "x"]}
    checkpoints.save(6, {}, {"loss": np.array([np.nan, 1])})
    found = checkpoints.latest().checkpoint
    assert found is not None
    assert np.isnan(found.about["loss"][0])


KINDS = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", ">f8", ">i4"]
ANY_ARRAY = st.sampled_from(KINDS).flatmap(
    lambda kind: hnp.arrays(np.dtype(kind), hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), ANY_ARRAY, max_size=4), st.booleans())
def test_any_arrays_come_back_bit_for_bit(tmp_path_factory, arrays, turned: bool):
    if turned:  # not as they lie in memory
        arrays = {name: array.T[::-1] if array.ndim else array for name, array in arrays.items()}
    checkpoints = Checkpoints(tmp_path_factory.mktemp("any"))
    path = checkpoints.save(3, arrays, {"names": list(arrays)})
    found = checkpoints.latest()
    assert found.refused == ()
    assert found.checkpoint is not None
    assert found.checkpoint.about == {"names": list(arrays)}
    for loaded in (found.checkpoint.arrays, safetensors.numpy.load_file(path)):
        assert set(loaded) == set(arrays)
        for name, array in arrays.items():
            native = array.astype(array.dtype.newbyteorder("="))
            assert loaded[name].dtype == native.dtype
            assert loaded[name].shape == native.shape
            assert loaded[name].tobytes() == native.tobytes()
            assert loaded[name].flags.writeable


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), ANY_ARRAY, max_size=4))
def test_a_file_is_what_safetensors_writes(tmp_path_factory, arrays):
    path = Checkpoints(tmp_path_factory.mktemp("same")).save(3, arrays, {"a": "Δ"})
    with safetensors.safe_open(path, "np") as content:
        metadata = content.metadata()
    assert path.read_bytes() == safetensors.numpy.save(arrays, metadata)


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_one_that_is_given_up_leaves_nothing(checkpoints: Checkpoints, asked: int):
    """Before the first piece, before the second, and before it is forced to disk."""
    checkpoints.save(1, ARRAYS, {})
    answers = iter([True] * (asked - 1) + [False])
    arrays = {"a": np.zeros(2**20 + 1, dtype=np.uint8)}
    with pytest.raises(GivenUpError):
        checkpoints.save(2, arrays, {}, keep=1, wanted=lambda: next(answers))
    assert [path.name for path in checkpoints.folder.iterdir()] == [file_of(1)]
    assert latest_step(checkpoints) == 1


def test_arrays_that_change_while_they_are_written_do_not_damage_the_file(checkpoints: Checkpoints):
    array = np.zeros(3 * 2**20, dtype=np.uint8)

    def wanted() -> bool:
        array[:] += 1
        return True

    checkpoints.save(1, {"a": array}, {}, wanted=wanted)
    found = checkpoints.latest().checkpoint
    assert found is not None
    assert set(found.arrays["a"].tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"step": -1}, "step must be a whole number"),
        ({"step": 1.0}, "step must be a whole number"),
        ({"keep": 0}, "keep must be at least 1, got 0"),
        ({"arrays": {"a": [1.0]}}, r"arrays\['a'\] must be a NumPy array of .*, got list"),
        ({"arrays": {"a": np.array([None])}}, r"arrays\['a'\] .* got object"),
        ({"arrays": {"a": np.array(["x"])}}, r"arrays\['a'\] .* got <U1"),
        ({"arrays": {"__metadata__": np.ones(1)}}, "not __metadata__"),
        ({"arrays": {3: np.ones(1)}}, "words as names"),
        ({"arrays": {"\ud800": np.ones(1)}}, "surrogates not allowed"),
        ({"arrays": {"a": np.ones(1, dtype=np.longdouble)}}, "must be a NumPy array of .*float"),
        ({"about": {"x": object()}}, "cannot be written as JSON"),
    ],
)
def test_bad_checkpoints_are_refused(checkpoints: Checkpoints, bad: dict[str, Any], message: str):
    good: dict[str, Any] = {"step": 1, "arrays": ARRAYS, "about": {}}
    with pytest.raises(ValueError, match=message):
        checkpoints.save(**{**good, **bad})
    assert not checkpoints.folder.exists()


def test_the_newest_stay(checkpoints: Checkpoints):
    for step in (100, 200, 300):
        checkpoints.save(step, ARRAYS, {})
    assert visible(checkpoints.folder) == [file_of(200), file_of(300)]
    checkpoints.save(400, ARRAYS, {}, keep=3)
    assert visible(checkpoints.folder) == [file_of(200), file_of(300), file_of(400)]
    checkpoints.save(400, ARRAYS, {"again": True}, keep=1)
    assert visible(checkpoints.folder) == [file_of(400)]
    checkpoints.save(300, ARRAYS, {}, keep=1)  # a run that went back leaves what came later
    assert visible(checkpoints.folder) == [file_of(300)]
    checkpoints.save(10**10, ARRAYS, {})
    assert latest_step(checkpoints) == 10**10


class TestDamage:
    """Two checkpoints, of which the newer one is changed in some way."""

    @pytest.fixture(autouse=True)
    def two(self, checkpoints: Checkpoints):
        self.older = checkpoints.save(500, ARRAYS, {"of": 500})
        self.newer = checkpoints.save(1000, ARRAYS, {"of": 1000})
        self.whole = self.newer.read_bytes()

    def refused(self, checkpoints: Checkpoints, content: bytes) -> str:
        """Why a file with this content is not used; the older checkpoint must be."""
        self.newer.write_bytes(content)
        found = checkpoints.latest()
        assert found.checkpoint is not None
        assert found.checkpoint.step == 500
        assert found.checkpoint.about == {"of": 500}
        (sentence,) = found.refused
        assert sentence.startswith(f"checkpoint {self.newer} ")
        assert sentence.endswith(" and is not used; going back to step 500")
        return sentence

    def test_every_byte_flipped(self, checkpoints: Checkpoints):
        bits = np.random.default_rng(0).integers(0, 8, len(self.whole))
        for place, bit in enumerate(bits):
            for mask in (1 << int(bit), 0x20):  # 0x20: an upper-case letter for a lower
                changed = bytearray(self.whole)
                changed[place] ^= mask
                self.refused(checkpoints, bytes(changed))

    def test_every_length(self, checkpoints: Checkpoints):
        for length in range(0, len(self.whole), 3):
            self.refused(checkpoints, self.whole[:length])
        self.refused(checkpoints, self.whole + b"\0")

    def test_a_pickle_is_not_run(self, checkpoints: Checkpoints, tmp_path: Path):
        marker = tmp_path / "executed"

        class Payload:
            def __reduce__(self):
                return (os.mkdir, (str(marker),))

        payload = pickle.dumps(Payload())
        hidden = np.frombuffer(payload, dtype=np.uint8)
        for content in (payload, len(payload).to_bytes(8, "little") + payload):
            self.refused(checkpoints, content)
        checkpoints.save(1000, {"a": hidden}, {"pickle": payload.hex()})
        assert latest_step(checkpoints) == 1000
        assert not marker.exists()
        pickle.loads(payload)  # the payload works
        assert marker.exists()

    def test_contents_that_are_wrong_though_signed(self, checkpoints: Checkpoints):
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        right = '{"step": 1000, "about": {}}'
        wrong: list[tuple[str, dict[str, Any]]] = [
            ('{"step": 1000, "about": 3}', entry),
            ('{"step": 1000', entry),
            ("", entry),
            (right, {**entry, "shape": [2]}),
            (right, {**entry, "dtype": "OBJECT"}),
            (right, {**entry, "data_offsets": [0, 2**60]}),
        ]
        for record, array in wrong:
            data = made({"__metadata__": {"sha256": record}, "a": array}, b"\0" * 4)
            assert "is not a checkpoint" in self.refused(checkpoints, data)
        self.newer.write_bytes(made({"__metadata__": {"sha256": right}, "a": entry}, b"\0" * 4))
        assert latest_step(checkpoints) == 1000  # so what is refused is refused for its fault

    @pytest.mark.parametrize("step", STEPS_OF_A_WRITE)
    def test_a_full_disk(self, checkpoints: Checkpoints, monkeypatch, step: str):
        files = {path: path.read_bytes() for path in (self.older, self.newer)}
        with monkeypatch.context() as patch:
            fill_disk(patch, step)
            for at in (1000, 1500):
                with pytest.raises(OSError, match="No space left"):
                    checkpoints.save(at, ARRAYS, {}, keep=1)
                assert {path: path.read_bytes() for path in checkpoints.folder.iterdir()} == files
        checkpoints.save(1500, ARRAYS, {}, keep=1)
        assert latest_step(checkpoints) == 1500

    def test_a_kill_at_any_moment(self, checkpoints: Checkpoints, monkeypatch):
        seen = []

        def save() -> None:
            checkpoints.save(1500, ARRAYS, {}, keep=1)

        for _ in every_kill(monkeypatch, save):
            seen.append((latest_step(checkpoints), len(visible(checkpoints.folder))))
            assert checkpoints.latest().refused == ()
            (checkpoints.folder / file_of(1500)).unlink(missing_ok=True)
            for step in (500, 1000):
                checkpoints.save(step, ARRAYS, {})
        before = [(1000, 2)] * 3  # open, fsync, rename
        assert seen == [*before, (1500, 3), (1500, 3), (1500, 2), (1500, 1), (1500, 1)]


def made(header: dict[str, Any], data: bytes) -> bytes:
    header["__metadata__"]["sha256"] = "0" * 64 + header["__metadata__"]["sha256"]
    text = json.dumps(header, separators=(",", ":")).encode()
    return signed(len(text).to_bytes(8, "little") + text + data)


def signed(content: bytes) -> bytes:
    """A file with the checksum it should have."""
    place = content.index(b'"sha256":"') + len(b'"sha256":"')
    before, after = content[:place], content[place + 64 :]
    return before + hashlib.sha256(before + after).hexdigest().encode() + after


def test_steps_and_clearing(checkpoints: Checkpoints):
    assert checkpoints.steps == []
    checkpoints.clear()
    for step in (5, 7):
        checkpoints.save(step, ARRAYS, {})
    others = ["note.txt", "step-2.safetensors", "step-0000000009.safetensors"]
    for name in others:
        (checkpoints.folder / name).write_text("mine")
    assert checkpoints.steps == [7, 5]
    checkpoints.clear()
    assert sorted(os.listdir(checkpoints.folder)) == sorted(others)
    assert checkpoints.latest().checkpoint is None
