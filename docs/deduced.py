"""Writes docs/deduced.md: every default that a paper leaves open, from the help texts of the flags and the tables of the pages. python docs/deduced.py"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ("ante_bapo", "sero", "mrtpo", "mpo", "fork", "interq_rl", "credit_granularity", "collapse_sim", "outcome_decomp")


def deduced_flags(script: str) -> list[tuple[str, str, str]]:
    """(flag, default, help) of each field of a dataclass in a script, or of its companions, whose help says ``deduced``."""
    rows = []
    for path in [ROOT / f"{script}.py", *(p for p in sorted(ROOT.glob(f"{script.split('_')[0]}_*.py")) if p.stem != script)]:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for field, after in zip(node.body, node.body[1:]):
                if not (isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    continue
                if "deduced" in str(after.value.value):
                    default = ast.unparse(field.value) if field.value is not None else "required"
                    rows.append((f"--{field.target.id.replace('_', '-')}", default, " ".join(after.value.value.split())))
    return rows


def page_section(script: str) -> str:
    """The text under "Deduced choices" of a page."""
    found = re.search(r"^## Deduced choices[^\n]*\n(.*?)(?=^## |\Z)", (ROOT / "docs" / f"{script}.md").read_text(), re.M | re.S)
    return found[1].strip() if found else ""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def document() -> str:
    parts = [
        "# Deduced choices of the nine scripts",
        "What a paper leaves open and a script chose: the flags whose help says `deduced`, with their defaults, then the table of the page with the reasons. "
        "Written by `python docs/deduced.py` from the scripts and the pages; a test holds it up to date.",
    ]
    for script in PAPERS:
        parts.append(f"## {script}.py\n\nPage: [{script}.md]({script}.md)")
        rows = [f"| `{flag}` | `{cell(default)}` | {cell(text)} |" for flag, default, text in deduced_flags(script)]
        if rows:
            parts.append("\n".join(["| flag | default | help |", "| --- | --- | --- |", *rows]))
        else:
            parts.append("No flag says `deduced`.")
        if section := page_section(script):
            parts.append(section)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "deduced.md").write_text(document())
