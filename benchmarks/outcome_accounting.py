"""Time of `outcome_decomp.py decompose` on 20 simulated pairs x 300 problems x 8 samples, 9 budgets, k = 1, 2, 4, 8, two graders, 2,000 resamples.

python benchmarks/outcome_accounting.py [--problems 300] [--pairs 20]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outcome_records import Recipe, simulate, write_records

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--problems", type=int, default=300)
parser.add_argument("--pairs", type=int, default=20)
args = parser.parse_args()
with tempfile.TemporaryDirectory() as folder:
    names = [(f"base{i}", f"rl{i}") for i in range(args.pairs)]
    recipes = [r for i, (base, rl) in enumerate(names) for r in (Recipe(base), Recipe(rl, 1 - 0.03 * (i % 20), 0.03 * (i % 20), 0.05))]
    count = write_records(Path(folder) / "records.jsonl", simulate(1, args.problems, 8, tuple(recipes))[0])
    caps = (8192, 16384, 32768, 49152)
    pairs = [{"rl": rl, "base": base, "cap": caps[i % 4]} for i, (base, rl) in enumerate(names)]
    (Path(folder) / "pairs.json").write_text(json.dumps(pairs))
    script = Path(__file__).resolve().parent.parent / "outcome_decomp.py"
    command = [sys.executable, str(script), "decompose", "--records", "records.jsonl", "--pairs", "pairs.json", "--out", "out"]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{count} records: {wall:.1f} s, of these {cpu:.1f} s processor time, peak memory {used.ru_maxrss / 1024:.0f} MiB")
