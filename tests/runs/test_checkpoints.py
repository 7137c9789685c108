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
from numpy.typing import NDArray

from joma.runs import Checkpoints, GivenUpError, Run, _checkpoints
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


def test_a_run_has_checkpoints(tmp_path: Path):
    run = Run.create("table1", {}, out=tmp_path)
    path = run.checkpoints.save(1000, ARRAYS, {})
    assert path == tmp_path / "checkpoints" / "step-000001000.safetensors"
    assert latest_step(Run.open(tmp_path).checkpoints) == 1000


def test_none_yet(checkpoints: Checkpoints):
    found = checkpoints.latest()
    assert found.checkpoint is None
    assert found.refused == ()


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


def test_arrays_are_not_copied(checkpoints: Checkpoints):
    """Copies of a large training's state would take seconds, in which it waits."""
    arrays = {"a": np.ones((300, 40)), "b": np.ones(70, dtype=np.float32), "c": np.array(True)}
    _, laid = _checkpoints._laid_out(1, arrays, {})
    assert all(
        np.shares_memory(np.asarray(one), own)
        for one, own in zip(laid, arrays.values(), strict=True)
    )


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_one_that_is_given_up_leaves_nothing(checkpoints: Checkpoints, asked: int):
    """Before the first piece, before the second, and before it is forced to disk."""
    checkpoints.save(1, ARRAYS, {})
    answers = iter([True] * (asked - 1) + [False])
    arrays = {"a": np.zeros(_checkpoints._BLOCK + 1, dtype=np.uint8)}
    with pytest.raises(GivenUpError):
        checkpoints.save(2, arrays, {}, keep=1, wanted=lambda: next(answers))
    assert [path.name for path in checkpoints.folder.iterdir()] == [file_of(1)]
    assert latest_step(checkpoints) == 1


def test_arrays_that_change_while_they_are_written_do_not_damage_the_file(checkpoints: Checkpoints):
    array = np.zeros(3 * _checkpoints._BLOCK, dtype=np.uint8)

    def wanted() -> bool:
        array[:] += 1
        return True

    checkpoints.save(1, {"a": array}, {}, wanted=wanted)
    found = checkpoints.latest().checkpoint
    assert found is not None
    assert set(found.arrays["a"].tolist()) == {1, 2, 3}


def test_the_same_contents_make_the_same_file(tmp_path: Path):
    one = Checkpoints(tmp_path / "one").save(1, ARRAYS, {"a": 1, "b": 2})
    two = Checkpoints(tmp_path / "two").save(1, dict(reversed(ARRAYS.items())), {"a": 1, "b": 2})
    assert one.read_bytes() == two.read_bytes()


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
    checkpoints.save(10**10, ARRAYS, {})
    assert latest_step(checkpoints) == 10**10


def test_a_run_that_went_back_leaves_what_came_later(checkpoints: Checkpoints):
    """Else it would be resumed from a damaged or an abandoned future."""
    for step in (500, 1000):
        checkpoints.save(step, ARRAYS, {})
    checkpoints.save(600, ARRAYS, {}, keep=1)
    assert visible(checkpoints.folder) == [file_of(600)]


def test_other_files_stay_and_are_not_read(checkpoints: Checkpoints):
    checkpoints.save(1, ARRAYS, {})
    for name in ("notes.txt", "step-2.safetensors", f".{file_of(3)}.0123456789ab.tmp"):
        (checkpoints.folder / name).write_bytes(b"x")
    assert latest_step(checkpoints) == 1
    assert checkpoints.latest().refused == ()
    checkpoints.save(4, ARRAYS, {}, keep=1)
    assert {"notes.txt", "step-2.safetensors"} < set(os.listdir(checkpoints.folder))


@pytest.mark.parametrize("digits", ["0000000009", "00000000٩", "00000009"])
def test_a_step_has_one_name(checkpoints: Checkpoints, digits: str):
    whole = checkpoints.save(9, ARRAYS, {}).read_bytes()
    other = checkpoints.folder / f"step-{digits}.safetensors"
    other.write_bytes(whole)
    assert checkpoints.steps == [9]
    checkpoints.save(1, ARRAYS, {}, keep=1)
    assert checkpoints.steps == [1]
    checkpoints.clear()
    assert visible(checkpoints.folder) == [other.name]
    found = checkpoints.latest()
    assert found.checkpoint is None
    assert found.refused == ()


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

    def test_undamaged(self, checkpoints: Checkpoints):
        assert latest_step(checkpoints) == 1000

    def test_every_byte_flipped(self, checkpoints: Checkpoints):
        bits = np.random.default_rng(0).integers(0, 8, len(self.whole))
        for place, bit in enumerate(bits):
            for mask in (1 << int(bit), 0x20, 0xFF):  # 0x20: an upper-case letter for a lower
                changed = bytearray(self.whole)
                changed[place] ^= mask
                self.refused(checkpoints, bytes(changed))

    def test_every_length(self, checkpoints: Checkpoints):
        for length in range(len(self.whole)):
            self.refused(checkpoints, self.whole[:length])
        self.refused(checkpoints, self.whole + b"\0")

    def test_what_is_said(self, checkpoints: Checkpoints):
        assert self.refused(checkpoints, self.whole[:-1]) == (
            f"checkpoint {self.newer} is damaged (its contents do not match its checksum) and is "
            "not used; going back to step 500"
        )
        assert "does not begin like one" in self.refused(checkpoints, b"")

    def test_another_file_under_its_name(self, checkpoints: Checkpoints):
        sentence = self.refused(checkpoints, self.older.read_bytes())
        assert "was saved after step 500, under another name" in sentence

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

    def test_safetensors_that_no_run_saved(self, checkpoints: Checkpoints):
        for metadata in (None, {"step": "1000"}, {"sha256": "0" * 64, "step": "1000"}):
            self.refused(checkpoints, safetensors.numpy.save(ARRAYS, metadata))

    @pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 0])
    def test_absurd_headers(self, checkpoints: Checkpoints, length: int):
        self.refused(checkpoints, signed(length.to_bytes(8, "little") + self.whole[8:]))

    def test_contents_that_are_wrong_though_signed(self, checkpoints: Checkpoints):
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        right = '{"step": 1000, "about": {}}'
        wrong: list[tuple[str, dict[str, Any]]] = [
            ('{"step": "many", "about": {}}', entry),
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

    def test_nested_too_deeply(self, checkpoints: Checkpoints):
        deep = "[" * 200_000 + "]" * 200_000
        metadata = {"sha256": "", "step": "1000", "about": deep}
        assert "is not a checkpoint" in self.refused(
            checkpoints, made({"__metadata__": metadata}, b"")
        )

    def test_one_that_may_not_be_read(self, checkpoints: Checkpoints, monkeypatch):
        def closed(path: Path, mode: str) -> Any:
            if path == self.newer:
                raise PermissionError(13, "Permission denied")
            return open(path, mode)

        monkeypatch.setattr(_checkpoints, "open", closed, raising=False)
        assert "cannot be read (Permission denied)" in self.refused(checkpoints, self.whole)

    def test_both(self, checkpoints: Checkpoints):
        for path in (self.older, self.newer):
            path.write_bytes(b"")
        found = checkpoints.latest()
        assert found.checkpoint is None
        assert [sentence.split(" is ")[0] for sentence in found.refused] == [
            f"checkpoint {self.newer}",
            f"checkpoint {self.older}",
        ]
        assert all(sentence.endswith("there is no earlier one") for sentence in found.refused)

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


def test_a_really_full_disk(small_disk: Path):
    checkpoints = Checkpoints(small_disk)
    noise: NDArray[Any] = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8)
    checkpoints.save(1, {"a": noise}, {})
    checkpoints.save(2, {"a": noise}, {})
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(step, {"a": noise}, {}, keep=1)
        assert sorted(os.listdir(small_disk)) == [file_of(1), file_of(2)]
        assert latest_step(checkpoints) == 2


def test_a_checkpoint_removed_during_the_search_is_skipped(checkpoints: Checkpoints, monkeypatch):
    checkpoints.save(1, ARRAYS, {})
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [*listdir(folder), file_of(2)])
    assert latest_step(checkpoints) == 1
    assert checkpoints.latest().refused == ()


def test_steps_and_clearing(checkpoints: Checkpoints):
    assert checkpoints.steps == []
    checkpoints.clear()
    for step in (5, 7):
        checkpoints.save(step, ARRAYS, {})
    (checkpoints.folder / "note.txt").write_text("mine")
    assert checkpoints.steps == [7, 5]
    checkpoints.clear()
    assert os.listdir(checkpoints.folder) == ["note.txt"]
    assert checkpoints.latest().checkpoint is None
