"""Bad input to every training script: one line that names the flag or the file and what would work, exit code 1, before a model is loaded."""

import pytest
import script_runner

SCRIPTS = ("ante_bapo", "sero", "mrtpo", "mpo", "fork", "interq_rl", "credit_granularity")
CASES = {
    "negative number": (["--learning-rate", "-1"], r"ArgumentError: --learning-rate -1.0: must be at least 0"),
    "not a number": (["--temperature", "nan"], "ArgumentError: --temperature nan: must be a finite number"),
    "malformed line": (["--env", "instructions:FOLDER/bad.jsonl"], "DataError: FOLDER/bad.jsonl:1: not valid JSON"),
    "missing file": (["--env", "instructions:FOLDER/none.jsonl"], "DataError: FOLDER/none.jsonl: cannot be read"),
    "unknown family": (["--env", "poetry"], "DataError: --env 'poetry': unknown family"),
    "a file where the run folder should be": (["--out", "FOLDER/bad.jsonl/run"], "ArgumentError: --out FOLDER/bad.jsonl/run: FOLDER/bad.jsonl is a file"),
    "no such run": (["--resume", "FOLDER/none"], "RunError: FOLDER/none"),
}


def no_model():
    """Hook: loading a policy ends the process with a code of its own."""
    import sys

    from common import policies

    policies.load_policy = policies.build_tiny = lambda *a, **k: sys.exit(99)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input(script, case, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"key": 1\n')
    argv, said = CASES[case]
    fill = str(tmp_path)
    ended = script_runner.run(f"{script}.py", [word.replace("FOLDER", fill) for word in argv], tmp_path / "log", no_model)
    lines = ended.output.strip().splitlines()
    assert ended.code == 1, ended.output
    assert lines[-1].startswith(said.replace("FOLDER", fill)) and "Traceback" not in ended.output, ended.output
    assert not (tmp_path / "runs").exists()
