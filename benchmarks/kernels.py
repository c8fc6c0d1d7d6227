"""Speed of kernels/ against plain references, torch.compile and Liger: one command, one table.

    python benchmarks/kernels.py                 # on a GPU when there is one, else on the CPU; under 4 minutes
    python benchmarks/kernels.py --device cpu

Needs torch >= 2.11; triton >= 3.6 on a GPU; numba on a CPU; liger-kernel for its two rows (GPU only). Every row's result is compared with the reference first.
GB/s counts the bytes that the operation must read and write, GFLOP/s the arithmetic of its formula (an exponential is one); the percentages are shares of this
machine's copy bandwidth and float32 matmul rate (bfloat16 on a GPU), measured in the same run. Times are the fastest of several calls; on a CPU they are
processor time of one thread.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read when torch.compile is first used: no pool of compiler processes beside the timings

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import fp8, js_divergence, segment_scan

BUDGET = 0.5  # seconds of repeats per row


def fastest(call, device: str) -> float:
    """Seconds of the fastest call within the budget, after one warm-up: wall time on a GPU, processor time on a CPU, which other programs disturb less."""
    sync, clock = (torch.cuda.synchronize, time.perf_counter) if device == "cuda" else (lambda: None, time.process_time)
    call()
    sync()
    best, spent, calls = float("inf"), 0.0, 0
    while calls < 3 or (spent < BUDGET and calls < 50):
        start = clock()
        call()
        sync()
        took = clock() - start
        best, spent, calls = min(best, took), spent + took, calls + 1
        if took > 3:
            break
    return best


def flat(result) -> torch.Tensor:
    """One float64 tensor of whatever a row returned."""
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    return torch.cat([p.double().reshape(-1).cpu() for p in parts])


def naive_js(ref, var):
    """The textbook formula in float32, as written by hand: two log-softmaxes, mixture, two KL terms."""
    p, r = F.log_softmax(var.float(), -1), F.log_softmax(ref.float(), -1)
    m = torch.logaddexp(p, r) - 0.6931471805599453
    return ((p.exp() * (p - m) + r.exp() * (r - m)).sum(-1) / (2 * 0.6931471805599453)).clamp(0, 1).sqrt()


def padded_cumsum(values, mask):
    return torch.where(mask, values, 0.0).cumsum(1)


def cast_blocks(x):
    y = x.view(-1, 128)
    s = y.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return ((y / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s).view_as(x)


def operations(device: str):
    """(operation, shape, bytes, flops, tolerance, [(variant, call, scale of its time), ...]), the reference first."""
    gpu = device == "cuda"
    own = ["triton", "torch"] if gpu else ["numba", "torch"]
    g = torch.Generator().manual_seed(0)
    S, L = 4096, 200
    lengths = torch.randint(100, 301, (S,), generator=g)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    N = int(cu[-1])
    values, decay = torch.randn(N, generator=g).to(device), torch.rand(N, generator=g).to(device)
    mask = (torch.rand(-(-N // 20), generator=g) < 0.7).repeat_interleave(20)[:N].to(device)
    cu = cu.to(device)
    part = cu[: S // 64 + 1]
    few = int(part[-1])
    shape = f"{S:,} x ~{L}"
    for reverse in (False, True):
        rows = [("loop over segments", lambda r=reverse: segment_scan.segment_cumsum_reference(values, cu, mask, r), 1)]
        rows += [(f"ours, {b}", lambda b=b, r=reverse: segment_scan.segment_cumsum(values, cu, mask, r, backend=b), 1) for b in own]
        yield "cumsum" + " reverse" * reverse, shape, 9 * N, N, 1e-5, rows
    rows = [
        ("loop over tokens, 1/64 of it", lambda: segment_scan.segment_scan_reference(values[:few].cpu(), decay[:few].cpu(), part.cpu(), mask[:few].cpu()), 64)
    ]
    rows += [(f"ours, {b}", lambda b=b: segment_scan.segment_scan(values, decay, cu, mask, backend=b), 1) for b in own]
    yield "decayed scan", shape, 13 * N, 2 * N, 1e-5, rows
    rows = [("loop over segments", lambda: segment_scan.segment_stats_reference(values, cu, mask), 1)]
    rows += [(f"ours, {b}", lambda b=b: segment_scan.segment_stats(values, cu, mask, backend=b), 1) for b in own]
    yield "statistics", shape, 5 * N, 4 * N, 1e-5, rows

    box, box_mask = torch.randn(S, L, generator=g).to(device), (torch.rand(S, L, generator=g) < 0.7).to(device)
    rows = [("torch, eager", lambda: padded_cumsum(box, box_mask), 1), ("torch.compile", lambda: compiled(padded_cumsum)(box, box_mask), 1)]
    rows += [(f"ours, {b}", lambda b=b: segment_scan.segment_cumsum(box, mask=box_mask, backend=b), 1) for b in own]
    yield "cumsum, padded", f"{S:,} x {L}", 9 * S * L, S * L, 1e-5, rows

    for T, V in ((4096, 50_257), (2048, 151_936)) if gpu else ((4096, 1000), (96, 50_257)):
        dtype = torch.bfloat16 if gpu else torch.float32
        ref = torch.randn(T, V, device=device, dtype=dtype) * 4
        var = ref + 0.2 * torch.randn(T, V, device=device, dtype=dtype)
        rows = [("textbook, float32", lambda ref=ref, var=var: naive_js(ref, var), 1)]
        if V < 10_000 or gpu:
            rows.append(("torch.compile of it", lambda ref=ref, var=var: compiled(naive_js)(ref, var), 1))
        rows += [
            (f"ours, {b}", lambda b=b, ref=ref, var=var: js_divergence.js_distance(ref, var, backend=b), 1)
            for b in (("triton", "torch") if gpu else ("torch",))
        ]
        rows.append(("Liger JSD (+ log-softmax)", lambda ref=ref, var=var: liger_jsd(ref, var), 1))
        yield "JS distance", f"{T:,} x {V:,}", 4 * ref.element_size() * T * V, 60 * T * V, 2e-3, rows

    for T, D, V, K in ((4096, 4096, 151_936, 3),) if gpu else ((2048, 128, 1000, 3), (96, 512, 50_257, 3)):
        dtype = torch.bfloat16 if gpu else torch.float32
        ref = torch.randn(T, D, device=device, dtype=dtype)
        var = ref + 0.05 * torch.randn(K, T, D, device=device, dtype=dtype)
        weight = torch.randn(V, D, device=device, dtype=dtype) / D**0.5
        rows = [("all logits, textbook", lambda r=ref, v=var, w=weight: torch.stack([naive_js(r @ w.T, x @ w.T) for x in v]), 1)]
        rows.append(("ours", lambda r=ref, v=var, w=weight: js_divergence.js_distance_from_hidden(r, v, w), 1))
        rows.append(("Liger fused linear JSD", lambda r=ref, v=var, w=weight: liger_fused(r, v, w), 1))
        size = ref.element_size()
        yield "JS from hidden", f"{K} x {T:,} x {D} x {V:,}", size * ((K + 1) * T * D + V * D), (K + 1) * 2 * T * D * V, 2e-2 if gpu else 2e-3, rows

    M, N = (16_384, 8192) if gpu else (4096, 1024)
    x = torch.randn(M, N, device=device)
    rows = [("torch casts", lambda: cast_blocks(x), 1), ("torch.compile of it", lambda: compiled(cast_blocks)(x), 1)]
    rows += [(f"ours, {b}", lambda b=b: fp8.quantize_dequantize(x, backend=b), 1) for b in (("triton", "torch") if gpu else ("torch",))]
    yield "E4M3, 1 x 128", f"{M:,} x {N:,}", 8 * M * N, 6 * M * N, 0, rows


COMPILED = {}


def compiled(function):
    return COMPILED.setdefault(function, torch.compile(function))


def liger_jsd(ref, var):
    if not ref.is_cuda:
        raise RuntimeError("needs a GPU")
    from liger_kernel.transformers.jsd import LigerJSD

    LigerJSD(beta=0.5)(F.log_softmax(var.float(), -1), F.log_softmax(ref.float(), -1))  # one mean over all positions, so there is no result to compare


def liger_fused(ref, var, weight):
    if not ref.is_cuda:
        raise RuntimeError("needs a GPU")
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    for x in var:
        LigerFusedLinearJSD(jsd_beta=0.5)(x, weight, ref, weight)


def ceilings(device: str) -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read and write) and matmul rate in FLOP/s."""
    x = torch.ones((2**30 if device == "cuda" else 2**26) // 4, device=device)
    y = torch.empty_like(x)
    copy = 2 * 4 * x.numel() / fastest(lambda: y.copy_(x), device)
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a = torch.randn(n, n, device=device, dtype=dtype)
    return copy, 2 * n**3 / fastest(lambda: a @ a, device)


def memory() -> None:
    """Prints the peak of memory beyond inputs already held, as a multiple of the inputs, for the CPU paths (Linux)."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # every larger block goes back to the system when freed, so that peaks are real

    def peak() -> int:
        return 1024 * next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

    n = 2**23
    values, decay, mask, cu = torch.rand(n), torch.rand(n), torch.ones(n, dtype=torch.bool), torch.arange(0, n + 1, 256)
    ref, var = torch.rand(1024, 8192), torch.rand(1024, 8192)
    calls = [
        ("cumsum", lambda s: segment_scan.segment_cumsum(values[:s], cu[: s // 256 + 1], mask[:s]), 5 * n),
        ("decayed scan", lambda s: segment_scan.segment_scan(values[:s], decay[:s], cu[: s // 256 + 1], mask[:s]), 9 * n),
        ("statistics", lambda s: segment_scan.segment_stats(values[:s], cu[: s // 256 + 1], mask[:s]), 5 * n),
        ("JS distance", lambda s: js_divergence.js_distance(ref[: s // 8192], var[: s // 8192]), 8 * n),
        ("E4M3, 1 x 128", lambda s: fp8.quantize_dequantize(ref[: s // 8192]), 4 * n),
    ]
    for name, call, size in calls:
        call(8192)
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        call(n)
        print(f"  {name}: {(peak() - before) / size:.2f} x its inputs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", action="store_true", help="only the memory of the CPU paths")
    args = parser.parse_args()
    if args.memory:
        return memory()
    device = args.device
    torch.set_num_threads(1)  # processor time adds threads up
    if device == "cpu" and sys.platform == "linux":  # keep freed memory, as a training process does in effect: fresh pages cost more than a scan
        for parameter in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 2**30)
    began = time.time()
    copy, matmul = ceilings(device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    lines = [f"{'operation':<16} {'shape':<24} {'variant':<28} {'ms':>9} {'x':>8} {'GB/s':>7} {'copy':>5} {'GFLOP/s':>8} {'matmul':>6} {'error':>8}"]
    for operation, shape, size, flops, tolerance, rows in operations(device):
        base, want = None, None
        for variant, call, scale in rows:
            head = f"{operation:<16} {shape:<24} {variant:<28}"
            print(f"[{time.time() - began:4.0f} s] {operation}, {shape}: {variant}", file=sys.stderr)
            try:
                got = call()
                seconds = fastest(call, device) * scale
            except Exception as e:
                lines.append(f"{head} not run: {str(e).splitlines()[0][:60] if str(e) else type(e).__name__}")
                continue
            error = ""
            if got is not None:
                got = flat(got).nan_to_num(neginf=0)
                want = got if want is None else want
                difference = float((got[: len(want)] - want).abs().max())
                if difference > tolerance * max(1.0, float(want.abs().max())):
                    raise SystemExit(f"{operation}, {variant}: result differs from the reference by {difference}")
                error = f"{difference:.0e}" if got is not want else "-"
            base = base or seconds
            rates = f"{size / seconds / 1e9:>7.1f} {size / seconds / copy:>5.0%} {flops / seconds / 1e9:>8.1f} {flops / seconds / matmul:>6.1%}"
            lines.append(f"{head} {seconds * 1e3:>9.2f} {base / seconds:>8.1f} {rates} {error:>8}")
    print(f"\n{name}; torch {torch.__version__}; copy {copy / 1e9:.1f} GB/s, matmul {matmul / 1e9:.0f} GFLOP/s; {time.time() - began:.0f} s")
    print("\n".join(lines))
    if device == "cpu" and sys.platform == "linux":
        print("peak memory beyond the inputs (CPU paths):", flush=True)
        subprocess.run([sys.executable, __file__, "--memory"], check=True, env={**os.environ})


if __name__ == "__main__":
    main()
