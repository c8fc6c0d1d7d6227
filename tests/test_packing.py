"""Packed batches against ordinary forward passes of single sequences: log-probs and every gradient, in float64."""

import copy

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from common import packing
from common.packing import EMPTY, check_packing, forward_hidden, micro_batches, pack, pack_rows

SIZES = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": 128}
KINDS = {
    "llama-gqa": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama-mha-tied": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
}


def build(kind, dtype=torch.float64, **kwargs):
    config, cls, more = KINDS[kind]
    torch.manual_seed(0)
    lm = cls(config(**SIZES, **more, **kwargs)).to(dtype).eval()
    with torch.no_grad():
        for p in lm.parameters():
            if p.ndim > 1:
                p.mul_(6)  # far from uniform, so that a wrong position or mask shows
    return lm


def logprobs(lm, batch):
    logp = lm.lm_head(forward_hidden(lm, batch)).log_softmax(-1)
    return logp.gather(1, batch.target_ids[:, None])[:, 0]


def plain_logprobs(lm, groups):
    out = []
    for prompt, responses in groups:
        for r in responses:
            logp = lm(input_ids=torch.tensor([[*prompt, *r]]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            out.append(logp.gather(1, torch.tensor(r)[:, None])[:, 0])
    return torch.cat(out)


def ids(n, start):
    return [(start * 11 + i * 7) % 36 + 1 for i in range(n)]


GROUPS = [
    (ids(5, 1), [ids(3, 2), ids(1, 3), ids(8, 4)]),
    (ids(1, 5), [ids(1, 6)]),  # one-token prompt, one-token response
    (ids(12, 1), [ids(4, 2), ids(4, 2)]),  # begins like the first prompt; the same response twice
    (ids(5, 1), [ids(2, 2), [*ids(3, 2), 36]]),  # the first prompt again; responses that begin like one of its own
    (ids(3, 9), [[*ids(3, 9)], [5], [5, 6], [5, 6, 7]]),  # a response is the beginning of another one
]


@pytest.mark.parametrize("kind", KINDS)
def test_shared_equals_padded_equals_plain(kind):
    lm = build(kind)
    generator = torch.Generator().manual_seed(1)
    n = sum(len(r) for _, rs in GROUPS for r in rs)
    up = torch.randn(n, generator=generator, dtype=torch.float64)
    want = plain_logprobs(lm, GROUPS)
    grads = torch.autograd.grad((want * up).sum(), list(lm.parameters()))
    assert want.std() > 0.3  # tokens differ, so a shift would show
    for share in (True, False):
        batch = pack(GROUPS, share, pad_id=0)
        got = logprobs(lm, batch)
        assert torch.allclose(got, want, rtol=0, atol=1e-10)
        for a, b in zip(torch.autograd.grad((got * up).sum(), list(lm.parameters())), grads):
            assert float((a - b).abs().max()) <= 1e-6 * float(b.abs().max())  # transformers computes norms and rotations in float32
        assert batch.response_ids.tolist() == [i for i, r in enumerate(r for _, rs in GROUPS for r in rs) for _ in r]
        assert batch.target_ids.tolist() == [t for _, rs in GROUPS for r in rs for t in r]
        assert batch.lengths.tolist() == [len(r) for _, rs in GROUPS for r in rs]


LM = build("llama-gqa")
ANSWER = st.lists(st.integers(1, 3), min_size=1, max_size=5)  # few tokens: sequences share beginnings in every way there is


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ANSWER, st.lists(ANSWER, min_size=1, max_size=4)), min_size=1, max_size=4))
def test_any_groups(groups):
    with torch.no_grad():
        want = plain_logprobs(LM, groups)
        batch = pack(groups)
        assert torch.allclose(logprobs(LM, batch), want, rtol=0, atol=1e-10)
        assert torch.allclose(logprobs(LM, pack(groups, False)), want, rtol=0, atol=1e-10)
    sequences = [(*p, *r) for p, rs in groups for r in rs]
    assert batch.num_tokens == len({s[:n] for s in sequences for n in range(1, len(s) + 1)})  # every distinct prefix once
    assert pack(groups, False).num_tokens == sum(map(len, sequences))


def test_many_groups_and_long_neighbours():
    """300 responses of 60 prompts; one response far longer than the rest."""
    groups = [(ids(3 + g % 9, g), [ids(1 + (g * j) % 7, g + j + 1) for j in range(5)]) for g in range(60)]
    groups[7] = (groups[7][0], [*groups[7][1], ids(90, 2)])
    with torch.no_grad():
        assert torch.allclose(logprobs(LM, pack(groups)), plain_logprobs(LM, groups), rtol=0, atol=1e-10)


def test_pad_token_inside_the_data_is_a_token():
    groups = [([0, 4, 0], [[0, 0, 7], [0]]), ([3], [[2, 0]])]
    with torch.no_grad():
        want = plain_logprobs(LM, groups)
        for share in (True, False):
            assert torch.allclose(logprobs(LM, pack(groups, share, pad_id=0)), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "groups", [[([], [[1]])], [([1], [])], [([1, 2], [[3], []])], [([1], [[2]]), ([], [[1]])]], ids=["prompt", "no response", "response", "second group"]
)
@pytest.mark.parametrize("share", [True, False])
def test_empty_pieces_are_refused(groups, share):
    with pytest.raises(ValueError, match=r"group [01]: prompt of \d tokens, responses of .* every one needs at least 1"):
        pack(groups, share)


def test_no_groups_are_refused():
    with pytest.raises(ValueError, match="no groups to pack"):
        pack([])


def test_pack_rows_joins_neighbours_only():
    p, q = [1, 2], [3]
    rows = [(p, [4]), (list(p), [5, 6]), (q, [7]), (p, [8])]
    for share in (True, False):
        a, b = pack_rows(rows, share), pack([(p, [[4], [5, 6]]), (q, [[7]]), (p, [[8]])], share)
        assert a.target_ids.tolist() == [4, 5, 6, 7, 8]
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.predict_index, b.predict_index)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([(1, 1), (2,), (3, 3, 3, 3)]), st.integers(1, 6)), max_size=12), st.integers(1, 25))
def test_micro_batches_keep_order_and_budget(rows, budget):
    rows = [(list(p), [1] * n) for p, n in rows]
    batches = list(micro_batches(rows, budget))
    assert [i for b in batches for i in b] == list(range(len(rows)))
    assert all(batches)

    def cost(batch):
        return sum(len(rows[i][1]) + (0 if j and rows[batch[j - 1]][0] == rows[i][0] else len(rows[i][0])) for j, i in enumerate(batch))

    for batch, following in zip(batches, [*batches[1:], None]):
        assert cost(batch) <= budget or len(batch) == 1
        if following:
            assert cost([*batch, following[0]]) > budget  # none is closed early


def test_forward_leaves_the_attention_implementation():
    lm = build("llama-gqa")
    before = lm.config._attn_implementation
    forward_hidden(lm, pack(GROUPS))
    assert lm.config._attn_implementation == before
    with pytest.raises(IndexError):
        forward_hidden(lm, pack([([1], [[10**6]])]))  # a token outside the vocabulary
    assert lm.config._attn_implementation == before
    with pytest.raises(ValueError, match="only runs inside common"), packing._attention(lm, packing.ATTENTION):
        lm(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_packing_accepts_plain_models(kind, dtype):
    lm = build(kind, dtype)
    lm.train()
    check_packing(lm, True)
    check_packing(lm, False)
    assert lm.training


def small(cls, config, **kwargs):
    torch.manual_seed(0)
    return cls(config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **kwargs)).eval()


def test_check_packing_refuses_what_it_cannot_reproduce():
    capped = small(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, final_logit_softcapping=0.05, sliding_window=64, query_pre_attn_scalar=8)
    with pytest.raises(ValueError, match=r"sliding-window or soft-capped attention: run with --share-prompts off"):
        check_packing(capped, True)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM differ by .* transforms its logits after the output head"):
        check_packing(capped, False)
    windowed = small(transformers.MistralForCausalLM, transformers.MistralConfig, sliding_window=4)
    with pytest.raises(ValueError, match=r"sliding-window .* --share-prompts off"):
        check_packing(windowed, True)
    check_packing(windowed, False)  # its own mask in padded rows
    scaled = copy.deepcopy(build("llama-gqa", torch.float32))
    scaled.lm_head.register_forward_hook(lambda module, args, out: out * 0.5 if out.shape[0] == 1 and out.ndim == 3 else out)  # only in its own forward pass
    with pytest.raises(ValueError, match=r"LlamaForCausalLM differ by .* run with --share-prompts off"):
        check_packing(scaled, True)


def test_the_stand_in_batch_runs_on_every_model():
    """A process without data computes it, also for models that cannot share prompts."""
    for lm in (small(transformers.MistralForCausalLM, transformers.MistralConfig, sliding_window=4), build("qwen3", torch.float32)):
        hidden = forward_hidden(lm, EMPTY)
        assert hidden.shape == (1, 16)
        hidden.sum().backward()
        assert all(p.grad is not None for name, p in lm.named_parameters() if name != "lm_head.weight")


def test_moving_a_batch_moves_every_tensor():
    batch = pack(GROUPS).to("meta")
    tensors = [v for v in vars(batch).values() if isinstance(v, torch.Tensor)] + [x for bucket in batch.buckets for x in bucket]
    assert len(tensors) > 10
    assert all(x.device.type == "meta" for x in tensors)


@pytest.mark.parametrize("share", [True, False])
def test_masks_pick_the_predicted_tokens_and_leave_the_rest_as_context(share):
    lm = build("llama-gqa")
    rows = [(p, r) for p, responses in GROUPS for r in responses]
    masks = [[(i * 3 + j) % 4 != 1 for j in range(len(r))] for i, (_, r) in enumerate(rows)]
    masks[2] = [False] * len(masks[2])
    everything, marked = pack_rows(rows, share), pack_rows(rows, share, masks=masks)
    kept = torch.tensor([m for mask in masks for m in mask])
    assert torch.equal(logprobs(lm, marked), logprobs(lm, everything)[kept])
    assert torch.equal(marked.response_ids, everything.response_ids[kept])
    assert marked.lengths.tolist() == [sum(m) for m in masks] and marked.lengths[2] == 0
    with pytest.raises(ValueError, match="masks of"):
        pack_rows(rows, share, masks=[*masks[:-1], [True]])
