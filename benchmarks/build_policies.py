"""Builds the tiny policies of the embedded tasks into policies/, replacing what is there: python benchmarks/build_policies.py

Needed after a change to a task's generator, to a script's warm-start text or to TinyConfig (a test says so). About a minute each on two quiet cores.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mrtpo
from common import envs, policies


def main() -> None:
    target = policies.SHIPPED
    shutil.rmtree(target, ignore_errors=True)
    for env in ("sql", "instructions", "tools"):
        folder = policies.build_tiny(mrtpo.warm_start_conversations(envs.load(env)), policies.TinyConfig())
        shutil.copytree(folder, target / folder.name)
        print(env, folder.name, f"{sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
