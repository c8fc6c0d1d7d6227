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
        assert "@@" not in re.sub(r"^@@ -\d.* @@", "", page.read_text(), flags=re.M), page  # a diff's own marks may stay


def regions(path):
    return dict(re.findall(r"# region (\w+)\n(.*?)# endregion", path.read_text(), re.S))


def test_regions_are_byte_identical_in_every_script():
    seen = {}
    for path in SCRIPTS:
        for name, body in regions(path).items():
            assert seen.setdefault(name, body) == body, f"region {name} of {path.name} differs"
    assert seen, "no region found: the pattern or the marks are broken"


def flags_nothing_reads(script, companions=()):
    """Fields of Args that neither the script (a source text) nor a companion reads outside Args and its checks: as `args.NAME`, `self.args.NAME`,
    getattr with a literal, or, for collapse_sim.py, as `s.NAME` of a Setting that has all the fields by the same names."""
    tree = ast.parse(script)
    [args] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"]
    holders = {"args", "s"} if "Setting = " in script else {"args"}
    read = set()
    for node in (n for text in (script, *companions) for n in ast.parse(text).body):
        if (isinstance(node, ast.ClassDef) and node.name == "Args") or (isinstance(node, ast.FunctionDef) and node.name.startswith("check_")):
            continue
        for n in ast.walk(node):
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load):
                holder = n.value.id if isinstance(n.value, ast.Name) else n.value.attr if isinstance(n.value, ast.Attribute) else ""
                read |= {n.attr} if holder in holders else set()
            elif isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "getattr" and isinstance(n.args[1], ast.Constant):
                read.add(n.args[1].value)
    return [n.target.id for n in args.body if isinstance(n, ast.AnnAssign) and n.target.id not in read | {"out", "track"}]  # common/run.py reads these two


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_every_flag_is_documented_and_read(path):
    tree = ast.parse(path.read_text())
    [args] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"]
    for node, after in zip(args.body, [*args.body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), f"--{node.target.id} has no help line"
    companions = [p.read_text() for p in ROOT.glob(f"{path.stem.split('_')[0]}_*.py") if p != path]
    dead = set(flags_nothing_reads(path.read_text(), companions)) - NOT_BY_NAME.get(path.name, set())
    assert not dead, "flags that nothing reads"


NOT_BY_NAME = {"credit_granularity.py": {"compare"}}  # --compare is taken off the command line before Args is parsed; the field is there for --help


def test_a_dead_flag_is_found():
    source = '''
class Args:
    used: int = 1
    """read"""
    dead: int = 1
    """read by its check only"""
def check_args(args):
    assert args.dead > 0
def main(args, other):
    return args.used + other.dead
'''
    assert flags_nothing_reads(source) == ["dead"]


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


LONG_SCRIPTS = {"collapse_sim.py", "fork.py", "sero.py"}
LONG_MODULES = set()


def test_no_file_is_too_long_to_read():
    """Scripts of at most 850 lines, modules of at most 600. The exceptions are exactly those that are still longer."""
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in [*ROOT.glob("*.py"), *(ROOT / "common").rglob("*.py")]}
    assert {name for name, n in lengths.items() if "/" not in name and n > 850} == LONG_SCRIPTS
    assert {name for name, n in lengths.items() if "/" in name and n > 600} == LONG_MODULES


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_deduced_choices_are_listed_as_they_are():
    """Fails after a change to a help text or a page: run python docs/deduced.py."""
    assert (ROOT / "docs" / "deduced.md").read_text() == module_of(ROOT / "docs" / "deduced.py").document()


HEADINGS = [r".*formula to line", r"Logged metrics|Diagnostics", "Deduced choices", "Results"]  # others may stand between


@pytest.mark.parametrize("path", [p for p in SCRIPTS if p.name != "collapse_sim.py"], ids=lambda p: p.name)
def test_pages_of_the_training_scripts_have_the_same_parts_in_the_same_order(path):
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / f"{path.stem}.md").read_text(), re.M)
    places = [[i for i, title in enumerate(titles) if re.fullmatch(heading, title)] for heading in HEADINGS]
    assert all(len(found) == 1 for found in places) and places == sorted(places), titles


def shipped():
    return module_of(ROOT / "benchmarks" / "build_policies.py").SHIPPED


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


UNREFERENCED = {  # reason why nothing in the repository but tests and documents names them
    "sweep_": "collapse_sim.py collects its sweeps by this prefix",
    "quantize": "public, docs/kernels.md",
    "dequantize": "public, docs/kernels.md",
    "quantize_kv": "public, docs/kernels.md",
    "segment_offsets": "public, docs/kernels.md",
    "js_distance_reference": "the plain reference of the kernel",
    "agreement": "public, docs/judges.md",
    "agreement_table": "public, docs/judges.md",
    "skyrl_env": "our environments for skyrl-gym",
    "openenv_environment": "our environments for OpenEnv",
}


def unreferenced(files):
    """Top-level functions and classes of the scripts, common/ and kernels/ that no other top-level statement of ``files`` {path: text} names."""
    defined, named = [], set()
    for path, text in files.items():
        for node in ast.parse(text).body:
            own = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
            names = set()
            for n in ast.walk(node):
                if isinstance(n, (ast.Name, ast.Attribute)):
                    names.add(n.id if isinstance(n, ast.Name) else n.attr)
                elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier():
                    names.add(n.value)
            named |= names - {own}
            defined += [own] if own and path.split("/")[0] not in ("benchmarks", "docs") else []
    return sorted(set(defined) - named)


def test_every_helper_is_used_outside_the_tests():
    files = {
        str(p.relative_to(ROOT)): p.read_text() for folder in (".", "common", "common/envs", "kernels", "benchmarks") for p in (ROOT / folder).glob("*.py")
    }
    found = unreferenced(files)
    assert not [name for name in found if not name.startswith("sweep_") and name not in UNREFERENCED]
    assert not [name for name in UNREFERENCED if name != "sweep_" and name not in found], "the list of exceptions is out of date"
    assert unreferenced({"common/a.py": "def one():\n    one()\ndef two():\n    pass\ntwo()"}) == ["one"]


def test_the_table_of_tests_names_tests_that_exist():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / "docs" / "testing.md").read_text())
    assert named and not [(file, name) for file, name in named if f"\ndef {name}(" not in (ROOT / "tests" / file).read_text()]
