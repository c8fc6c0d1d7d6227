"""The command line of a script: parsing, resuming with the saved arguments, and keeping credentials out of everything that is written."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.curves import MAY_CHANGE, read_json, run_folder_of

REDACTED = "<redacted>"

T = TypeVar("T")


class ArgumentError(ValueError):
    """A flag has a value that cannot work. The text names the flag, the value and what would."""


def is_secret(name: str) -> bool:
    """Whether a field or flag name looks like a credential: ``judge_api_key`` and ``hf_token`` do, ``max_new_tokens`` does not."""
    parts = re.split(r"[_\-]+", name.strip("-").lower())
    return parts[-1] in {"key", "apikey", "token", "auth"} or bool({"secret", "password", "passwd", "credential", "credentials"} & set(parts))


def redact(name: str, value: Any) -> Any:
    """``value`` with credentials taken out: strings under a secret name, and user:password inside URLs."""
    if isinstance(value, str):
        if value and is_secret(name):
            return REDACTED
        return re.sub(r"(\w+://)[^/@\s]+@", rf"\1{REDACTED}@", value)
    if isinstance(value, (list, tuple)):
        return [redact(name, item) for item in value]
    if isinstance(value, dict):
        return {key: redact(f"{name}_{key}", item) for key, item in value.items()}
    return value


def args_dict(args: Any) -> dict[str, Any]:
    """A dataclass instance as a JSON-serialisable dict without secrets."""
    plain = json.loads(json.dumps(dataclasses.asdict(args), default=str))
    return {name: redact(name, value) for name, value in plain.items()}


def safe_command(argv: Sequence[str]) -> str:
    """The command line with the values of secret flags removed."""
    shown, hide = [], False
    for word in argv:
        name, equals, value = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(REDACTED)
        elif equals and name.startswith("--"):
            shown.append(f"{name}={redact(name, value)}")
        else:
            shown.append(redact("", word))
        hide = word.startswith("--") and not equals and is_secret(word)
    return " ".join(shown)


def compare_args(saved: dict[str, Any], new: dict[str, Any], may_change: frozenset[str] | set[str] = MAY_CHANGE) -> list[str]:
    """Fields that differ and would change the result, one line each (``"learning_rate: 0.001 in the run, 0.01 now"``). Empty: may resume."""
    absent = object()
    changed = []
    for name in sorted(saved.keys() | new.keys()):
        old, now = saved.get(name, absent), new.get(name, absent)
        if name in may_change or old == now or REDACTED in (old, now):
            continue
        changed.append(f"{name}: {'absent' if old is absent else repr(old)} in the run, {'absent' if now is absent else repr(now)} now")
    return changed


def check_out(out: str | os.PathLike[str]) -> None:
    """Raises ArgumentError when no folder can be made, or nothing written, at ``--out``: said before a model is loaded, not after."""
    path = Path(out).absolute()
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir():
        raise ArgumentError(f"--out {out}: {nearest} is a file; choose a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ArgumentError(f"--out {out}: {nearest} is not writable; choose another folder")


def parse_args(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """tyro's command line for ``cls``. With ``--resume RUN`` the run's saved arguments replace the defaults, so only changes need typing.

    Raises RunError when RUN is not a run folder, ArgumentError when ``--out`` cannot be written. Fields that were redacted keep the default of ``cls``.
    """
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    described = getattr(sys.modules.get(cls.__module__), "__doc__", None) or ""  # --help begins with what the script says of itself
    described = re.sub(r"^(?=\S.*: +(python|accelerate) )", "  ", described, flags=re.M)  # indented lines stay lines
    resume = ""
    for i, word in enumerate(argv):
        if word == "--resume" and i + 1 < len(argv):
            resume = argv[i + 1]
        elif word.startswith("--resume="):
            resume = word.partition("=")[2]
    if not resume:
        parsed = tyro.cli(cls, args=argv, description=described)
        if getattr(parsed, "out", None):
            check_out(parsed.out)
        return parsed
    saved = read_json(run_folder_of(resume) / "args.json")
    default, kept = cls(), {}
    for field in dataclasses.fields(cls):
        if field.name in saved and saved[field.name] != REDACTED and field.name not in ("resume", "out"):
            now, value = getattr(default, field.name), saved[field.name]
            kept[field.name] = tuple(value) if isinstance(now, tuple) else Path(value) if isinstance(now, Path) else value
    return tyro.cli(cls, args=argv, default=dataclasses.replace(default, **kept), description=described)
