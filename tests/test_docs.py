"""The documentation: every module and page is in it, and its sources can be found."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import math
import pathlib
import re

import pytest

from mbx.training import glossary

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def build_site():
    pytest.importorskip("yaml")
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(build_site, tmp_path_factory):
    """The folder of pages that the site is made of."""
    folder = tmp_path_factory.mktemp("site").resolve()
    build_site.write_pages(folder)
    return folder / "docs"


def test_the_api_reference_has_the_stable_modules_alone(build_site):
    modules = [module for page in build_site.API.values() for module in page]
    assert len(modules) == len(set(modules)) and len(build_site.API) <= 25
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module
    stable = (ROOT / "docs" / "interface.md").read_text()
    parts = re.findall(r"^\| `(mbx[\w.]*)`", stable, flags=re.MULTILINE)
    assert set(parts) - {*build_site.API, *modules} == set() and len(parts) > 12


def test_the_page_of_the_log_has_every_name(site):
    page = (site / "log.md").read_text()
    for names in (glossary.COMMON, *map(glossary.own, glossary.AGENTS)):
        assert all(f"| `{name}` | {words} |" in page for name, words in names.items())


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in links, here and where repositories are shown."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(build_site, page: pathlib.Path, root: pathlib.Path) -> list[str]:
    """Links and pictures of a page that lead to nothing under `root`, or outside of it."""
    wrong = []
    for link in build_site.links(page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve()
        if not target.exists() or not target.is_relative_to(root):
            wrong.append(link)
        elif anchor and target.suffix == ".md" and target.parent.name == "api":
            # Of an API page, whose text is made of docstrings; the names are tested below.
            assert anchor.startswith(build_site.API[target.stem]), link
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            wrong.append(link)
    return wrong


def test_every_link_of_every_page_leads_somewhere(build_site, site):
    """In the repository and on the site, anchors and pictures included."""
    count = 0
    for page in build_site.pages():
        assert broken(build_site, page, ROOT) == [], page
        count += len(build_site.links(page.read_text()))
        for anchor in re.findall(r"\]\(#([^)]+)\)", page.read_text()):
            assert anchor in anchors(page.read_text()), (page, anchor)
    assert count > 150
    for page in site.rglob("*.md"):
        if "api" not in page.parts:
            assert broken(build_site, page, site) == [], page
    assert (site / "api" / "mbx.mppi.md").exists()


def test_the_reference_by_task_leads_to_every_part_of_the_kit():
    """Each link names what its module defines, so that it has an entry there."""
    text = (ROOT / "docs" / "reference.md").read_text()
    found = re.findall(r"\[`([\w.]+)`\]\(\.\./(mbx/[\w/]+)\.py#([\w.]+)\)", text)
    for shown, path, name in found:
        module, _, own = name.rpartition(".")
        assert module.split(".") == path.removesuffix("/__init__").split("/")
        value = getattr(importlib.import_module(module), own)
        assert value.__module__ == module and shown.split(".")[-1] == own
    stable = (ROOT / "docs" / "interface.md").read_text()
    parts = set(re.findall(r"^\| `mbx\.(\w+)`", stable, flags=re.MULTILINE))
    folders = {part for _, path, _ in found for part in path.split("/")}
    assert {*parts, "planners"} <= folders and len(found) > 45


def test_the_site_goes_into_one_folder_and_knows_no_other_option(build_site, capsys):
    for arguments in (["--out=site"], ["--page"], ["one", "two"]):
        assert build_site.main(arguments) == 2
        assert " ".join(arguments) in capsys.readouterr().err


def test_a_tutorial_is_a_notebook_with_its_outputs(build_site, tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "\n", "Words."]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [{"data": {"text/plain": ["2"]}}, {"data": {"image/png": "aGk="}}],
        },
    ]
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": cells}))
    build_site.write_tutorial(tmp_path / "one.ipynb", tmp_path / "site")
    page = (tmp_path / "site" / "one.md").read_text()
    assert page.startswith("# A title\n\nWords.\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n![")
    (picture,) = re.findall(r"\]\((one-\d+\.png)\)", page)
    assert (tmp_path / "site" / picture).read_bytes() == b"hi"


def test_what_is_no_link(build_site):
    text = "see [a](b.md#c)\n\n    [d](e.md)\n```\n[f](g.md)\n```\n`[h](i.md)` [j](https://k)"
    text += " ![l](m.png) [n](#o)"
    assert build_site.links(text) == ["b.md#c", "m.png"]


def test_every_document_is_in_the_navigation(build_site):
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for path in [*build_site.pages(), *(ROOT / "notebooks").glob("*.ipynb")]:
        listed = f" {build_site.on_site(path)}\n" in nav
        assert listed == ("notes" not in path.parts), path


def test_every_page_is_two_clicks_from_the_front_page(site):
    """By links of the text alone, without the navigation; of the notes, their index."""

    def follow(page: pathlib.Path) -> set[pathlib.Path]:
        found = re.findall(r"\]\(([^)#:\s]+\.md)", page.read_text())
        return {(page.parent / link).resolve() for link in found}

    once = follow(site / "index.md")
    twice = once.union(*map(follow, once))
    pages = {page for page in site.rglob("*.md") if not {"api", "notes"} & set(page.parts)}
    assert pages - twice <= {site / "index.md"} and site / "notes" / "README.md" in twice


def test_the_front_page_begins_with_what_one_gets():
    """On one screen: what it is, both commands, every agent, Python, citation and licence."""
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    for wanted in (
        "python -m experiments.train --config=configs/tdmpc.py ",
        "pip install -e '.[test]' && python -m pytest",
        "docs/tdmpc.md",
        "docs/dreamer.md",
        "docs/empo.md",
        "```python",
        "CITATION.cff",
        "LICENSE",
    ):
        assert wanted in screen, wanted


def test_the_path_through_the_code_is_short_and_there():
    """README's "Read the code": eight files, in an order in which each needs those before alone."""
    section = (ROOT / "README.md").read_text().partition("## Read the code")[2]
    path = re.findall(r"^\| \[`(mbx/[\w/]+\.py)`\]\((.*?)\)", section, flags=re.MULTILINE)
    assert len(path) == 8 and all(shown == link for shown, link in path)
    lines = [len((ROOT / link).read_text().splitlines()) for _, link in path]
    assert sum(lines) <= 3_600, dict(zip(path, lines, strict=True))
    for _, link in path:  # each opens with what it is for
        words = (ROOT / link).read_text().partition('"""')[2].partition('"""')[0]
        assert len(words.split()) >= 10, link


def test_sources_are_papers_or_entries_of_the_sources_page():
    """Nothing refers to papers of the project that a reader does not have."""
    elsewhere = re.compile("[Dd]ocument 0" + r"0\d|\bDES" + r"IGN\b|\bsp" + r"ecs/|the sp" + "ec's")
    suffixes = {".py", ".md", ".json", ".ipynb", ".cfg", ".toml", ".yml", ".yaml"}
    folders = ("mbx", "configs", "experiments", "tests", "docs", "examples", "notebooks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found = [
        path.relative_to(ROOT).as_posix()
        for path in [*files, ROOT / "README.md"]
        if path.suffix in suffixes and elsewhere.search(path.read_text())
    ]
    assert set(found) <= {"docs/sources.md"}


def test_links_to_the_sources_page_lead_to_its_entries():
    entries = {
        line.removeprefix("## ").strip().lower().replace(" ", "-")
        for line in (ROOT / "docs" / "sources.md").read_text().splitlines()
        if line.startswith("## ")
    }
    texts = [
        p.read_text() for folder in ("mbx", "docs") for p in (ROOT / folder).rglob("*.[mp][dy]")
    ]
    assert {name for text in texts for name in re.findall(r"sources\.md#([\w-]+)", text)} <= entries


def test_pages_that_the_code_names_exist():
    folders = ("mbx", "configs", "experiments", "benchmarks", "examples", "tests", "notebooks")
    texts = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts += [path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb")]
    named = {name for text in texts for name in re.findall(r"\bdocs/[\w/]+\.md\b", text)}
    assert len(named) > 5 and {name for name in named if not (ROOT / name).exists()} == set()


def test_long_lines_of_code_wrap_and_the_theme_has_a_switch():
    yaml = pytest.importorskip("yaml")

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    styles = "".join((ROOT / "docs" / name).read_text() for name in config["extra_css"])
    rule = re.search(r"\.md-typeset pre > code \{(.*?)\}", styles, flags=re.DOTALL)
    assert "white-space: pre-wrap" in rule[1] and "overflow-wrap: anywhere" in rule[1]
    assert all("toggle" in palette for palette in config["theme"]["palette"])


def test_every_formula_becomes_mathml(build_site):
    """Each is understood whole, and drawn without a script or the network."""
    pytest.importorskip("latex2mathml")
    count = 0
    for page in build_site.pages():
        code = r"^```.*?^```|^    .*?$|`[^`]*`"
        prose = re.sub(code, "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for own, tex in re.findall(r"(\$\$?)([^$]+)\1", prose):
            tag = "div" if own == "$$" else "span"
            found = build_site.as_mathml(f'<{tag} class="arithmatex">\\[{tex}\\]</{tag}>')
            start = '<div class="formula"><math' if own == "$$" else "<math"
            assert found.startswith(start) and "arithmatex" not in found
            count += 1
    assert count >= 20
    with pytest.raises(ValueError, match=r"foo is not understood"):
        build_site.as_mathml('<span class="arithmatex">\\(\\foo x\\)</span>')
    found = build_site.as_mathml('a <span class="arithmatex">\\(x &lt; y_1\\)</span> b')
    assert re.sub("<.*?>", "", found) in ("a x&lt;y1 b", "a x&#x0003C;y1 b")


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
    "use the planner alone": "kit",
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


Entry = tuple[str, collections.Counter[str]]


@pytest.fixture(scope="module")
def searched(site) -> list[Entry]:
    """Page and words of every section of every page; titles count ten times, headings five."""
    found: list[tuple[str, str, str]] = []
    for path in site.rglob("*.md"):
        page, text = path.relative_to(site).with_suffix("").as_posix(), path.read_text()
        if not text.startswith("---\nsearch:"):
            parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)[1:]
            found += [(page, *part) for part in zip(parts[::2], parts[1::2], strict=True)]
    titles: dict[str, str] = {}
    for page, title, _ in found:
        titles.setdefault(page, title)
    return [
        (page, terms(" ".join([text, *[titles[page]] * 5, *[title] * 5])))
        for page, title, text in found
    ]


def rank(query: str, searched: list[Entry]) -> list[str]:
    """Pages by the tf-idf of their best section: it stands in for the search of a browser."""
    score: dict[str, float] = collections.defaultdict(float)
    asked = terms(query)
    rare = {t: math.log(1 + len(searched) / (1 + sum(t in e for _, e in searched))) for t in asked}
    for page, found in searched:
        own = sum(rare[term] * (1 + math.log(found[term])) for term in asked if found[term])
        score[page] = max(score[page], own)
    return sorted(score, key=lambda page: -score[page])


@pytest.mark.parametrize("query", QUERIES)
def test_a_newcomers_query_finds_its_page(query, searched):
    assert QUERIES[query] in rank(query, searched)[:3], rank(query, searched)[:5]
