#!/usr/bin/env bash
# The experiment of docs/outcome_decomp.md: GSPO plain, with each channel and with the control, three seeds, 40 updates. One process and one thread per run.
# bash benchmarks/outcome_probe.sh runs/probe && python outcome_decomp.py probe --compare runs/probe/*
set -euo pipefail
out="${1:-runs/probe}"
export OMP_NUM_THREADS=1
for seed in 1 2 3; do
  for channel in plain hint control teacher setup questions reward; do
    python outcome_decomp.py probe --channel "$channel" --seed "$seed" --num-updates 40 --save-every 0 --out "$out/$channel-$seed"
  done
done
