"""Files that survive a kill or a full disk: whole JSON lines, replacement in one step, folders synced."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.curves import RunError, read_jsonl

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def disk_full(error: OSError, what: str, folder: Path, last_step: int | None) -> RunError:
    """What to tell the user when ``what`` could not be written."""
    if error.errno == errno.EFBIG:
        cause = "the file-size limit of this process is reached (ulimit -f)"
    else:
        cause = f"no space left on the disk of {folder} ({shutil.disk_usage(folder).free / 1e6:.1f} MB free)"
    kept = "no checkpoint exists yet: start again after making room"
    if last_step is not None:
        kept = f"the checkpoint of update {last_step} is intact: make room, then continue with --resume {folder}"
    return RunError(f"could not write {what}: {cause}. Free space there, for example old folders under {folder.parent}; {kept}")


def append_line(file: Any, record: dict[str, Any]) -> None:
    """One JSON line, whole or not at all. ``file`` is unbuffered binary; after a failed write the file is cut back to its old length."""
    line = (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode()
    start = file.seek(0, os.SEEK_END)
    try:
        written = 0
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        file.truncate(start)
        raise


def plain(value: Any, where: str, count: list[int]) -> Any:
    """``value`` as JSON types; NaN and infinities become None and are counted in ``count[0]``. Tensors and arrays become numbers or lists."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        count[0] += 1
        return None
    if isinstance(value, dict):
        return {str(key): plain(item, f"{where}.{key}", count) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", count) for i, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}; pass a number, string, list, dict, array or tensor")


def cut_jsonl(path: Path, last_step: int) -> int:
    """Rewrites a log with only the lines whose step is at most ``last_step`` (and no torn last line); returns how many lines went."""
    if not path.exists():
        return 0
    lines = path.read_bytes().split(b"\n")
    records = read_jsonl(path)
    kept = [line for line, record in zip(lines, records) if record["step"] <= last_step]
    write_atomic(path, b"".join(line + b"\n" for line in kept))
    return len(records) - len(kept) + (1 if lines[-1] else 0)


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file in one step: a reader, or a restart after a full disk, sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
