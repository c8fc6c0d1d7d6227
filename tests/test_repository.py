"""The repository's own promises: documented lines exist, repeated regions are equal, no flag is dead, shipped policies are current."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from common import envs, policies

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(p for p in ROOT.glob("*.py") if "class Args" in p.read_text())


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_formula_tables_point_at_the_right_lines(page):
    """A row of a formula table names `file.py:LINE` and, in backticks after it, the code that stands there."""
    for name, line, fragment in re.findall(r"`([\w/]+\.py):(\d+)` `([^`]+)`", page.read_text()):
        lines = (ROOT / name).read_text().splitlines()
        assert fragment in lines[int(line) - 1], f"{page.name}: {name}:{line} is {lines[int(line) - 1]!r}, not {fragment!r}"


def test_no_page_has_unfilled_places():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert "@@" not in page.read_text(), page


def regions(path):
    return dict(re.findall(r"# region (\w+)\n(.*?)# endregion", path.read_text(), re.S))


def test_regions_are_byte_identical_in_every_script():
    seen = {}
    for path in SCRIPTS:
        for name, body in regions(path).items():
            assert seen.setdefault(name, body) == body, f"region {name} of {path.name} differs"
    assert seen, "no region found: the pattern or the marks are broken"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_every_flag_is_documented_and_read(path):
    tree = ast.parse(path.read_text())
    [args] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"]
    fields = [n.target.id for n in args.body if isinstance(n, ast.AnnAssign)]
    for node, after in zip(args.body, [*args.body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), f"--{node.target.id} has no help line"
    text = "".join(p.read_text() for p in ROOT.glob(f"{path.stem.split('_')[0]}*.py"))  # a script and its companion
    by_run = {"env", "seed", "out", "resume", "track", "num_updates"}  # read by common/run.py and common/arguments.py
    dead = [name for name in fields if name not in by_run and not re.search(rf"\w\.{name}\b|[\"']{name}[\"']|\b{name}=", text)]
    assert not dead, "flags that nothing reads"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_first_line_points_to_an_existing_docs_page_and_readme_lists_the_script(path):
    assert f"docs/{path.stem}.md" in path.read_text().splitlines()[0]
    assert (ROOT / "docs" / f"{path.stem}.md").exists()
    assert f"[`{path.name}`]" in (ROOT / "README.md").read_text()


def test_common_and_kernels_import_no_script():
    for path in [*(ROOT / "common").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        imported = {n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)} | {
            a.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import) for a in n.names
        }
        assert not imported & {p.stem for p in SCRIPTS}, path


def shipped():
    spec = importlib.util.spec_from_file_location("build_policies", ROOT / "benchmarks" / "build_policies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SHIPPED


@pytest.mark.parametrize("script, env", shipped())
def test_shipped_policies_belong_to_the_present_demonstrations(script, env, monkeypatch, tmp_path):
    """Fails after a change to a generator, the warm-start text or TinyConfig: run benchmarks/build_policies.py."""
    monkeypatch.setattr(policies, "train_tiny", lambda *a: pytest.fail("not shipped: run benchmarks/build_policies.py"))
    monkeypatch.setenv("CLEANAGENTRL_CACHE", str(tmp_path))
    conversations = importlib.import_module(script).warm_start_conversations(envs.load(env))
    assert policies.build_tiny(conversations, policies.TinyConfig()).parent == policies.SHIPPED


def test_no_policy_is_shipped_for_nothing():
    assert len(list(policies.SHIPPED.glob("tiny-*"))) == len(shipped())


def test_no_module_of_common_is_longer_than_600_lines():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in (ROOT / "common").rglob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > 600}
