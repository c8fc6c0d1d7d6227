"""Bounds of arguments, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from common.arguments import ArgumentError


def check_bounds(args: Any, at_least: Mapping[str, float], above_zero: Sequence[str] = (), shares: Sequence[str] = ()) -> None:
    """Raises ArgumentError for a float that is not finite, a field under its bound, one not above 0, and a share outside [0, 1]."""

    def refuse(name: str, must: str) -> None:
        raise ArgumentError(f"--{name.replace('_', '-')} {getattr(args, name)}: must {must}")

    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(name, "be a finite number")
    for name, low in at_least.items():
        if not getattr(args, name) >= low:
            refuse(name, f"be at least {low}")
    for name in above_zero:
        if not getattr(args, name) > 0:
            refuse(name, "be above 0")
    for name in shares:
        if not 0 <= getattr(args, name) <= 1:
            refuse(name, "lie in [0, 1]")
