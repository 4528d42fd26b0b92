"""Pages that mkdocs is given beside the documents: the README as the front page, and one page of
reference for every public module, whose text is its docstrings (mkdocs.yml names this file).

`FieldLists` makes lists of lines such as "mean, std: `[B, T, A]`.", as which they are written.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Parts of the package in the order of the reference; "" is what lies directly in mbx.
PARTS = {"Kit": "", "Agents": "agents", "Environments": "envs", "Training": "training"}
_NAME = r"[a-z_]\w*(?:\([^)]*\))?"
_FIELD = re.compile(rf"({_NAME}(?:, {_NAME})*)(: | -> )")
_AFTER_FIELDS = re.compile(r"(Raises|Returns|Source|Sources|[A-Z]\w+:$)")


class FieldLists(griffe.Extension):
    """Writes the fields and arguments that docstrings explain as Markdown lists."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = field_lists(obj.docstring.value)


def field_lists(text: str) -> str:
    """`text` with unindented lines "name: words" as items of a list, what follows them apart."""
    lines, in_list = [], False
    for line in text.splitlines():
        field = _FIELD.match(line)
        ends = not line or (in_list and _AFTER_FIELDS.match(line))
        if lines and lines[-1] and ((field and not in_list) or (ends and line)):
            lines.append("")
        in_list = bool(field) or (in_list and not ends)
        if field:
            name, separator = field[1].replace("`", ""), field[2]
            line = f"- `{name}`{separator}{line[field.end() :]}"
        lines.append(line)
    return "\n".join(lines)


def modules() -> dict[str, list[str]]:
    """Public modules by the part of the reference they belong to."""
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    for path in sorted((ROOT / "mbx").rglob("*.py")):
        *folders, name = path.relative_to(ROOT / "mbx").with_suffix("").parts
        if name == "__init__":
            name = folders.pop() if folders else ""
        if name.startswith("_"):
            continue
        top = folders[0] if folders else name
        part = next((part for part, folder in PARTS.items() if folder == top), "Kit")
        found[part].append(".".join(filter(None, ["mbx", *folders, name])))
    return found


def on_config(config: Any) -> Any:
    """Put the reference into the navigation."""
    pages = {
        part: [{name: f"api/{name}.md"} for name in names] for part, names in modules().items()
    }
    config.nav = [*config.nav, {"Reference": [{part: page} for part, page in pages.items()]}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of the repository."""
    readme = (ROOT / "README.md").read_text()
    texts = {"index.md": re.sub(r"\]\(docs/", "](", readme)}
    for names in modules().values():
        texts |= {f"api/{name}.md": f"# `{name}`\n\n::: {name}\n" for name in names}
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    return files
