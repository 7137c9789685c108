"""One run folder, as an object."""

import importlib.metadata
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from numpy.typing import ArrayLike, NDArray

from joma.common import json_files
from joma.common.checks import check_one_of
from joma.errors import JomaError
from joma.runs import _tables
from joma.runs._checkpoints import Checkpoints
from joma.runs._folder import (
    CONFIG,
    ENVIRONMENT,
    check_restart,
    check_resumable,
    is_damaged_run,
    is_run,
    new_folder,
    remove_leftovers,
)
from joma.runs._lock import locked
from joma.runs._manifest import MANIFEST, Manifest
from joma.runs._metrics import Metrics

_logger = logging.getLogger(__name__)

_PACKAGES = ("numpy", "scipy", "torch", "matplotlib")

DEFAULT_ROOT = Path("runs")

_OLDER = ("0.1.", "0.2.")
"""Versions whose folders are refused."""

_NAME = re.compile(r"\w[\w.+-]*")

Existing = Literal["refuse", "next", "restart"]
"""What `Run.create` does where the folder holds an earlier run."""


@dataclass(frozen=True)
class Run:
    """A run folder; made by `Run.create`, resumed by `Run.resume`, read by `Run.open`.

    Attributes:
        path: The folder.
        config: The settings of the run, with its "name".
        environment: Versions, device, commit, command line and date (UTC) of when it began; under
            "resumed", a record for each time it was resumed: the date and whatever else was not as
            in the beginning.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]

    @classmethod
    def create(
        cls,
        name: str,
        config: Mapping[str, Any],
        *,
        out: Path | str | None = None,
        device: str = "cpu",
        existing: Existing = "refuse",
    ) -> "Run":
        """Make a run folder and write its configuration and environment.

        The files of an earlier run are never removed.

        Args:
            name: What is run; letters, digits and . + - _.
            config: Everything that decides the run's numbers; kept as `config.json`.
            out: The folder itself, `./runs/NAME-date-time` if not given. One that holds other
                things than a run is refused.
            device: What the run computes on.
            existing: What to do where `out` holds an earlier run. "refuse" raises JomaError.
                "next" makes `out-2`, `out-3`, … and logs a warning that names it; processes that
                ask at the same time get a folder each. "restart" starts a run of the same name
                and settings over if it did not finish, and otherwise refuses: its metrics are
                emptied, and its other files stay until they are written again.

        Raises:
            JomaError: The folder cannot be used, or another process has it `locked`.
        """
        check_one_of("existing", existing, get_args(Existing))
        settings = _settings(name, config)
        given = None if out is None else Path(out)
        if given is not None and existing == "restart" and check_restart(given, name):
            return cls._restart(given, name, settings, device)
        around = environment(device)
        files = {ENVIRONMENT: around, CONFIG: settings}  # the first marks a run folder
        folder = default_folder(name) if given is None else given
        with new_folder(name, folder, next_free=given is None or existing == "next") as path:
            run = cls(path, settings, around)
            run.manifest.begin({file: json_files.encode(it) for file, it in files.items()})
        if given not in (None, path):
            _logger.warning(f"{given} holds an earlier run; this one is written to {path}")
        return run

    @classmethod
    def _restart(cls, out: Path, name: str, settings: dict[str, Any], device: str) -> "Run":
        with locked(out):
            check_restart(out, name)  # again: another process may have been faster
            run = cls._resume_in(out, name, settings, device, ())
            run.metrics.rewind(-1)
            return run

    @classmethod
    def resume(
        cls,
        name: str,
        config: Mapping[str, Any],
        *,
        out: Path | str | None,
        device: str = "cpu",
        changing: Collection[str] = (),
    ) -> "Run":
        """Open the run in `out` to resume it, or make it as `create` does if there is none.

        Everything in the folder stays: outcome, tables, figures, metrics and checkpoints. Refused
        while another process has it `locked`.

        Args:
            name: What is run.
            config: As for `create`; must be what the run in `out` was made with.
            out: The folder; if not given, a new one is made.
            device: What the run computes on from now on.
            changing: Entries of the configuration that may be other numbers than the run in
                `out` has, "outer.inner" for a nested one; `config.json` keeps what it has until
                `write_config`.
        """
        settings = _settings(name, config)
        if out is None or not check_resumable(Path(out), name):
            return cls.create(name, config, out=out, device=device)
        with locked(Path(out)):
            return cls._resume_in(Path(out), name, settings, device, changing)

    @classmethod
    def _resume_in(
        cls, out: Path, name: str, settings: dict[str, Any], device: str, changing: Collection[str]
    ) -> "Run":
        run = cls.open(out)
        if differences := differing(run.config, settings, changing=changing):
            there = " and ".join(_entry(key, value) for key, (value, _) in differences.items())
            asked = " and ".join(_entry(key, value) for key, (_, value) in differences.items())
            raise JomaError(
                f"out {out} holds a {name} run with {there}, but {asked} "
                f"{'was' if len(differences) == 1 else 'were'} asked for; out must be a new "
                f"folder, an empty one or that of a {name} run with the same settings"
            )
        remove_leftovers(run.path)
        around = _resumed(run.environment, environment(device))
        run._write(ENVIRONMENT, around)
        changed = differing(run.config, settings)
        return cls(run.path, settings if changed else run.config, around)

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """Return the run in an existing folder."""
        path = Path(path)
        if not is_run(path):
            if is_damaged_run(path):
                json_files.read(path / ENVIRONMENT)  # says what is wrong with it
            raise JomaError(f"{path} is not a run folder")
        run = cls(path, {}, {})
        config, around = run._read_json(CONFIG), run._read_json(ENVIRONMENT)
        if not isinstance(config, dict) or not isinstance(config.get("name"), str):
            raise JomaError(
                f'{path / CONFIG} must hold the settings of a run by name, with a word as "name"'
            )
        if str(around.get("joma")).startswith(_OLDER):
            raise JomaError(f"{path} was written by joma {around['joma']}, which only that reads")
        return cls(path, config, around)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the run, for a `with` block that writes to it.

        They are refused with a JomaError when they ask for the same, or would create or resume a
        run in this folder; readers are not. A process may nest it; a kill ends it. Where the
        system or the file system has no locks, nothing is locked.
        """
        with locked(self.path):
            yield

    def write_config(self) -> None:
        """Write `config.json` of a run whose resuming changed a number, once it continues."""
        if differing(self._read_json(CONFIG), self.config):
            self._write(CONFIG, self.config)

    @property
    def name(self) -> str:
        """What was run."""
        return self.config["name"]

    @cached_property
    def metrics(self) -> Metrics:
        """The log of what was measured, step by step."""
        return Metrics(self.path / "metrics", self.manifest)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints from which the run can be resumed."""
        return Checkpoints(self.path / "checkpoints")

    def write_table(self, name: str, columns: Mapping[str, ArrayLike]) -> Path:
        """Write `tables/NAME.parquet` from columns of equal length."""
        return self.manifest.write_file(_table(name), _tables.encode_columns(columns))

    def read_table(self, name: str) -> dict[str, NDArray[Any]]:
        """Return the columns of `tables/NAME.parquet`."""
        file = _table(name)
        try:
            data = self.manifest.read_file(file)
        except FileNotFoundError:
            known = ", ".join(self.tables) or "no tables"
            raise JomaError(f"{self.path} has no table {name!r}; it has {known}") from None
        return _tables.decode_columns(self.path / file, data)

    def write_figure(self, filename: str, data: bytes) -> Path:
        """Write `figures/FILENAME`."""
        return self.manifest.write_file(f"figures/{check_name('filename', filename)}", data)

    def write_json(self, name: str, value: Any) -> Path:
        """Write `NAME.json`; numbers that are not finite become null."""
        return self._write(_json_file(name), value)

    def read_json(self, name: str) -> Any:
        """Return the value in `NAME.json`."""
        return self._read_json(_json_file(name))

    @property
    def tables(self) -> list[str]:
        """Names of the tables there are."""
        return sorted(path.stem for path in _visible(self.path / "tables", ".parquet"))

    @property
    def figures(self) -> list[Path]:
        """Paths of the figures there are."""
        return _visible(self.path / "figures")

    @property
    def manifest(self) -> Manifest:
        """The list of the files the run owns, with their checksums."""
        return Manifest(self.path)

    @property
    def verified(self) -> bool:
        """Whether everything in the folder has a checksum, which is checked whenever it is read.

        False for a run folder without a manifest, or one that files were added to.
        """
        contents = self.manifest.read()
        return contents is not None and self._own_files() <= contents.files.keys()

    @property
    def missing(self) -> list[str]:
        """Names of files that the run wrote and that are no longer there."""
        contents = self.manifest.read()
        return [] if contents is None else sorted(contents.files.keys() - self._own_files())

    def _own_files(self) -> set[str]:
        """Return names of the files that a manifest lists."""
        own = [*_visible(self.path, ".json"), *_visible(self.path / "tables", ".parquet")]
        names = {str(path.relative_to(self.path)) for path in (*own, *self.figures)}
        return names - {MANIFEST}

    def _write(self, name: str, value: Any) -> Path:
        return self.manifest.write_file(name, json_files.encode(value))

    def _read_json(self, name: str) -> Any:
        try:
            data = self.manifest.read_file(name)
        except FileNotFoundError:
            raise JomaError(f"{self.path / name} does not exist") from None
        return json_files.decode(self.path / name, data)


_CHANGING = (int | float, str | bool)
"""Kinds of values that may take each other's place in an entry that may change."""


def differing(
    first: Mapping[str, Any], second: Mapping[str, Any], *, changing: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Return the entries that differ, nested ones as "outer.inner"; None stands for a missing one.

    Args:
        first: Entries by name.
        second: The entries to compare them with.
        changing: Names of entries that do not count where they are numbers in both, or in both
            words or true or false.
    """
    one, two = _flat(first), _flat(second)
    found = {
        key: (one.get(key), two.get(key))
        for key in [*one, *(key for key in two if key not in one)]
        if one.get(key) != two.get(key)
    }
    for key in changing:
        values = found.get(key, (None, None))
        if any(all(isinstance(value, kind) for value in values) for kind in _CHANGING):
            del found[key]
    return found


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            entries.update(_flat(value, f"{prefix}{key}."))
        else:
            entries[f"{prefix}{key}"] = value
    return entries


def check_name(what: str, name: str) -> str:
    """Return `name` if it is good as a file name; else raise JomaError."""
    if not _NAME.fullmatch(name):
        raise JomaError(
            f"{what} must be letters, digits and . + - _ beginning with a letter or digit, "
            f"got {name!r}"
        )
    return name


def default_folder(name: str) -> Path:
    """Return `./runs/NAME-date-time` in local time, the folder of a run that begins now."""
    return DEFAULT_ROOT / f"{check_name('name', name)}-{datetime.now():%Y%m%d-%H%M%S}"


def environment(device: str) -> dict[str, Any]:
    """Return the record behind `environment.json`; imports none of the packages it names."""
    return {
        "joma": _version("joma") or "0+source",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "host": platform.node(),
        "device": device,
        "cores": os.cpu_count(),
        "commit": _commit(),
        "command": [Path(sys.argv[0]).name if sys.argv else "", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the working folder's repository, "-dirty" if files were changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _table(name: str) -> str:
    return f"tables/{check_name('name', name)}.parquet"


def _json_file(name: str) -> str:
    file = f"{check_name('name', name)}.json"
    if file in (CONFIG, ENVIRONMENT, MANIFEST):
        raise JomaError(f"name must not be {name!r}, which the run folder keeps itself")
    return file


def _settings(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as `config.json` has it."""
    check_name("name", name)
    if config.get("name", name) != name:
        raise JomaError(f"config says name {config['name']!r}, but the run's is {name!r}")
    return json_files.plain({"name": name, **config})


def _entry(key: str, value: Any) -> str:
    return f"no {key}" if value is None else f"{key} {value}"


def _resumed(first: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a run that began in one and was resumed in another."""
    changed = {key: value for key, value in now.items() if first.get(key) != value}
    again = {"date": now["date"], **changed}
    return {**first, "resumed": [*first.get("resumed", []), again]}


def _visible(folder: Path, suffix: str = "") -> list[Path]:
    """Return the whole files of a folder; those that killed writes left are hidden."""
    return sorted(path for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
