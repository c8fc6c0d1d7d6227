"""outcome_decomp.py: the identity on random records, slow loops, the worked example of the docs page, planted truth, malformed records, the command line."""

import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import need_module, need_program
from hypothesis import given, settings
from hypothesis import strategies as st

import outcome_decomp as od
import outcome_records
from common.envs import DataError
from outcome_records import Pair, Recipe, Record, Source, build_tables, check_record, pick_budgets, read_pairs, simulate, texts_at, write_records

ROOT = Path(__file__).parent.parent
NAN = math.nan


def line(model="base", problem="p1", sample=0, tokens=50, finished=True, correct=False, **more):
    return {"model": model, "problem": problem, "sample": sample, "tokens": tokens, "finished": finished, "correct": correct, **more}


def jsonl(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def matrix(models=("base", "rl"), problems=("p1", "p2"), samples=2):
    return [line(m, p, j, correct=(i + j) % 2 == 0) for m in models for i, p in enumerate(problems) for j in range(samples)]


def table_of(records):
    """Table from Records, without files."""
    source = Source(())
    source.files = ["memory"]
    rows = [dataclasses.replace(r, line=i + 1) for i, r in enumerate(records)]
    source.__class__ = type("Memory", (Source,), {"__iter__": lambda self: iter(rows)})
    return build_tables(source)[0]


# ---------------------------------------------------------------------------------------------------------------------- identity


@st.composite
def counts(draw):
    """(n, [fin_base, cor_base, fin_rl, cor_rl]) with 0 <= correct <= finished <= n; extremes (nothing, everything, lone wins) are frequent."""
    n, problems = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    out = []
    for _ in range(2):
        kinds = draw(st.lists(st.sampled_from(["any", "any", "none", "all wrong", "all right"]), min_size=problems, max_size=problems))
        fin = [0 if kind == "none" else n if kind != "any" else draw(st.integers(0, n)) for kind in kinds]
        cor = [0 if kind == "all wrong" else n if kind == "all right" else draw(st.integers(0, f)) for kind, f in zip(kinds, fin)]
        out += [np.array(fin), np.array(cor)]
    return n, out


def slow_any(n, hits, k):
    """Share of the k-subsets of n samples, the first `hits` of which are hits, that hold one."""
    subsets = list(itertools.combinations(range(n), k))
    return sum(any(i < hits for i in subset) for subset in subsets) / len(subsets)


def slow_account(n, k, fin_base, cor_base, fin_rl, cor_rl, cross):
    """The definitions, problem by problem, with Python floats."""
    size = len(fin_base)
    fb, pb, fr, pr = (math.fsum(slow_any(n, int(c), k) for c in x) / size for x in (fin_base, cor_base, fin_rl, cor_rl))
    reach = robust = 0.0
    for f0, c0, f1, c1 in zip(fin_base, cor_base, fin_rl, cor_rl):
        if f0 == n and c0 == 0 and c1 > 0:
            reach += slow_any(n, int(c1), k) / size
            robust += slow_any(n, int(c1), k) / size if c1 >= n / 2 else 0
        if f1 == n and c1 == 0 and c0 > 0:
            reach -= slow_any(n, int(c0), k) / size
            robust -= slow_any(n, int(c0), k) / size if c0 >= n / 2 else 0
    gb, gr = (pb / fb if fb else None), (pr / fr if fr else None)
    gb, gr = (gb if gb is not None else gr or 0.0), (gr if gr is not None else gb or 0.0)
    orders = {"finishing": ((fr - fb) * gr, fb * (gr - gb)), "reliability": ((fr - fb) * gb, fr * (gr - gb))}
    orders["half"] = tuple(sum(x) / 2 for x in zip(*orders.values()))
    finishing, reliability = orders[cross]
    same = [i for i in range(size) if fin_base[i] / n >= 7 / 8 and fin_rl[i] / n >= 7 / 8]
    matched = NAN
    if same:
        matched = sum(cor_rl[i] for i in same) / sum(fin_rl[i] for i in same) - sum(cor_base[i] for i in same) / sum(fin_base[i] for i in same)
    return {"delta": pr - pb, "finishing": finishing, "reliability": reliability - reach, "reach": reach, "robust_reach": robust, "matched": matched}


def fast_account(n, k, values, cross, weights=None):
    weights = np.full((1, len(values[0])), 1 / len(values[0])) if weights is None else weights
    return od.account(od.resampled(od.linear_terms(*(v[None] for v in values), n, k), weights), cross)


@settings(max_examples=150, deadline=None)
@given(counts(), st.sampled_from(["finishing", "half", "reliability"]), st.data())
def test_terms_add_up_and_equal_the_slow_loops(data, cross, more):
    n, values = data
    k = more.draw(st.integers(1, n))
    fast, slow = fast_account(n, k, values, cross), slow_account(n, k, *values, cross)
    total = fast["finishing"] + fast["reliability"] + fast["reach"]
    assert abs(total - fast["delta"])[0, 0] <= 1e-12
    assert np.all(fast["pass_base"] <= fast["fin_base"] + 1e-15)
    if values[0].any():
        assert abs(fast["fin_base"] * fast["cond_base"] - fast["pass_base"])[0, 0] <= 1e-12  # pass@k = fin@k * pass@k(|fin)
    for name, value in slow.items():
        if name != "matched" or k == 1:
            assert fast[name][0, 0] == pytest.approx(value, abs=1e-12, nan_ok=True), name


@settings(max_examples=60, deadline=None)
@given(counts(), st.randoms(use_true_random=False))
def test_order_of_problems_does_not_matter_and_swapped_sides_change_the_sign(data, random):
    n, values = data
    order = list(range(len(values[0])))
    random.shuffle(order)
    one, other = fast_account(n, 1, values, "half"), fast_account(n, 1, [v[order] for v in values], "half")
    swapped = fast_account(n, 1, values[2:] + values[:2], "half")
    for name in ("delta", "finishing", "reliability", "reach", "robust_reach", "matched"):
        assert one[name][0, 0] == pytest.approx(other[name][0, 0], abs=1e-12, nan_ok=True)
        assert one[name][0, 0] == pytest.approx(-swapped[name][0, 0], abs=1e-12, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(counts(), st.integers(0, 2**31))
def test_bootstrap_weights_are_resamples_of_the_problems(data, seed):
    n, values = data
    weights = od.bootstrap_weights(len(values[0]), 5, np.random.default_rng(seed))
    drawn = np.rint(weights[1:] * len(values[0])).astype(int)
    assert np.allclose(weights.sum(1), 1, atol=1e-12) and (drawn.sum(1) == len(values[0])).all()
    fast = fast_account(n, 1, values, "finishing", weights)
    for row, times in enumerate([np.ones(len(values[0]), int), *drawn]):
        slow = slow_account(n, 1, *(np.repeat(v, times) for v in values), "finishing")
        for name, value in slow.items():
            assert fast[name][0, row] == pytest.approx(value, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for k in range(1, n + 1):
        assert np.allclose(od.any_of(n, k), [slow_any(n, c, k) for c in range(n + 1)], rtol=0, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------------------- records to counts


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.booleans(), st.booleans()), min_size=4, max_size=24), st.randoms(use_true_random=False))
def test_counts_against_a_loop_monotone_in_the_budget_and_free_of_record_order(cells, random):
    cells = cells[: len(cells) // 4 * 4]
    records = [Record("m", f"p{i // 4}", i % 4, t if f else 90, f, f and c) for i, (t, f, c) in enumerate(cells)]
    budgets = [1, 7, 30, 31, 60, 90]
    table = table_of(records)
    fin, cor = od.counts_within(table, table.correct, budgets)
    for b, budget in enumerate(budgets):
        for p in range(len(table.problems)):
            mine = [r for r in records if r.problem == table.problems[p]]
            assert fin[0, b, p] == sum(r.finished and r.tokens <= budget for r in mine)
            assert cor[0, b, p] == sum(r.finished and r.tokens <= budget and r.correct for r in mine)
    assert (np.diff(fin, axis=1) >= 0).all() and (np.diff(cor, axis=1) >= 0).all() and (cor <= fin).all()
    shuffled = records[:]
    random.shuffle(shuffled)
    again = table_of(shuffled)
    assert all(np.array_equal(getattr(table, name), getattr(again, name)) for name in ("tokens", "finished", "correct"))


def test_names_and_samples_land_in_their_cells():
    table = table_of([Record(m, p, s, 100 * i + 10 * j + s, True, False) for j, p in enumerate("zxy") for i, m in enumerate("ba") for s in (5, 3)])
    assert table.models == ["a", "b"] and table.problems == ["x", "y", "z"]
    assert table.tokens.tolist() == [[[113, 115], [123, 125], [103, 105]], [[13, 15], [23, 25], [3, 5]]]


def test_samples_takes_the_lowest_numbers_and_says_so(tmp_path):
    rows = [line(sample=s, tokens=s) for s in (4, 0, 9, 2)] + [line("rl", sample=s, tokens=10 + s) for s in (1, 3, 5)]
    source = Source((jsonl(tmp_path / "r.jsonl", rows),))
    [table] = build_tables(source, samples=3)
    assert table.tokens.tolist() == [[[0, 2, 4]], [[11, 13, 15]]]
    assert source.notes["samples beyond the first 3 of a problem were left out (--samples 3)"] == 1
    with pytest.raises(DataError, match=r"r\.jsonl line 5.*'rl', problem 'p1': 3 samples, --samples asks for 4"):
        build_tables(source, samples=4)


# ---------------------------------------------------------------------------------------------------------------------- worked example


def test_worked_example_of_the_docs_page(tmp_path):
    """The records printed in docs/outcome_decomp.md give the fractions derived there by hand."""
    page = (ROOT / "docs" / "outcome_decomp.md").read_text()
    block = re.search(r"```jsonl\n(.*?)```", page, re.S).group(1)
    (tmp_path / "r.jsonl").write_text(block)
    table = build_tables(Source((str(tmp_path / "r.jsonl"),)))[0]
    fin, cor = od.counts_within(table, table.correct, [100])
    values = [fin[0, 0], cor[0, 0], fin[1, 0], cor[1, 0]]
    assert [v.tolist() for v in values] == [[2, 2, 1, 0], [0, 1, 1, 0], [2, 2, 2, 1], [1, 2, 1, 1]]
    want = {  # (k, cross) -> F, P, reach, delta
        (1, "finishing"): (10 / 56, 4 / 56, 7 / 56, 3 / 8),
        (1, "half"): (39 / 280, 31 / 280, 35 / 280, 3 / 8),
        (1, "reliability"): (4 / 40, 6 / 40, 5 / 40, 3 / 8),
        (2, "finishing"): (1 / 4, 0, 1 / 4, 1 / 2),
    }
    for (k, cross), numbers in want.items():
        got = fast_account(2, k, values, cross)
        assert [got[m][0, 0] for m in ("finishing", "reliability", "reach", "delta")] == pytest.approx(numbers, abs=1e-15)
    got = fast_account(2, 1, values, "finishing")
    assert [got[m][0, 0] for m in ("fin_base", "fin_rl", "cond_base", "cond_rl", "matched")] == pytest.approx([5 / 8, 7 / 8, 2 / 5, 5 / 7, 1 / 2])
    for fraction in ("10/56", "4/56", "7/56", "39/280", "31/280", "35/280"):
        assert fraction in page


def test_where_one_side_finishes_nothing_the_change_is_all_finishing():
    zero, full, half = np.array([0, 0]), np.array([2, 2]), np.array([1, 1])
    for cross in ("finishing", "half", "reliability"):
        gone = fast_account(2, 1, [full, half, zero, zero], cross)
        assert (gone["finishing"][0, 0], gone["reliability"][0, 0]) == (-0.5, 0.0) and math.isnan(gone["cond_rl"][0, 0])
        came = fast_account(2, 1, [zero, zero, full, half], cross)
        assert (came["finishing"][0, 0], came["reliability"][0, 0]) == (0.5, 0.0)
        none = fast_account(2, 1, [zero] * 4, cross)
        assert none["finishing"][0, 0] == none["reliability"][0, 0] == none["delta"][0, 0] == 0 and math.isnan(none["finishing_share"][0, 0])


def test_borders_of_matched_and_robust():
    def terms(fb, cb, fr, cr, n=8):
        return {k: float(v[0]) for k, v in od.linear_terms(*(np.array([x]) for x in (fb, cb, fr, cr)), n, 1).items()}

    assert terms(7, 3, 7, 3)["matched_share"] == 1 and terms(6, 3, 8, 3)["matched_share"] == 0 and terms(8, 3, 6, 3)["matched_share"] == 0
    assert terms(8, 0, 5, 4)["robust_rl"] == 1 and terms(8, 0, 5, 3)["robust_rl"] == 0 and terms(8, 0, 5, 3)["lone_rl"] == 1
    assert terms(7, 0, 8, 8)["lone_rl"] == 0  # one sample of the loser was not finished: no lone win
    assert terms(8, 5, 8, 0)["reach"] == -5 / 8 and terms(8, 5, 8, 0)["robust_base"] == 1


# ---------------------------------------------------------------------------------------------------------------------- statistics


def test_intervals_and_undefined_resamples():
    draws = np.concatenate([[7.0], np.arange(101.0)])
    assert od.intervals(draws, 0.9).tolist() == pytest.approx([7, 5, 95])
    some = draws.copy()
    some[1:5] = NAN  # 4 of 101: left out
    assert od.intervals(np.stack([some, draws]), 0.9)[1].tolist() == pytest.approx([7, 5, 95])
    assert od.intervals(some, 0.9).tolist() == pytest.approx([7, *np.quantile(np.arange(4.0, 101), [0.05, 0.95])])
    some[1:20] = NAN
    assert math.isnan(od.intervals(some, 0.9)[1])


def test_spearman_is_the_correlation_of_average_ranks():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (20, 15)).astype(float), rng.normal(size=(20, 15))

    def slow(values):
        return [sum(v < u for v in values) + (sum(v == u for v in values) + 1) / 2 for u in values]

    assert od.spearman(x, y) == pytest.approx([np.corrcoef(slow(a), slow(b))[0, 1] for a, b in zip(x, y)], abs=1e-12)
    assert od.spearman(np.array([[1.0, 2, 9, 4]]), np.array([[0.0, 1, 7, 5]])) == pytest.approx([1.0])
    assert math.isnan(od.spearman(np.ones((1, 4)), y[:1, :4])[0])


def test_sign_test_chance_and_wilson_by_hand():
    assert od.sign_test(0, 0) == 1 and od.sign_test(3, 0) == 0.25 and od.sign_test(2, 2) == 1 and od.sign_test(0, 6) == 2 / 64
    # one problem, n = 2: finished 2 + 2, correct 0 + 1: three wrong of four; a side gets two of the wrong ones with probability C(3,2) / C(4,2)
    assert od.chance_wins(np.array([[2], [2]]), np.array([[0], [1]]), 2) == 0.5
    assert od.chance_wins(np.array([[2], [2]]), np.array([[0], [0]]), 2) == 0 and od.chance_wins(np.array([[1], [2]]), np.array([[1], [2]]), 2) == 0
    # enumerated: 4 samples (wrong, wrong, wrong, right) dealt to two sides
    deals = [set(d) for d in itertools.combinations(range(4), 2)]
    assert sum(3 not in d for d in deals) / len(deals) == 0.5
    share, low, high = od.wilson(5, 10)
    assert (share, low, high) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4) and math.isnan(od.wilson(0, 0)[0])


def counts_of(records, planted, budget, samples):
    """[fin_base, cor_base, fin_rl, cor_rl] of a simulation with two models."""
    table = table_of(records)
    fin, cor = od.counts_within(table, table.correct, [budget])
    order = [table.models.index(m) for m in planted.models]
    return [x[m, 0] for m in order for x in (fin, cor)]


def expected(planted, budget, n):
    """Means over the draw of answers, in closed form: lengths and correctness are independent."""
    phi, q = planted.finish(budget), planted.solve
    fin, right = phi.mean(1), (phi * q).mean(1)
    lone = [(phi[1 - w] * (1 - q[1 - w])) ** n * phi[w] * q[w] for w in range(2)]  # the loser finishes all n and all are wrong
    reach = (lone[1] - lone[0]).mean()
    cond = right / fin
    finishing, reliability = (fin[1] - fin[0]) * cond[1], fin[0] * (cond[1] - cond[0]) - reach
    return {"delta": right[1] - right[0], "finishing": finishing, "reliability": reliability, "reach": reach}


def test_planted_truth_lies_in_the_intervals():
    base, rl = Recipe("base"), Recipe("rl", length=0.5, logit=0.8, learned=0.6)
    hits, errors, runs, budget = dict.fromkeys(("delta", "finishing", "reliability", "reach"), 0), {}, 30, 20480
    for seed in range(runs):
        records, planted = simulate(seed, 60, 8, (base, rl))
        weights = od.bootstrap_weights(60, 400, np.random.default_rng(seed))
        got, truth = fast_account(8, 1, counts_of(records, planted, budget, 8), "finishing", weights), expected(planted, budget, 8)
        assert min(truth["finishing"], truth["reliability"]) > 0.02 and truth["reach"] > 0.01, truth  # all three effects are really there
        for name, value in truth.items():
            middle, low, high = od.intervals(got[name][0], 0.95)
            hits[name] += low <= value <= high
            errors.setdefault(name, []).append(middle - value)
    assert min(hits.values()) >= 0.85 * runs, hits
    for name, values in errors.items():  # and no bias
        assert abs(np.mean(values)) < 4 * np.std(values) / math.sqrt(runs), name


def test_equal_models_have_reach_around_zero():
    reach = []
    for seed in range(40):
        records, planted = simulate(2000 + seed, 60, 4, (Recipe("base"), Recipe("rl")))
        reach.append(fast_account(4, 1, counts_of(records, planted, 24576, 4), "finishing")["reach"][0, 0])
    assert np.std(reach) > 0  # there are lone wins, they only cancel
    assert abs(np.mean(reach)) < 3 * np.std(reach) / math.sqrt(len(reach))


# ---------------------------------------------------------------------------------------------------------------------- malformed records

BAD_LINES = [
    ({**line(), "finished": None}, "field 'finished' is null; write true if the answer ended by itself"),
    ({k: v for k, v in line().items() if k != "correct"}, "field 'correct' is missing"),
    ({**line(), "finished": "unknown"}, "finished is 'unknown' \\(str\\); give true or false; unknown is not allowed"),
    ({**line(), "finished": 1}, "finished is 1 \\(int\\); give true or false"),
    ({**line(), "correct": 1.0}, "correct is 1.0 \\(float\\); give true or false"),
    ({**line(), "judge": "yes"}, "judge is 'yes'"),
    (line(finished=False, correct=True), "correct is true but finished is false"),
    (line(finished=False, judge=True), "judge is true but finished is false"),
    ({**line(), "tokens": -1}, "tokens is -1 \\(int\\); give a whole number"),
    ({**line(), "tokens": 50.0}, "tokens is 50.0 \\(float\\)"),
    ({**line(), "tokens": True}, "tokens is True \\(bool\\)"),
    ({**line(), "tokens": 2**60}, "tokens is 1152921504606846976"),
    ({**line(), "sample": "3"}, "sample is '3' \\(str\\)"),
    ({**line(), "model": ""}, "model is '' \\(str\\); give a string that is not empty"),
    ({**line(), "problem": ["p"]}, "problem is \\['p'\\]"),
    ({**line(), "dataset": 7}, "dataset is 7"),
    ({**line(), "text": 7}, "text is 7"),
    ('{"model": "base", "tokens": NaN}', "not valid JSON \\(NaN is not a number\\)"),
    ('{"model": "base", "tok', "not valid JSON"),
    ("[1, 2]", "is not a record; a line is one JSON object"),
    ("[" * 100_000, "not valid JSON"),
]


@pytest.mark.parametrize("bad,message", BAD_LINES, ids=[m[:40] for _, m in BAD_LINES])
def test_bad_json_lines_name_file_and_line(tmp_path, bad, message):
    path = jsonl(tmp_path / "bad.jsonl", [line("x", "other"), "", bad, line()])
    with pytest.raises(DataError, match=f"bad.jsonl line 3: .*{message}"):
        build_tables(Source((path,)))


def test_a_file_that_was_cut_says_so(tmp_path):
    (tmp_path / "cut.jsonl").write_text(json.dumps(line()) + "\n" + json.dumps(line("rl"))[:-20])
    with pytest.raises(DataError, match=r"cut\.jsonl line 2: .*no line end: the file was cut there; delete the line and sample that answer again"):
        build_tables(Source((str(tmp_path / "cut.jsonl"),)))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl line 1: the file has no records"):
        build_tables(Source((str(tmp_path / "empty.jsonl"),)))
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(line()).encode() + b"\n" + b'{"model": "b\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl line 2: not UTF-8"):
        build_tables(Source((str(tmp_path / "latin.jsonl"),)))


def test_bad_matrices_name_file_and_line(tmp_path):
    def build(rows, name="m.jsonl", **more):
        return build_tables(Source((jsonl(tmp_path / name, rows),)), **more)

    rows = matrix()
    with pytest.raises(DataError, match=r"m\.jsonl line 9: model 'base', problem 'p1': sample 0 stands already in .*m\.jsonl line 1"):
        build([*rows, rows[0]])
    with pytest.raises(DataError, match=r"m\.jsonl line 3: model 'rl', problem 'p2': no record, while model 'base' has it"):
        build([r for r in rows if (r["model"], r["problem"]) != ("rl", "p2")])
    with pytest.raises(DataError, match=r"m\.jsonl line 7: model 'rl', problem 'p2': 1 samples, most cells have 2; sample the missing ones, or .*--samples 1"):
        build(rows[:-1])
    with pytest.raises(DataError, match=r"line 2: model 'base', problem 'p1', data set 'x': no field 'judge' \(1 of the model's 2 records"):
        build([line(dataset="x", judge=True), line(dataset="x", sample=1)])
    [table] = build([line(judge=True), line(sample=1, correct=True)], judge_missing="matcher")
    assert table.judge.tolist() == [[[1, 1]]]
    path = jsonl(tmp_path / "m.jsonl", rows)
    for twice in ((path, path), (path, str(tmp_path))):
        with pytest.raises(DataError, match=r"m\.jsonl: given twice"):
            build_tables(Source(twice))
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        build_tables(Source((str(tmp_path / "nowhere"),)))
    (tmp_path / "r.txt").write_text("")
    with pytest.raises(DataError, match=r"unknown format '\.txt'"):
        build_tables(Source((str(tmp_path / "r.txt"),)))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="the folder has no"):
        build_tables(Source((str(tmp_path / "none"),)))


HEADER = "model,problem,sample,tokens,finished,correct\n"
BAD_CSV = [
    (HEADER.replace(",tokens", ""), "line 1: no column tokens"),
    (HEADER.replace("sample", "tokens"), "line 1: no column sample"),
    (HEADER.replace("correct\n", "correct,model\n"), "line 1: column 'model' occurs twice"),
    (HEADER, "line 2: the file has no records"),
    (HEADER + "base,p,0,5,true,false\nbase,p,1,5,true\n", "line 3: 5 cells, the header has 6"),
    (HEADER + 'base,"p\nq",0,5,true,false\nbase,p,x,5,true,false\n', "line 4: sample is 'x'"),
    (HEADER + "base,p,0,5.5,true,false\n", "line 2: tokens is '5.5'"),
    (HEADER + "base,p,0,,true,false\n", "line 2: tokens is ''"),
    (HEADER + "base,p,0,nan,true,false\n", "line 2: tokens is 'nan'"),
    (HEADER + "base,p,0,5,maybe,false\n", "line 2: finished is 'maybe'"),
    (HEADER + "base,p,0,5,,false\n", "line 2: finished is ''"),
    (HEADER + "base,p,0,5,false,true\n", "line 2: correct is true but finished is false"),
    (HEADER + 'base,p,0,5,true,false\nbase,"p', "line 3: not valid CSV"),
    (HEADER + "base,p,0,5,true,false\nb\xe9,p", "not UTF-8"),
]


@pytest.mark.parametrize("text,message", BAD_CSV, ids=[m for _, m in BAD_CSV])
def test_bad_csv_names_file_and_line(tmp_path, text, message):
    (tmp_path / "bad.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=rf"bad\.csv {message}" if message.startswith("line") else message):
        build_tables(Source((str(tmp_path / "bad.csv"),)))


def test_all_formats_read_the_same_records(tmp_path):
    need_module("pyarrow")
    import pyarrow
    from pyarrow import parquet

    records, _ = simulate(3, 5, 2, dataset="maths")
    assert write_records(tmp_path / "r.jsonl", records) == len(records)
    rows = [{name: getattr(r, name) for name in (*outcome_records.REQUIRED, *outcome_records.OPTIONAL)} for r in records]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    with open(tmp_path / "r.csv", "w") as out:
        out.write(",".join(rows[0]) + "\n")
        for row in rows:
            out.write(",".join(str(v).lower() if isinstance(v, bool) else str(v) for v in row.values()) + "\n")
    first = list(Source((str(tmp_path / "r.jsonl"),)))
    assert [dataclasses.replace(r, line=0) for r in first] == records
    for name in ("r.parquet", "r.csv"):
        assert [dataclasses.replace(r, line=0) for r in Source((str(tmp_path / name),))] == records, name
    assert [r.line for r in first[:2]] == [1, 2]
    with pytest.raises(DataError, match=r"record 1 for .*: correct is true but finished is false"):
        write_records(tmp_path / "x.jsonl", [Record("m", "p", 0, 1, False, True)])
    parquet.write_table(pyarrow.Table.from_pylist([{**rows[0]}, {**rows[1], "tokens": None}]), tmp_path / "null.parquet")
    with pytest.raises(DataError, match=r"null\.parquet row 2: field 'tokens' is null"):
        list(Source((str(tmp_path / "null.parquet"),)))
    parquet.write_table(pyarrow.table({"model": ["m"]}), tmp_path / "few.parquet")
    with pytest.raises(DataError, match=r"few\.parquet row 1: no column problem, sample"):
        list(Source((str(tmp_path / "few.parquet"),)))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"broken\.parquet: not a readable Parquet file"):
        list(Source((str(tmp_path / "broken.parquet"),)))


def test_unknown_fields_are_named_and_texts_are_found_again(tmp_path):
    path = jsonl(tmp_path / "r.jsonl", [line(text="Wait, actually. Waiting. WAIT", grade=1), line(sample=1)])
    source = Source((path,))
    [table] = build_tables(source)
    assert source.notes == {"field 'grade' is not part of the schema and was not read": 1}
    assert table.backtracks.tolist() == [[[3, -1]]]  # "Waiting" is another word; no text is not zero words
    assert texts_at(source, {(0, 1), (0, 2)}) == {(0, 1): "Wait, actually. Waiting. WAIT"} and texts_at(source, set()) == {}


# ---------------------------------------------------------------------------------------------------------------------- harness logs


def harness(doc=0, answers=("one two three",), scores=1.0, limit=10, **more):
    row = {"doc_id": doc, "doc": {"q": "?"}, "target": "3", "resps": [list(answers)], "filtered_resps": [answers[0]], "filter": "none"}
    row |= {"arguments": {"gen_args_0": {"arg_0": "prompt", "arg_1": {"until": ["Q"], "max_gen_toks": limit}}}}
    return row | {"metrics": ["exact_match"], "doc_hash": "0123456789abcdef", "exact_match": scores} | more


def read_logs(tmp_path, files, **options):
    for name, rows in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(tmp_path / name, rows)
    source = Source((str(tmp_path),), **options)
    source.count_tokens = lambda text: len(text.split())
    return list(source), source


def test_harness_logs_become_records(tmp_path):
    long = " ".join(["w"] * 10)
    files = {
        "base/samples_gsm8k_2026-04-15T13-55-33.588896.jsonl": [harness(0), harness(1, scores=0.0)],
        "base/samples_gsm8k_2026-04-16T13-55-33.588896.jsonl": [harness(0, [long], 1.0), harness(1)],
        "rl/samples_gsm8k_2026-04-15T13-55-33.588896.jsonl": [harness(0, ["a", long], [1, 0]), harness(1, ["a b", "b"], [False, True])],
    }
    records, source = read_logs(tmp_path, files)
    got = [(r.model, r.dataset, r.problem, r.sample, r.tokens, r.finished, r.correct) for r in records]
    assert got == [
        ("base", "gsm8k", "0:01234567", 0, 3, True, True),
        ("base", "gsm8k", "1:01234567", 0, 3, True, False),
        ("base", "gsm8k", "0:01234567", 1, 10, False, False),  # reached max_gen_toks: cut, and the harness's 1 does not count
        ("base", "gsm8k", "1:01234567", 1, 3, True, True),
        ("rl", "gsm8k", "0:01234567", 0, 1, True, True),
        ("rl", "gsm8k", "0:01234567", 1, 10, False, False),
        ("rl", "gsm8k", "1:01234567", 0, 2, True, False),
        ("rl", "gsm8k", "1:01234567", 1, 1, True, True),
    ]
    assert source.notes["harness answers within 0.01 of max_gen_toks count as cut"] == 2
    assert source.notes["of these the harness scored 1: they count as not correct"] == 1
    assert [table.tokens.shape for table in build_tables(source)] == [(2, 2, 2)]
    name = next(tmp_path.glob("rl/*.jsonl"))
    named = Source((f"mine={name}",), count_tokens=len)
    assert {r.model for r in named} == {"mine"}


def test_a_line_as_the_harness_writes_it(tmp_path):
    """Written by lm-evaluation-harness 0.4.13 (its dummy model, a task of two sums)."""
    line = (
        r'{"doc_id": 0, "doc": {"q": "1+1", "a": "lol"}, "target": "lol", "arguments": {"gen_args_0": {"arg_0": "1+1", "arg_1": {"until": ["\n\n"], '
        r'"do_sample": true, "temperature": 0.6, "max_gen_toks": 16}}}, "resps": [["lol"]], "filtered_resps": ["lol"], "filter": "none", '
        r'"metrics": ["exact_match"], "doc_hash": "e7c01d1f1a913e82fa045022cf10e929ce1589f4e12a487f5e48be668fa70647", '
        r'"prompt_hash": "4a1b21d876ae00c8ed5c4d1cde09c61f8a61b50fe370a801b10c339831f370ab", '
        r'"target_hash": "07123e1f482356c415f684407a3b8723e10b2cbbc0b8fcd6282c49d37c9c1abc", "exact_match": 1.0}'
    )
    [record], _ = read_logs(tmp_path, {"dummy/samples_tiny_sums_2026-11-30T19-24-15.078384.jsonl": [line]})
    assert record == Record("dummy", "0:e7c01d1f", 0, 1, True, True, "tiny_sums", text="lol", line=1)


BAD_LOGS = [
    (harness(answers=["a", "b"]), "2 answers but 1 score of 'exact_match'"),
    (harness(scores=0.5), "exact_match is 0.5 \\(float\\); a score must be 0 or 1"),
    (harness(scores=NAN), "not valid JSON \\(NaN is not a number\\)"),
    (harness(limit=None), "max_gen_toks is missing"),
    (harness(arguments=[]), "max_gen_toks is missing"),
    (harness(resps=[[["-1.2", "True"]], [["-3", "False"]]]), "only generation tasks"),
    (harness(resps=["a"]), "only generation tasks"),
    (harness(metrics=["a", "b"]), "several metrics; choose --lm-metric from a, b"),
    (harness(metrics=["gone"]), "no metric 'gone'"),
    (harness(metrics=None), "no list 'metrics'"),
    (harness(0), "doc_id 0 stands already in line 1"),
    (harness(1, filter="strict"), "the log holds the filters none, strict; choose one with --lm-filter"),
]


@pytest.mark.parametrize("bad,message", BAD_LOGS, ids=[m[:30] for _, m in BAD_LOGS])
def test_bad_harness_lines_name_file_and_line(tmp_path, bad, message):
    with pytest.raises(DataError, match=f"samples_x.jsonl line 2: .*{message}"):
        read_logs(
            tmp_path, {"m/samples_x.jsonl": [harness(0), bad if bad["doc_id"] or bad["exact_match"] != 1 or "stands" in message else {**bad, "doc_id": 5}]}
        )


def test_harness_filter_metric_and_tokenizer(tmp_path):
    rows = [harness(d, filter=f, other=1 - s, metrics=["exact_match", "other"], scores=s) for f, s in (("strict", 0), ("loose", 1)) for d in (0, 1)]
    records, _ = read_logs(tmp_path, {"m/samples_x.jsonl": rows}, lm_filter="loose", lm_metric="other")
    assert [(r.problem[0], r.correct) for r in records] == [("0", False), ("1", False)]
    with pytest.raises(DataError, match=r"line 3: a harness log stores no token counts; give the models' tokenizer with --tokenizer"):
        list(Source((str(tmp_path),), lm_filter="loose", lm_metric="other"))
    folder = next((ROOT / "policies").rglob("tokenizer.json")).parent
    records = list(Source((str(tmp_path),), lm_filter="loose", lm_metric="other", tokenizer=str(folder)))
    assert all(2 < r.tokens <= 10 for r in records)


# ---------------------------------------------------------------------------------------------------------------------- pairs, budgets


def test_pairs(tmp_path):
    tables = [table_of([Record(m, "p", 0, 5, True, True) for m in ("base", "rl", "rl2")])]
    assert read_pairs(tables, base="base", cap=8) == [Pair("rl", "base", 8), Pair("rl2", "base", 8)]
    path = tmp_path / "pairs.json"
    path.write_text('[{"rl": "rl", "base": "base", "cap": null}]')
    assert read_pairs(tables, str(path)) == [Pair("rl", "base", None)]
    bad = {
        "{": "not valid JSON",
        "[]": "a list of pairs is needed",
        '[{"rl": "rl"}]': "pair 1: .* a pair is",
        '[{"rl": "rl", "base": "base", "cap": -1}]': "pair 1",
        '[{"rl": "rl", "base": "base", "cap": true}]': "pair 1",
        '[{"rl": "rl", "base": "base", "kap": 1}]': "pair 1",
        '[{"rl": "rl", "base": "rl"}]': "a model against itself",
        '[{"rl": "rl", "base": "base"}, {"rl": "rl", "base": "base", "cap": 3}]': "given twice",
        '[{"rl": "new", "base": "base"}]': "model 'new' has no records; they hold base, rl, rl2",
    }
    for text, message in bad.items():
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_pairs(tables, str(path))
    with pytest.raises(DataError, match="which model is the base"):
        read_pairs(tables)
    with pytest.raises(DataError, match="--base and --cap are for records without --pairs"):
        read_pairs(tables, str(path), base="base")
    with pytest.raises(DataError, match="No such file"):
        read_pairs(tables, str(tmp_path / "none.json"))
    with pytest.raises(DataError, match="model 'x' has no records"):
        read_pairs(tables, base="x")
    more = [*tables, dataclasses.replace(table_of([Record("rl", "p", 0, 5, True, True)]), dataset="physics")]
    with pytest.raises(DataError, match="data set 'physics' has records of 'rl' but none of 'base'"):
        read_pairs(more, base="base")


def test_budgets_stop_where_an_answer_was_cut():
    def budgets(lengths, cut, cap=None, wanted=()):
        records = [Record(m, "p", j, t, t != cut, False) for m in ("base", "rl") for j, t in enumerate(lengths)]
        warnings = []
        _, readable = pick_budgets(table_of(records), [Pair("rl", "base", cap)], wanted, warnings)
        return readable[Pair("rl", "base", cap)], warnings

    assert budgets([70_000], 70_000)[0] == list(outcome_records.GRID)
    assert budgets([20_000], None)[0] == [4096, 6144, 8192, 12288, 16384, 24576, 32768]  # nothing changes beyond
    grid, warnings = budgets([100, 16384], 16384)
    assert grid == [4096, 6144, 8192, 12288, 16384] and "budgets above 16384 tokens cannot be read, answers were cut there" in warnings[0]
    grid, warnings = budgets([100, 60, 50_000], 60)  # one answer broke off early: nothing beyond it can be read, and that is said
    assert grid == [3, 7, 15, 30, 60] and "budgets above 60 tokens cannot be read, an answer was cut there while others got to 50000" in warnings[0]
    assert budgets([100, 16000], 16000, cap=10_000)[0] == [4096, 6144, 8192, 10_000, 12288]
    assert budgets([100, 16000], 16000, cap=20_000)[0] == [4096, 6144, 8192, 12288]
    assert budgets([30, 64], 64)[0] == [4, 8, 16, 32, 64]
    assert budgets([30, 64], 64, wanted=(64, 20, 20))[0] == [20, 64]
    with pytest.raises(DataError, match="--budgets 65: rl against base can be read up to 64 tokens, where an answer was cut"):
        budgets([30, 64], 64, wanted=(20, 65))
    with pytest.raises(DataError, match="a budget is a number of tokens from 1"):
        budgets([30, 64], 64, wanted=(0,))
    assert od.reading_budget([4, 8, 16], 8) == 8 and od.reading_budget([4, 8, 16], 5) == 8
    assert od.reading_budget([4, 8, 16], 17) == 16 and od.reading_budget([4, 8, 16], None) == 16


# ---------------------------------------------------------------------------------------------------------------------- analysis


@pytest.fixture(scope="module")
def example():
    args = od.Decompose(resamples=200)
    source = Source((str(ROOT / od.EXAMPLE),))
    tables = build_tables(source)
    pairs = read_pairs(tables, str(ROOT / od.EXAMPLE.replace(".jsonl", ".pairs.json")))
    return args, tables, pairs, od.analyse(args, tables, pairs, {})


def test_every_row_of_the_example_adds_up_and_follows_the_comparison_rule(example):
    _, tables, _, result = example
    assert len(result["rows"]) == 3 * 9 * 4 * 2
    for row in result["rows"]:
        t = {name: v[0] for name, v in row["terms"].items()}
        assert abs(t["finishing"] + t["reliability"] + t["reach"] - t["delta"]) <= 1e-12
        assert row["below_cap"] == (row["budget"] < row["cap"]) and row["tight"] == (row["budget"] <= 8192)
        assert row["reading"] == (row["budget"] == row["cap"])
        for _, low, high in row["terms"].values():
            assert math.isnan(low) or low - 1e-12 <= high
    fin, _ = od.counts_within(tables[0], tables[0].correct, [8192])
    row = next(r for r in result["rows"] if r["rl"] == "rl-8k" and r["budget"] == 8192 and r["k"] == 8)
    share = (fin[tables[0].models.index("rl-8k"), 0] > 0).mean()  # k = n: problems with at least one finished sample
    assert row["terms"]["fin_rl"][0] == pytest.approx(share, abs=1e-12)
    assert not result["warnings"] and result["summary"]["points"] == 9
    assert result["summary"]["finishing_share"][0] > 0.7 and result["summary"]["spearman_delta_finishing"][0] > 0.8


def test_lone_wins_of_the_example_against_a_loop(example):
    _, tables, pairs, result = example
    [table], found = tables, set()
    for pair in pairs:
        for direction, winner, loser in (("rl", pair.rl, pair.base), ("base", pair.base, pair.rl)):
            w, l = table.models.index(winner), table.models.index(loser)
            for p, problem in enumerate(table.problems):
                ended = table.finished[:, p] & (table.tokens[:, p] <= pair.cap)
                right = ended & table.correct[:, p]
                if ended[l].all() and not right[l].any() and right[w].any():
                    found.add((pair.rl, direction, problem, int(right[w].sum())))
    assert {(w["rl"], w["direction"], w["problem"], w["winner_correct"]) for w in result["lone_wins"]} == found and len(found) > 3
    counts = result["pooled"]["counts"]
    assert counts["rl"] + counts["base"] == len(found) and counts["checked_rl"] == 0
    for pair, test in zip(pairs, result["symmetry"]):  # dealing the 2n samples of a problem out anew, both ways
        sides = [table.models.index(pair.base), table.models.index(pair.rl)]
        ended = table.finished[sides] & (table.tokens[sides] <= pair.cap)
        right = ended & table.correct[sides]
        wrong = (ended & ~right).sum((0, 2))[right.any((0, 2))]
        assert test["chance"] == pytest.approx(sum(math.comb(w, 8) for w in wrong.tolist()) / math.comb(16, 8))
    for name in ("reach", "robust_reach"):
        for pair in pairs:
            wins = [w for w in result["lone_wins"] if w["rl"] == pair.rl and (w["robust"] or name == "reach")]
            net = sum(w["winner_correct"] / 8 * (1 if w["direction"] == "rl" else -1) for w in wins) / len(table.problems)
            row = next(r for r in result["rows"] if r["rl"] == pair.rl and r["reading"] and r["k"] == 1 and r["grader"] == "matcher")
            assert row["terms"][name][0] == pytest.approx(net, abs=1e-12)


def test_further_samples_of_the_loser(example):
    _, tables, pairs, result = example
    win = next(w for w in result["lone_wins"] if w["direction"] == "rl")
    pair = next(p for p in pairs if p.rl == win["rl"])
    key = (win["dataset"], win["loser"], win["problem"])

    def again(*samples):
        extra = {key: [Record(win["loser"], win["problem"], 100 + i, *s) for i, s in enumerate(samples)]}
        return od.lone_wins(tables[0], tables[0].correct, pair, win["budget"], extra)

    rows = again((10, True, False), (win["budget"], True, True), (win["budget"] + 1, True, True))  # the last one is right, but too long
    row = next(r for r in rows if r["problem"] == win["problem"])
    assert (row["checked"], row["recovered"]) == (3, 1) and rows[-1] == row  # what the loser can do after all comes last
    counts = od.symmetry(rows, 0.0)["counts"]
    assert (counts["checked_rl"], counts["recovered_rl"], counts["checked_base"]) == (1, 1, 0)
    with pytest.raises(DataError, match=r"--recheck, model 'base', problem .* cut at 10 tokens, below the budget"):
        again((10, False, False))


def test_words_and_lengths(example):
    _, tables, _, result = example
    [table], line = tables, next(r for r in result["lengths"] if r["rl"] == "rl-8k")
    b, r = table.models.index("base"), table.models.index("rl-8k")
    assert line["tokens_rl"] == pytest.approx(table.tokens[r].mean()) and line["length_ratio"][0] == pytest.approx(
        table.tokens[r].mean() / table.tokens[b].mean()
    )
    assert line["backtracks_ratio"][0] == pytest.approx(table.backtracks[r].mean() / table.backtracks[b].mean())
    assert line["per_1000_tokens_base"] == pytest.approx(1000 * table.backtracks[b].sum() / table.tokens[b].sum())
    assert line["with_text_rl"] == line["answers"] == table.tokens[r].size
    some = dataclasses.replace(table, backtracks=np.where(np.arange(8) < 2, table.backtracks, -1))
    line = od.analyse(od.Decompose(resamples=100, ks=(1,)), [some], [Pair("rl-8k", "base", 8192)], {})["lengths"][0]
    assert line["with_text_rl"] == table.tokens[r].size // 4
    assert line["backtracks_base"][0] == pytest.approx(table.backtracks[b][:, :2].mean())


def test_catch_up_follows_the_same_problems(example):
    _, tables, _, result = example
    table, row = tables[0], next(c for c in result["catch_up"] if c["rl"] == "rl-8k" and c["budget"] == 4096)
    _, cor = od.counts_within(table, table.correct, [4096, 65536])
    b, r = table.models.index("base"), table.models.index("rl-8k")
    chosen = cor[r, 0] > cor[b, 0]
    want = [cor[b, 0], cor[r, 0], cor[b, 1], cor[r, 1]]
    assert [row[m][0] for m in ("base_then", "rl_then", "base_last", "rl_last")] == pytest.approx([w[chosen].mean() / 8 for w in want])
    assert row["problems"] == chosen.sum() and row["last"] == 65536 and row["base_last"][0] > row["base_then"][0] + 0.3


def test_warnings_for_caps_and_few_finished():
    records = [Record(m, f"p{i}", j, t, t < 64, False) for m in ("base", "rl") for i in range(20) for j, t in enumerate((20 if i == 0 else 60, 64))]
    table = table_of(records)
    for cap, message in ((None, "training cap unknown"), (1000, "no budget at or above its training cap 1000 can be read")):
        result = od.analyse(od.Decompose(resamples=100, ks=(1,)), [table], [Pair("rl", "base", cap)], {})
        assert any(message in w for w in result["warnings"])
        assert {r["below_cap"] for r in result["rows"]} == {None if cap is None else True}
        assert [r["few_finished"] for r in result["rows"]] == [True, True, True, True, False]  # 1 of 40 within 32 tokens
    assert result["summary"]["tight"] == 16


# ---------------------------------------------------------------------------------------------------------------------- predictions


def row(rl="a", budget=4096, value=0.6, k=1, dataset="", **more):
    terms = {"finishing_share": [value, NAN, NAN]}
    return {
        "dataset": dataset,
        "rl": rl,
        "base": "b",
        "budget": budget,
        "k": k,
        "grader": "matcher",
        "tight": budget <= 8192,
        "reading": budget > 9000,
        "terms": terms,
    } | more


def held(text, rows):
    return od.score(od.parse_prediction(text), rows, 8192)


def test_predictions_are_scored_failures_included():
    rows = [row(), row("c", value=0.4), row(budget=16384, value=0.1), row(value=0.9, k=2), row(value=0.0, grader="judge")]
    result = held("H1: every finishing_share > 0.5 at tight", rows)
    assert not result["held"] and result["rows"] == 2 and [f["rl"] for f in result["failing"]] == ["c"]
    assert held("H: any finishing_share > 0.5 at tight", rows)["held"] and held("H: mean finishing_share >= 0.5 at 4096", rows)["held"]
    assert held("H: every finishing_share > 0.5 at tight for a", rows)["held"] and held("H: every finishing_share < 0.2 at reading", rows)["held"]
    assert held("H: every finishing_share > 0.8 at all k 2", rows)["held"] and not held("H: every |finishing_share| < 0.03 at all", rows)["held"]
    assert held("H: every finishing_share > 0.5 at 4096,16384 for a", rows)["failing"][0]["value"] == 0.1
    short = held("H: every finishing_share > 0.5 at 4096,999 for a", rows)
    assert not short["held"] and short["why"] == "not every pair can be read at every budget"
    assert held("H: every finishing_share > 0.5 at tight for z", rows)["why"] == "no rows for z"
    assert held("H: every finishing_share > 0.5 at tight on maths", rows)["why"] == "no rows for maths"
    nan = held("H: every finishing_share < 0.5 at tight", [row(value=NAN)])
    assert not nan["held"] and nan["why"] == "not measurable"  # what cannot be measured has not been predicted right
    assert not held("H: mean finishing_share < 0.5 at tight", [row(value=NAN), row(value=0.1)])["held"]
    assert held("H: every finishing_share < 0.5 at reading", [row()])["why"] == "nothing to test"


@pytest.mark.parametrize(
    "text", ["", "H1 every reach > 0 at tight", "H: some reach > 0 at tight", "H: every reach > 0", "H: every luck > 0 at tight", "H: every reach = 0 at all"]
)
def test_unreadable_predictions(text):
    with pytest.raises(DataError, match=r"prediction .*(form NAME|unknown metric|at k = 1 only)"):
        od.parse_prediction(text)


def test_registered_predictions_cannot_be_changed(tmp_path):
    path = tmp_path / "p.json"
    args = od.Preregister(out=str(path), note="me")
    assert od.preregister(args) == 0
    content = od.read_predictions(str(path), [])
    assert content["predictions"] == list(od.PAPER_PREDICTIONS) and content["late"] == [] and len(content["parsed"]) == 2
    older = tmp_path / "older.jsonl"
    older.write_text("")
    os.utime(older, (1e9, 1e9))
    assert od.read_predictions(str(path), [str(older)])["late"] == [str(older)]
    with pytest.raises(DataError, match="never overwritten"):
        od.preregister(args)
    with pytest.raises(DataError, match="a name of its own"):
        od.preregister(od.Preregister(predict=("H: every reach > 0 at all",) * 2, out=str(tmp_path / "q.json")))
    for field, value in (("note", "you"), ("written", "2020-01-01T00:00:00+00:00"), ("predictions", ["H1: every reach > 0 at tight"])):
        path.write_text(json.dumps({**{k: v for k, v in content.items() if k not in ("late", "parsed")}, field: value}))
        with pytest.raises(DataError, match="the file was changed after it was written"):
            od.read_predictions(str(path), [])
    path.write_text("{}")
    with pytest.raises(DataError, match="not a file written by `preregister`"):
        od.read_predictions(str(path), [])


# ---------------------------------------------------------------------------------------------------------------------- command line


def run(argv, cwd, code=0):
    done = subprocess.run([sys.executable, str(ROOT / "outcome_decomp.py"), *map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_decompose_without_arguments_needs_no_torch(tmp_path):
    """The README's promise for somebody who only has records: no model, no torch, no waiting."""
    lines = [
        "import runpy, sys",
        f"sys.argv = ['outcome_decomp.py', 'decompose']; sys.path.insert(0, {str(ROOT)!r})",
        "try:",
        f"    runpy.run_path({str(ROOT / 'outcome_decomp.py')!r}, run_name='__main__')",
        "except SystemExit as end:",
        "    assert not end.code",
        "heavy = {'torch', 'transformers', 'numba', 'scipy', 'pandas', 'matplotlib', 'pyarrow'} & set(sys.modules)",
        "assert not heavy, heavy",
    ]
    script = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "these records are simulated" in done.stdout and "<- read here" in done.stdout and "below cap" in done.stdout
    [folder] = (tmp_path / "runs").iterdir()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["summary"]["finishing_share"][0] > 0.7 and metrics["args"]["resamples"] == 2000
    wins = [json.loads(w) for w in (folder / "lone_wins.jsonl").read_text().splitlines()]
    assert len(wins) == sum(metrics["pooled"]["counts"][d] for d in ("rl", "base"))
    assert wins[0]["robust"] and len(wins[0]["records"]) == 16 and wins[0]["texts"]["loser"][0].startswith("simulated")
    name, number = wins[0]["records"][0].rsplit(":", 1)
    first = json.loads(Path(name).read_text().splitlines()[int(number) - 1])
    assert (first["model"], first["problem"]) == (wins[0]["winner"], wins[0]["problem"])


def test_the_whole_way_with_names_that_are_markup(tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    records = [
        dataclasses.replace(r, model=evil, judge=None) if r.model == "rl-8k" else dataclasses.replace(r, judge=None)
        for r in simulate(2, 30, 4)[0]
        if r.model in ("base", "rl-8k")
    ]
    records = [dataclasses.replace(r, dataset=d, problem=r.problem + evil) for d in ("maths", evil) for r in records]
    write_records(tmp_path / "r.jsonl", records)
    os.utime(tmp_path / "r.jsonl", (1e9, 1e9))
    predict = ["--predict", "H1: every finishing_share > 0.5 at tight", "H2: every delta < -1 at all"]
    run(["preregister", *predict, "--note", evil, "--out", "p.json"], tmp_path)
    write_records(tmp_path / "more.jsonl", [Record(m, p, 50, 10, True, True, d) for m, p, d in {(r.model, r.problem, r.dataset) for r in records}])
    flags = "--records r.jsonl --base base --cap 24576 --predictions p.json --recheck more.jsonl --resamples 200 --out o"
    text = run(["decompose", *flags.split()], tmp_path)
    assert "prediction FAILED  H2: every delta < -1 at all" in text and "not a pre-registration" in text and "further samples of the loser solve" in text
    page = (tmp_path / "o" / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page and "src=" not in page and "href=" not in page
    assert page.count("<figure>") == 6 and "Two graders" not in page and "Registered predictions" in page
    for tag in ("svg", "table", "section", "details", "ul", "figure"):
        assert page.count(f"<{tag}") == page.count(f"</{tag}>"), tag
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", page.lower())
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert [s["held"] for s in metrics["predictions"]["scores"]][1] is False and metrics["predictions"]["note"] == evil
    assert metrics["pooled"]["counts"]["checked_rl"] == metrics["pooled"]["counts"]["recovered_rl"] == metrics["pooled"]["counts"]["rl"]
    assert "is not an empty folder" in run(["decompose", "--out", "o"], tmp_path, 2)


def test_page_draws_in_a_browser(tmp_path):
    need_program("chromium")
    run(["decompose", "--resamples", 100, "--out", "o"], tmp_path)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'u'}",
    ]
    done = subprocess.run([*command, "--dump-dom", f"file://{tmp_path / 'o' / 'report.html'}"], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("<svg") == 10 and done.stdout.count('class="finishing"') == 3 * 9 + 3 and "Two graders" in done.stdout


def test_mistakes_on_the_command_line_end_with_a_message(tmp_path):
    jsonl(tmp_path / "r.jsonl", matrix())
    jsonl(tmp_path / "bad.jsonl", [line(), "{"])
    jsonl(tmp_path / "twice.jsonl", [line(), line()])
    cases = [
        (["--records", "r.jsonl"], "which model is the base"),
        (["--records", "bad.jsonl", "--base", "base"], "bad.jsonl line 2: not valid JSON"),
        (["--base", "base"], "--base and --cap are for records without --pairs"),
        (["--level", "1.5"], "--level 1.5"),
        (["--resamples", "5"], "--resamples 5"),
        (["--ks", "2", "4"], "--ks 2 4"),
        (["--samples", "-1"], "--samples, --cap and --tight are 0 or more"),
        (["--records", "r.jsonl", "--base", "base", "--budgets", "0"], "--budgets 0"),
        (["--predictions", "none.json"], "--predictions none.json"),
        (["--samples", "9"], "--samples asks for 9"),
        (["--records", "r.jsonl", "--base", "base", "--recheck", "r.jsonl"], "the file is among --records too"),
        (["--records", "r.jsonl", "--base", "base", "--recheck", "twice.jsonl"], "twice.jsonl line 2: sample 0 of model 'base', problem 'p1' is given twice"),
    ]
    for argv, message in cases[:3]:  # as a process: exit code 2, one line, no traceback
        text = run(["decompose", *argv], tmp_path, 2)
        assert message in text and text.startswith("DataError: ") and "Traceback" not in text
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for argv, message in cases:
            with pytest.raises(DataError, match=re.escape(message)):
                import tyro

                od.decompose(tyro.cli(od.Decompose, args=argv))
    finally:
        os.chdir(before)
    assert not (tmp_path / "runs").exists()
    for work in (lambda: od.preregister(od.Preregister(out="/none/p.json")), lambda: od.simulate_command(od.Simulate(problems=1, out="/none/s.jsonl"))):
        with pytest.raises(DataError, match=r"--out /none/.*: No such file"):
            work()


def test_shipped_example_is_the_simulators_default_output(tmp_path):
    od.simulate_command(od.Simulate(out=str(tmp_path / "s.jsonl")))
    for suffix in (".jsonl", ".pairs.json"):
        assert (tmp_path / f"s{suffix}").read_bytes() == (ROOT / od.EXAMPLE).with_suffix(suffix).read_bytes()
    assert (ROOT / od.EXAMPLE).stat().st_size < 300_000


def test_every_flag_is_documented_and_read():
    text = "".join(p.read_text() for p in ROOT.glob("outcome*.py"))
    page = (ROOT / "docs" / "outcome_decomp.md").read_text()
    for name, (flags, _) in od.COMMANDS.items():
        source = "".join(inspect.getsource(cls) for cls in flags.__mro__[:-1])  # recheck's flags are sample's and one more
        for field in dataclasses.fields(flags):
            assert re.search(rf"^    {field.name}: .*\n    \"\"\"", source, re.M), f"{name} --{field.name} has no help line"
            if field.name != "track":  # read by common/run.py
                assert re.search(rf"args\.{field.name}\b", text), f"{name} --{field.name}: nothing reads it"
        assert f"outcome_decomp.py {name}" in page, name


def test_check_record_accepts_what_the_schema_says():
    assert check_record({**line(problem=7), "text": "", "judge": None, "dataset": None}, "x") == Record("base", "7", 0, 50, True, False, text="")
