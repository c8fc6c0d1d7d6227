# Guide, derivations, measured results and figures: docs/collapse_sim.md
"""The part of collapse_sim.py that trains or measures networks, `--what transformer` and `--measure-llm`. Run it through collapse_sim.py.

Small transformers compare two six-digit numbers. After a few supervised steps they go on alone, rewarded by their own majority vote. The readout decides
whether a shared direction exists: plain has one, antisymmetric has none by construction, controlled gets one back in a chosen dose."""

import functools
import json
import math

import numpy as np
import torch
from tqdm import tqdm

from collapse_sim import LAMBDA_C, amplification_mixed, drift_slope, kernel_coefficients, simulate_binary, window_edge
from common.collapse_tools import (
    answer_logit,
    bootstrap,
    encode_question,
    feature_signs,
    gradient_kernel,
    init_network,
    network_score,
    number_pairs,
    read_questions,
    replica_keys,
    row,
    sample_answers,
    share_row,
    wilson,
)

NET_FIELDS = ("seed", "digits", "width", "layers", "net_seeds", "net_epochs", "net_eta", "pretrain_lr")  # what a network run depends on, besides its group
NET_BASES = (10, 20, 90, 120)  # supervised steps of the base networks (paper: base 10, 20, 90, 120)


def readout_logit(net: dict, tokens, readout: str, bias_scale):
    """z(x) of R stacked networks. tokens: (R, B, 2 digits) -> (R, B).

    plain: h(x) + b. antisymmetric: h(x) - h(x with its halves swapped), which leaves no shared direction. controlled: antisymmetric + bias_scale b, an output
    bias whose kernel k_u = bias_scale^2 is dosed. bias_scale: (R, 1)."""
    if readout == "plain":
        return network_score(net, tokens) + net["bias"][:, 0]
    both = network_score(net, torch.cat([tokens, tokens.roll(tokens.shape[-1] // 2, -1)], 1))
    z = both[:, : tokens.shape[1]] - both[:, tokens.shape[1] :]
    return z + bias_scale * net["bias"][:, 0] if readout == "controlled" else z


def pretrain(args, seeds: list[int], readout: str, bases: tuple[int, ...]) -> dict[int, dict]:
    """Base networks: {supervised steps: stacked parameters} on fresh labelled pairs, Adam, batch 64, every seed with its own data."""
    net = {name: p.requires_grad_() for name, p in init_network(seeds, args.digits, args.width, args.layers).items()}
    trained = [p for name, p in net.items() if name != "bias" or readout == "plain"]
    optimizer, streams, saved = torch.optim.Adam(trained, args.pretrain_lr), [np.random.default_rng([7, seed]) for seed in seeds], {}
    for step in range(max(bases) + 1):
        if step in bases:
            saved[step] = {name: p.detach().clone() for name, p in net.items()}
        labels = np.stack([rng.permutation(np.repeat([1.0, -1.0], 32)) for rng in streams])
        tokens = torch.tensor(np.stack([number_pairs(rng, y, args.digits) for rng, y in zip(streams, labels)]))
        z = readout_logit(net, tokens, readout, torch.zeros(len(seeds), 1))
        optimizer.zero_grad()
        torch.nn.functional.softplus(-z * torch.tensor(labels, dtype=z.dtype)).mean(1).sum().backward()
        optimizer.step()
    return saved


def empirical_kernel(net: dict, tokens, readout: str, bias_scale: float) -> np.ndarray:
    """(5) K_ij = grad z_i . grad z_j over all parameters of one network, from per-example gradients. tokens: (N, L) -> (N, N) float64."""
    scale = torch.full((1, 1), float(bias_scale))

    def logit(parameters, x):
        return readout_logit({name: p[None] for name, p in parameters.items()}, x[None, None], readout, scale)[0, 0]

    gradients = torch.func.vmap(torch.func.grad(logit), (None, 0), chunk_size=64)(net, tokens)
    rows = torch.cat([g.reshape(len(tokens), -1) for g in gradients.values()], 1).double()
    return (rows @ rows.T).numpy()


def self_reward(
    net: dict, tokens, readout: str, bias_scale, rates, taus, beta: float, epochs: int, streams: list, batch: int = 32, answers: int = 3, traces: int = 20
):
    """Majority-vote self-reward by plain SGD on R networks side by side, REINFORCE, policy sigmoid(z / tau).

    tokens: (R, N, L); rates, taus: (R,) learning rate and temperature of every replica; streams: R numpy generators.
    -> trained net, Phi at `traces` times (R, traces)."""
    n = tokens.shape[1]
    batch = min(batch, n)
    blocks, names = n // batch, list(net)
    net, tau, phi = {name: p.clone().requires_grad_() for name, p in net.items()}, torch.tensor(taus, dtype=torch.float32)[:, None], []
    for step in range(epochs * blocks):
        if step % blocks == 0:
            order = torch.tensor(np.stack([rng.permutation(n) for rng in streams]))
        at = order[:, step % blocks * batch : (step % blocks + 1) * batch]  # (R, B)
        z = readout_logit(net, torch.gather(tokens, 1, at[..., None].expand(-1, -1, tokens.shape[-1])), readout, bias_scale) / tau
        p = torch.sigmoid(z.detach()).double().numpy()
        yes = np.stack([rng.binomial(answers, row) for rng, row in zip(streams, p)])
        g = np.where(2 * yes > answers, yes * (1 - p), (yes - answers) * p) / answers
        if beta > 0:  # (4) entropy of the batch-mean answer
            pooled = p.mean(1, keepdims=True).clip(1e-12, 1 - 1e-12)
            g = g + beta * p * (1 - p) * np.log((1 - pooled) / pooled)
        gradients = torch.autograd.grad((z * torch.tensor(g, dtype=z.dtype)).mean(1).sum(), [net[name] for name in names], allow_unused=True)
        with torch.no_grad():
            for name, gradient in zip(names, gradients):
                if gradient is not None:
                    net[name] += rates.reshape(-1, *[1] * (gradient.ndim - 1)) * gradient
        if (step + 1) * traces >= (len(phi) + 1) * epochs * blocks:
            with torch.no_grad():
                phi.append(torch.sign(readout_logit(net, tokens, readout, bias_scale)).mean(1).abs())
    return {name: p.detach() for name, p in net.items()}, torch.stack(phi, 1).numpy()


REDUCED_SIZES, FULL_SIZES, RESCUE_SIZE = (16, 64, 256), (16, 32, 64, 128, 256, 512, 1024), 256


def network_group(args, grid, readout: str, base: int, n: int, doses: tuple, taus: tuple, beta: float = 0.0) -> list[dict]:
    """Self-reward runs of every (dose, temperature, network seed) of one readout, base and N, side by side.

    One record per run: settings, initial kernel and G, the surrogate's collapse share, Phi, mean |z|, accuracies, and for some the kernel after training."""
    label = json.dumps({"net": [readout, base, n, doses, taus, beta], "args": {f: getattr(args, f) for f in NET_FIELDS}, "version": 1})
    grid_axes = [(dose, tau, seed) for dose in doses for tau in taus for seed in range(args.net_seeds)]

    def compute():
        seeds, key = list(range(args.net_seeds)), (readout, base)
        if key not in grid.bases:
            built = pretrain(args, [args.seed * 1000 + s for s in seeds], readout, NET_BASES)
            grid.bases |= {(readout, b): net for b, net in built.items()}
        nets, rng = grid.bases[key], np.random.default_rng([args.seed, 3])
        probe_y = np.repeat([1.0, -1.0], 128)
        probe = torch.tensor(number_pairs(rng, probe_y, args.digits))
        if ("kernel", *key) not in grid.bases:
            free = "antisymmetric" if readout == "controlled" else readout  # the dose is added below
            grid.bases["kernel", *key] = [empirical_kernel({k: v[s] for k, v in nets.items()}, probe, free, 0.0) for s in seeds]
        plain_k = grid.bases["kernel", *key]
        k_d0 = np.array([np.trace(k) / len(k) for k in plain_k])
        pick = torch.tensor([seed for _, _, seed in grid_axes])
        net = {name: p[pick].clone() for name, p in nets.items()}
        scale = torch.tensor([math.sqrt(dose * k_d0[seed]) for dose, _, seed in grid_axes], dtype=torch.float32)[:, None]
        tau = np.array([t for _, t, _ in grid_axes])
        labels = np.repeat([1.0, -1.0], n // 2)
        pools = [torch.tensor(number_pairs(np.random.default_rng([args.seed, 5, s, n]), labels, args.digits)) for s in seeds]
        tokens = torch.stack([pools[seed] for _, _, seed in grid_axes])
        tests = torch.tensor(number_pairs(np.random.default_rng([args.seed, 6]), np.repeat([1.0, -1.0], 256), args.digits))[None].expand(len(pick), -1, -1)
        with torch.no_grad():
            z0 = readout_logit(net, tokens, readout, scale).double().numpy() / tau[:, None]
        runs = []
        for i, (dose, t, seed) in enumerate(grid_axes):
            kernel = plain_k[seed] + dose * k_d0[seed]
            with torch.no_grad():
                sign = np.sign(readout_logit({k: v[seed : seed + 1] for k, v in nets.items()}, probe[None], readout, scale[i : i + 1])[0].numpy())
            k = kernel_coefficients(kernel, sign)
            g = amplification_mixed(z0[i], answers=3)
            unit = [max(k[name], 0.0) / k["k_d"] for name in ("k_dp", "k_u", "k_s")]
            batch = min(32, n)
            keys, steps = replica_keys(args.seed, f"{label}{i}", 24), args.net_epochs * (n // batch)
            settings = (batch, 3, 0, 0, args.net_eta, beta, steps, True, False, np.ones((3, 1)))
            surrogate = simulate_binary(z0[i], np.where(z0[i] > 0, 1.0, -1.0), *unit, *settings, keys, 1)[1]
            runs.append(
                {
                    "readout": readout,
                    "base": base,
                    "n": n,
                    "dose": dose,
                    "tau": t,
                    "seed": seed,
                    "beta": beta,
                    "g": g,
                    **k,
                    "predicted": float((surrogate > 0.9).mean()),
                }
            )
        rates = torch.tensor([args.net_eta * t * t / r["k_d"] for (_, t, _), r in zip(grid_axes, runs)], dtype=torch.float32)
        streams = [np.random.default_rng([args.seed, 9, i, n, base]) for i in range(len(pick))]
        trained, phi = self_reward(net, tokens, readout, scale, rates, tau, beta, args.net_epochs, streams)
        with torch.no_grad():
            z = readout_logit(trained, tokens, readout, scale).double().numpy() / tau[:, None]
            z_test = readout_logit(trained, tests, readout, scale).numpy()
        truth = np.sign(np.repeat([1.0, -1.0], 256))
        features = feature_signs(tests[0].numpy(), args.digits)
        for i, run in enumerate(runs):
            run |= {
                "phi": float(phi[i, -1]),
                "trace": phi[i].round(4).tolist(),
                "size": float(np.abs(z[i]).mean()),
                "accuracy": float(((z[i] > 0) == (labels > 0)).mean()),
            }
            run |= {
                "test_accuracy": float(((z_test[i] > 0) == (truth > 0)).mean()),
                "rule": float(max(abs((np.sign(z_test[i]) * f).mean()) for f in features) / 2 + 0.5),
            }
            if i < args.net_seeds and n == REDUCED_SIZES[-1]:  # kernel drift, at the first dose and temperature
                one = {name: p[i] for name, p in trained.items()}
                with torch.no_grad():
                    sign = np.sign(readout_logit({k: v[None] for k, v in one.items()}, probe[None], readout, scale[i : i + 1])[0].numpy())
                run["after"] = kernel_coefficients(empirical_kernel(one, probe, readout, float(scale[i])), sign)
        spectrum = np.linalg.eigvalsh(plain_k[0])[::-1][:12]
        return {"runs": runs, "spectrum": spectrum.tolist(), "uniform": float(np.ones(256) @ plain_k[0] @ np.ones(256) / 256)}

    return grid.cell(label, compute, lambda r: {"net/n": n, "net/share": float(np.mean([run["phi"] > 0.9 for run in r["runs"]]))})


def auc(score: np.ndarray, outcome: np.ndarray) -> float:
    """Area under the ROC curve, ties counted half. nan when only one outcome occurs."""
    positive, negative = score[outcome], score[~outcome]
    return float((np.sign(positive[:, None] - negative[None]) * 0.5 + 0.5).mean()) if len(positive) and len(negative) else math.nan


def sweep_transformer(args, grid):
    """Reduced grid by default; --full runs N = 16 .. 1024 for four antisymmetric bases, five bias doses and two plain bases at three temperatures."""
    sizes = FULL_SIZES if args.full else REDUCED_SIZES
    anti = (10, 20, 90, 120) if args.full else (10, 90)
    doses = (0.01, 0.1, 0.3, 1.0, 3.0) if args.full else (0.03, 1.0)
    cells = [network_group(args, grid, "antisymmetric", b, n, (0.0,), (1.0,)) for b in anti for n in sizes]
    cells += [network_group(args, grid, "controlled", b, n, doses, (1.0,)) for b in anti for n in sizes]
    cells += [network_group(args, grid, "plain", b, n, (0.0,), (1.0, 2.0, 3.0)) for b in ((90, 120) if args.full else (90,)) for n in sizes]
    rescue = [network_group(args, grid, "plain", 90, RESCUE_SIZE, (0.0,), (2.0,), beta) for beta in (0.0, 0.25, 0.5, 1.0)]
    runs = [run for cell in cells for run in cell["runs"]]
    rows = []

    def share(quantity, paper, chosen, note=""):
        rows.append(share_row("transformer", quantity, paper, sum(run["phi"] > 0.9 for run in chosen), len(chosen), note))

    def of(**wanted):
        return [run for run in runs if all(run[k] == v for k, v in wanted.items())]

    share("share collapsed, antisymmetric readout", 0.0, of(readout="antisymmetric"), f"; G up to {max(r['g'] for r in of(readout='antisymmetric')):.3f}")
    share("share collapsed, bias dose rho_b >= 1", 335 / 336, [r for r in of(readout="controlled") if r["dose"] >= 1])
    for n, paper in ((sizes[0], 0.0), (sizes[-1], 1.0)):
        share(f"share collapsed, plain, base 90, N {n}", paper if args.full or n == 16 else None, of(readout="plain", base=90, n=n), "; all temperatures")
    for tau, paper in ((1.0, 29 / 42), (2.0, 34 / 42), (3.0, 37 / 42)):
        share(f"share collapsed, plain, base 90, temperature {tau:g}", paper if args.full else None, of(readout="plain", base=90, tau=tau))
    if args.full:
        share(
            "share collapsed, plain, base 120, temperature 1",
            17 / 42,
            of(readout="plain", base=120, tau=1.0),
            f"; G {np.mean([r['g'] for r in of(readout='plain', base=120, tau=1.0)]):.3f}",
        )
    for readout, paper in (("antisymmetric", None), ("plain", (0.40, 0.70))):
        ratio = np.array([r["k_u"] / r["k_dp"] for r in of(readout=readout, tau=1.0, n=sizes[0])])
        rows.append(
            row(
                "transformer",
                f"k_u / k'_d, {readout}",
                paper,
                float(np.mean(ratio)),
                float(ratio.min()),
                float(ratio.max()),
                "interval: smallest and largest network",
            )
        )
    free = [r for r in runs if r["readout"] == "plain"]
    seen, predicted = np.array([r["phi"] > 0.9 for r in free]), np.array([r["predicted"] for r in free])
    rows.append(
        row(
            "transformer",
            "ROC AUC of the initial-kernel surrogate, plain",
            0.87,
            auc(predicted, seen),
            *bootstrap(lambda i: auc(predicted[i], seen[i]), len(free)),
            "bootstrap",
        )
    )
    agree = (predicted > 0.5) == seen
    rows.append(
        row(
            "transformer",
            "sign agreement of the surrogate, plain",
            0.71,
            float(agree.mean()),
            *wilson(int(agree.sum()), len(agree)),
            f"always collapse: {max(seen.mean(), 1 - seen.mean()):.2f}",
        )
    )
    rows.append(
        row(
            "transformer",
            "mean predicted share, plain",
            0.46,
            float(predicted.mean()),
            *bootstrap(lambda i: predicted[i].mean(), len(free)),
            f"seen {seen.mean():.2f} (paper 0.71)",
        )
    )
    for cell, beta in zip(rescue, (0.0, 0.25, 0.5, 1.0)):
        r = cell["runs"]
        phi, size, accuracy = (np.mean([x[name] for x in r]) for name in ("phi", "size", "test_accuracy"))
        note = f"Phi {phi:.2f}, |z| {size:.1f}, test accuracy {accuracy:.2f}, best simple rule {max(x['rule'] for x in r):.2f}"
        share(f"share collapsed, plain, base 90, tau 2, N {RESCUE_SIZE}, beta {beta:g}", 0.0 if beta >= 0.5 else None, r, f"; {note}")
    for readout in ("antisymmetric", "plain"):
        drift = [r for r in runs if r["readout"] == readout and "after" in r]
        for b in sorted({r["base"] for r in drift}):
            some = [r for r in drift if r["base"] == b]
            before, after = np.mean([r["k_s"] / r["k_dp"] for r in some]), np.mean([r["after"]["k_s"] / r["after"]["k_dp"] for r in some])
            growth = [r["after"]["k_d"] / r["k_d"] for r in some]
            rows.append(
                row(
                    "transformer",
                    f"k_s / k'_d after training, {readout}, base {b}",
                    None,
                    after,
                    note=f"before {before:.3f}; k_d grew {min(growth):.1f} to {max(growth):.1f} times",
                )
            )
    by_size = [
        (f"plain, tau {t:g}", sizes, [np.mean([r["phi"] > 0.9 for r in of(readout="plain", base=90, tau=t, n=n)]) for n in sizes]) for t in (1.0, 2.0, 3.0)
    ]
    by_size.append(("antisymmetric", sizes, [np.mean([r["phi"] > 0.9 for r in of(readout="antisymmetric", n=n)]) for n in sizes]))
    by_dose = [(f"base {b}", doses, [np.mean([r["phi"] > 0.9 for r in of(readout="controlled", base=b, dose=d)]) for d in doses]) for b in anti]
    spectrum = {c["runs"][0]["readout"]: c["spectrum"] for c in cells if c["runs"][0]["base"] == 90 and c["runs"][0]["readout"] != "controlled"}
    self_kernel = of(readout="plain", base=90)[0]["k_d"]
    return {"rows": rows, "curves": [], "runs": runs, "by_size": by_size, "by_dose": by_dose, "spectrum": spectrum, "self_kernel": self_kernel}


# ------------------------------------------------------------------------------------------------ measurement on a causal LM
def screen(counts: np.ndarray, z: np.ndarray, kernel: np.ndarray, lambda_c: float = LAMBDA_C) -> dict[str, float]:
    """Everything the theory says about a model before training. counts: (N, 2) sampled answers; z: (N,) exact logits; kernel: (N, N).

    <F'> from samples is unbiased: F' = 6 s^2 - s with s = p(1-p); s and s^2 from falling factorials of the counts (4 or more matched samples)."""
    yes, no = counts[counts.sum(1) >= 4].T.astype(float)
    total = yes + no
    s1 = yes * no / (total * (total - 1))
    s2 = yes * (yes - 1) * no * (no - 1) / (total * (total - 1) * (total - 2) * (total - 3))
    k = kernel_coefficients(kernel, np.where(z > 0, 1.0, -1.0))
    g = amplification_mixed(z)
    margin = g * k["k_u"] - lambda_c * k["k_s"]
    sampled = float((6 * s2 - s1).mean()) if len(yes) else math.nan
    z_hat = np.log((counts[:, 0] + 0.5) / (counts[:, 1] + 0.5))
    result = {"questions": len(z), "F' sampled": sampled, "F' exact": float(drift_slope(z).mean()), "window share": float((np.abs(z) < window_edge()).mean())}
    result |= {
        "window share sampled": float((np.abs(z_hat) < window_edge()).mean()),
        "mean |z|": float(np.abs(z).mean()),
        "mean sign": float(np.sign(z).mean()),
        "G": g,
        **k,
    }
    return result | {
        "k_u/k'_d": k["k_u"] / k["k_dp"],
        "k_s/k'_d": k["k_s"] / k["k_dp"],
        "predicted N_c": lambda_c * k["k_dp"] / margin if margin > 0 else math.inf,
    }


def measure_llm(args) -> dict[str, float]:
    """Samples, exact logits and per-example gradients of --model on --questions; prints the screening. Needs torch and transformers."""
    from common.policies import TinyConfig, load_policy  # here: the solvable model needs neither torch nor transformers

    if args.llm_samples < 1 or args.llm_max_questions < 2 or args.temperature <= 0:
        raise ValueError("--llm-samples starts at 1, --llm-max-questions at 2, --temperature is positive")
    questions = read_questions(args.questions, args.llm_max_questions)
    flips = np.random.default_rng(args.seed).integers(0, 2, len(questions))  # the tiny policy learns either answer, so that it starts undecided
    talks = [[{"role": "user", "content": p}, {"role": "assistant", "content": a[f]}] for (p, a), f in zip(questions, flips)]
    lm, tokenizer, _ = load_policy(args.model, lambda: talks, TinyConfig(steps=150, seed=args.seed))
    lm.eval()
    encoded = [encode_question(tokenizer, *question) for question in questions]
    bar, counts = tqdm(total=2 * len(questions), desc="measure", unit="question"), []
    for i, ((_, answers), (prompt, ids)) in enumerate(zip(questions, encoded)):
        counts.append(sample_answers(lm, tokenizer, prompt, answers, args.llm_samples, args.temperature, max(map(len, ids)) + 2, args.seed * 100003 + i))
        bar.update()
    z = []

    def logit(prompt, ids):
        value = answer_logit(lm, prompt, ids, args.temperature)
        z.append(float(value))
        bar.update()
        return value

    parameters = [p for p in lm.parameters() if p.requires_grad]
    kernel = gradient_kernel(parameters, [functools.partial(logit, *pair) for pair in encoded])
    bar.close()
    result = screen(np.array(counts), np.array(z), kernel)
    result["matched samples"] = float(np.sum(counts)) / (args.llm_samples * len(questions))
    print("\n".join(f"{name:22s} {value:.4g}" for name, value in result.items()))
    bound = "no training-set size (G k_u below Lambda_c k_s, or G = 0)" if math.isinf(result["predicted N_c"]) else f"near N = {result['predicted N_c']:.0f}"
    print(f"predicted collapse under majority-vote self-reward: {bound}. A screening, not a guarantee: the kernel drifts during training.")
    return result
