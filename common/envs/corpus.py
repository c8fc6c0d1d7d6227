"""Pages with a BM25 index by bm25s (Lucene's form, k1 = 0.9, b = 0.4), kept in the user's cache folder where asked for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import bm25s
import numpy as np

from common.envs import DataError
from common.policies import cache_folder

K1, B = 0.9, 0.4  # pyserini's defaults
TOKEN_PATTERN = r"(?u)\b\w+\b"  # single characters count, as in "5"
MMAP_FROM = 50_000  # pages; the index of a larger corpus stays on disk and is mapped


class Corpus:
    """Pages and their BM25 index, which is built at the first search.

    ``hits`` pages are shown for a search, each with ``snippet_chars`` characters of text (0: the title alone); ``read`` shows ``page_chars`` at a time.
    ``cached``: the index is kept in the user's cache folder, under a hash of the pages.
    """

    def __init__(
        self,
        ids: Sequence[str],
        titles: Sequence[str],
        texts: Sequence[str],
        hits: int = 3,
        snippet_chars: int = 0,
        page_chars: int = 1500,
        stopwords: str | None = None,
        cached: bool = False,
    ) -> None:
        if not ids:
            raise DataError("the corpus is empty")
        self.ids, self.titles, self.texts = ids, titles, texts
        self.hits, self.snippet_chars, self.page_chars, self.stopwords, self.cached = hits, snippet_chars, page_chars, stopwords, cached
        self.place = {key: number for number, key in enumerate(ids)}
        if len(self.place) != len(ids):
            raise DataError(f"the corpus has two pages with the id {next(key for key, count in Counter(ids).items() if count > 1)!r}")

    def _content(self, number: int) -> str:
        return f"{self.titles[number]}\n{self.texts[number]}"

    @cached_property
    def index(self) -> bm25s.BM25:
        if not self.cached:
            return self._build()
        digest = hashlib.sha256(repr((bm25s.__version__, K1, B, TOKEN_PATTERN, self.stopwords, len(self.ids))).encode())
        for number in range(len(self.ids)):
            digest.update(self._content(number).encode("utf-8", "surrogatepass") + b"\0")
        return self._kept(cache_folder() / "search" / digest.hexdigest()[:24])

    def _build(self) -> bm25s.BM25:
        if len(self.ids) >= MMAP_FROM:
            print(f"indexing {len(self.ids)} pages (once)", flush=True)
        tokens = bm25s.tokenize(
            [self._content(number) for number in range(len(self.ids))], token_pattern=TOKEN_PATTERN, stopwords=self.stopwords, show_progress=False
        )
        index = bm25s.BM25(k1=K1, b=B, method="lucene")
        index.index(tokens, show_progress=False)
        return index

    def _kept(self, folder: Path) -> bm25s.BM25:
        """The index of ``folder``; built and put there, whole or not at all, where there is none or a broken one. sizes.json is the list of what is there."""

        def read() -> bm25s.BM25:
            for name, size in json.loads((folder / "sizes.json").read_text()).items():
                if (folder / name).stat().st_size != size:
                    raise ValueError(f"{name} has another size than when it was written")
            index = bm25s.BM25.load(folder, mmap=len(self.ids) >= MMAP_FROM, show_progress=False)
            if index.scores["num_docs"] != len(self.ids) or len(index.scores["indptr"]) < len(index.vocab_dict):
                raise ValueError("another number of pages")
            return index

        if folder.is_dir():
            try:
                return read()
            except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
                print(f"{folder}: broken index ({error}), built again", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
        index = self._build()
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            index.save(temporary, show_progress=False)
            (temporary / "sizes.json").write_text(json.dumps({path.name: path.stat().st_size for path in sorted(temporary.iterdir())}))
            os.replace(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return read() if len(self.ids) >= MMAP_FROM else index

    def scores(self, query: str) -> np.ndarray:
        """BM25 score of every page, float32 [pages]."""
        (tokens,) = bm25s.tokenize([query], token_pattern=TOKEN_PATTERN, stopwords=self.stopwords, return_ids=False, show_progress=False, allow_empty=False)
        known = [token for token in tokens if token and token in self.index.vocab_dict]  # bm25s gives "" for a query without words
        return self.index.get_scores(known) if known else np.zeros(len(self.ids), np.float32)

    def search(self, query: str) -> list[int]:
        """Places of the best pages with a score above 0; equal scores in the order of the corpus."""
        scores = self.scores(query)
        found = np.flatnonzero(scores > 0)
        if len(found) > self.hits:  # np.partition of mostly zeros would be slow
            found = found[scores[found] >= np.partition(scores[found], -self.hits)[-self.hits]]
        return found[np.lexsort((found, -scores[found]))][: self.hits].tolist()

    def hit_line(self, number: int) -> str:
        snippet = " ".join(self.texts[number][: self.snippet_chars].split())
        return f"{self.titles[number]} : {self.ids[number]}" + (f" | {snippet}" if snippet else "")
