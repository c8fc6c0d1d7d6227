"""Every Triton kernel through the real compiler, to machine code of sm_80 or sm_90: the interpreter does not see type errors. No GPU needed."""

import subprocess
import sys

from conftest import need_module

CODE = r"""
import itertools, torch
torch.version.cuda = torch.version.cuda or "12.8"  # lets the modules define their kernels; nothing is launched
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import fp8, js_divergence, segment_scan

capability = 90
def build(kernel, signature, warps, **constants):
    signature = {**signature, **{name: "constexpr" for name in constants}}
    global capability
    capability = 170 - capability  # 80 and 90 in turn
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert made.asm["cubin"]

js = {"ref": "*bf16", "var": "*bf16", "mask": "*i1", "out": "*fp32", "T": "i32", "K": "i32", "V": "i32",
      "ref_stride": "i64", "var_stride_k": "i64", "var_stride_t": "i64", "inv_temperature": "fp32"}
build(js_divergence.js_distance_fwd_kernel, js, 8, HAS_MASK=True, BLOCK=4096)
build(js_divergence.js_distance_fwd_kernel, {**js, "ref": "*fp32", "var": "*fp32"}, 8, HAS_MASK=False, BLOCK=1024)

cases = (("fp32", 0, 0, 0, 0), ("bf16", 0, 1, 1, 1), ("fp64", 1, 1, 1, 0), ("fp32", 1, 0, 0, 1), ("fp32", 2, 1, 1, 2), ("bf16", 2, 0, 0, 2))
for dtype, decay, masked, reverse, order in cases:
    out = "fp64" if dtype == "fp64" else "fp32"
    scan = {"values": "*" + dtype, "decay": "*fp64" if decay == 1 else "*" + dtype, "cu": "*i64", "mask": "*i1", "out": "*" + out, "S": "i32", "N": "i64"}
    flags = {"DECAY": decay, "HAS_MASK": bool(masked), "MASK_VALUES": order != 2, "REVERSE": bool(reverse), "ORDER": order}
    build(segment_scan.segment_scan_fwd_kernel, scan, 4, **flags, ROWS=4, BLOCK=256)
stats = {"values": "*bf16", "cu": "*i64",
         "mask": "*i1", "count": "*i64", **dict.fromkeys(("mean", "second", "ess", "largest"), "*fp32"), "S": "i32", "N": "i64"}
build(segment_scan.segment_stats_fwd_kernel, stats, 4, HAS_MASK=True, ROWS=4, BLOCK=256)

for name, (kv, static, per_row), (value, code) in zip(fp8.FORMATS, ((0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)), ((1, 0), (1, 1), (0, 1), (1, 1))):
    f = fp8.FORMATS[name]
    quant = {"x": "*bf16", "value": "*bf16", "code": "*u8" if f.mantissa else "*i8", "scale": "*fp32", "M": "i32", "N": "i32", "static": "fp32"}
    build(fp8.block_quantize_kernel, quant, 8, COLS=128, MAX=f.max, MANTISSA=f.mantissa, MIN_EXPONENT=f.min_exponent, KV=bool(kv), STATIC=bool(static),
          PER_ROW=bool(per_row), VALUE=bool(value), CODE=bool(code), ROWS=32 if per_row else 128, WIDTH=128)
print("built")
"""


def test_kernels_compile(tmp_path, monkeypatch):
    need_module("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.strip().endswith("built"), done.stderr[-3000:]
