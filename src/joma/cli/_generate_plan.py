"""What `joma generate --dry-run` prints: tokens, what each cache would hold, about how long."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.cli import _show
from joma.cli._generate_show import size_text
from joma.cli._probe_request import device_speed, file_sizes
from joma.common.text import duration

if TYPE_CHECKING:
    from joma.cli._generate_request import GenerateRequest


def show_plan(asked: "GenerateRequest", *, device: str, out: Path | None, as_json: bool) -> None:
    """Print what would be generated and compared, where it goes, and what it takes.

    The bytes of caches are those of the formula; nothing is loaded, so that they are known for a
    folder here alone.

    Args:
        asked: The request.
        device: What it would run on.
        out: The folder given with --out.
        as_json: Whether JSON is printed.
    """
    from joma.cli._generate_request import check_asked
    from joma.models.loading import check_source, outlined
    from joma.runs import default_folder

    check_asked(asked)
    check_source(asked.model, revision=asked.revision, tokenizer=asked.tokenizer)
    loaded = outlined(asked.model, revision=asked.revision, tokenizer=asked.tokenizer)
    plan: dict[str, Any] = {
        "model": asked.model,
        "run": str(out or default_folder("generate")),
        "device": device,
        "prompt_tokens": None,
        "new_tokens": asked.max_new_tokens,
        "caches": None,
        "about_seconds": None,
    }
    note = "what it takes is known once the model is loaded"
    if loaded is not None:
        note = ""
        plan |= _of_outline(asked, loaded, device)
    if as_json:
        _show.as_json(plan)
        return
    _show.say(f"{asked.model} → {plan['run']}")
    if note:
        _show.say(f"  {note}")
        return
    _show.say(f"  {plan['prompt_tokens']} tokens of the prompt, {asked.max_new_tokens} new ones")
    table = _show.table("cache", "bytes at the end", "of full", justify="right")
    table.columns[0].justify = "left"
    for it in plan["caches"]:
        table.add_row(it["cache"], size_text(it["bytes"]), f"{it['share']:.1%}")
    _show.put(table)
    _show.say(f"  device: {device}; about {duration(plan['about_seconds'])}")


def _of_outline(asked: "GenerateRequest", loaded: Any, device: str) -> dict[str, Any]:
    """Return what is known of a model without numbers."""
    from joma.analysis.generation import (
        AskedCaches,
        check_generates,
        check_length,
        encode_prompt,
        planned_caches,
    )
    from joma.analysis.probing import DTYPES
    from joma.inference import Full, cache_bytes

    check_generates(loaded.model, loaded.source)
    tokens = encode_prompt(loaded, asked.prompt, chat=asked.chat)
    check_length(loaded, len(tokens), asked.max_new_tokens)
    length = len(tokens) + asked.max_new_tokens
    given = AskedCaches(asked.caches, asked.budget, asked.sweep)
    caches = [("full", Full()), *((it.name, it.policy) for it in planned_caches(given, length))]
    sizes = [
        cache_bytes(loaded.model, policy, tokens=length, dtype=DTYPES[asked.dtype])  # type: ignore[arg-type]
        for _, policy in caches
    ]
    parameters = (file_sizes(asked.model) or (0, 0))[0]
    # Each cache reads the prompt twice and in every round; one token at a time is far slower.
    passes = len(caches) * (2 + asked.rounds)
    work = 2.0 * parameters * (passes * len(tokens) + 8 * len(caches) * length)
    return {
        "prompt_tokens": len(tokens),
        "caches": [
            {"cache": name, "bytes": size, "share": size / sizes[0]}
            for (name, _), size in zip(caches, sizes, strict=True)
        ],
        "about_seconds": work / device_speed(device) + 5,
    }
