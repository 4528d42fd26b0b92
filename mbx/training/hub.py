"""Runs on a model hub, named hf://USER/NAME: `push` uploads one, `local` is where it is read from.

A run is its settings, inputs, rows and best train state (arrays and JSON), with a card, README.md.
Nothing of it is executed but its own environment's file, and that only with --trust: also where
this user trains with a file of that name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from mbx.training import rundir
from mbx.training.logging import read_rows

_PREFIX = "hf://"
_FILES = ("config.json", "run.json", "spec.json", "metrics.jsonl", "best", "inputs")
_PATTERNS = [pattern for name in _FILES for pattern in (name, f"{name}/*")]


def is_remote(path: str) -> bool:
    """Whether a run directory is named by hf://."""
    return path.startswith(_PREFIX)


def local(path: str) -> str:
    """The directory of a run: `path` itself, or a copy of an hf:// run of the newest commit.
    Without network an earlier copy. Raises ValueError for a malformed name, ImportError without
    huggingface_hub, OSError where there is no such run or it cannot be downloaded.
    """
    if not is_remote(path):
        return path
    with _errors(path, "downloaded") as hub:
        snapshot = hub.snapshot_download(
            _name(path), allow_patterns=_PATTERNS, endpoint=os.environ.get("HF_ENDPOINT")
        )
    commit = os.path.basename(snapshot)
    copy = os.path.join(rundir.downloads(), _name(path).replace("/", "--"), commit)
    if not os.path.isdir(copy):  # of files, where the library's has links, which no run may have
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(copy)) as folder:
            shutil.copytree(snapshot, os.path.join(folder, "run"))
            with contextlib.suppress(OSError):  # another process was first
                os.rename(os.path.join(folder, "run"), copy)
    return copy


def push(workdir: str, url: str, *, private: bool = False) -> str:
    """Upload a run; returns the address of its page. Files of an earlier run are replaced.
    Raises as `local`, and ValueError or FileNotFoundError where `workdir` holds no evaluated run.
    """
    with tempfile.TemporaryDirectory() as folder, _errors(url, "uploaded") as hub:
        name = _name(url)
        pack(workdir, folder, url)
        api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        page = api.create_repo(name, private=private or None, exist_ok=True)
        options: dict[str, Any] = dict(delete_patterns=_PATTERNS, commit_message="Push a run")
        api.upload_folder(repo_id=name, folder_path=folder, **options)
    return str(page)


def pack(workdir: str, folder: str, url: str) -> None:
    """Copy what is shared of a run to a folder, with its card. Raises as `push`."""
    config = rundir.load_config(workdir)
    if not os.path.isdir(os.path.join(workdir, "best")):
        raise FileNotFoundError(f"{workdir} has no best/: push a run that was evaluated once")
    for name in _FILES:
        source, target = os.path.join(workdir, name), os.path.join(folder, name)
        if os.path.isdir(source):
            shutil.copytree(source, target)
        elif os.path.exists(source):
            shutil.copy(source, target)
    with open(os.path.join(folder, "README.md"), "w") as file:
        file.write(card(workdir, config, url))


def card(workdir: str, config: dict[str, Any], url: str) -> str:
    """The card of a run in Markdown: result, command, versions and how to use it."""
    agent, task = config["agent"], config["env"]["name"]
    rows = read_rows(os.path.join(workdir, "metrics.jsonl"))
    rows = [row for row in rows if row.get("return_mean") is not None]  # null: not finite
    head: dict[str, Any] = {"library_name": "mbx"}
    head["tags"] = ["reinforcement-learning", "model-based", agent]
    words = "Never evaluated."
    if rows:
        best = max(rows, key=lambda row: row["return_mean"])
        score = f"{best['return_mean']:.4g} ± {best.get('return_std') or 0.0:.4g}"
        result = {
            "task": {"type": "reinforcement-learning"},
            "dataset": {"name": task, "type": task},
            "metrics": [{"type": "mean_reward", "name": "mean return", "value": score}],
        }
        head["model-index"] = [{"name": url.rpartition("/")[2], "results": [result]}]
        words = (
            f"Mean return {score} over {config['eval'].get('episodes')} episodes at step "
            f"{best['step']:,}, the best of {len(rows)} evaluations."
        )
    made = (rundir.attempts(workdir) or [{}])[-1]
    versions = ", ".join(f"{k} {v}" for k, v in made.get("versions", {}).items())
    lines = [f"{key}: {json.dumps(value)}" for key, value in head.items()]  # JSON is YAML
    return "\n".join(
        [
            *("---", *lines, "---", f"# {agent} on {task}", ""),
            *(words, "", "Trained by", "", f"    {made.get('command', 'unknown')}", ""),
            f"with {versions or 'unknown versions'} (commit {made.get('commit', 'unknown')}).",
            *("", "Evaluate it, or act with it:", "", f"    mbx evaluate {url}", ""),
            f'    policy = mbx.load_policy("{url}")',
            "",
        ]
    )


def _name(url: str) -> str:
    name = url.removeprefix(_PREFIX)
    if not is_remote(url) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"{url} names no run on a hub: give hf://USER/NAME")
    return name


@contextlib.contextmanager
def _errors(url: str, done: str) -> Iterator[Any]:
    """The library; its errors become one sentence."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ImportError(f"{url} needs huggingface_hub: pip install 'mbx-rl[hub]'") from error
    from huggingface_hub import errors, utils

    utils.disable_progress_bars()
    try:
        yield hub
    except errors.HFValidationError as error:
        raise ValueError(f"{url} names no run on a hub: {error}") from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        # A missing copy is reported in place of the answer that led to looking for one.
        answers = [getattr(x, "response", None) for x in (error, error.__cause__)]
        status = next((x.status_code for x in answers if x is not None), None)
        reason, remedy = "it cannot be reached", "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        if status is not None:
            reason = f"the server answered {status}"
        if status in (401, 403):
            remedy = "correct the name, or set HF_TOKEN to a token with access"
        elif status == 404:
            remedy = "correct the name"
        raise OSError(f"{url} is not {done}, {reason}: {remedy}") from error
