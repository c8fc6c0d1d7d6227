"""The search environment's index at size: building, reading it back from the cache, one query.

    python benchmarks/search_index.py
    python benchmarks/search_index.py --pages 1000 10000 100000 --words 150

Pages are random words with Zipf's frequencies out of a vocabulary of 200,000. `cpu s` is the processor time of `build s`; `load` is a second process's way:
hash the pages, map the kept index. `query` is the median of 200 queries of 8 words that occur, search and hit lines included; `rare` the same without the
100 most frequent words.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from common.envs.corpus import MMAP_FROM, Corpus

VOCABULARY = 200_000


def make_pages(pages: int, words: int, rng: np.random.Generator) -> list[str]:
    frequency = 1 / np.arange(1, VOCABULARY + 1)
    lengths = rng.poisson(words, pages).clip(1)
    drawn = iter(rng.choice(VOCABULARY, int(lengths.sum()), p=frequency / frequency.sum()).tolist())
    return [" ".join(f"w{next(drawn)}" for _ in range(length)) for length in lengths]


def corpus_of(texts: list[str]) -> Corpus:
    return Corpus(
        [str(i) for i in range(len(texts))], [f"title {i}" for i in range(len(texts))], texts, hits=5, snippet_chars=150, stopwords="english", cached=True
    )


def query_ms(corpus: Corpus, queries: list[str]) -> float:
    times = []
    for query in queries:
        start = time.perf_counter()
        assert [corpus.hit_line(number) for number in corpus.search(query)]
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--words", type=int, default=100, help="mean length of a page")
    args = parser.parse_args()
    print(f"{'pages':>8} {'build s':>8} {'cpu s':>6} {'load s':>7} {'query ms':>9} {'rare ms':>8} {'MB on disk':>11}  (mapped from {MMAP_FROM} pages)")
    for pages in args.pages:
        rng = np.random.default_rng(pages)
        texts = make_pages(pages, args.words, rng)
        queries, rare = [], []
        for page in rng.integers(0, pages, 200):
            words = texts[page].split()
            queries.append(" ".join(rng.choice(words, 8)))
            rare.append(" ".join([word for word in words if int(word[1:]) >= 100][:8]) or words[0])
        with tempfile.TemporaryDirectory() as folder:
            os.environ["CLEANAGENTRL_CACHE"] = folder
            start, cpu = time.perf_counter(), time.process_time()
            expected = corpus_of(texts).scores(queries[0])
            built, cpu = time.perf_counter() - start, time.process_time() - cpu
            start = time.perf_counter()
            corpus = corpus_of(texts)
            assert (corpus.scores(queries[0]) == expected).all()
            loaded = time.perf_counter() - start
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6
            print(f"{pages:8} {built:8.1f} {cpu:6.1f} {loaded:7.2f} {query_ms(corpus, queries):9.2f} {query_ms(corpus, rare):8.2f} {size:11.1f}", flush=True)
            del corpus


if __name__ == "__main__":
    main()
