"""Episodes of several turns: played side by side, kept token-exact, laid out flat for the advantages, counted for the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common import envs
from common.engine import Sampling
from common.policies import PolicyError


@dataclass
class Turn:
    """One assistant message and the environment's answer. Its tokens are Episode.token_ids[start:stop], the stop token included."""

    start: int
    stop: int
    text: str
    unfinished: bool  # ran into max_new_tokens
    observation: str = ""
    reward: float = 0.0
    info: dict = field(default_factory=dict)


@dataclass
class Episode:
    """One trajectory, token-exact: prompt_ids is o_0, token_ids holds a_0 o_1 a_1 ... as sampled and as encoded once."""

    group: int  # index of its task in the update, over all processes
    sample: int  # index in its group
    task: dict
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)  # like token_ids: True where the policy sampled
    logprobs: list[float] = field(default_factory=list)  # of the engine, one per sampled token, at the sampling temperature
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0  # sum over the turns
    rewards: dict[str, float] = field(default_factory=dict)  # by name, from the step that ended the episode
    success: float = 0.0
    terminated: bool = False
    truncated: str = ""  # why it was cut: turns, context, padding, environment; empty when it ended by itself
    error: str = ""  # the environment failed: the episode is counted and takes no part


def encode(tokenizer, messages: list[dict]) -> list[int]:
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False).input_ids


def observation_frame(tokenizer, stop_token_ids: Sequence[int]) -> tuple[str, str, str]:
    """What the chat template writes from the end of one assistant message to the start of the next: (end, before, after) the observation.

    Raises PolicyError when the template does not end a message with one of the stop tokens.
    """
    said, seen = "assistant-message", "environment-message"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}, {"role": "user", "content": seen}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    between, _, after = text.partition(said)[2].partition(seen)
    end = next((t for t in tokenizer.convert_ids_to_tokens(list(stop_token_ids)) if between.startswith(t)), None)
    if end is None:
        raise PolicyError(f"the chat template ends an assistant message with {between!r}, which starts with none of the stop tokens {stop_token_ids}")
    return end, between.removeprefix(end), after


def turn_seed(seed: int, update: int, episode: Episode) -> int:
    """Independent stream per turn of each episode: results do not depend on how a batch is split over calls or processes."""
    key = [seed, update + 1, episode.group, episode.sample, len(episode.turns)]
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def rollout(
    engine, tokenizer, games: Sequence[envs.Env], threads: int, tasks: Sequence[tuple[int, dict]], n: int, sampling: Sampling, max_turns: int,
    context: int, seed: int, update: int, on_turn: Callable[[Episode, envs.Env], None] | None = None,
) -> list[Episode]:  # fmt: skip
    """Plays n episodes of each (group index, task), as many side by side as there are games, one turn of all of them at a time.

    on_turn(episode, game) is called before each action is executed. Episodes of a group are adjacent. An episode that has no room left for
    max_new_tokens more is cut there (truncated "context"), one that has not ended after max_turns too ("turns"), and one whose text so far
    holds the padding token, which an engine accepts in no prompt ("padding").
    """
    end, before, after = observation_frame(tokenizer, sampling.stop_token_ids)
    episodes = [Episode(group, j, task) for group, task in tasks for j in range(n)]

    def begin(pair: tuple[Episode, envs.Env]) -> bool:
        episode, game = pair
        try:
            episode.prompt_ids = encode(tokenizer, game.reset(episode.task))
        except envs.EnvironmentFailed as e:
            episode.error = str(e)
        return not episode.error

    def act(pair: tuple[Episode, envs.Env]) -> bool:
        """Executes the newest turn; True while the episode goes on."""
        episode, game = pair
        turn = episode.turns[-1]
        try:
            if on_turn is not None:
                on_turn(episode, game)
            turn.observation, turn.reward, episode.terminated, cut, turn.info = game.step(turn.text)
        except envs.EnvironmentFailed as e:
            episode.error = str(e)
            return False
        if episode.terminated or cut:
            episode.truncated = "" if episode.terminated else "environment"
            episode.rewards, episode.success = dict(turn.info.get("rewards", {})), float(turn.info.get("success", 0.0))
            episode.error = turn.info.get("error", "")
            return False
        return True

    def room(episode: Episode) -> bool:
        if len(episode.prompt_ids) + len(episode.token_ids) + sampling.max_new_tokens > context:
            episode.truncated = "context"
        elif engine.pad_token_id in episode.token_ids:
            episode.truncated = "padding"
        return not episode.truncated

    with ThreadPoolExecutor(max(threads, 1)) as pool:
        side_by_side = pool.map if threads else map
        for first in range(0, len(episodes), len(games)):
            pairs = list(zip(episodes[first : first + len(games)], games))
            pairs = [pair for pair, works in zip(pairs, side_by_side(begin, pairs)) if works]
            for number in range(max_turns):
                pairs = [pair for pair in pairs if room(pair[0])]
                if not pairs:
                    break
                prompts, seeds = [e.prompt_ids + e.token_ids for e, _ in pairs], [[turn_seed(seed, update, e)] for e, _ in pairs]
                for (e, _), [s] in zip(pairs, engine.generate(prompts, sampling, 1, seeds, session_ids=[(e.group, e.sample) for e, _ in pairs])):
                    body = s.token_ids[:-1] if s.finish_reason == "stop" else s.token_ids
                    text = tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                    start = len(e.token_ids)
                    e.turns.append(Turn(start, start + len(s.token_ids), text, s.finish_reason == "length"))
                    e.token_ids += s.token_ids
                    e.policy_mask += [True] * len(s.token_ids)
                    e.logprobs += s.logprobs
                pairs = [pair for pair, goes_on in zip(pairs, side_by_side(act, pairs)) if goes_on]
                if number < max_turns - 1:
                    for e, _ in pairs:
                        closing = end if e.turns[-1].unfinished else ""
                        seen = tokenizer(closing + before + e.turns[-1].observation + after, add_special_tokens=False).input_ids
                        e.token_ids += seen
                        e.policy_mask += [False] * len(seen)
            for e, _ in pairs:
                e.truncated = e.truncated or "turns"
            engine.end_sessions()
    for e in episodes:
        e.reward = sum(t.reward for t in e.turns)
        if e.turns:  # an observation that nobody answered takes no part
            del e.token_ids[e.turns[-1].stop :], e.policy_mask[e.turns[-1].stop :]
    return episodes


class Layout(NamedTuple):
    """Where episodes and turns lie in the N policy tokens of E episodes, flat, without observations. No turn is empty. All int64."""

    turns: torch.Tensor  # [T + 1] first token of each turn, and N
    episodes: torch.Tensor  # [E + 1] first token of each episode, and N
    episode_turns: torch.Tensor  # [E + 1] first turn of each episode, and T
    turn_ids: torch.Tensor  # [N]
    episode_ids: torch.Tensor  # [N]

    def to(self, device: torch.device | str) -> Layout:
        return Layout(*(x.to(device) for x in self))


def make_layout(turn_lengths: Sequence[Sequence[int]]) -> Layout:
    """turn_lengths: policy tokens of each turn of each episode."""
    lengths = torch.tensor([n for turns in turn_lengths for n in turns], dtype=torch.int64)  # [T]
    turns = F.pad(lengths.cumsum(0), (1, 0))
    episode_turns = F.pad(torch.tensor([len(turns) for turns in turn_lengths], dtype=torch.int64).cumsum(0), (1, 0))
    episodes = turns[episode_turns]
    turn_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return Layout(turns, episodes, episode_turns, turn_ids, torch.repeat_interleave(torch.arange(len(turn_lengths)), episodes.diff()))


def episode_metrics(measured: Sequence[Episode], everything: Sequence[Episode]) -> dict[str, tuple[float, float]]:
    """(sum, count) of what every script logs of its episodes, for `reduce_metrics`. measured: those of `everything` whose environment worked."""
    n, n_all, n_turns = float(len(measured)), float(len(everything)), float(sum(len(e.turns) for e in measured))
    return {
        "charts/episodic_return": (sum(e.reward for e in measured), n),
        "charts/episodic_length": (float(sum(len(e.logprobs) for e in measured)), n),
        "charts/context_length": (float(sum(len(e.prompt_ids) + len(e.token_ids) for e in measured)), n),
        "charts/turns": (n_turns, n),
        "charts/success": (sum(e.success for e in measured), n),
        "rollout/truncated_frac": (float(sum(bool(e.truncated) for e in measured)), n),
        **{f"rollout/truncated/{why}": (float(sum(e.truncated == why for e in measured)), n) for why in ("turns", "context", "padding", "environment")},
        "rollout/unfinished_turn_frac": (float(sum(t.unfinished for e in measured for t in e.turns)), n_turns),
        "rollout/invalid_turn_frac": (float(sum(bool(t.info.get("invalid")) for e in measured for t in e.turns)), n_turns),
        "rollout/error_frac": (n_all - n, n_all),
    }
