"""Record the numbers and the public surface of a source tree, and compare two recordings.

    python tools/golden.py record --tree DIR --out FILE.json [--part NAME …] [--keep DIR]
    python tools/golden.py record --tree DIR --out FILE.json --cuda
    python tools/golden.py compare BEFORE.json AFTER.json
    python tools/golden.py open DIR --tree DIR
    python tools/golden.py size [--tree DIR]

`record` runs the package of a source tree, `DIR/src`, in processes of its own, through
`python -m joma` and the public Python API alone. What it writes is one flat table of keys and
values for each part. Floats are kept exactly (`float.hex`). Arrays with more than 200 numbers are
kept as the SHA-256 of their little-endian bytes with their first and last values. Clocks, dates,
paths, versions, durations and memory are left out. Every process has one thread.

Parts on the CPU:

- `surface`: commands, arguments and options; public names with their parameters; claims;
  experiments with their scales, options and groups. With `--before FILE` it also tries the names
  of an earlier recording that are no longer listed: a name that can still be imported is kept.
- `closed_forms`: calls of the functions of `joma.theory`.
- `verify`: `joma verify --json`.
- `reproduce`: every experiment, at scale tiny where it has scales.
- `train`: `joma train tiny`. The monitor's time budget is switched off (`monitor.budget=0`): with
  one, the steps at which it measures depend on the clock.
- `resume`: the same training killed after its first checkpoint and resumed; `reproduce table1`
  killed, resumed, stopped by SIGTERM and resumed. Both must equal the uninterrupted runs.
- `probe`: `joma probe --metrics all` of a tiny model of each mapped architecture, from its weight
  files alone (`--low-memory`) and of a series; `joma superposition`.

Parts with `--cuda` (`--device cpu --scale tiny` runs them where there is no GPU):

- `fig6_steps`: the first 1,000 steps of the networks of Fig. 6 and 8.
- `table1_steps`: the first 200 steps of a group of Table 1.

No option of the command line limits the steps of an experiment. So these two start
`joma reproduce … --scale full`, wait until the metrics of every group have passed that step, kill
the process and keep the rows up to that step. The text is WikiText-2, found through the environment
variable JOMA_SHARED, as `joma.data.corpus` describes.

`compare` fails on every value that differs and every key that is lost, except as the table of
renames allows (`tools/golden_renames.toml`, which explains itself). Keys that are new are counted
and do not fail. Sentences that differ in words but not in their numbers are counted as reworded.

`size` counts what `Size` describes.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import math
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Leaf = Any
"""A recorded value: what JSON has, with floats as {"float": hex}, arrays and series as objects."""
Values = dict[str, Leaf]

ROOT = Path(__file__).resolve().parent.parent
RENAMES = Path(__file__).resolve().with_name("golden_renames.toml")
VERSION = 1
LONG = 200
"""Arrays with more numbers are kept as a digest."""
WHOLE = ("stable_rank", "effective_rank")
"""Columns with these words in their names are kept in full, to be compared within bounds."""

VOLATILE = frozenset(
    {
        "about_seconds", "begun_at", "command", "date", "environment", "figures", "memory",
        "monitor_seconds", "path", "peak_gib", "run", "seconds", "taken_from",
        "time", "tokens_per_second",
    }
)  # fmt: skip
"""Entries of JSON objects that are left out."""
IDENTITY = ("claim", "metric", "name", "series", "step", "module", "kind", "layer", "head", "node")
"""Entries that tell the objects of a list apart."""


class GoldenError(Exception):
    """What was asked for cannot be recorded or compared."""


# Values


def number(value: float) -> Leaf:
    """A float, exactly."""
    return {"float": float(value).hex()}


def array(values: Any) -> Leaf:
    """An array of numbers: all of them, or a digest where there are many."""
    found = np.asarray(values)
    if found.dtype.kind not in "biuf":
        raise GoldenError(f"an array must be of numbers, got {found.dtype}")
    little = np.ascontiguousarray(found.astype(found.dtype.newbyteorder("<")))
    kept: dict[str, Leaf] = {"array": list(found.shape), "dtype": little.dtype.str}
    flat = found.reshape(-1)
    if flat.size <= LONG:
        return {**kept, "values": [_plain(one) for one in flat]}
    digest = hashlib.sha256(little.tobytes()).hexdigest()
    ends = {"first": [_plain(one) for one in flat[:3]], "last": [_plain(one) for one in flat[-3:]]}
    return {**kept, "sha256": digest, **ends}


def _plain(one: Any) -> Leaf:
    """A number of an array, floats as hexadecimal text."""
    return float(one).hex() if isinstance(one, float | np.floating) else one.item()


def flatten(value: Any, key: str, into: Values) -> None:
    """Puts a value into a flat table.

    Objects and dataclasses become one key for each entry; objects of a list are distinguished by
    their names where they have some. An object with a value and the bound on its error is one leaf.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        value = {name: one for name, one in value.items() if not name.startswith("_")}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Mapping):
        _flatten_object(value, key, into)
    elif isinstance(value, list | tuple):
        _flatten_list(value, key, into)
    elif isinstance(value, np.ndarray | np.generic):
        into[key] = array(value) if value.ndim else flat_scalar(value.item())
    elif not callable(value):
        into[key] = flat_scalar(value)


def flat_scalar(value: Any) -> Leaf:
    """A single value as JSON keeps it."""
    if isinstance(value, float):
        return number(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise GoldenError(f"a value must be a number, a word or an array, got {type(value).__name__}")


def _flatten_object(value: Mapping[Any, Any], key: str, into: Values) -> None:
    rest = {str(name): one for name, one in value.items() if str(name) not in VOLATILE}
    if isinstance(rest.get("value"), float) and "bound" in rest:
        measured = rest.pop("value"), rest.pop("bound")
        leaf = number(measured[0]) | {"bound": None if measured[1] is None else measured[1].hex()}
        into[f"{key}/value"] = leaf | {"name": str(rest.get("metric", rest.get("name", "")))}
    for name, one in rest.items():
        flatten(one, f"{key}/{name}" if key else name, into)


def _flatten_list(value: Sequence[Any], key: str, into: Values) -> None:
    if value and all(isinstance(one, Mapping) for one in value):
        names = [_identity(one) for one in value]
        if len(set(names)) < len(names) or not all(names):
            names = [str(place) for place in range(len(names))]
        for name, one in zip(names, value, strict=True):
            flatten(one, f"{key}/{name}" if key else name, into)
    elif all(one is None or isinstance(one, bool | int | float | str) for one in value):
        numbers = len(value) > LONG and all(type(one) in (int, float) for one in value)
        into[key] = array(value) if numbers else [flat_scalar(one) for one in value]
    else:
        for place, one in enumerate(value):
            flatten(one, f"{key}/{place}", into)


def _identity(value: Mapping[str, Any]) -> str:
    parts = [f"{name}={value[name]}" for name in IDENTITY if value.get(name) is not None]
    return "&".join(parts)


# Run folders


def run_folder(folder: Path, key: str, into: Values, last: int | None = None) -> None:
    """Puts what a run folder holds into a flat table, with the runs inside it.

    Args:
        folder: of the run.
        key: before every key.
        into: the table.
        last: rows of the metrics after this step are left out, and other files too.
    """
    for file in sorted(folder.glob("*.json")):
        if file.stem not in ("manifest", "environment") and (last is None or file.stem == "config"):
            flatten(json.loads(file.read_text(encoding="utf-8")), f"{key}/{file.stem}", into)
    for name, leaf in metric_series(folder / "metrics", last).items():
        into[f"{key}/metrics/{name}"] = leaf
    if last is None:
        for file in sorted((folder / "tables").glob("*.parquet")):
            _table(file, f"{key}/tables/{file.stem}", into)
        if figures := sorted(file.name for file in (folder / "figures").glob("*")):
            into[f"{key}/figures"] = figures
        for file in sorted((folder / "series").glob("*/*.safetensors")):
            _weights(file, f"{key}/series/{file.parent.name}", into)
    for inner in sorted((folder / "groups").glob("*")):
        run_folder(inner, f"{key}/groups/{inner.name}", into, last)


def metric_series(folder: Path, last: int | None = None) -> Values:
    """The metrics of a run: steps, values and bounds by name, module, layer, head and member."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.read_table(file) for file in _whole_parts(folder)]
    if not tables:
        return {}
    rows = pa.concat_tables(tables, promote_options="permissive").to_pylist()
    found: Values = {}
    for row in sorted(rows, key=lambda one: one["step"]):
        if last is not None and row["step"] > last:
            continue
        labels = [label for label in ("module", "kind", "layer", "head", "member") if label in row]
        parts = [f"{label}={row[label]}" for label in labels if row[label] is not None]
        leaf = found.setdefault(
            "&".join([row["name"], *parts]),
            {"name": row["name"], "steps": [], "values": [], "bounds": []},
        )
        leaf["steps"].append(row["step"])
        leaf["values"].append(_hex(row["value"]))
        leaf["bounds"].append(_hex(row.get("bound")))
    for leaf in found.values():
        if all(bound is None for bound in leaf["bounds"]):
            del leaf["bounds"]
    return found


def _hex(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def _whole_parts(folder: Path) -> list[Path]:
    """The parts of a log, without those that a merged part covers."""
    spans: dict[Path, tuple[int, int]] = {}
    for file in sorted(folder.glob("*.parquet")):
        places = [int(digits) for digits in re.findall(r"[0-9]+", file.stem)]
        spans[file] = (places[0], places[-1]) if places else (0, 0)

    def covered(file: Path) -> bool:
        first, last = spans[file]
        others = (span for other, span in spans.items() if other != file)
        return any(a <= first and last <= b and (a, b) != (first, last) for a, b in others)

    return [file for file in spans if not covered(file)]


def _table(file: Path, key: str, into: Values) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    for name in (one for one in table.column_names if one not in VOLATILE):
        column = table.column(name).to_pylist()
        if all(type(one) in (int, float) for one in column):
            whole = any(word in name for word in WHOLE)
            listed = {"column": name, "values": [_plain(np.asarray(one)[()]) for one in column]}
            into[f"{key}/{name}"] = listed if whole else array(column)
        else:
            listed = [flat_scalar(one) for one in column]
            text = json.dumps(listed, ensure_ascii=False).encode()
            digest = {"rows": len(listed), "sha256": hashlib.sha256(text).hexdigest()}
            into[f"{key}/{name}"] = listed if len(listed) <= LONG else digest


def _weights(file: Path, key: str, into: Values) -> None:
    """The tensors of a file, one digest each."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items()):
            begin, end = tensor["data_offsets"]
            opened.seek(8 + size + begin)
            digest = hashlib.sha256(opened.read(end - begin)).hexdigest()
            into[f"{key}/{name}"] = [tensor["dtype"], tensor["shape"], digest]


# Recording


@dataclass
class Recorder:
    """Runs the package of a source tree.

    Attributes:
        tree: the source tree.
        scratch: folder to write into.
        keep: folder that gets a copy of finished runs, if any.
        device: of the parts that train at full scale.
        scale: of these.
        before: an earlier recording, whose public names are tried.
        renames: the table of renames.
    """

    tree: Path
    scratch: Path
    keep: Path | None = None
    device: str = "cuda"
    scale: str = "full"
    before: Mapping[str, Any] = field(default_factory=dict)
    renames: "Renames" = field(default_factory=lambda: Renames({}))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process: one thread, the tree's package, nothing from the network."""
        threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return {
            **os.environ,
            **dict.fromkeys(threads, "1"),
            "PYTHONPATH": str(self.tree / "src"),
            "PYTHONHASHSEED": "0",
            "JOMA_CACHE": str(self.scratch / "cache"),
            "MPLBACKEND": "Agg",
            "MPLCONFIGDIR": str(self.scratch / "matplotlib"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def folder(self, *names: str) -> Path:
        """A folder to work in, made where it is missing."""
        folder = self.scratch.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def start(self, arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
        """Starts `joma` with its output in the folder's files `stdout` and `stderr`."""
        with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
            command = [sys.executable, "-m", "joma", *arguments]
            return subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=out, stderr=err, text=True
            )

    def joma(self, arguments: Sequence[str], folder: Path, seconds: float = 600) -> Any:
        """Runs a `joma` command to its end and returns the JSON it prints."""
        process = self.start(arguments, folder)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise GoldenError(f"joma {' '.join(arguments)} took over {seconds:.0f} s") from None
        if code not in (0, 1):
            tail = (folder / "stderr").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise GoldenError(f"joma {' '.join(arguments)} ended with {code}:\n{tail}")
        printed = json.loads((folder / "stdout").read_text(encoding="utf-8") or "null")
        return {"code": code, "json": printed}

    def inside(self, what: str, *arguments: str) -> Any:
        """Runs a function of `INSIDE` in a process that imports the tree's package."""
        folder = self.folder("inside")
        command = [sys.executable, str(Path(__file__).resolve()), "inside", what, *arguments]
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise GoldenError(f"{what} failed:\n{done.stderr[-3000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def keeps(self, run: Path, name: str) -> None:
        """Copies a finished run to the folder that is kept."""
        if self.keep is not None:
            target = self.keep / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(run, target)

    def until(
        self, arguments: Sequence[str], folder: Path, reached: Callable[[], bool], how: int
    ) -> bool:
        """Starts a command and sends it a signal when a state is reached.

        Returns:
            Whether it was stopped; otherwise it ended by itself.
        """
        process = self.start(arguments, folder)
        deadline = time.monotonic() + 600
        try:
            while process.poll() is None:
                if reached():
                    process.send_signal(how)
                    process.wait(120)
                    return True
                if time.monotonic() > deadline:
                    raise GoldenError(f"joma {' '.join(arguments)} did not get there in 600 s")
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode not in (0, 1):
            tail = (folder / "stderr").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise GoldenError(f"joma {' '.join(arguments)} ended too early:\n{tail}")
        return False


def record_surface(recorder: Recorder) -> Values:
    """Commands, options, public names, claims and experiments."""
    earlier = recorder.before.get("parts", {}).get("surface", {})
    wanted = recorder.folder("inside") / "earlier.json"
    wanted.write_text(json.dumps([key for key in earlier if key.startswith("name/")]))
    values: Values = recorder.inside("surface", str(wanted))
    folder = recorder.folder("surface")
    for claim in recorder.joma(["verify", "--list", "--json"], folder)["json"]:
        flatten(claim, f"claim/{claim['claim']}", values)
    for name in recorder.inside("experiments"):
        arguments = ["reproduce", name, "--dry-run", "--device", "cpu", "--json"]
        (plan,) = recorder.joma(arguments, folder)["json"]
        plan["scales"] = list(plan.get("scales", ()))
        flatten(plan, f"experiment/{name}", values)
    return values


def record_closed_forms(recorder: Recorder) -> Values:
    """Calls of the functions of `joma.theory`."""
    return recorder.inside("closed_forms", json.dumps(recorder.renames.names))


def record_verify(recorder: Recorder) -> Values:
    """Every claim, as printed and as derived."""
    values: Values = {}
    folder = recorder.folder("verify")
    flatten(recorder.joma(["verify", "--json", "--out", "run"], folder), "", values)
    run_folder(folder / "run", "run", values)
    recorder.keeps(folder / "run", "verify")
    return values


def record_reproduce(recorder: Recorder) -> Values:
    """Every experiment, at scale tiny where it has scales."""
    values: Values = {}
    for name in recorder.inside("experiments"):
        folder = recorder.folder("reproduce", name)
        flatten(recorder.joma([*_tiny(recorder, name), "--json"], folder), name, values)
        run_folder(folder / "run", f"{name}/run", values)
        recorder.keeps(folder / "run", f"reproduce-{name}")
    return values


def _tiny(recorder: Recorder, name: str) -> list[str]:
    """The command that reproduces an experiment in the folder `run`, as small as it can be."""
    plan = recorder.joma(
        ["reproduce", name, "--dry-run", "--device", "cpu", "--json"], recorder.folder("plan")
    )
    scale = ["--scale", "tiny"] if "tiny" in plan["json"][0].get("scales", ()) else []
    return ["reproduce", name, *scale, "--device", "cpu", "--out", "run"]


TRAIN = ("train", "tiny", "--device", "cpu", "--set", "monitor.budget=0", "--out", "run", "--json")


def record_train(recorder: Recorder) -> Values:
    """`joma train tiny` with the monitor."""
    values: Values = {}
    folder = recorder.folder("train")
    flatten(recorder.joma(TRAIN, folder), "tiny", values)
    run_folder(folder / "run", "tiny/run", values)
    recorder.keeps(folder / "run", "train")
    return values


def record_resume(recorder: Recorder) -> Values:
    """A training and an experiment that were stopped and resumed."""
    values: Values = {}
    folder = recorder.folder("resume", "train")
    arguments = [*TRAIN, "--set", "checkpoints.seconds=2"]

    def saved() -> bool:
        return any(file.is_file() for file in (folder / "run").glob("checkpoint*/*"))

    if not recorder.until(arguments, folder, saved, signal.SIGKILL):
        raise GoldenError("the training ended before it could be killed")
    flatten(recorder.joma(arguments, folder), "tiny", values)
    run_folder(folder / "run", "tiny/run", values)

    folder = recorder.folder("resume", "table1")
    arguments = [*_tiny(recorder, "table1"), "--json"]

    def groups() -> int:
        return len(list((folder / "run").glob("groups/*/outcome.json")))

    stopped = recorder.until(arguments, folder, lambda: groups() >= 1, signal.SIGKILL)
    began = groups()
    if stopped:  # between two groups, or early in one
        stopped = recorder.until(arguments, folder, lambda: groups() > began, signal.SIGTERM)
    if not stopped:
        raise GoldenError("table1 ended before it could be stopped")
    flatten(recorder.joma(arguments, folder), "table1", values)
    run_folder(folder / "run", "table1/run", values)
    return values


SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
HEADED: dict[str, Any] = GROUPED | {"head_dim": 12}
MAPPED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 256,
        "n_embd": 32,
        "n_inner": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 32},
    "llama": GROUPED,
    "mistral": GROUPED,
    "smollm3": GROUPED,
    "bert": SIZES,
    "gemma": HEADED,
    "gemma2": HEADED,
    "gemma3_text": HEADED,
}
"""The model types with a map of their own, and a tiny configuration of each."""

READ = ("--tokenizer", "bytes", "--window", "32", "--windows", "4", "--device", "cpu", "--json")


def record_probe(recorder: Recorder) -> Values:
    """Tiny models of every mapped architecture, measured."""
    values: Values = {}
    models = recorder.folder("models")
    recorder.inside("models", str(models))
    asked = {
        model_type: ["probe", f"../../models/{model_type}", *READ, "--metrics", "all"]
        for model_type in MAPPED
    }
    for model_type in ("gpt2", "llama"):
        weights = ["probe", f"../../models/{model_type}", "--low-memory", "--device", "cpu"]
        asked[f"low-memory {model_type}"] = [*weights, "--json"]
    asked["series"] = ["probe", "--series", "../../models/series", *READ]
    asked["superposition"] = ["superposition", "../../models/gpt_neox", "--tokenizer", "bytes"]
    asked["superposition"] += ["--windows", "64", "--window", "32", "--device", "cpu", "--json"]
    for name, arguments in asked.items():
        folder = recorder.folder("probe", name)
        flatten(recorder.joma([*arguments, "--out", "run"], folder), name, values)
        run_folder(folder / "run", f"{name}/run", values)
        if name in ("gpt_neox", "low-memory llama", "series", "superposition"):
            recorder.keeps(folder / "run", f"probe-{name.replace(' ', '-')}")
    return values


FIG6_STEPS = 1000
TABLE1_STEPS = 200


def record_fig6_steps(recorder: Recorder) -> Values:
    """The first steps of the networks of Fig. 6 and 8."""
    groups = _groups(recorder, "fig6")
    heavy = [name for name in groups if name == "depth-5"]  # which has all learning rates
    light = [name for name in groups if name not in heavy]
    together = recorder.device == "cuda"  # light ones are trained side by side
    parts = [light, heavy] if together else [[name] for name in groups]
    return _first_steps(recorder, "fig6", parts, FIG6_STEPS)


def record_table1_steps(recorder: Recorder) -> Values:
    """The first steps of a group of Table 1."""
    return _first_steps(recorder, "table1", [_groups(recorder, "table1")[:1]], TABLE1_STEPS)


def _groups(recorder: Recorder, name: str) -> list[str]:
    arguments = ["reproduce", name, "--dry-run", "--device", "cpu", "--json"]
    return recorder.joma(arguments, recorder.folder("plan"))["json"][0]["all_groups"]


def _first_steps(
    recorder: Recorder, name: str, parts: Sequence[Sequence[str]], last: int
) -> Values:
    """Trains groups until all have passed a step; those of one part in one process."""
    values: Values = {}
    for groups in parts:
        folder = recorder.folder(f"{name}-steps", "+".join(groups))
        arguments = ["reproduce", name, "--scale", recorder.scale, "--device", recorder.device]
        arguments += [word for group in groups for word in ("--group", group)]
        own = [folder / "run" / "groups" / group / "metrics" for group in groups]

        def passed(own: Sequence[Path] = own) -> bool:
            time.sleep(1)
            return all(_newest_step(metrics) > last for metrics in own)

        arguments += ["--json", "--out", "run"]
        stopped = recorder.until(arguments, folder, passed, signal.SIGKILL)
        for group, metrics in zip(groups, own, strict=True):
            run_folder(metrics.parent, f"{name}/{group}", values, last)
            losses = metric_series(metrics, last).get("loss&member=0", {"steps": []})["steps"]
            if not losses or losses != list(range(losses[0], losses[-1] + 1)):
                raise GoldenError(f"{group} of {name} has gaps in its losses")
            if stopped and losses[-1] < last:
                raise GoldenError(f"{group} of {name} was stopped at step {losses[-1]}")
    return values


def _newest_step(metrics: Path) -> int:
    """The newest step with a loss, -1 where there is none."""
    import pyarrow.parquet as pq

    newest = -1
    for file in metrics.glob("*.parquet"):
        try:
            table = pq.read_table(file, columns=["name", "step"])
        except OSError:  # merged or replaced just now
            continue
        names, steps = table["name"].to_pylist(), table["step"].to_pylist()
        own = (step for name, step in zip(names, steps, strict=True) if name == "loss")
        newest = max(newest, max(own, default=-1))
    return newest


PARTS: dict[str, Callable[[Recorder], Values]] = {
    "surface": record_surface,
    "closed_forms": record_closed_forms,
    "verify": record_verify,
    "reproduce": record_reproduce,
    "train": record_train,
    "resume": record_resume,
    "probe": record_probe,
}
CUDA_PARTS: dict[str, Callable[[Recorder], Values]] = {
    "fig6_steps": record_fig6_steps,
    "table1_steps": record_table1_steps,
}
SAME = {"resume": (("tiny/", "train"), ("table1/", "reproduce"))}
"""What must equal another part of the same recording: keys that begin so."""


def same_within(parts: Mapping[str, Values]) -> list[str]:
    """Keys of resumed runs whose values differ from those of uninterrupted ones."""
    different: list[str] = []
    for part, pairs in SAME.items():
        for start, other in pairs:
            if part not in parts or other not in parts:
                continue
            for key, leaf in parts[part].items():
                compared = key.startswith(start) and "/checkpoints/" not in key
                if compared and parts[other].get(key) != leaf:
                    different.append(f"{part}: {key}")
    return different


def record(arguments: argparse.Namespace) -> int:
    """Records parts of a tree; parts that the file has already and that are not asked for stay."""
    known = CUDA_PARTS if arguments.cuda else PARTS
    wanted = arguments.part or list(known)
    if strange := [name for name in wanted if name not in PARTS | CUDA_PARTS]:
        raise GoldenError(f"part must be one of {', '.join(PARTS | CUDA_PARTS)}, got {strange[0]}")
    out = Path(arguments.out)
    recording = read_recording(out) if out.is_file() else {"version": VERSION, "parts": {}}
    before = read_recording(Path(arguments.before)) if arguments.before else {}
    keep = None if arguments.keep is None else Path(arguments.keep).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    tree = Path(arguments.tree).resolve()
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        recorder = Recorder(
            tree,
            Path(scratch).resolve(),
            keep,
            arguments.device,
            arguments.scale,
            before,
            Renames.read(RENAMES),
        )
        where = Path(recorder.inside("where")).resolve()
        if not where.is_relative_to(tree):
            raise GoldenError(f"joma is imported from {where}, which is not in {tree}")
        for name in wanted:
            began = time.monotonic()
            text = json.dumps((PARTS | CUDA_PARTS)[name](recorder))
            text = text.replace(str(recorder.scratch), "SCRATCH")
            recording["parts"][name] = json.loads(text)
            out.write_text(json.dumps(recording, indent=0, ensure_ascii=False, sort_keys=True))
            took = time.monotonic() - began
            print(f"{name}: {len(recording['parts'][name])} values, {took:.0f} s", flush=True)
    different = same_within(recording["parts"])
    for key in different[:10]:
        print(f"a resumed run differs from an uninterrupted one: {key}")
    return 1 if different else 0


def read_recording(file: Path) -> dict[str, Any]:
    """A recording from its file."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if found.get("version") != VERSION:
        raise GoldenError(f"{file} must be of version {VERSION}, got {found.get('version')}")
    return found


# In a process that imports the package


def inside_where() -> str:
    """Where the package is."""
    import joma

    return str(Path(str(joma.__file__)))


def inside_experiments() -> list[str]:
    """The names of the experiments."""
    from joma.experiments import EXPERIMENTS

    return list(EXPERIMENTS)


def inside_models(folder: str) -> None:
    """Builds and saves the tiny models, and a series of three."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()

    def build(model_type: str, target: Path, seed: int) -> None:
        config = transformers.AutoConfig.for_model(model_type, **MAPPED[model_type])
        bert = model_type == "bert"
        kind = transformers.AutoModelForMaskedLM if bert else transformers.AutoModelForCausalLM
        model = kind.from_config(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim < 2:
                    parameter.add_(0.1 * noise)
                else:
                    parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
        model.save_pretrained(target)

    for place, model_type in enumerate(MAPPED):
        build(model_type, Path(folder) / model_type, place)
    for place, step in enumerate((0, 100, 200)):
        build("gpt_neox", Path(folder) / "series" / f"step-{step:06d}", 100 + place)


def inside_surface(earlier: str) -> Values:
    """Commands with their options, and public names with their parameters.

    Args:
        earlier: a JSON file with keys of names that are tried too.
    """
    values: Values = {}
    _walk_commands(_command_line(), "", values)
    for module in _public_modules():
        for name in public_names(module):
            found = getattr(module, name)
            if not inspect.ismodule(found):
                _describe(found, f"name/{module.__name__}:{name}", values)
    for key in json.loads(Path(earlier).read_text()):
        if key not in values and key.count(".", key.find(":")) == 0:
            module, _, name = key.removeprefix("name/").partition(":")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = getattr(importlib.import_module(module), name)
                except (ImportError, AttributeError):
                    continue
            _describe(found, key, values)
    return values


def _command_line() -> Any:
    """The group of commands, caught when the command line is called."""
    import typer.core

    caught: list[Any] = []

    def catch(self: Any, *arguments: Any, **options: Any) -> None:
        caught.append(self)

    for kind in (typer.core.TyperGroup, typer.core.TyperCommand):
        kind.main = catch  # pyright: ignore[reportAttributeAccessIssue]
    from joma import cli

    with contextlib.suppress(SystemExit):
        cli.main()
    if not caught:
        raise GoldenError("the command line has no group of typer")
    return caught[0]


def _walk_commands(command: Any, path: str, values: Values) -> None:
    values[f"command/{path}".rstrip()] = True
    for parameter in command.params:
        kind = "option" if parameter.param_type_name == "option" else "argument"
        default = parameter.default
        leaf = {
            "default": None if default is None or callable(default) else repr(default),
            "multiple": bool(getattr(parameter, "multiple", False)) or parameter.nargs != 1,
            "flag": bool(getattr(parameter, "is_flag", False)),
            "required": bool(parameter.required),
        }
        names = parameter.opts + parameter.secondary_opts if kind == "option" else [parameter.name]
        for name in names:
            values[f"{kind}/{path} {name}".replace("/ ", "/")] = leaf
    for name, inner in getattr(command, "commands", {}).items():
        _walk_commands(inner, f"{path} {name}".strip(), values)


def _public_modules() -> Iterator[Any]:
    import joma

    yield joma
    waiting = [joma]
    while waiting:
        package = waiting.pop()
        for found in pkgutil.iter_modules(package.__path__):
            if found.name.startswith("_"):
                continue
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            yield module
            if found.ispkg:
                waiting.append(module)


def public_names(module: Any) -> list[str]:
    """`__all__`, or what the module defines without an underscore in front."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    try:
        tree = ast.parse(inspect.getsource(module))
    except OSError:  # an empty file
        return []
    package = hasattr(module, "__path__")
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                one.id
                for target in targets
                for one in ast.walk(target)
                if isinstance(one, ast.Name)
            }
        elif (
            package and isinstance(node, ast.ImportFrom) and (node.module or "").startswith("joma")
        ):
            names |= {one.asname or one.name for one in node.names}
    return sorted(name for name in names if not name.startswith("_") and hasattr(module, name))


def _describe(found: Any, key: str, values: Values) -> None:
    """A name with its parameters, and the members of a class."""
    values[key] = _parameters(found)
    if not inspect.isclass(found):
        return
    for name in dir(found):
        if name.startswith("_") or name == "mro":
            continue
        member = inspect.getattr_static(found, name)
        own = any(
            name in vars(base) and base.__module__.startswith("joma") for base in found.__mro__
        )
        if own:
            member = getattr(member, "__func__", member)
            values[f"{key}.{name}"] = _parameters(member)
    for name in getattr(found, "__dataclass_fields__", {}):
        if not name.startswith("_"):
            values[f"{key}.{name}"] = None


def _parameters(found: Any) -> list[str] | None:
    """Names, kinds and defaults of parameters; None for what is not called."""
    if not callable(found):
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "KEYWORD_ONLY": "keyword "}
    texts = []
    for one in signature.parameters.values():
        default = getattr(one.default, "__name__", None) or repr(one.default)
        default = "" if one.default is one.empty else "=" + re.sub(" at 0x[0-9a-f]+", "", default)
        texts.append(stars.get(one.kind.name, "") + one.name + default)
    return texts


SETUP = {
    "T": "np.linspace(0.0, 3.0, 7)",
    "S": "np.linspace(-2.0, 2.0, 9)",
    "R": "np.linspace(0.05, 0.95, 9)",
    "MU": "np.array([0.3, 0.7, 1.1, 1.9])",
    "DELTA": "np.array([0.2, 0.5, 0.9])",
    "M": "np.sin(np.arange(24.0)).reshape(4, 6)",
    "GAUSS": "marginals.Gaussian()",
    "STUDENT": "marginals.StudentT(3.0)",
    "LAPLACE": "marginals.Laplace()",
    "MEANS": "np.array([[2.0, 0.0], [-2.0, 0.5]])",
    "SIGNED": "np.array([0.6, -0.4])",
    "V": "np.array([0.8, 0.1])",
    "POINT": "clusters.CriticalPoint(-1.0, 1.5, 0.5)",
    "X": "np.abs(np.cos(np.arange(15.0))).reshape(5, 3)",
    "SAMPLES": "block.Samples(X, gradient=np.sin(np.arange(5.0)))",
    "LABELLED": "block.Samples(X, labels=np.array([0, 1, 0, 1, 1]))",
    "BLOCK": "block.Block('exp', 'linear')",
    "SOFT": "block.Block('softmax', 'relu', eta_z=0.5)",
    "PATH": "block.simulate(BLOCK, SAMPLES, T)",
    "SOFT_PATH": "block.simulate(SOFT, LABELLED, T)",
    "STATE": "block.State(PATH.v[-1], PATH.z[-1].reshape(1, -1), PATH.bias[-1].reshape(1, -1))",
    "TREE": "hblt.Tree(np.array([0.4, 0.6]), np.array([[0.2, 0.7]]),"
    " (np.array([0, 0]), np.array([0, 0, 1])),"
    " (np.array([0.8, 0.6]), np.array([0.5, 0.9, 0.7])))",
    "BALANCED": "scan_snap.Balanced(4, 2, 3)",
    "CORPUS": "BALANCED.corpus",
    "Z": "np.linspace(-0.5, 0.5, CORPUS.token_given_class.shape[1])[None]",
    "Y": "np.cos(np.arange(CORPUS.token_given_class.size * 1.0))"
    ".reshape(CORPUS.token_given_class.shape[::-1])",
    "B": "np.diag([1.0, 2.0, 3.0, 4.0])[None]",
    "C": "np.diag([1.0, 1.5, 2.0, 2.5, 3.0, 3.5])[None]",
    "P": "np.linalg.qr(np.cos(np.arange(8.0)).reshape(4, 2))[0]",
    "Q": "np.linalg.qr(np.sin(np.arange(12.0) + 1).reshape(6, 2))[0]",
    "PROBLEM": "galore.ReversibleGradient(M[None], B, C)",
    "ZERO": "np.zeros((4, 6))",
}
"""What the calls are made with, in the order in which it is made."""

CALLS = (
    "block.objective(BLOCK, SAMPLES, STATE)",
    "block.simulate(BLOCK, SAMPLES, T)",
    "block.simulate(SOFT, LABELLED, T)",
    "block.velocity(BLOCK, SAMPLES, STATE)",
    "cdag.angle(MU, MU[::-1])",
    "cdag.corr(M[0], M[1])",
    "cdag.correlation_bound(0.3, 0.4, 0.2)",
    "cdag.random_cases(20, 3, 0.1, 0)",
    "clusters.balance(GAUSS, SIGNED, V)",
    "clusters.critical_points(GAUSS, 4.0)",
    "clusters.critical_points(STUDENT, 6.0)",
    "clusters.curve(LAPLACE, S)",
    "clusters.curve_slope(STUDENT, S)",
    "clusters.distances(MEANS, V, 0.3)",
    "clusters.eigenvalues(STUDENT, POINT)",
    "clusters.expectations(GAUSS, V, MEANS[0], 0.2)",
    "clusters.fixed_bias_ratio(GAUSS, -1.0, 3.0)",
    "clusters.full_jacobian(GAUSS, SIGNED, MEANS, V, 0.1)",
    "clusters.homogeneous_slopes(LAPLACE, S)",
    "clusters.jacobian(STUDENT, POINT)",
    "clusters.phase(STUDENT, 3.0, 0.7)",
    "clusters.potential(GAUSS, SIGNED, MEANS, V, 0.1)",
    "clusters.radial_velocity(GAUSS, SIGNED, MEANS, V, 0.1)",
    "clusters.straddles(STUDENT, 4.0)",
    "clusters.sufficient_condition(STUDENT)",
    "clusters.velocity(GAUSS, SIGNED, MEANS, V, 0.1)",
    "embeddings.almost_orthogonal(12, 8, 0)",
    "embeddings.coherence(M)",
    "embeddings.dimension_for(0.1, 1000)",
    "embeddings.expected_overlaps(0.2, 100, 64)",
    "embeddings.superposed(M, M + 1.0, MU)",
    "functions.exp_attention().score(S)",
    "functions.leaky_relu(0.1).value(S)",
    "functions.sigmoid_attention().integral(S)",
    "galore.contraction_rate(B, C, P, Q)",
    "galore.descend(PROBLEM, ZERO, step=0.05, steps=20, rank=2, refresh=5)",
    "galore.exact_contraction_rate(B, C, P, Q)",
    "galore.noise_floor(0.1, rank=2, rows=4, columns=6)",
    "galore.noise_stall(0.1, rank=2, rows=4, columns=6)",
    "galore.project(M, P, Q)",
    "galore.refreshed_bound(PROBLEM, step=0.05, rank=2)",
    "galore.stalled_gradient(PROBLEM, ZERO, P, Q)",
    "galore.step_limit(B, C, P, Q)",
    "galore.svd_projection(M, 2)",
    "hblt.cooccurrence(np.arange(4), 4, 0.8, 0.3)",
    "hblt.cooccurrence_near_one(np.arange(4), 4, 0.01)",
    "hblt.dissociation_bound(np.arange(4), 4, 0.01)",
    "hblt.latent_distribution(0.5, np.array([0.4, 0.6]), np.array([0.2, 0.7]))",
    "hblt.path(np.array([0.9, 0.8, 0.7]))",
    "hblt.root_uncertainty(np.array([0.4, 0.6]), np.array([0.2, 0.7]))",
    "hblt.transition(R)",
    "invariants.conserved(PATH)",
    "invariants.conserved_pointwise(BLOCK, PATH.v, PATH.z)",
    "invariants.conserved_total(BLOCK, PATH.v, PATH.z)",
    "invariants.correlation(MU, MU[::-1] ** 2)",
    "invariants.drift(PATH)",
    "invariants.exp_logits(BLOCK, PATH.v)",
    "linear.blowup_time(DELTA)",
    "linear.conserved_ratio(DELTA, DELTA * 0.5)",
    "linear.limit(DELTA)",
    "linear.linear_attention(DELTA, T * 0.1)",
    "linear.stable_rank_limit(M)",
    "linear.unit_rates(DELTA, eta_z=0.5)",
    "linear.weights(DELTA, T * 0.2)",
    "linear.winner(DELTA)",
    "marginals.sphere_constant(5)",
    "memory.covariance(SOFT, LABELLED, SOFT_PATH.start)",
    "memory.gap_bound(SOFT_PATH)",
    "nonlinear.attention_entropy(M)",
    "nonlinear.drop_and_rebound(np.cos(T))",
    "nonlinear.elapsed(R, 1.5)",
    "nonlinear.entropy_fate(MU)",
    "nonlinear.lemma6_bound()",
    "nonlinear.lemma7_bound()",
    "nonlinear.linear_attention_residual(MU, T, initial=0.1)",
    "nonlinear.log_residual(MU, T)",
    "nonlinear.offset(R, 1.5)",
    "nonlinear.offset_bound()",
    "nonlinear.rate_ratio(0.7, 1.9, T + 0.1)",
    "nonlinear.residual_offset(MU)",
    "nonlinear.settled_threshold(MU)",
    "nonlinear.stable_rank_fate(np.abs(M))",
    "nonlinear.weights(MU, T)",
    "hblt.posteriors(TREE, np.array([[0, 1, 1], [1, 0, 0], [1, 1, 1]]))",
    "scan_snap.attention(CORPUS, Z)",
    "scan_snap.critical_margin(5)",
    "scan_snap.deciding_time(classes=4, distinct_share=0.5, eta_y=1.0)",
    "scan_snap.decoder_rate_turn(classes=4, distinct_share=0.5, eta_y=1.0)",
    "scan_snap.evolve(CORPUS, T, eta_y=1.0, eta_z=0.5)",
    "scan_snap.feature(CORPUS, Z)",
    "scan_snap.finite_length_bias(R, 20, 3)",
    "scan_snap.flow(CORPUS, Z, Y, eta_y=1.0, eta_z=0.5)",
    "scan_snap.full_log_gain_bounds(T, 0.4)",
    "scan_snap.growth_factor(R, R)",
    "scan_snap.initial_fate(CORPUS)",
    "scan_snap.initial_pull(CORPUS)",
    "scan_snap.log_gain_bounds(T, 0.4)",
    "scan_snap.margin_time(R, classes=4, distinct_share=0.5, eta_y=1.0)",
    "scan_snap.objective(CORPUS, Z, Y)",
    "scan_snap.rescaled_time(T, 2.0)",
    "scan_snap.snapping_time(4, 14, 1.0)",
    "scan_snap.train_on_samples(CORPUS, 20, 10, 4, eta_y=1.0, eta_z=0.5, rng=0)",
    "spectra.rank(M)",
    "spectra.singular_values(M)",
    "spectra.stable_rank(M)",
    "stationarity.drift(PATH)",
    "stationarity.gradient_means(BLOCK, SAMPLES, STATE)",
    "stationarity.preactivations(BLOCK, SAMPLES, STATE)",
    "stationarity.rate(SOFT, LABELLED, SOFT_PATH.start)",
)
"""Calls of public functions of `joma.theory`; names are those of its modules."""


class Moved:
    """A module whose names are looked up in the table of renames where it has them no more.

    Args:
        name: of the module.
        renames: of public names, "module:name".
    """

    def __init__(self, name: str, renames: Mapping[str, str]) -> None:
        self._name, self._renames = name, renames

    def __getattr__(self, name: str) -> Any:
        place = renamed_name(f"{self._name}:{name}", self._renames)
        module, _, attribute = place.partition(":")
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found


def inside_closed_forms(renames: str) -> Values:
    """Results of the calls, each under the text of the call; an error is a result, too."""
    table = json.loads(renames)
    modules = sorted({call.split(".")[0] for call in CALLS} | {"marginals"})
    names: dict[str, Any] = {one: Moved(f"joma.theory.{one}", table) for one in modules}
    names["np"] = np
    values: Values = {}
    for name, text in SETUP.items():
        names[name] = eval(text, names)
    for call in CALLS:
        try:
            flatten(eval(call, names), call.replace("/", "÷"), values)
        except (ValueError, ArithmeticError) as error:
            values[call] = f"{type(error).__name__}: {error}"
    return values


INSIDE: dict[str, Callable[..., Any]] = {
    "where": inside_where,
    "experiments": inside_experiments,
    "models": inside_models,
    "surface": inside_surface,
    "closed_forms": inside_closed_forms,
}


# Comparing


def renamed_name(name: str, renames: Mapping[str, str]) -> str:
    """The new place of a public name, "module:name.member", by its longest entry in the table."""
    module, _, rest = name.partition(":")
    parts = rest.split(".")
    for count in range(len(parts), 0, -1):
        entry = f"{module}:{'.'.join(parts[:count])}"
        if entry in renames:
            return ".".join([renames[entry], *parts[count:]])
    return f"{renames.get(module, module)}:{rest}"


@dataclass(frozen=True)
class Renames:
    """The table of renames: see the file itself.

    Attributes:
        sections: of the file.
    """

    sections: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> "Renames":
        """Reads the table; empty where there is no file."""
        return cls(tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})

    @property
    def names(self) -> dict[str, str]:
        """Public names."""
        return self._renamed("names")

    @property
    def bounded(self) -> frozenset[str]:
        """Metrics that may differ by their bounds."""
        return frozenset(self.sections.get("bounded", {}))

    def _renamed(self, section: str) -> dict[str, str]:
        return dict(self.sections.get("renamed", {}).get(section, {}))

    def word(self, word: str) -> str:
        """A recorded word as it is now."""
        return self._renamed("words").get(word, word)

    def key(self, part: str, key: str) -> str:
        """A key of the earlier recording as it is now."""
        if part == "surface":
            return self._surface(key)
        pieces = key.split("/")
        if "metrics" in pieces[:-1]:
            name, mark, labels = pieces[-1].partition("&")
            pieces[-1] = self._renamed("metrics").get(name, name) + mark + labels
        if len(pieces) > 2 and pieces[-3] == "tables":
            new = self._renamed("columns").get(f"{pieces[-2]}.{pieces[-1]}")
            pieces[-2:] = new.split(".", 1) if new else pieces[-2:]
        for section, label in (("claims", "claim"), ("metrics", "metric")):
            for place, piece in enumerate(pieces):
                pieces[place] = self._labelled(piece, label, self._renamed(section))
        return self._glob(part, "/".join(pieces), "keys")

    def _labelled(self, piece: str, label: str, renames: Mapping[str, str]) -> str:
        """A piece of a key with `label=word` in it."""
        words = [word.partition("=") for word in piece.split("&")]
        return "&".join(
            name + equals + (renames.get(value, value) if name == label else value)
            for name, equals, value in words
        )

    def _surface(self, key: str) -> str:
        kind, _, rest = key.partition("/")
        if kind == "name":
            return f"name/{renamed_name(rest, self.names)}"
        if kind in ("claim", "experiment"):
            name, mark, entry = rest.partition("/")
            return f"{kind}/{self._renamed(f'{kind}s').get(name, name)}{mark}{entry}"
        return f"{kind}/{self._renamed(f'{kind}s').get(rest, rest)}"

    def _glob(self, part: str, key: str, section: str) -> str:
        for old, new in self._renamed(section).items():
            if (middle := _matches(f"{part}:{key}", old)) is not None:
                return new.replace("*", middle, 1).removeprefix(f"{part}:")
        return key

    def changed(self, part: str, key: str) -> bool:
        """Whether the parameters of a public name changed on purpose."""
        names = self.sections.get("changed", {}).get("names", {})
        return part == "surface" and key.removeprefix("name/") in names

    def removed(self, part: str, key: str) -> str | None:
        """Why a key is gone; None where no reason is given."""
        removed = self.sections.get("removed", {})
        for pattern, reason in removed.get("keys", {}).items():
            if _matches(f"{part}:{key}", pattern) is not None:
                return reason
        if part == "surface":
            kind, _, rest = key.partition("/")
            for entry, reason in removed.get(f"{kind}s", {}).items():
                if rest == entry or rest.startswith((f"{entry}.", f"{entry}:", f"{entry}/")):
                    return reason
        pieces = key.split("/")
        words = {word.partition("=")[2] or word for piece in pieces for word in piece.split("&")}
        for section, found in (
            ("metrics", words),
            ("claims", words),
            ("columns", {".".join(pieces[-2:])} if "tables" in pieces else set()),
        ):
            for entry, reason in removed.get(section, {}).items():
                if entry in found:
                    return reason
        return None


def _matches(text: str, pattern: str) -> str | None:
    """What stands for the star in a pattern that fits; "" where it has none."""
    head, star, tail = pattern.partition("*")
    if not star:
        return "" if text == pattern else None
    fits = text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail)
    return text[len(head) : len(text) - len(tail)] if fits else None


@dataclass
class Comparison:
    """How a part compares.

    Attributes:
        differences: key, value before, value after, and their relative difference.
        counts: equal, renamed, removed, changed, bounded, reworded, extended and new values.
    """

    differences: list[tuple[str, str, str, float | None]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def differ(self, key: str, before: Any, after: Any) -> None:
        """Notes a difference."""
        x, y = _float(before), _float(after)
        relative = None
        if x is not None and y is not None:
            relative = abs(x - y) / abs(x) if x and math.isfinite(x - y) else math.inf
        self.differences.append((key, _shown(before, x), _shown(after, y), relative))


def _float(value: Any) -> float | None:
    text = value.get("float") if isinstance(value, dict) else value
    try:
        return float.fromhex(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _shown(value: Any, as_float: float | None) -> str:
    text = repr(as_float) if as_float is not None else json.dumps(value, ensure_ascii=False)
    return text if len(text) < 160 else f"{text[:157]}..."


LOST = "(not there)"


def compare_part(part: str, before: Values, after: Values, renames: Renames) -> Comparison:
    """Compares one part of two recordings."""
    result = Comparison()
    bounds = _largest_bounds(before), _largest_bounds(after)
    met: set[str] = set()
    for old, leaf in before.items():
        new = (
            old if old in after and renames.key(part, old) not in after else renames.key(part, old)
        )
        if new in after:
            met.add(new)
            result.counts["renamed"] += new != old
            if leaf != after[new] and renames.changed(part, old):
                result.counts["changed"] += 1
                continue
            _compare_leaf(
                result, f"{old} → {new}" if new != old else old, leaf, after[new], renames, bounds
            )
        elif renames.removed(part, old) is not None:
            result.counts["removed"] += 1
        else:
            result.differ(old, leaf, LOST)
    result.counts["new"] += len(after.keys() - met)
    return result


Bounds = Mapping[str, float]


def _largest_bounds(values: Values) -> Bounds:
    """The largest bound of each metric that states one."""
    largest: dict[str, float] = defaultdict(float)
    for leaf in values.values():
        if isinstance(leaf, dict) and "name" in leaf:
            stated = leaf.get("bounds", [leaf.get("bound")])
            known = [float.fromhex(one) for one in stated if one is not None]
            largest[leaf["name"]] = max([largest[leaf["name"]], *known])
    return largest


def _compare_leaf(
    result: Comparison,
    key: str,
    before: Leaf,
    after: Leaf,
    renames: Renames,
    bounds: tuple[Bounds, Bounds],
) -> None:
    if before == after:
        result.counts["equal"] += 1
    elif isinstance(before, dict) and isinstance(after, dict):
        _compare_objects(result, key, before, after, renames, bounds)
    elif isinstance(before, str) and isinstance(after, str):
        _compare_words(result, key, before, after, renames)
    elif isinstance(before, list) and isinstance(after, list):
        _compare_lists(result, key, before, after, renames, bounds)
    else:
        result.differ(key, before, after)


def _compare_objects(
    result: Comparison,
    key: str,
    before: dict[str, Leaf],
    after: dict[str, Leaf],
    renames: Renames,
    bounds: tuple[Bounds, Bounds],
) -> None:
    name = before.get("name", before.get("column", ""))
    loose = name in renames.bounded
    if "steps" in before and "steps" in after:
        pairs = _by_step(before), _by_step(after)
        for place in dict.fromkeys([*pairs[0], *pairs[1]]):
            own = f"{key} at step {place[0]}"
            _compare_measured(result, own, pairs[0].get(place), pairs[1].get(place), loose)
    elif "column" in before and "column" in after:
        widest = bounds[0].get(name, 0.0).hex(), bounds[1].get(name, 0.0).hex()
        if len(before["values"]) != len(after["values"]):
            result.differ(key, len(before["values"]), len(after["values"]))
            return
        for row, pair in enumerate(zip(before["values"], after["values"], strict=True)):
            own = [(value, bound) for value, bound in zip(pair, widest, strict=True)]
            _compare_measured(result, f"{key} row {row}", own[0], own[1], loose)
    elif "bound" in before and "bound" in after:
        own = [(leaf["float"], leaf["bound"]) for leaf in (before, after)]
        _compare_measured(result, key, own[0], own[1], loose)
    elif "values" in before and before.get("array") == after.get("array"):
        for place, (x, y) in enumerate(zip(before["values"], after["values"], strict=True)):
            if x != y:
                result.differ(f"{key}[{place}]", x, y)
        if before["dtype"] != after["dtype"]:
            result.differ(f"{key} dtype", before["dtype"], after["dtype"])
    else:
        result.differ(key, before, after)


Measured = tuple[str | None, str | None]
"""A value and the bound on its error, in hexadecimal."""


def _by_step(leaf: Mapping[str, Any]) -> dict[tuple[int, int], Measured]:
    """Values and bounds by step and place among those of that step."""
    seen: Counter[int] = Counter()
    found: dict[tuple[int, int], Measured] = {}
    bounds = leaf.get("bounds", [None] * len(leaf["steps"]))
    for step, value, bound in zip(leaf["steps"], leaf["values"], bounds, strict=True):
        found[step, seen[step]] = value, bound
        seen[step] += 1
    return found


def _compare_measured(
    result: Comparison, key: str, before: Measured | None, after: Measured | None, loose: bool
) -> None:
    """Compares a value with a bound: within both bounds together where that is allowed."""
    if before == after:
        result.counts["equal"] += 1
        return
    if before is None or after is None or before[0] is None or after[0] is None:
        result.differ(
            key, LOST if before is None else before[0], LOST if after is None else after[0]
        )
        return
    if loose:
        room = sum(float.fromhex(bound) for bound in (before[1], after[1]) if bound is not None)
        if abs(float.fromhex(before[0]) - float.fromhex(after[0])) <= room < math.inf:
            result.counts["bounded"] += 1
            return
    if before[0] != after[0]:
        result.differ(key, before[0], after[0])
    else:
        result.differ(f"{key}, its bound", before[1], after[1])


_NUMBER = re.compile(r"[0-9][0-9.,]*")


def _compare_words(result: Comparison, key: str, before: str, after: str, renames: Renames) -> None:
    sentence = " " in before.strip() and " " in after.strip()
    if renames.word(before) == after:
        result.counts["renamed"] += 1
    elif sentence and _NUMBER.findall(before) == _NUMBER.findall(after):
        result.counts["reworded"] += 1
    else:
        result.differ(key, before, after)


def _compare_lists(
    result: Comparison,
    key: str,
    before: list[Leaf],
    after: list[Leaf],
    renames: Renames,
    bounds: tuple[Bounds, Bounds],
) -> None:
    if key.startswith("name/"):
        if _extends(before, after):
            result.counts["extended"] += 1
        else:
            result.differ(key, before, after)
    elif len(before) != len(after):
        result.differ(key, before, after)
    else:
        for place, (x, y) in enumerate(zip(before, after, strict=True)):
            _compare_leaf(result, f"{key}[{place}]", x, y, renames, bounds)


def _extends(before: Sequence[str], after: Sequence[str]) -> bool:
    """Whether every call that fitted the old parameters fits the new ones.

    The old parameters stand in their order, with their defaults; one that was required may have
    got a default; new ones have defaults and come after those that are given by position.
    """
    position = [one for one in before if not one.startswith(("keyword ", "*"))]
    now = [one for one in after if not one.startswith(("keyword ", "*"))]
    if len(now) < len(position) or not all(map(_fits, position, now)):
        return False
    names = {_bare(one): one for one in after}
    kept = all(_bare(one) in names and _fits(one, names[_bare(one)]) for one in before)
    old = {_bare(one) for one in before}
    fresh = [one for one in after if _bare(one) not in old]
    return kept and all("=" in one or one.startswith("*") for one in fresh)


def _bare(parameter: str) -> str:
    return parameter.removeprefix("keyword ").partition("=")[0]


def _fits(before: str, after: str) -> bool:
    before, after = before.removeprefix("keyword "), after.removeprefix("keyword ")
    return before == after or ("=" not in before and before == _bare(after))


def compare(arguments: argparse.Namespace) -> int:
    """Compares two recordings and prints how each part does."""
    before, after = (read_recording(Path(name)) for name in (arguments.before, arguments.after))
    renames = Renames.read(Path(arguments.renames))
    failed = False
    for part, values in before["parts"].items():
        if part not in after["parts"]:
            print(f"{part}: not recorded after")
            failed = True
            continue
        result = compare_part(part, values, after["parts"][part], renames)
        failed |= bool(result.differences)
        said = f"{len(result.differences)} differences" if result.differences else "equal"
        counted = ", ".join(f"{number} {name}" for name, number in result.counts.items() if number)
        print(f"{part}: {said} ({counted})")
        for key, x, y, relative in result.differences[: arguments.show]:
            more = "" if relative is None else f", relative difference {relative:.3g}"
            print(f"  {key}: {x} before, {y} after{more}")
    return 1 if failed else 0


# Older run folders


def inside_open(folder: str) -> dict[str, Any]:
    """Reads all of a run folder through `joma.runs`."""
    from joma.runs import Run

    run = Run.open(folder)
    read = run.metrics.read()
    for name in run.tables:
        run.read_table(name)
    for file in Path(folder).glob("*.json"):
        if file.stem not in ("config", "manifest", "environment"):
            run.read_json(file.stem)
    return {
        "rows": len(next(iter(read.values()), ())),
        "tables": len(run.tables),
        "verified": run.verified,
        "missing": run.missing,
    }


INSIDE["open"] = inside_open


def open_runs(arguments: argparse.Namespace) -> int:
    """Opens every run folder in a folder with the command line and with `joma.runs`."""
    kept = Path(arguments.folder).resolve()
    configurations = sorted(kept.rglob("config.json"))
    runs = [file.parent for file in configurations if (file.parent / "environment.json").is_file()]
    if not runs:
        raise GoldenError(f"{kept} holds no run folders")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        recorder = Recorder(Path(arguments.tree).resolve(), Path(scratch))
        copy = Path(scratch) / "runs"
        shutil.copytree(kept, copy)  # nothing that is kept is changed
        for run in runs:
            name = str(run.relative_to(kept))
            try:
                arguments_ = ["runs", "show", str(copy / name), "--json"]
                shown = recorder.joma(arguments_, recorder.folder("show"))
                read = recorder.inside("open", str(copy / name))
                if shown["code"] or not shown["json"] or not read["verified"] or read["missing"]:
                    raise GoldenError(f"not whole: {read}")
                print(f"{name}: opened, {read['rows']} rows, {read['tables']} tables", flush=True)
            except GoldenError as error:
                failed += 1
                print(f"{name}: failed: {error}", flush=True)
    print(f"{len(runs) - failed} of {len(runs)} run folders open")
    return 1 if failed else 0


# Size

ENTRY_NAMES = frozenset({"EXPERIMENT", "METRIC", "OPTIMIZERS"})
"""Names for which `joma.experiments`, `joma.probes.metrics` and `joma.optim.registry` scan."""


@dataclass
class Module:
    """A module as its source has it.

    Attributes:
        name: with dots.
        package: whether it is the `__init__` of one.
        lines: of code: those with a token that is neither a comment nor part of a statement that
            is a string alone (a docstring).
        imports: module, name (None for the module itself), and whether it is lazy (inside a
            function); those for type checkers alone are marked "types".
        classes: public ones defined at the top.
        exports: names that it imports at the top, and where they come from.
        strings: short texts in it, among which are names of modules to load.
        entry: whether it is an entry of a registry that scans a package for it.
    """

    name: str
    package: bool
    lines: int
    imports: list[tuple[str, str | None, str]]
    classes: list[str]
    exports: dict[str, tuple[str, str]]
    strings: set[str]
    entry: bool = False


def code_lines(source: str) -> int:
    """Lines of code, without docstrings, comments and blank lines."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    empty = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


class _Imports(ast.NodeVisitor):
    """Collects the imports of a module."""

    def __init__(self, name: str, package: bool) -> None:
        self.base = name.split(".") if package else name.split(".")[:-1]
        self.found: list[tuple[str, str | None, str]] = []
        self.exports: dict[str, tuple[str, str]] = {}
        self.when = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node, self.when or "lazy")

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node, self.when or "lazy")

    def visit_If(self, node: ast.If) -> None:
        types = "TYPE_CHECKING" in ast.dump(node.test)
        self._inside(node, "types" if types else self.when)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(one.name, None, self.when) for one in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.base[: len(self.base) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for one in node.names:
            self.found.append((module, one.name, self.when))
            if self.when != "lazy":
                self.exports[one.asname or one.name] = (module, one.name)

    def _inside(self, node: ast.AST, when: str) -> None:
        outer, self.when = self.when, when
        self.generic_visit(node)
        self.when = outer


def _is_entry(parsed: ast.Module) -> bool:
    """Return whether a module assigns one of the names for which registries scan."""
    plain = (node for node in parsed.body if isinstance(node, ast.Assign))
    typed = (node for node in parsed.body if isinstance(node, ast.AnnAssign))
    targets = [one for node in plain for one in node.targets] + [node.target for node in typed]
    return any(isinstance(one, ast.Name) and one.id in ENTRY_NAMES for one in targets)


def read_modules(tree: Path) -> dict[str, Module]:
    """The modules of the only package in the `src` folder of a tree."""
    found: dict[str, Module] = {}
    for file in sorted((tree / "src").rglob("*.py")):
        parts = file.relative_to(tree / "src").with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        source = file.read_text(encoding="utf-8")
        parsed = ast.parse(source)
        imports = _Imports(name, package)
        imports.visit(parsed)
        classes = [node.name for node in parsed.body if isinstance(node, ast.ClassDef)]
        looked_up = {
            id(one)
            for node in ast.walk(parsed)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.modules.get"
            for one in node.args
        }
        constants = (
            node.value
            for node in ast.walk(parsed)
            if isinstance(node, ast.Constant) and id(node) not in looked_up
        )
        found[name] = Module(
            name,
            package,
            code_lines(source),
            imports.found,
            [one for one in classes if not one.startswith("_")],
            imports.exports,
            {one for one in constants if isinstance(one, str) and len(one) < 100},
            _is_entry(parsed),
        )
    return found


@dataclass(frozen=True)
class Size:
    """What there is in a source tree, and how it hangs together.

    A room is the first folder or module below the package.

    The importers of a module are the modules that import it, at any place in their source, or a
    name that is defined in it. A name that a package's `__init__` imports from a module inside the
    package counts as imported from that module: who imports the name from the package is an
    importer of the module, and the package is not. Imports by the `__init__` of a package that the
    module is in do not count. Not counted among the modules with exactly one importer: `__main__`,
    kernels (`*_kernel*.py`, folders `kernels`), entries of registries that scan for them (modules
    that assign one of `ENTRY_NAMES`), and modules that are loaded by name: "module" or
    "module:name" as a string in the package or in pyproject.toml.

    Attributes:
        lines: of code by room.
        modules: how many.
        single: modules with exactly one importer, and that one.
        unused: modules with none that are neither packages nor among those left out.
        private: imports of a private module, or of a private name, of another room: importer and
            module, once for all names.
        cycles: of imports at the top of modules.
        lazy_cycles: those that imports inside functions add.
        repeated: public classes that several modules define under one name.
    """

    lines: Mapping[str, int]
    modules: int
    single: Mapping[str, str]
    unused: Sequence[str]
    private: Sequence[tuple[str, str]]
    cycles: Sequence[Sequence[str]]
    lazy_cycles: Sequence[Sequence[str]]
    repeated: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, tree: Path) -> "Size":
        """Measures a source tree."""
        modules = read_modules(tree)
        lines: Counter[str] = Counter()
        repeated: dict[str, list[str]] = defaultdict(list)
        for name, module in modules.items():
            lines[_room(name)] += module.lines
            for one in module.classes:
                repeated[one].append(name)
        importers = _importers(modules)
        left_out = _left_out(modules, tree)
        single = {name: next(iter(own)) for name, own in sorted(importers.items()) if len(own) == 1}
        top, every = _graph(modules, lazy=False), _graph(modules, lazy=True)
        cycles = _cycles(top)
        return cls(
            dict(sorted(lines.items())),
            len(modules),
            {name: own for name, own in single.items() if name not in left_out},
            sorted(
                name
                for name, own in importers.items()
                if not own and name not in left_out and not modules[name].package
            ),
            _private(modules),
            cycles,
            [one for one in _cycles(every) if one not in cycles],
            {name: own for name, own in sorted(repeated.items()) if len(own) > 1},
        )

    def show(self, names: bool) -> Iterator[str]:
        """The lines to print; with `names`, which modules."""
        yield f"code lines: {sum(self.lines.values())}"
        for room, count in self.lines.items():
            yield f"  {room}: {count}"
        share = len(self.single) / max(self.modules, 1)
        yield f"modules: {self.modules}"
        yield f"modules with exactly one importer: {len(self.single)} ({share:.0%})"
        if names:
            yield from (f"  {name}: {own}" for name, own in self.single.items())
        yield f"modules without importer: {len(self.unused)}"
        yield from (f"  {name}" for name in self.unused if names)
        yield f"private imports across rooms: {len(self.private)}"
        yield from (f"  {' '.join(one)}" for one in self.private if names)
        yield f"import cycles at the top of modules: {len(self.cycles)}"
        yield from (f"  {' '.join(one)}" for one in self.cycles)
        yield f"import cycles with imports inside functions: {len(self.lazy_cycles)}"
        yield from (f"  {' '.join(one)}" for one in self.lazy_cycles if names)
        yield f"public class names defined more than once: {len(self.repeated)}"
        yield from (f"  {name}: {' '.join(own)}" for name, own in self.repeated.items() if names)


def _room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _defining(modules: Mapping[str, Module], module: str, name: str | None) -> str | None:
    """The module an import reaches: a module itself, or the one in which a name is defined."""
    for _ in range(20):  # re-exports of re-exports
        if name is not None and f"{module}.{name}" in modules:
            return f"{module}.{name}"
        if module not in modules:
            return None
        found = modules[module]
        if name is None or not found.package or name not in found.exports:
            return module
        if not found.exports[name][0].startswith(f"{module}."):
            return module
        module, name = found.exports[name]
    return module


def _importers(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for target, one, _ in module.imports:
            reached = _defining(modules, target, one)
            above = module.package and reached is not None and reached.startswith(f"{name}.")
            if reached is not None and reached != name and not above:
                importers[reached].add(name)
    return importers


def _left_out(modules: Mapping[str, Module], tree: Path) -> set[str]:
    """Modules that are not counted by their importers."""
    project = tree / "pyproject.toml"
    text = project.read_text(encoding="utf-8") if project.is_file() else ""
    loaded = {one.partition(":")[0] for module in modules.values() for one in module.strings}
    loaded |= set(re.findall(r"\"([\w.]+):[\w.]+\"", text))
    kernel = re.compile(r"_kernel[^.]*$|\.kernels(\.|$)")
    return {
        name
        for name, module in modules.items()
        if name.endswith("__main__")
        or kernel.search(name)
        or module.entry
        or (name in loaded and "." in name)
    }


def _private(modules: Mapping[str, Module]) -> list[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for name, module in modules.items():
        for target, one, _ in module.imports:
            inside = one is not None and f"{target}.{one}" in modules
            path = f"{target}.{one}" if inside else target
            if path not in modules or _room(path) == _room(name):
                continue
            words = [*path.split(".")[1:], *([] if inside or one is None else [one])]
            if any(word.startswith("_") and not word.startswith("__") for word in words):
                found.add((name, path))
    return sorted(found)


def _graph(modules: Mapping[str, Module], *, lazy: bool) -> dict[str, set[str]]:
    """Which modules a module names in its imports, those for type checkers left out."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for target, one, when in module.imports:
            reached = f"{target}.{one}" if one and f"{target}.{one}" in modules else target
            if reached in modules and reached != name and (not when or (lazy and when == "lazy")):
                graph[name].add(reached)
    return graph


def _cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            place = stack.index(name)
            own = sorted(stack[place:])
            del stack[place:]
            if len(own) > 1:
                found.append(own)

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return sorted(found)


def size(arguments: argparse.Namespace) -> int:
    """Prints the size of a tree."""
    print("\n".join(Size.of(Path(arguments.tree)).show(arguments.names)))
    return 0


def main(given: Sequence[str] | None = None) -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("record", help="record the numbers of a source tree")
    one.add_argument("--tree", default=str(ROOT), help="the source tree")
    one.add_argument(
        "--out", required=True, help="the file; parts in it that are not asked for stay"
    )
    one.add_argument("--part", action="append", help=f"of {', '.join(PARTS | CUDA_PARTS)}")
    one.add_argument("--cuda", action="store_true", help="the parts that train at full scale")
    one.add_argument("--device", default="cuda", help="of those parts")
    one.add_argument("--scale", default="full", help="of those parts")
    one.add_argument("--before", help="an earlier recording, whose public names are tried")
    one.add_argument("--keep", help="folder that gets one finished run of each kind")
    one.set_defaults(do=record)

    one = commands.add_parser("compare", help="compare two recordings")
    one.add_argument("before")
    one.add_argument("after")
    one.add_argument("--renames", default=str(RENAMES), help="the table of renames")
    one.add_argument("--show", type=int, default=10, help="differences to print of each part")
    one.set_defaults(do=compare)

    one = commands.add_parser("open", help="open run folders that were kept")
    one.add_argument("folder")
    one.add_argument("--tree", default=str(ROOT), help="the source tree")
    one.set_defaults(do=open_runs)

    one = commands.add_parser("size", help="count code lines, modules and imports")
    one.add_argument("--tree", default=str(ROOT), help="the source tree")
    one.add_argument("--names", action="store_true", help="name the modules")
    one.set_defaults(do=size)

    one = commands.add_parser("inside")
    one.add_argument("what", choices=INSIDE)
    one.add_argument("given", nargs="*")
    one.set_defaults(do=_inside)

    arguments = parser.parse_args(given)
    try:
        return arguments.do(arguments)
    except GoldenError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 2


def _inside(arguments: argparse.Namespace) -> int:
    print(json.dumps(INSIDE[arguments.what](*arguments.given), ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
