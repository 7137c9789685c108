"""Files of weights: read tensor by tensor, refused where they are damaged or lie."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from joma.models import WeightFiles
from tests.models.tiny import tiny
from tests.own_process import said


class Trap:
    """Makes the folder it names where it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _same(files, state):
    assert set(files.names) == set(state)
    for name, tensor in state.items():
        stored = files.tensors[name]
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert stored.bytes == tensor.numel() * tensor.element_size()
        assert torch.equal(files.read(name), tensor)
        assert torch.equal(files.mapped()[name], tensor)


def test_every_tensor_is_listed_and_read(folder):
    files = WeightFiles(folder)
    _same(files, tiny("llama").state_dict())
    assert files.bytes == sum(tensor.bytes for tensor in files.tensors.values())
    assert files.files == [folder / "model.safetensors"]
    assert (files.config() or {})["model_type"] == "llama"
    assert WeightFiles(folder / "model.safetensors").names == files.names
    with pytest.raises(ValueError, match="'nothing'"):
        files.read("nothing")


def test_shards_of_both_kinds(tmp_path):
    state = tiny("llama").state_dict()
    tiny("llama").save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    files = WeightFiles(tmp_path / "shards")
    assert len(files.files) > 2
    _same(files, state)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    names = list(state)
    halves = {"a.bin": names[:5], "b.bin": names[5:]}
    for file, inside in halves.items():
        torch.save({name: state[name] for name in inside}, pickled / file)
    where = {name: file for file, inside in halves.items() for name in inside}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    _same(WeightFiles(pickled), state)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pytorch_file_of_tensors_is_read(tmp_path, zipped):
    state = tiny("gpt2").state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    _same(WeightFiles(tmp_path), state)
    assert WeightFiles(tmp_path).config() is None


def test_every_type_of_number(tmp_path):
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
    kinds = (*kinds, torch.bool, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    state = {str(kind): torch.tensor([[1, 0], [0, 1], [1, 1]]).to(kind) for kind in kinds}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    for name, tensor in state.items():
        read = files.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.float(), tensor.float())


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_no_damaged_header_is_believed(data, tmp_path_factory):
    """What is read after any change of one byte of the header, or a cut, still fits the file."""
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "model.safetensors"
    save_file({"a": torch.ones(9, 9), "b": torch.zeros(4)}, path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    at = data.draw(st.integers(0, 7 + length))
    content[at] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    try:
        files = WeightFiles(folder)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
    else:
        message = str(path)
        assert sum(files.read(name).nbytes for name in files.names) == 85 * 4
    assert str(path) in message


def test_what_is_missing_or_misnamed(tmp_path, folder):
    with pytest.raises(ValueError, match=r"has no weights: none of model\.safetensors"):
        WeightFiles(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        WeightFiles(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="tensor by tensor"):
        WeightFiles(folder / "config.json")
    with pytest.raises(ValueError, match="revision goes with a hub id"):
        WeightFiles(folder, revision="step1")
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold tensors by name, got a list"):
        WeightFiles(tmp_path)
    torch.save({"model": {"weight": torch.zeros(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="'model' is a dict"):
        WeightFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged, cut short"):
        WeightFiles(tmp_path)


def test_an_index_that_lies(tmp_path, folder):
    index = tmp_path / "model.safetensors.index.json"
    shutil.copy(folder / "model.safetensors", tmp_path / "part.safetensors")
    for where, message in (
        ({"a": "../model/model.safetensors"}, "which file next to it"),
        ({"a": 3}, "which file next to it"),
        ({"a": "other.safetensors"}, r"other\.safetensors is missing"),
        ({"a": "part.safetensors"}, r"has a in part\.safetensors, which does not hold it"),
    ):
        index.write_text(json.dumps({"weight_map": where}))
        with pytest.raises(ValueError, match=message):
            WeightFiles(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        WeightFiles(tmp_path)


_MEASURE = """
import resource, sys
from joma.models import WeightFiles
files = WeightFiles(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in files.names:
    files.read(name).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux tells it")
def test_reading_one_by_one_takes_the_memory_of_one(tmp_path):
    largest = 8 * 1024 * 1024
    state = {str(index): torch.zeros(largest // 4) for index in range(10)}
    save_file(state, tmp_path / "model.safetensors")
    message = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(message.stdout) * 1024 < 2 * largest


# Pickled checkpoints with DTensors

SAVE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
mesh, local = init_device_mesh("cpu", (1,)), torch.arange(8.0).view(2, 4)

def saved(name, placement, shape):
    given = {"run_check": False, "shape": torch.Size(shape), "stride": (4, 1)}
    tensor = DTensor.from_local(local, mesh, [placement], **given)
    if name == "odd":
        del tensor._spec
    torch.save({"w": tensor, "b": local}, f"{sys.argv[1]}/{name}.pt")

saved("whole", Shard(0), (2, 4))
saved("part", Shard(0), (4, 4))
saved("summand", Partial(), (2, 4))
saved("odd", Shard(0), (2, 4))
sys.stdout.flush(); os._exit(0)  # gloo's threads may abort the interpreter's end
"""

LOAD = """
import sys
from pathlib import Path
from joma.models.weight_files import load_pickled
assert "torch.distributed.tensor" not in sys.modules
for name in ("whole", "part", "summand", "odd"):
    try:
        found = load_pickled(Path(sys.argv[1]) / f"{name}.pt")
        print(name, *(f"{type(it).__name__} {it.tolist()}" for it in found.values()), sep=": ")
    except ValueError as error:
        print(f"{name}: {error}".replace(sys.argv[1], "FOLDER"))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_whole_ones_are_read_and_parts_refused(tmp_path: Path):
    said(SAVE, tmp_path)
    whole, part, summand, odd = said(LOAD, tmp_path)
    assert whole == ": ".join(
        ["whole", *["Tensor [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]"] * 2]
    )
    for line in (part, summand):
        assert "holds of w the part that one process had (a DTensor); save whole tensors" in line
    assert odd.startswith("odd: FOLDER/odd.pt ")
