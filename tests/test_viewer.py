"""credit.html: what is written, what is refused, hostile text, and what a real browser shows."""

import copy
import html.parser
import json
import math
import os
import random
import re
import shutil
import subprocess
import urllib.parse

import pytest
from conftest import need_program

from common import viewer
from common.viewer import ViewerError, strip_domain, write_credit_html

RESPONSE = """<think>The question asks for a count of singers. The table singer has the columns country and age.</think>
<answer> SELECT COUNT(*) FROM singer WHERE country = 'France' AND age > 20</answer>"""
TOKENS = re.findall(r"\n| ?[A-Za-z_]+| ?\d+| ?[^\sA-Za-z_\d]+| ", RESPONSE)


def sql_episode(name="0", group="question 1", tokens=TOKENS, seed=0):
    """A response with three rewards: credit A_k w_k, mean of w_k over the tokens 1."""
    generator = random.Random(seed)
    strips = []
    for reward, advantage in (("format", 0.6), ("executes", -0.8), ("matches", 1.4)):
        weights = [0.5 + generator.random() for _ in tokens]
        mean = sum(weights) / len(weights)
        values = [advantage * w / mean for w in weights]
        strips.append({"name": reward, "values": values, "scale": "diverging", "note": f"A = {advantage:+.2f}"})
    facts = {"format": 1.0, "executes": 0.0, "total": 1.0}
    return {"id": name, "title": f"sample {name}", "group": group, "prompt": "How many singers?", "facts": facts, "tokens": list(tokens), "strips": strips}


def household_episode():
    """Three turns of six tokens, the last two of each an observation."""
    tokens = [f" t{i}" for i in range(18)]
    masked = [i % 6 >= 4 for i in range(18)]
    strips = [
        {"name": "advantage", "values": [None if m else i / 10 for i, m in enumerate(masked)], "scale": "diverging"},
        {"name": "value", "values": [None if m else i / 18 for i, m in enumerate(masked)], "scale": "sequential", "domain": [0, 1]},
        {"name": "verdict", "values": [None if m else i % 3 for i, m in enumerate(masked)], "scale": "categorical", "labels": ["good", "neutral", "bad"]},
    ]
    turns = [{"name": f"turn {k + 1}", "start": 6 * k, "end": 6 * k + 4, "value": [0.5, -1.0, None][k]} for k in range(3)]
    return {"id": "house", "group": "put a mug", "tokens": tokens, "strips": strips, "turns": turns, "masked": masked, "notes": ["cut at turn 3"]}


class Page(html.parser.HTMLParser):
    """Every tag with its attributes, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.inside = True
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag == "script":
            self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def written(tmp_path, episodes, title="Credit", **options):
    path = write_credit_html(tmp_path / "credit.html", episodes, title, **options)
    text = path.read_text()
    return text, json.loads(Page(text).scripts[0])


def test_data_survives_and_is_rounded_to_six_digits(tmp_path):
    episode = sql_episode()
    episode["strips"][0]["values"][:4] = [1 / 3, float("nan"), None, -math.inf]
    _, data = written(tmp_path, [episode, household_episode()])
    got = data["episodes"][0]
    assert got["tokens"] == TOKENS and "".join(got["tokens"]) == RESPONSE
    assert got["strips"][0]["values"][:4] == [0.333333, None, None, None]
    assert got["strips"][1]["values"] == [float(f"{v:.6g}") for v in episode["strips"][1]["values"]]
    assert list(got["facts"]) == ["format", "executes", "total"]  # the script's order, not the alphabet's
    house = data["episodes"][1]
    assert house["masked"] == [0, 0, 0, 0, 1, 1] * 3 and house["strips"][1]["domain"] == [0, 1] and house["strips"][2]["domain"] == [0, 2]
    assert [turn["value"] for turn in house["turns"]] == [0.5, -1.0, None] and data["turn_domain"] == [-1.0, 1.0]
    assert house["title"] == "house" and house["prompt"] == ""


def test_the_caller_keeps_its_records(tmp_path):
    episodes = [sql_episode(), household_episode()]
    before = copy.deepcopy(episodes)
    written(tmp_path, episodes)
    assert episodes == before


def test_strips_of_one_name_share_a_domain(tmp_path):
    low, high = sql_episode("a"), sql_episode("b")
    for episode, scale in ((low, 0.1), (high, 3.0)):
        for strip in episode["strips"]:
            strip["values"] = [scale if i else -scale for i in range(len(TOKENS))]
    low["strips"][2]["domain"] = [-9, 9]
    _, data = written(tmp_path, [low, high])
    assert [[s["domain"] for s in e["strips"]] for e in data["episodes"]] == [[[-3, 3], [-3, 3], [-9, 9]], [[-3, 3], [-3, 3], [-3, 3]]]


def test_domains():
    assert strip_domain([0.2, -0.5, None], "diverging") == (-0.5, 0.5)
    assert strip_domain([0.2, 0.5], "sequential") == (0.0, 0.5)
    assert strip_domain([-1.0, 0.5], "sequential") == (-1.0, 0.5)
    assert strip_domain([1.0] * 999 + [500.0], "diverging") == (-1.0, 1.0)  # one outlier does not wash out the page
    assert strip_domain([0.0] * 999 + [2.0], "sequential") == (0.0, 2.0)  # but a strip that is nearly all zero keeps its signal
    assert strip_domain([], "diverging") == (-1.0, 1.0) and strip_domain([None], "sequential") == (0.0, 1.0)
    assert strip_domain([0.0, 0.0], "diverging") == (-1.0, 1.0) and strip_domain([0.0], "sequential") == (0.0, 1.0)
    assert strip_domain([0, 3, None], "categorical") == (0.0, 3.0)


def broken(change):
    episode = household_episode()
    change(episode)
    return episode


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("tokens"), r"episode 1 \('house'\): field 'tokens' is missing"),
        (lambda e: e["tokens"].append(" x"), r"strip 'advantage': 18 values for 19 tokens"),
        (lambda e: e.update(tokens=[1] * 18), r"tokens must be strings"),
        (lambda e: e["strips"][0].update(scale="rainbow"), r"scale is 'rainbow'; choose one of diverging, sequential, categorical"),
        (lambda e: e["strips"][1].update(domain=[1, 1]), r"strip 'value': domain \[1, 1\] is not \[low, high\]"),
        (lambda e: e["strips"][1].update(domain=[0, math.nan]), r"domain .* is not \[low, high\]"),
        (lambda e: e["strips"][0]["values"].__setitem__(3, "0.5"), r"strip 'advantage', value 3 is a str"),
        (lambda e: e["strips"][2]["values"].__setitem__(3, 0.5), r"categorical values are codes"),
        (lambda e: e["turns"][2].update(end=19), r"turn 'turn 3': tokens 12 to 19 do not lie in 0 to 18"),
        (lambda e: e["turns"][1].update(start=3), r"turn 'turn 2' begins at token 3, inside 'turn 1'"),
        (lambda e: e.update(masked=[True]), r"masked has 1 entries for 18 tokens"),
        (lambda e: e.update(id="0"), r"episode id '0' occurs 2 times"),
    ],
)
def test_bad_records_are_refused(tmp_path, change, message):
    with pytest.raises(ViewerError, match=message):
        write_credit_html(tmp_path / "credit.html", [sql_episode(), broken(change)], "x")
    assert list(tmp_path.iterdir()) == []


HOSTILE = [
    "</script><img src=x onerror=\"document.title='PWNED'\">",
    "<script>document.title='PWNED'</script>",
    "<!--<script>",
    "]]>",
    "&lt;b&gt;",
    "{{ 7*7 }}",
    "${document.title='PWNED'}",
    "'\"`\\",
    "javascript:document.title='PWNED'",
    "\u2028",
    "\u202e",
    "\x00",
    "\x1b[31m",
    "\ufffd",
    "\ud83d",
    "",
    " ",
    "\n",
    "\t",
    "😀日本",
    "__proto__",
]


def hostile_episode():
    strip = {"name": HOSTILE[0], "values": [float(i) for i in range(len(HOSTILE))], "scale": "sequential", "note": HOSTILE[1]}
    codes = {"name": HOSTILE[1], "values": [0] * len(HOSTILE), "scale": "categorical", "labels": [HOSTILE[0]]}
    turn = {"name": HOSTILE[0], "start": 0, "end": 3, "value": 1.0}
    facts = {HOSTILE[0]: HOSTILE[1], "__proto__": "x", "constructor": 1.0}
    return {
        "id": HOSTILE[0],
        "title": HOSTILE[0],
        "group": HOSTILE[1],
        "prompt": HOSTILE[0],
        "facts": facts,
        "tokens": HOSTILE,
        "strips": [strip, codes],
        "turns": [turn],
        "notes": HOSTILE[:3],
    }


def test_hostile_text_never_becomes_markup(tmp_path):
    plain, _ = written(tmp_path, [sql_episode()], title="x", subtitle="y", legend=["z"])
    text, data = written(tmp_path, [hostile_episode()], title=HOSTILE[0], subtitle=HOSTILE[1], legend=[HOSTILE[0], HOSTILE[2]])
    tags = Page(text).tags
    extra = [("p", {})]  # the second legend line
    assert sorted(map(str, tags)) == sorted(map(str, Page(plain).tags + extra))  # no tag, and no attribute, came from the data
    assert len(Page(text).scripts) == 2 and Page(text).scripts[1] == Page(plain).scripts[1]
    got = data["episodes"][0]
    assert got["tokens"] == HOSTILE and got["title"] == HOSTILE[0] and got["facts"]["__proto__"] == "x"


def test_page_is_self_contained_and_locked(tmp_path):
    text, _ = written(tmp_path, [sql_episode()])
    page = Page(text)
    policy = next(attrs["content"] for tag, attrs in page.tags if tag == "meta" and attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-") and "unsafe-inline" not in policy.split("script-src")[1]
    for _, attrs in page.tags:
        assert not {"src", "href", "onclick", "onload", "onerror", "style"} & set(attrs)
    assert not re.search(r"https?://|url\(|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


def test_size_of_fifty_long_episodes(tmp_path):
    tokens = (TOKENS * 30)[:1100]
    text, _ = written(tmp_path, [sql_episode(str(i), f"question {i // 8}", tokens, seed=i) for i in range(50)])
    assert len(text.encode()) < 3_000_000


def test_write_is_atomic(tmp_path, monkeypatch):
    text, _ = written(tmp_path, [sql_episode()])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            write_credit_html(tmp_path / "credit.html", [], "x")
    assert (tmp_path / "credit.html").read_text() == text and os.listdir(tmp_path) == ["credit.html"]


# ---- in a browser

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"


class Browser:
    """Chromium over its debugging pipe: one JSON message, one NUL."""

    def __init__(self, profile):
        theirs, self.out = os.pipe()
        self.inn, ours = os.pipe()
        command = f"exec chromium {FLAGS} --user-data-dir={profile} --window-size=1300,900 --remote-debugging-pipe about:blank 3<&{theirs} 4>&{ours}"
        environment = os.environ | {"TMPDIR": str(profile)}  # what a killed browser leaves behind goes with the profile
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(theirs, ours), env=environment, stdout=-3, stderr=-3)
        os.close(theirs), os.close(ours)
        self.buffer, self.count, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def read(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.inn, 1 << 20)
            if not piece:
                raise EOFError("the browser ended")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def navigate(self, url):
        """Returns when this very document is loaded (a load event of the page before may still be on its way)."""
        loader = self.call("Page.navigate", url=url)["loaderId"]
        wanted = {"loaderId": loader, "name": "load"}
        while not any(e.get("method") == "Page.lifecycleEvent" and wanted.items() <= e["params"].items() for e in self.events):
            self.events.append(self.read())

    def open(self, path, **where):
        self.navigate("about:blank")  # the same file with another hash would not be loaded again
        self.events = []
        self.navigate(f"file://{path}#{urllib.parse.urlencode(where)}")

    def js(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def key(self, key):
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": key} if len(key) == 1 else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def complaints(self):
        """Exceptions, and what the console says above information."""
        self.js("1")
        bad = [e for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        return bad + [e for e in self.events if e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] in ("warning", "error")]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.out), os.close(self.inn)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    need_program("chromium")
    profile = tmp_path_factory.mktemp("profile")
    running = Browser(profile)
    yield running
    running.close()
    shutil.rmtree(profile, ignore_errors=True)


TEXT = """[...document.querySelectorAll('.strip')].map(s => [...s.querySelectorAll('[data-i]')].map(t => [...t.childNodes].map(
    n => n.nodeType === 3 ? n.data : n.className === 'sign' ? '' : n.textContent).join('')).join(''))"""


def test_browser_shows_every_strip_with_its_colours(browser, tmp_path):
    path = write_credit_html(tmp_path / "credit.html", [sql_episode(), sql_episode("1")], "Credit", legend=["Blue is up."])
    browser.open(path, e="0", v="text", t="light")
    assert browser.complaints() == []
    assert browser.js(TEXT) == [RESPONSE] * 3  # readable, complete, once a reward
    values = sql_episode()["strips"][1]["values"]
    colours = browser.js("[...document.querySelectorAll('.strip')[1].querySelectorAll('.tok')].map(t => t.style.background)")
    assert len(colours) == len(TOKENS) and all(re.fullmatch(r"rgb\(\d+, \d+, \d+\)", c) for c in colours)
    red = [int(re.findall(r"\d+", c)[0]) - int(re.findall(r"\d+", c)[2]) for c in colours]
    assert all(r > 0 for r in red)  # a negative advantage: orange everywhere
    top = max(map(abs, values))
    assert colours[min(range(len(values)), key=values.__getitem__)] == "rgb(168, 72, 10)" and top == pytest.approx(
        strip_domain(values, "diverging")[1], rel=1e-6
    )
    assert browser.js("document.querySelectorAll('nav button').length") == 2
    assert "Blue is up." in browser.js("document.getElementById('legend').textContent")
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")  # nothing runs off the side


def test_browser_text_is_readable_on_every_colour(browser, tmp_path):
    """Contrast of letters to their background is at least 4.5 (WCAG AA), over the whole ramp, dark and light."""
    n = 101
    strips = [{"name": scale, "values": [i / 50 - 1 for i in range(n)], "scale": scale, "domain": [-1, 1]} for scale in ("diverging", "sequential")]
    strips.append({"name": "codes", "values": [i % 8 for i in range(n)], "scale": "categorical"})
    path = write_credit_html(tmp_path / "credit.html", [{"id": "0", "tokens": ["x"] * n, "strips": strips}], "Credit")
    for theme in ("light", "dark"):
        browser.open(path, t=theme)
        pairs = browser.js("[...document.querySelectorAll('.tok')].map(t => { const s = getComputedStyle(t); return [s.backgroundColor, s.color]; })")

        def luminance(colour):
            parts = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
            return sum(w * (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4) for w, v in zip((0.2126, 0.7152, 0.0722), parts))

        for background, ink in pairs:
            low, high = sorted((luminance(background), luminance(ink)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (theme, background, ink)


def test_browser_aligned_view_repeats_strip_names_and_shows_values(browser, tmp_path):
    path = write_credit_html(tmp_path / "credit.html", [sql_episode(tokens=TOKENS * 8)], "Credit")
    browser.open(path, v="numbers")
    assert browser.complaints() == []
    assert browser.js("(g => g.scrollWidth <= g.clientWidth)(document.querySelector('.grid'))")
    lines = browser.js("[...document.querySelectorAll('.grid table')].map(t => [...t.rows].map(r => [r.cells[0].textContent, r.cells.length]))")
    assert len(lines) > 8 and all([row[0] for row in line[1:]] == ["format", "executes", "matches"] for line in lines)
    assert all(len({row[1] for row in line}) == 1 for line in lines)
    assert sum(line[0][1] - 1 for line in lines) == len(TOKENS) * 8
    starts = [int(line[0][0]) for line in lines]
    assert starts == [sum(line[0][1] - 1 for line in lines[:i]) for i in range(len(lines))]
    shown = browser.js("[...document.querySelectorAll('.grid tr:nth-child(2) td')].map(c => c.textContent)")
    expected = sql_episode(tokens=TOKENS * 8)["strips"][0]["values"]
    assert [float(v) for v in shown] == pytest.approx(expected, abs=0.0051)
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")


def test_browser_turns_and_masked_tokens(browser, tmp_path):
    path = write_credit_html(tmp_path / "credit.html", [household_episode()], "Credit")
    browser.open(path, v="text", t="light")
    assert browser.complaints() == []
    assert browser.js("[...document.querySelectorAll('.strip')[0].querySelectorAll('.turn')].map(t => t.innerText)") == ["turn 1\n+0.5", "turn 2\n-1", "turn 3"]
    masked = browser.js("[...document.querySelectorAll('.strip')[0].querySelectorAll('.masked')].map(t => Number(t.dataset.i))")
    assert masked == [4, 5, 10, 11, 16, 17]
    assert browser.js("[...document.querySelectorAll('.masked')].every(t => getComputedStyle(t).backgroundColor === 'rgba(0, 0, 0, 0)')")
    order = browser.js(
        "[...document.querySelectorAll('.strip')[0].querySelectorAll('.turn, .tok')].map(t => t.classList.contains('turn') ? 't' : t.dataset.i).join(' ')"
    )
    assert order == "t 0 1 2 3 4 5 t 6 7 8 9 10 11 t 12 13 14 15 16 17"
    assert "cut at turn 3" in browser.js("document.querySelector('article').textContent")
    browser.open(path, v="numbers")
    assert browser.js("[...new Set([...document.querySelectorAll('.turncell')].map(t => t.textContent.trim()).filter(Boolean))]") == [
        "turn 1 +0.5",
        "turn 2 -1",
        "turn 3",
    ]
    assert "neutr" in browser.js("document.querySelector('.grid').textContent")


def test_browser_turns_without_strips_still_show_their_text(browser, tmp_path):
    episode = household_episode() | {"strips": []}
    browser.open(write_credit_html(tmp_path / "credit.html", [episode], "Credit"), v="text", t="light")
    assert browser.complaints() == []
    order = browser.js("[...document.querySelectorAll('article .turn, article .tok')].map(t => t.classList.contains('turn') ? 't' : t.dataset.i).join(' ')")
    assert order == "t 0 1 2 3 4 5 t 6 7 8 9 10 11 t 12 13 14 15 16 17"
    assert browser.js("[...document.querySelectorAll('article .masked')].map(t => Number(t.dataset.i))") == [4, 5, 10, 11, 16, 17]


def test_browser_hostile_text_is_inert(browser, tmp_path):
    path = write_credit_html(tmp_path / "credit.html", [hostile_episode(), sql_episode()], "safe", subtitle=HOSTILE[0], legend=[HOSTILE[1]])
    for view in ("text", "grid", "numbers"):
        browser.open(path, e=HOSTILE[0], v=view)
        assert browser.complaints() == []
        assert browser.js("document.title") == "safe"
        assert browser.js("document.querySelectorAll('img, iframe, svg, object, a').length") == 0 and browser.js("document.scripts.length") == 2
        assert browser.js("document.querySelector('h3').textContent") == HOSTILE[0]
        boxed = browser.js("[...document.querySelectorAll('article [data-i] .odd')].map(t => t.textContent)")
        assert boxed[:6] == ["U+2028", "U+202E", "U+0000", "U+001B", "byte", "byte"]
        signs = browser.js("[...document.querySelectorAll('article [data-i] .sign')].map(t => t.textContent)")
        assert signs[:3] == ["\u2205", "\u21b5", "\u21e5"]
        facts = browser.js("[...document.querySelectorAll('.facts span')].map(t => t.textContent)")
        assert facts == [HOSTILE[0] + HOSTILE[1], "__proto__x", "constructor1"]
    # the policy holds even against code that reaches the page by some other road
    browser.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.js("(() => { const s = document.createElement('script'); s.textContent = 'document.title = 2'; document.body.append(s); })()")
    assert browser.js("document.title") == "safe"


def test_browser_keys_and_switches(browser, tmp_path):
    episodes = [sql_episode("a", "one"), sql_episode("b", "one"), sql_episode("c", "two"), household_episode()]
    path = write_credit_html(tmp_path / "credit.html", episodes, "Credit")
    browser.open(path, v="text", s="one", t="light")
    current = "[...document.querySelectorAll('article')].map(a => a.dataset.id).join()"
    assert browser.js(current) == "a"
    for key, expected in (
        ("ArrowRight", "b"),
        ("ArrowRight", "c"),
        ("ArrowLeft", "b"),
        ("s", "a,b"),
        ("ArrowRight", "c"),
        ("ArrowRight", "house"),
        ("ArrowRight", "a,b"),
    ):
        browser.key(key)
        assert browser.js(current) == expected, key
    browser.key("v")
    assert browser.js("document.querySelectorAll('.grid').length") == 2 and browser.js("location.hash.includes('v=grid')")
    browser.key("t")
    assert browser.js("document.documentElement.dataset.theme") == "dark"
    browser.key("2")  # hides the second strip everywhere
    assert browser.js("[...document.querySelectorAll('.grid table')].every(t => t.rows.length === 3)")
    assert browser.js("[...document.querySelectorAll('.scale')].map(b => b.getAttribute('aria-pressed'))") == ["true", "false", "true"]
    browser.key("p")
    assert browser.js("document.getElementById('prompt').open") and browser.js("document.querySelector('pre').textContent") == "How many singers?"
    browser.key("?")
    assert browser.js("document.getElementById('keys').open")
    assert browser.complaints() == []


def test_browser_tooltip_gives_exact_values(browser, tmp_path):
    episode = sql_episode()
    path = write_credit_html(tmp_path / "credit.html", [episode], "Credit")
    browser.open(path, v="text")
    middle = "(() => { const b = document.querySelectorAll('.strip')[1].querySelector('[data-i=\"5\"]').getBoundingClientRect(); return %s; })()"
    where = browser.js(middle % "[b.x + b.width / 2, b.y + b.height / 2]")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    tip = browser.js("document.getElementById('tip').innerText")
    assert json.dumps(TOKENS[5]) in tip and "token 5" in tip
    for strip in episode["strips"]:
        assert f"{strip['values'][5]:.6g}" in tip
    assert browser.js("[...document.querySelectorAll('.hot')].map(t => t.dataset.i)") == ["5", "5", "5"]  # the same token in every strip
    browser.key(".")
    assert "token 6" in browser.js("document.getElementById('tip').innerText")
    bar = browser.js("(() => { const b = document.querySelector('canvas[data-bar]').getBoundingClientRect(); return [b.right - 1, b.y + 3]; })()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=bar[0], y=bar[1])
    assert f"token {len(TOKENS) - 1}" in browser.js("document.getElementById('tip').innerText")


def test_browser_long_episodes_and_none(browser, tmp_path):
    tokens = (TOKENS * 40)[:1200]
    path = write_credit_html(tmp_path / "credit.html", [sql_episode(str(i), f"q{i // 8}", tokens, i) for i in range(50)], "Credit")
    browser.open(path, v="grid", s="group")
    assert browser.complaints() == []
    assert browser.js("document.querySelectorAll('article').length") == 8 and browser.js("document.querySelectorAll('nav button').length") == 50
    assert browser.js("document.querySelectorAll('article [data-i]').length") == 8 * 1200 * 4
    assert browser.js("[...document.querySelectorAll('.grid')].every(g => g.scrollWidth <= g.clientWidth)")  # lines fit the width of their card
    empty = write_credit_html(tmp_path / "none.html", [], "Credit")
    browser.open(empty)
    browser.key("ArrowRight")
    assert browser.complaints() == [] and "No episodes were recorded." in browser.js("document.body.innerText")
    bare = write_credit_html(tmp_path / "bare.html", [{"id": "x", "tokens": [], "strips": []}], "Credit")
    for view in ("text", "grid"):
        browser.open(bare, v=view)
        browser.key(".")
        assert browser.complaints() == []


def test_the_script_builds_no_markup_from_strings():
    source = (viewer.PAGE / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|</script", source)
