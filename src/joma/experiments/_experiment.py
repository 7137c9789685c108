"""An experiment: what was published, what may be asked of it, and whether ours agrees.

Nothing heavy is imported here: `joma --help` reads the metadata of every experiment.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.common.progress import Progress, no_progress
from joma.errors import JomaError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from joma.runs import Run


@dataclass(frozen=True)
class Scale:
    """What an experiment takes at one of its sizes.

    Attributes:
        seconds: About how long it takes.
        device: What that was measured on, such as "2 CPU cores".
        memory: About how much it needs, such as "2 GB".
    """

    seconds: float
    device: str
    memory: str


@dataclass(frozen=True)
class Option:
    """A positive number that decides an experiment's results and that the user may change.

    Attributes:
        name: Its name on the command line, without dashes in front.
        default: Its value when none is given; None if the scale decides it.
        help: What it is, in a few words.
        kind: int for whole numbers, float for any.
        published: The values that were published; others may be given too.
    """

    name: str
    default: float | None
    help: str
    kind: type[int] | type[float] = float
    published: tuple[float, ...] = ()

    def at(self, scale: str) -> float | None:
        """Return its value when none is given, which is the same at every scale."""
        del scale
        return self.default

    def checked(self, value: Any) -> float:
        """Return `value` as a number of this option's kind."""
        whole = " whole" if self.kind is int else ""
        refused = JomaError(f"{self.name} must be a positive{whole} number, got {value!r}")
        try:
            number = self.kind(value)
        except (TypeError, ValueError, OverflowError):
            raise refused from None
        if isinstance(value, bool) or not 0 < number < math.inf or number != value:
            raise refused
        return number


@dataclass(frozen=True)
class ChoiceOption:
    """A word that decides an experiment's results and that the user may change.

    Attributes:
        name: Its name on the command line, without dashes in front.
        defaults: Its value at each scale when none is given.
        help: What it is, in a few words.
        choices: The words that may be given.
        other: Returns what becomes of any other word, or raises a `ValueError` that begins with the
            name. Other words are refused where it is None.
    """

    name: str
    defaults: Mapping[str, str]
    help: str
    choices: tuple[str, ...]
    other: Callable[[str], str] | None = None

    def at(self, scale: str) -> str:
        """Return its value at a scale when none is given."""
        return self.defaults[scale]

    def checked(self, value: Any) -> str:
        """Return `value`, as a run folder keeps it, if it may be given."""
        if value in self.choices:
            return value
        if self.other is None or not isinstance(value, str):
            raise JomaError(f"{self.name} must be one of {', '.join(self.choices)}, got {value!r}")
        return self.other(value)


def corpus_option(defaults: Mapping[str, str]) -> ChoiceOption:
    """Return the option for the text of an experiment, given that of each scale."""
    return ChoiceOption(
        "corpus",
        defaults,
        "the text, wikitext-2, wikitext-103, embedded (prose that comes with Python), "
        "hub:NAME, or a folder with train.txt and valid.txt; as the scale has it if not given",
        choices=("wikitext-2", "wikitext-103", "embedded"),
        other=_folder_or_hub,
    )


def _folder_or_hub(given: str) -> str:
    """Return a text that is none of those with a name, as the run folder keeps it."""
    folder = Path(given)
    if given.startswith("hub:"):
        return given
    if not given or not folder.is_dir():
        raise JomaError(
            "corpus must be wikitext-2, wikitext-103, embedded, hub:NAME or a folder with "
            f"train.txt and valid.txt, got {given!r}, which is none of them"
        )
    missing = [name for name in ("train.txt", "valid.txt") if not (folder / name).is_file()]
    if missing:
        raise JomaError(
            "corpus must be a folder with train.txt and valid.txt, "
            f"got {given!r}, which has no {' and no '.join(missing)}"
        )
    return str(folder.resolve())  # the same from wherever it is named


@dataclass(frozen=True)
class Request:
    """What was asked of an experiment; `Experiment.request` makes one that fits.

    Attributes:
        seed: Decides every random number.
        scale: One of the experiment's scales, "" where it has none.
        device: What to compute on, "cpu" or "cuda".
        options: The experiment's own options, all of them.
        groups: Parts of the work to do; all where empty.
        reference: A folder with recorded results to compare with, if there is one.
        progress: Is called with how far the work is.
    """

    seed: int = 0
    scale: str = ""
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    reference: Path | None = None
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise JomaError(f"device must be cpu or cuda, got {self.device!r}")

    @property
    def config(self) -> dict[str, Any]:
        """What decides the numbers, as the run folder keeps it: not device, groups or reference."""
        config: dict[str, Any] = {"seed": self.seed}
        if self.scale:
            config["scale"] = self.scale
        if self.options:
            config["options"] = dict(self.options)
        return config


class Verdict(StrEnum):
    """How what is measured compares with what was published.

    Attributes:
        AGREES: It shows what was published.
        DIFFERS: It does not.
        NOT_COMPARABLE: Nothing was published of this scale, setting or text.
        INCOMPLETE: What was measured does not decide: networks are missing, or the difference that
            matters is within its error.
    """

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_COMPARABLE = "not comparable"
    INCOMPLETE = "incomplete"

    @classmethod
    def of(cls, agrees: bool) -> "Verdict":
        """Return the verdict where all is there and can be compared."""
        return cls.AGREES if agrees else cls.DIFFERS


@dataclass(frozen=True)
class Outcome:
    """How an experiment ended.

    Attributes:
        verdict: Whether ours shows what was published.
        finding: What ours shows, in one sentence with its numbers.
        table: The numbers behind it: rows of equal keys, values text, numbers or None.
        paragraphs: What else the reader should know.
    """

    verdict: Verdict
    finding: str
    table: Sequence[Mapping[str, Any]] = ()
    paragraphs: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether ours shows what was published."""
        return self.verdict is Verdict.AGREES


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the papers, as a module of this package declares it.

    Attributes:
        name: What `joma reproduce` takes.
        title: What it shows, in one line.
        published: The published observation, in one sentence.
        run: The function that makes the data and the figures in a run folder, given the run and a
            `Request`; as "module:function", so that its module is imported only when it is needed.
        seconds: About how long it takes on one core with its imports, where it has no scales.
        memory: What it then needs.
        scales: The sizes it can be done at; empty where there is one alone.
        default_scale: The scale that is used when none is given.
        options: Its own options.
        groups: Parts of its work that can be done one by one.
        resumable: Whether it resumes in a run folder in which it was stopped.
        reference: What a folder with recorded results holds that it can be compared with; empty
            where it cannot.
        needs: A function that raises `JomaError` where something is missing that a request needs;
            named as `run` is.
        estimate: What the scales take with the options of a request, where those change it.
    """

    name: str
    title: str
    published: str
    run: "str | Callable[[Run, Request], Outcome]"
    seconds: float = 5.0
    memory: str = "under 1 GB"
    scales: Mapping[str, Scale] = field(default_factory=dict)
    default_scale: str = ""
    options: tuple[Option | ChoiceOption, ...] = ()
    groups: tuple[str, ...] = ()
    resumable: bool = False
    reference: str = ""
    needs: str = ""
    estimate: Callable[[Mapping[str, Any]], Mapping[str, Scale]] | None = None

    def reproduce(self, run: "Run", request: Request) -> Outcome:
        """Make the data and the figures in a run folder, as requested."""
        return (_load(self.run) if isinstance(self.run, str) else self.run)(run, request)

    def check_needs(self, request: Request) -> None:
        """Raise `JomaError` where something is missing that a request needs."""
        if self.needs:
            _load(self.needs)(request)

    def request(
        self,
        *,
        seed: int = 0,
        scale: str = "",
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        groups: Iterable[str] = (),
        reference: Path | None = None,
        progress: Progress = no_progress,
    ) -> Request:
        """Return a request that this experiment can meet, with defaults for what is not given."""
        if device == "cuda" and not self.scales:
            raise JomaError(
                f"device must be cpu for {self.name}, which has no use for another, got 'cuda'"
            )
        if reference is not None and not self.reference:
            raise JomaError(
                f"reference must not be given for {self.name}, which has no recorded results to "
                f"compare with, got '{reference}'"
            )
        if reference is not None and not reference.is_dir():
            raise JomaError(f"reference must be a folder with recorded results, got '{reference}'")
        groups = tuple(groups)
        if scale:
            self._check("scale", scale, self.scales)
        for group in groups:
            self._check("group", group, self.groups)
        scale = scale or self.default_scale
        chosen = tuple(group for group in self.groups if group in groups)
        given = self._options(options or {}, scale)
        return Request(seed, scale, device, given, chosen, reference, progress)

    def takes(self, request: Request) -> Mapping[str, Scale]:
        """Return what each of the scales takes with the options of a request."""
        return self.scales if self.estimate is None else self.estimate(request.options)

    def _options(self, given: Mapping[str, Any], scale: str) -> dict[str, Any]:
        named = {option.name: option for option in self.options}
        for name, value in given.items():
            if name not in named:
                has = f"has {', '.join(named)}" if named else "has no options"
                raise JomaError(
                    f"{name} must not be given for {self.name}, which {has}, got {value!r}"
                )
        return {
            name: option.checked(given[name]) if name in given else option.at(scale)
            for name, option in named.items()
        }

    def _check(self, what: str, given: str, available: Iterable[str]) -> None:
        names = ", ".join(available)
        if not names:
            raise JomaError(
                f"{what} must not be given for {self.name}, which has no {what}s, got {given!r}"
            )
        if given not in available:
            raise JomaError(f"{what} must be one of {names} for {self.name}, got {given!r}")


def publish(
    run: "Run",
    experiment: Experiment,
    outcome: Outcome,
    figure: "Figure | None",
    tables: Mapping[str, Mapping[str, Any]],
    **summary: Any,
) -> None:
    """Write what an experiment found to its run folder: tables, `summary.json` and the figure.

    Args:
        run: The run.
        experiment: The experiment, whose published observation stands in the figure's caption.
        outcome: How it ended, which stands next to it.
        figure: The figure, None where nothing can be drawn yet.
        tables: The columns of each table.
        **summary: What `summary.json` has besides the outcome's table and paragraphs.
    """
    from joma.report import figures

    for name, table in tables.items():
        run.write_table(name, table)
    run.write_json("summary", {"table": outcome.table, "paragraphs": outcome.paragraphs, **summary})
    if figure is not None:
        figures.save(
            run,
            experiment.name,
            figure,
            title=experiment.title,
            published=experiment.published,
            finding=outcome.finding,
            verdict=outcome.verdict,
        )


def _load(name: str) -> Any:
    """Return the function that is called "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
