"""Builds the documentation: `python docs/build_site.py OUT` writes the site to OUT (default: site).

The pages are those of docs/, the README as the front page, the notebooks with their outputs, one
of all settings, one of the log, and the API reference of the public modules, whose text is their
docstrings. They are written to a temporary folder and given to zensical. `--pages` only writes
that folder, to OUT.
"""

from __future__ import annotations

import base64
import html
import json
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile

import yaml

from mbx.settings import describe, requirement
from mbx.training import glossary
from mbx.training.build import settings_class

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Pages of the API reference and the modules whose docstrings each shows (docs/interface.md).
API = {
    "mbx": ("mbx.api", "mbx.training.policy"),
    "mbx.mppi": ("mbx.mppi",),
    "mbx.categorical": ("mbx.categorical",),
    "mbx.planners": (
        "mbx.planners",
        *(f"mbx.planners.{m}" for m in ("cem", "predictive", "evosax", "bases", "tuning")),
    ),
    "mbx.returns": ("mbx.returns",),
    "mbx.distributions": ("mbx.distributions",),
    "mbx.successors": ("mbx.successors",),
    "mbx.replay": ("mbx.replay", "mbx.replay_storage"),
    "mbx.heads": ("mbx.heads",),
    "mbx.networks": ("mbx.networks",),
    "mbx.world_model": ("mbx.world_model",),
    "mbx.observations": ("mbx.observations",),
    "mbx.derivatives": ("mbx.fast.gradients",),
    "mbx.power": ("mbx.empo.power", "mbx.empo.power.equations", "mbx.empo.power.solver"),
    "mbx.empo.multigrid": ("mbx.empo.multigrid.packed",),
    "mbx.agents.base": ("mbx.agents.base",),
    "mbx.agents.dreamer.rssm": ("mbx.agents.dreamer.rssm",),
    "mbx.envs": ("mbx.envs", "mbx.envs.registry", "mbx.envs.base"),
    "mbx.training": ("mbx.training", "mbx.training.run", "mbx.config.agents"),
}
PAGE_OF = {module: page for page, modules in API.items() for module in modules}
# Pages that do not lie in docs/.
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/fixtures/README.md")
_TABLE = ("| setting | default | what it does |", "|---|---|---|")


def settings_page(agent: str) -> str:
    """Every setting of an agent as its class declares it."""
    lines = [
        f"# Settings of {agent}",
        "",
        "Every hyperparameter is a flag of `python -m experiments.train`, with the default of the",
        "agent's first configuration file. A setting without effect in a combination is refused.",
        "",
        *_TABLE,
    ]
    settings = settings_class(agent)()
    for one in describe(settings):
        if one.is_section:
            lines += ["", f"## {one.name}", "", one.help, "", *_TABLE]
            continue
        needs = [f"`{requirement(settings, *need)}`" for need in one.needs.items()]
        words = [one.help, one.allowed, f"needs {', '.join(needs)}" if needs else ""]
        said = [f"{text[0].upper()}{text[1:].rstrip('.')}." for text in words if text]
        text = " ".join(said).replace("|", "\\|")
        lines.append(f"| `--config.{one.name}` | `{one.default!r}` | {text} |")
    return "\n".join(lines) + "\n"


def as_mathml(page: str) -> str:
    """A page of HTML with its TeX, as the Markdown extension marks it, turned into MathML.

    Browsers draw that by themselves: no script and nothing from the network.

    Raises:
        ValueError: a command that is not understood.
    """
    from latex2mathml.converter import convert

    def formula(found: re.Match) -> str:
        tex = html.unescape(found[2]).strip()[2:-2]  # without the marks around it
        display = "block" if found[1] == "div" else "inline"
        mathml = convert(tex, display=display)
        if unknown := re.search(r"\\\w+", mathml):
            raise ValueError(f"formula {tex!r}: {unknown[0]} is not understood; write it otherwise")
        return f'<div class="formula">{mathml}</div>' if display == "block" else mathml

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', formula, page, flags=re.DOTALL)


def pages() -> list[pathlib.Path]:
    """Every page that is written by hand."""
    return [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").rglob("*.md"))]


def links(text: str) -> list[str]:
    """Targets of a page's links and pictures that lead to files of this repository."""
    prose = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in found if not re.match(r"\w+:|#", target)]


def on_site(target: pathlib.Path) -> str:
    """Where a file of the repository lies on the site; a public module leads to its API page."""
    name = target.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if settings := re.fullmatch(
        r"mbx/(?:agents/)?(tdmpc|dreamer|empo)/(agent/)?settings\.py", name
    ):
        return f"settings/{settings[1]}.md"
    if name == "mbx/training/glossary.py":
        return "log.md"
    if name.endswith(".ipynb"):
        return f"tutorials/{target.stem}.md"
    module = re.fullmatch(r"(mbx/.*?|mbx)(/__init__)?\.py", name)
    if module and (page := PAGE_OF.get(module[1].replace("/", "."))):
        return f"api/{page}.md"
    return name.removeprefix("docs/")


def write_tutorial(notebook: pathlib.Path, folder: pathlib.Path) -> None:
    """Write a notebook with its outputs as a page, and its pictures as files beside that."""
    folder.mkdir(exist_ok=True)
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            kind = next((kind for kind in ("image/png", "image/gif") if kind in data), "")
            text = "".join(output.get("text", data.get("text/plain", "")))
            if kind:
                name = f"{notebook.stem}-{len(parts)}.{kind.partition('/')[2]}"
                (folder / name).write_bytes(base64.b64decode("".join(data[kind])))
                parts.append(f"![What the cell above shows]({name})")
            elif text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    (folder / f"{notebook.stem}.md").write_text("\n\n".join(parts) + "\n")


def write_page(source: pathlib.Path, docs: pathlib.Path) -> None:
    """Copy a page to where it lies on the site, with its links, and the files that they name.

    In the repository a link to a module opens its source, on the site its API page if it has one.
    """
    text, place = source.read_text(), on_site(source)
    for link in set(links(text)):
        name, _, anchor = link.partition("#")
        target = (source.parent / name).resolve()
        where = on_site(target)
        if (ROOT / "docs") not in target.parents and not where.startswith(
            ("api/", "settings/", "log.", "tutorials/")
        ):
            (docs / where).parent.mkdir(parents=True, exist_ok=True)
            if not (docs / where).exists() and target.suffix != ".md":
                shutil.copy(target, docs / where)
        where = posixpath.relpath(where, posixpath.dirname(place) or ".")
        text = text.replace(f"]({link})", f"]({where}{'#' + anchor if anchor else ''})")
    if "notes" in source.parts or source.name == "CHANGELOG.md":  # history
        text = "---\nsearch:\n  exclude: true\n---\n" + text
    (docs / place).parent.mkdir(parents=True, exist_ok=True)
    (docs / place).write_text(text)


def log_page() -> str:
    """Everything that a run logs, with its meaning."""
    lines = ["# What the log says", "", *glossary.__doc__.split("\n\n")[1].strip().splitlines()]
    parts = {"Every run": glossary.COMMON} | {name: glossary.own(name) for name in glossary.AGENTS}
    for title, entries in parts.items():
        lines += ["", f"## {title}", "", "| in the log | what it is |", "|---|---|"]
        lines += [f"| `{name}` | {words} |" for name, words in entries.items()]
    return "\n".join(lines) + "\n"


def write_pages(folder: pathlib.Path) -> pathlib.Path:
    """Write all pages and the configuration into an empty folder; returns the configuration."""
    docs = folder / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in pages():
        write_page(page, docs)
    (docs / "settings").mkdir()
    for agent in ("tdmpc", "dreamer", "empo"):
        (docs / "settings" / f"{agent}.md").write_text(settings_page(agent))
    (docs / "log.md").write_text(log_page())
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        write_tutorial(notebook, docs / "tutorials")
    (docs / "api").mkdir()
    for page, modules in API.items():
        text = "\n".join([f"# `{page}`\n", *(f"::: {module}\n" for module in modules)])
        (docs / "api" / f"{page}.md").write_text(text)
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    reference = next(part["Reference"] for part in config["nav"] if "Reference" in part)
    reference.append({"API": [{page: f"api/{page}.md"} for page in API]})
    python = config["plugins"][-1]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT)]
    path = folder / "mkdocs.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def main(arguments: list[str]) -> int:
    """Build the site; warnings (a link or a page that is missing) are errors."""
    places = [argument for argument in arguments if argument != "--pages"]
    if len(places) > 1 or any(place.startswith("-") for place in places):
        print(f"{' '.join(places)}: give one folder, and --pages or nothing", file=sys.stderr)
        return 2
    out = pathlib.Path(*places or [ROOT / "site"]).resolve()
    if "--pages" in arguments:
        write_pages(out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        config = write_pages(pathlib.Path(folder))
        command = [
            sys.executable,
            "-m",
            "zensical",
            "build",
            "--strict",
            "--config-file",
            str(config),
        ]
        code = subprocess.run(command, check=False).returncode
        if code == 0:
            for page in (pathlib.Path(folder) / "site").rglob("*.html"):
                page.write_text(as_mathml(page.read_text()))
            shutil.copytree(pathlib.Path(folder) / "site", out, dirs_exist_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
