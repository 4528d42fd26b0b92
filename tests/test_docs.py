"""The documentation: every module and page is in it, and its sources can be found."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pages():
    pytest.importorskip("yaml")
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_has_a_page(pages):
    found = pages.modules()
    names = [name for part in found.values() for name in part]
    assert len(names) == len(set(names)) == len(list((ROOT / "mbx").rglob("*.py")))
    assert "mbx" in found["Kit"] and "mbx.mppi" in found["Kit"]
    assert "mbx.agents" in found["Agents"] and "mbx.envs.empo" in found["Environments"]


def test_every_document_is_in_the_navigation(pages, tmp_path):
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for path in (ROOT / "docs").rglob("*.md"):
        assert path.relative_to(ROOT / "docs").as_posix() in nav, path
    pages.write_pages(tmp_path)
    assert (tmp_path / "docs" / "api" / "mbx.mppi.md").exists()
    front = (tmp_path / "docs" / "index.md").read_text()
    links = [x for x in re.findall(r"\]\(([^)#]+)", front) if not x.startswith("http")]
    assert len(links) >= 10
    for link in links:
        assert (tmp_path / "docs" / link).exists(), link


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
