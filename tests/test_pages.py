"""How the pages are written: short sentences, the field's words, tables that fit, and search."""

from __future__ import annotations

import collections
import math
import pathlib
import re

import pytest

from mbx.settings import describe
from mbx.training.build import settings_class

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "notes" not in page.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"


def prose(text: str) -> str:
    """A page without code, tables, formulas, comments, headings and targets of links."""
    text = re.sub(r"<!--.*?-->|\$\$.*?\$\$|^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(    |\||#).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`\n]*`", "code", text))


def sentences(text: str) -> list[str]:
    """Sentences of a page's prose; an item of a list begins a new one."""
    blocks = re.split(r"\n\s*\n|^[*>] |^\d+\. ", prose(text), flags=re.MULTILINE)
    found = [re.split(r"(?<=[.!?])[*)]*\s+|:\s*$", " ".join(block.split())) for block in blocks]
    return [sentence for block in found for sentence in block if sentence]


def test_sentences_by_hand():
    page = "# A title. x\n\nOne: `a. b`.\nTwo [three](x.md)\nfour.\n\n* five\n* six:\n\n    code\n"
    assert sentences(page) == ["One: code.", "Two three four.", "five", "six"]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_is_read_without_effort(page):
    """No sentence over 35 words, no table over seven columns, no date outside a protocol box."""
    text = page.read_text()
    assert [s for s in sentences(text) if len(s.split()) > 35] == []
    heads = re.findall(r"^\|(?:\s*:?-+:?\s*\|)+$", text, flags=re.MULTILINE)
    assert all(head.count("|") <= 8 for head in heads)
    outside = re.sub(r"^> .*$", "", text, flags=re.MULTILINE)
    assert not re.search(rf"\b\d{{1,2}} ({MONTHS})\b|\b20\d\d-\d\d-\d\d\b", outside)


def test_the_pages_are_short():
    """README and docs together, without notes; a page that grows is split or cut."""
    words = {name: len(page.read_text().split()) for name, page in zip(NAMES, PAGES, strict=True)}
    assert sum(words.values()) <= 25_000, words
    assert words["README.md"] <= 500


def test_no_word_that_the_field_does_not_use():
    words = r"beside|told|in the median|looked at|look on|mend(s|ed|ing)?|such a one|of one's own"
    odd = re.compile(rf"\b({words}|whatever|whoever|alike|goes on|hangs on|behind one another)\b")
    assert [
        (page.name, m[0]) for page in PAGES for m in odd.finditer(prose(page.read_text()))
    ] == []


def known_settings() -> set[str]:
    return {
        one.name
        for name in ("tdmpc", "dreamer", "empo")
        for one in describe(settings_class(name)())
    }


def test_every_setting_that_a_page_names_exists():
    """`section.name` between backticks and in commands, where section holds settings."""
    classes = [settings_class(name)() for name in ("tdmpc", "dreamer", "empo")]
    known = {one.name for settings in classes for one in describe(settings)}
    sections = {name.partition(".")[0] for name in known if "." in name}
    others = r"\.(png|py|json|insert_step|kwargs)|^power\.\w+_\w+$"
    for page in PAGES:
        if page.name in ("reference.md", "interface.md"):  # names of Python
            continue
        named = re.findall(r"(?:`|config\.|set=)([a-z_]+\.\w+)(?![\w(.])", page.read_text())
        wrong = {s for s in named if s.partition(".")[0] in sections} - known
        assert not {s for s in wrong if not re.search(others, s)}, page


def test_every_file_that_a_page_names_exists():
    """Paths between backticks and in commands, from the repository's root."""
    folders = "mbx|configs|experiments|benchmarks|examples|tests|notebooks|docs"
    for name, page in zip(NAMES, PAGES, strict=True):
        for path in re.findall(rf"(?<![\w./-])((?:{folders})/[\w/.-]*\w)", page.read_text()):
            if not path.startswith("docs/results/empo_networks"):
                assert (ROOT / path).exists(), (name, path)


# What a newcomer types into the search box, and the page that answers.
QUERIES = {
    "install gpu": "install",
    "quickstart first run": "quickstart",
    "reinforcement learning which agent": "choosing",
    "custom environment": "custom_environments",
    "gymnasium environment": "custom_environments",
    "vectorized environments": "custom_environments",
    "hyperparameter tuning": "tune",
    "image observations pixels": "pixels",
    "evaluate policy video": "evaluate",
    "hyperparameter sweep seeds": "sweeps",
    "jax vmap training": "train_fn",
    "resume training checkpoint": "resume",
    "deploy policy robot": "deploy",
    "onnx export": "deploy",
    "multi gpu tpu": "devices",
    "slurm": "devices",
    "multi-task fine-tuning": "several_tasks",
    "offline data": "several_tasks",
    "callbacks": "extending",
    "world model planner mppi": "kit",
    "dreamerv3": "dreamer",
    "replay buffer": "reference",
    "termination truncation": "termination",
    "reproducibility seed": "reproducibility",
    "troubleshooting": "faq",
    "nan loss": "faq",
    "out of memory": "faq",
    "dm_control benchmark results": "results/learning",
    "ablation": "results/ablations",
    "speed pytorch": "results/performance",
}


def terms(text: str) -> collections.Counter[str]:
    """Words in lower case without a plural's or a gerund's end."""
    words = re.findall(r"[a-z0-9_]+", text.lower())
    return collections.Counter(re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", word) for word in words)


def rank(query: str) -> list[str]:
    """Pages by tf-idf, in which a title counts ten times and a heading five times.

    Stands in for the site's own search, whose index is made by a browser.
    """
    weighed = {}
    for page in DOCS:
        text = page.read_text()
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        found = terms(text)
        for times, words in ((9, headings[0]), (4, " ".join(headings[1:]))):
            for term in terms(words):
                found[term] += times
        weighed[page.relative_to(ROOT / "docs").with_suffix("").as_posix()] = found

    def score(found: collections.Counter[str]) -> float:
        total = 0.0
        for term in terms(query):
            holding = sum(term in other for other in weighed.values())
            if found[term]:
                rare = math.log(1 + len(weighed) / holding)
                total += rare * (1 + math.log(found[term]))
        return total

    return sorted(weighed, key=lambda name: -score(weighed[name]))


@pytest.mark.parametrize("query", QUERIES)
def test_a_newcomers_query_finds_its_page(query):
    assert QUERIES[query] in rank(query)[:3], rank(query)[:5]
