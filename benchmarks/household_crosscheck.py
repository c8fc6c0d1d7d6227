"""Plays the same commands through TextWorld and through common/envs/household_engine.py, and compares every answer.

    python benchmarks/household_crosscheck.py FOLDER [--episodes 3] [--steps 60] [--seed 0]

FOLDER holds ALFWorld games (game.tw-pddl, at any depth). Needs `pip install alfworld==0.4.2 textworld==1.7.0` (compiles for minutes; its planner is GPL-3, so
it is no dependency of this project). Each game is played from its start with random admissible commands (a verb, then one of its commands), one in ten of
them any command at all, and then by the oracle; observation, admissible commands, and whether the game is won must be equal after every command.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common.envs.household_engine import NOTHING, plan
from common.envs.household_files import read_game


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=3, help="random episodes per game")
    parser.add_argument("--steps", type=int, default=60, help="random commands per episode, before the oracle takes over")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import textworld  # these imports overwrite sys.argv
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    files = sorted(args.folder.rglob("game.tw-pddl"))
    if not files:
        raise SystemExit(f"{args.folder}: no game.tw-pddl in it")
    rng = random.Random(args.seed)
    steps = differences = 0
    seconds = {"textworld step": 0.0, "textworld reset": 0.0, "engine step with admissible commands": 0.0}
    for file in files:
        theirs = textworld.start(str(file), textworld.EnvInfos(won=True, admissible_commands=True), wrappers=[AlfredDemangler(shuffle=False)])
        game = read_game(file)
        things = game.names[: len(game.types)]
        for _ in range(args.episodes):
            start = time.perf_counter()
            reference = theirs.reset()
            seconds["textworld reset"] += time.perf_counter() - start
            state, won, played = game.start, game.won(game.start), []
            answer = (game.intro(), game.admissible(state), won)
            expected = (reference.feedback, reference.admissible_commands, reference["won"])
            while True:
                if answer != expected:
                    differences += 1
                    print(f"{file}\nafter {played}\nours     {answer}\nexpected {expected}")
                    break
                if len(played) < args.steps:
                    verbs = sorted({c.split()[0] for c in answer[1]})  # first the verb, for most commands only go somewhere
                    verb = rng.choice(verbs)
                    command = rng.choice([c for c in answer[1] if c.split()[0] == verb])
                    if rng.random() < 0.1:
                        kind = rng.choice(list(game.grammar.templates))
                        command = game.grammar.templates[kind].format(**{p: rng.choice(things) for p in ("o", "r", "co", "ko")})
                elif won:
                    break
                else:
                    command = game.command(plan(game, state)[0])
                played.append(command)
                start = time.perf_counter()
                reference, _, _ = theirs.step(command)
                seconds["textworld step"] += time.perf_counter() - start
                start = time.perf_counter()
                action, text = game.parse(command), NOTHING
                if action is not None and game.allowed(state, action):
                    before, state = state, game.apply(state, action)
                    text = game.feedback(before, state, action)
                won = game.won(state)
                answer = (text, game.admissible(state), won)
                seconds["engine step with admissible commands"] += time.perf_counter() - start
                expected = (reference.feedback, reference.admissible_commands, reference["won"])
                steps += 1
        theirs.close()
    print(f"{len(files)} games, {args.episodes} episodes each, {steps} commands, {differences} differences")
    for what, total in seconds.items():
        count = len(files) * args.episodes if "reset" in what else steps
        print(f"{what}: {1e3 * total / count:.4f} ms")
    sys.exit(differences > 0)


if __name__ == "__main__":
    main()
