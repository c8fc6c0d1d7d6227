#!/usr/bin/env bash
# The experiment of docs/mrtpo.md: five credit rules, three seeds, 40 updates on generated databases. One process and one thread per run.
# bash benchmarks/mrtpo.sh runs/credits && python -m common.run runs/credits/* --group-by credit --out credits.png
set -euo pipefail
out="${1:-runs/credits}"
export OMP_NUM_THREADS=1
for seed in 1 2 3; do
  for credit in mrtpo gdpo grpo shuffled joint; do
    python mrtpo.py --credit "$credit" --seed "$seed" --num-updates 40 --save-every 0 --out "$out/$credit-$seed"
  done
done
