"""The kernel tests with real Triton on a GPU, and what only a GPU can show. Without one, everything here is skipped."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from conftest import missing  # noqa: E402
from kernels_common import ready  # noqa: E402
from test_kernels_fp8 import *  # noqa: E402, F403
from test_kernels_fp8 import fp8, wide_values  # noqa: E402
from test_kernels_js_divergence import *  # noqa: E402, F403
from test_kernels_js_divergence import js, pair  # noqa: E402
from test_kernels_segment_scan import *  # noqa: E402, F403
from test_kernels_segment_scan import scan  # noqa: E402

for name in ("test_importing_needs_neither_triton_nor_numba", "test_extra_memory_is_at_most_three_times_the_input", "test_any_layout", "test_any_logits"):
    del globals()[name]  # of the CPU paths only


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture(params=["triton", "torch"])
def backend(request, device):
    return ready(request.param, device)


def test_the_gpu_picks_triton():
    x = torch.ones(1, device="cuda")
    assert scan._pick(None, x) == "triton" and js._pick(None, x) is js._distance_triton


def test_bfloat16_values_round_as_torch_does():
    """The interpreter truncates here; a machine must not."""
    x = wide_values((64, 512), torch.bfloat16)
    for block in ((1, 128), (64, 128)):
        got = fp8.quantize_dequantize(x.cuda(), block=block).cpu()
        assert torch.equal(got.view(torch.int16), fp8.quantize_dequantize(x, block=block, backend="reference").view(torch.int16))


def test_fp8_formats_match_the_cpu_on_many_values():
    x = wide_values((4096, 1024), seed=9)
    for fmt in fp8.FORMATS:
        for got, want in zip(fp8.quantize(x.cuda(), fmt), fp8.quantize(x, fmt)):
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
        for got, want in zip(fp8.quantize_kv(x.cuda(), fmt), fp8.quantize_kv(x, fmt)):
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_hidden_states_in_bfloat16_keep_float32_logits():
    g = torch.Generator().manual_seed(0)
    ref = torch.randn(300, 256, generator=g).bfloat16()
    var = (ref.float() + 0.05 * torch.randn(2, 300, 256, generator=g)).bfloat16()
    weight = (torch.randn(50_257, 256, generator=g) * 0.1).bfloat16()
    got = js.js_distance_from_hidden(ref.cuda(), var.cuda(), weight.cuda(), max_elements=64 * 50_257).cpu()
    want = js.js_distance_reference(ref[:20].double() @ weight.double().T, var[:, :20].double() @ weight.double().T)
    assert float((got[:, :20] - want).abs().max()) < 1e-5


def test_offsets_past_two_to_the_31():
    """int32 offsets wrap here, sometimes silently."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        missing("60 GB of GPU memory")
    n = 2**31 + 5000
    values = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    values[-4000:] = 1
    cu = torch.tensor([0, 100, n - 4000, n], device="cuda")
    out = scan.segment_cumsum(values, cu)
    assert out[-1] == 4000 and out[-4001] == 0
    assert scan.segment_stats(values, cu).count.tolist() == [100, n - 4100, 4000]
    del values, out
    V = 151_936
    T = 2**31 // V + 3
    ref, var = pair(2, V, 1.0)
    big = torch.zeros(T, V, dtype=torch.bfloat16, device="cuda")
    big[-2:] = ref.bfloat16().cuda()
    other = big.clone()
    other[-2:] = var.bfloat16().cuda()
    q = js.js_distance(big, other).cpu()
    assert q[:-2].abs().sum() == 0
    torch.testing.assert_close(q[-2:].double(), js.js_distance_reference(ref.bfloat16(), var.bfloat16()), rtol=1e-5, atol=0)
