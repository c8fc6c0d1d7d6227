# Guide, derivations, worked example: docs/outcome_decomp.md
"""What outcome RL buys: finishing, reliability, rarely reach (arXiv 2610.34894)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from common.envs import DataError


@dataclass
class Decompose:
    """Splits every gain into finishing, reliability and reach; without arguments on the shipped simulated example."""

    seed: int = 1
    """of the bootstrap"""


@dataclass
class Preregister:
    """Writes predictions with date and hash, before the records exist; `decompose --predictions FILE` scores them, failures included."""

    out: str = "predictions.json"
    """file to write; an existing one is never overwritten"""


def decompose(args: Decompose) -> int:
    return 0


def preregister(args: Preregister) -> int:
    return 0


# One subcommand per row: name, its flags, what it does. Commands that need torch import it inside their function.
COMMANDS = {"decompose": (Decompose, decompose), "preregister": (Preregister, preregister)}


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand and returns the exit code."""
    import tyro

    cls = None
    for name, (flags, _) in COMMANDS.items():
        one = Annotated[flags, tyro.conf.subcommand(name=name)]
        cls = one if cls is None else cls | one
    args = tyro.cli(cls, args=list(argv) or ["decompose"], prog="outcome_decomp.py", description=__doc__)
    try:
        return next(run for flags, run in COMMANDS.values() if type(args) is flags)(args)
    except DataError as error:
        print(f"DataError: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
