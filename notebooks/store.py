"""Write what all notebooks share, run them, and store them with their outputs.

    python notebooks/store.py                 # all of them
    python notebooks/store.py planner empo    # some
    python notebooks/store.py --cells         # only what they share; outputs stay as they are

What they share is the cell that installs mbx, and, where `url` of setup.cfg says the repository's
address, the badge that opens a notebook on Colab. With its outputs a notebook stores a digest of
its code: tests/test_notebooks.py says when they are of other code.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import pathlib
import sys
from typing import Any

import nbclient
import nbformat

HERE = pathlib.Path(__file__).resolve().parent
INSTALL = """\
import importlib.util
import pathlib
import subprocess
import sys

ADDRESS = "{address}"  # of the repository, as its setup.cfg says it

# From the checkout around us, an uploaded wheel, or the repository's address.
if importlib.util.find_spec("mbx") is None:
    here = pathlib.Path.cwd()
    roots = [p for p in (here, *here.parents) if (p / "mbx" / "mppi.py").exists()]
    sources = [*roots[:1], *sorted(here.glob("mbx_rl-*.whl"))[-1:]]
    sources += [f"git+{{ADDRESS}}"] if ADDRESS else []
    if not sources:
        raise RuntimeError(
            "mbx is not installed, and there is nothing here to install it from. Upload a wheel "
            "beside this notebook (in a checkout: pip wheel --no-deps . makes mbx_rl-*.whl; on "
            "Colab: the folder symbol on the left), or set ADDRESS above to the repository's, then "
            "run this cell again."
        )
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", str(sources[0])], check=True)\
"""


def address() -> str:
    """The repository's address by the package's metadata; "" where there is none yet."""
    config = configparser.ConfigParser()
    config.read(HERE.parent / "setup.cfg")
    return config.get("metadata", "url", fallback="").strip()


def install_cell(where: str) -> str:
    """Source of the cell that installs mbx."""
    return INSTALL.format(address=where)


def badge(name: str, where: str) -> str:
    """The line that opens a notebook on Colab; "" unless the repository is on GitHub."""
    head = "https://github.com/"
    if not where.startswith(head):
        return ""
    path = where.removeprefix(head).removesuffix(".git").strip("/")
    link = f"https://colab.research.google.com/github/{path}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"


def digest(notebook: Any) -> str:
    """Of the code of a notebook, but the cell that installs."""
    found = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code" and "install" not in cell.metadata.get("tags", ()):
            found.update(cell.source.encode() + b"\0")
    return found.hexdigest()[:16]


def share(name: str, notebook: Any, where: str) -> None:
    """Put in what all notebooks share."""
    first, install = notebook.cells[:2]
    title, *parts = first.source.split("\n\n")
    parts = [part for part in parts if not part.startswith("[![Open in Colab]")]
    first.source = "\n\n".join(filter(None, [title, badge(name, where), *parts]))
    install.source = install_cell(where)


def run(notebook: Any) -> None:
    """Run all cells as a reader's kernel does, and keep what they show, but no log."""
    os.environ["PYTHONPATH"] = str(HERE.parent)
    place = {"metadata": {"path": str(HERE)}}
    nbclient.NotebookClient(notebook, timeout=7200, resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
    notebook.metadata["mbx"] = {"outputs_of": digest(notebook)}


def main(arguments: list[str]) -> None:
    """Write, run and store the notebooks that are named."""
    names = [x for x in arguments if x != "--cells"] or sorted(p.stem for p in HERE.glob("*.ipynb"))
    for name in names:
        path = HERE / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        info = dict(notebook.metadata.language_info)
        share(name, notebook, address())
        if "--cells" not in arguments:
            run(notebook)
        notebook.metadata.language_info = info  # not which Python it was
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
