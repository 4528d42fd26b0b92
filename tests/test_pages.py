"""How the pages are written: short sentences, the field's words, tables that fit, no stale name."""

from __future__ import annotations

import pathlib
import pkgutil
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
    assert words["README.md"] <= 450


def test_no_word_that_the_field_does_not_use():
    words = r"beside|told|in the median|looked at|look on|mend(s|ed|ing)?|such a one|of one's own"
    odd = re.compile(rf"\b({words}|whatever|whoever|alike|goes on|hangs on|behind one another)\b")
    assert [
        (page.name, m[0]) for page in PAGES for m in odd.finditer(prose(page.read_text()))
    ] == []


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
        flags = re.findall(r"--config\.([a-z_]+(?:\.\w+)?)", page.read_text())
        wrong = {s for s in named if s.partition(".")[0] in sections} | set(flags)
        wrong -= known | {"section.name"}
        assert not {s for s in wrong if not re.search(others, s)}, page


def test_every_file_that_a_page_names_exists():
    """Paths between backticks and in commands, from the repository's root."""
    folders = "mbx|configs|experiments|benchmarks|examples|tests|notebooks|docs"
    for name, page in zip(NAMES, PAGES, strict=True):
        for path in re.findall(rf"(?<![\w./-])((?:{folders})/[\w/.-]*\w)", page.read_text()):
            if not path.startswith("docs/results/empo_networks"):
                assert (ROOT / path).exists(), (name, path)


def test_every_name_of_python_that_a_page_names_exists():
    """`mbx.module.name`, by import."""
    for page in PAGES:
        for name in set(re.findall(r"(?<![\w./\"-])mbx(?:\.\w+)+", page.read_text())):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                raise AssertionError(f"{page.name} names {name}") from error
