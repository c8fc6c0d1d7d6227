"""Low-precision execution: the engine's emulation and the training forward pass see the same numbers; weights and names stay as they were."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

from common.engine import EngineError, Sampling, make_engine
from common.packing import forward_hidden, pack_rows
from common.quantized import EMULATED, as_stored, quantized
from kernels.fp8 import dequantize, quantize, quantize_kv

SIZES = {"vocab_size": 61, "hidden_size": 160, "intermediate_size": 144, "num_hidden_layers": 2, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def build(kind="llama"):
    config, cls = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(0)
    lm = cls(config(**SIZES, **HEADS, initializer_range=0.15, eos_token_id=1, pad_token_id=0)).eval()
    return lm


ROWS = [([3, 9, 14, 20], [7, 33, 2, 1]), ([3, 9, 14, 20], [7, 5]), ([40, 41], [8, 8, 8, 1])]


def logprobs(lm, batch):
    return lm.lm_head(forward_hidden(lm, batch)).log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]


def test_truncated_keys_go_to_the_next_value_toward_zero():
    grid = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()]
    x = torch.cat([torch.randn(500) * s for s in (1e-3, 0.02, 1.0, 100.0)] + [grid.float(), torch.tensor([500.0, -1e4, 1.0625, -1.07, 0.002, 1e-4])])
    want = [max((g for g in grid.tolist() if abs(g) <= abs(v) and g * v >= 0), key=abs) for v in x.tolist()]  # the slow, obvious rule
    x.requires_grad_(True)
    stored = as_stored(x[None], "fp8_e4m3", "kv", 1.0, truncate=True)[0]
    assert stored.tolist() == pytest.approx(want, abs=0)
    stored.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not torch.equal(as_stored(x[None], "fp8_e4m3", "kv", 1.0)[0], stored)


@pytest.mark.parametrize("fmt", [f for f in EMULATED if f != "bf16"])
def test_a_linear_layer_computes_with_the_dequantised_codes_bit_by_bit(fmt):
    lm = build()
    layer = lm.model.layers[1].mlp.up_proj  # 144 x 160: edge blocks both ways
    x = torch.randn(5, 160)
    activations = dequantize(*quantize(x, fmt))
    weight = dequantize(*quantize(layer.weight, fmt, (128, 128)), (128, 128))
    expected = F.linear(activations, weight)
    for frozen in (False, True):
        with quantized(lm, fmt, frozen=frozen), torch.no_grad():
            assert torch.equal(layer(x), expected)
    assert not torch.equal(layer(x), expected)


def test_keys_and_values_are_those_of_the_cache_rule_after_the_rotary_position():
    seen = []
    lm = build()
    batch = pack_rows(ROWS)
    real = F.scaled_dot_product_attention

    def record(q, k, v, **keywords):
        seen.append((k, v))
        return real(q, k, v, **keywords)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", record)
        with quantized(lm, "fp8_e4m3", kv=False):
            forward_hidden(lm, batch)
        plain = [seen.pop(0) for _ in range(len(seen) // 2)]  # the first layer's buckets: later layers see other inputs
        seen.clear()
        with quantized(lm, "fp8_e4m3"):
            forward_hidden(lm, batch)
    for before, after in zip(plain, seen):
        for x, y in zip(before, after):
            codes, scale = quantize_kv(x)
            assert torch.equal(codes.float() * scale, y)
            assert not torch.equal(x, y)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int4", "bf16"])
def test_the_engine_and_the_learner_agree_in_a_format_and_not_outside_of_it(kind, fmt):
    lm = build(kind)
    engine = make_engine("torch", lm, rollout_format="auto") if fmt == "bf16" else make_engine("torch", lm, rollout_format=fmt)
    engine.emulate = fmt  # bf16 as an emulated format is not a rollout format of the torch engine
    prompts = [[3, 9, 14, 20], [40, 41, 42, 43, 44, 45, 46]]
    engine.sync(lm)
    rows, got = [], []
    history = prompts
    for turn in range(3):  # a later turn continues from the keys and values that the earlier ones stored
        samples = engine.generate(history, Sampling(max_new_tokens=6), 1, [[turn], [turn + 9]], session_ids=["a", "b"])
        rows += [(h, s.token_ids) for h, [s] in zip(history, samples)]
        got += [torch.tensor(s.logprobs) for [s] in samples]
        history = [[*h, *s.token_ids, 50 + turn, 51] for h, [s] in zip(history, samples)]
    got = torch.cat(got)
    with torch.no_grad():
        exact = logprobs(lm, pack_rows(rows))
        with quantized(lm, fmt):
            aligned, padded = logprobs(lm, pack_rows(rows)), logprobs(lm, pack_rows(rows, share_prompts=False))
    gap = (exact - got).abs().mean()
    # sums of other batch shapes differ in the last bit, which can push a value over a rounding edge: close, and far closer than without alignment
    assert (aligned - got).abs().mean() < 0.25 * gap and (padded - got).abs().mean() < 0.25 * gap, (gap, (aligned - got).abs().mean())
    assert gap > (1e-4 if fmt == "bf16" else 1e-3)


def test_the_model_is_as_it_was_afterwards_and_its_names_never_change():
    lm = build()
    before, names, batch = copy.deepcopy(lm.state_dict()), [n for n, _ in lm.named_parameters()], pack_rows(ROWS)
    expected = logprobs(lm, batch)
    with pytest.raises(RuntimeError, match="inside"), quantized(lm, "int8"):
        assert [n for n, _ in lm.named_parameters()] == names and list(lm.state_dict()) == list(before)
        assert not torch.equal(logprobs(lm, batch), expected)
        raise RuntimeError("inside")
    assert torch.equal(logprobs(lm, batch), expected)
    assert all(torch.equal(a, b) for a, b in zip(lm.state_dict().values(), before.values()))
    with quantized(lm, None):
        assert torch.equal(logprobs(lm, batch), expected)


def test_gradients_pass_straight_through_to_the_master_weights():
    lm = build()
    layer = lm.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 160)
    up = torch.randn(3, layer.weight.shape[0])
    with quantized(lm, "fp8_e4m3"):
        layer(x.requires_grad_()).backward(up)
    assert torch.allclose(layer.weight.grad, up.T @ as_stored(x.detach(), "fp8_e4m3", "input"), rtol=1e-5, atol=1e-5)
    assert torch.allclose(x.grad, up @ as_stored(layer.weight.detach(), "fp8_e4m3", "weight"), rtol=1e-5, atol=1e-5)


def test_an_optimizer_step_in_the_format_moves_the_full_precision_weights():
    lm = build()
    batch = pack_rows(ROWS)
    optimizer = torch.optim.SGD(lm.parameters(), lr=1e-7)
    before = lm.model.layers[0].mlp.down_proj.weight.detach().clone()
    with quantized(lm, "int4"):
        (-logprobs(lm, batch).mean()).backward()
    optimizer.step()
    moved = lm.model.layers[0].mlp.down_proj.weight.detach() - before
    assert 0 < moved.abs().max() < 1e-4  # far under a step of int4, and not rounded away


def test_formats_and_contexts_are_checked():
    lm = build()
    with pytest.raises(ValueError, match="unknown format 'fp4'"), quantized(lm, "fp4"):
        pass
    with quantized(lm, "int8"), pytest.raises(ValueError, match="already"), quantized(lm, "int8"):
        pass
    with torch.no_grad():
        lm.model.layers[0].mlp.gate_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"), quantized(lm, "int8", frozen=True):
        pass
    assert "forward" not in vars(lm.model.layers[0].self_attn.q_proj)
    with quantized(lm, "fp8_e4m3", through_bf16=True), torch.no_grad():
        layer, x = lm.model.layers[1].mlp.gate_proj, torch.eye(160)
        assert torch.allclose(layer(x).T, as_stored(layer.weight.bfloat16().float(), "fp8_e4m3", "weight"), rtol=0, atol=1e-6)
    moe = transformers.Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
    with pytest.raises(ValueError, match=r"experts.* are weights outside of linear layers"), quantized(transformers.Qwen3MoeForCausalLM(moe), "int8"):
        pass
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(EngineError, match="cannot be emulated for GPT2"):
        make_engine("torch", gpt, rollout_format="int8")
