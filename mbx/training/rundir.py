"""A run directory: checks before a run starts or resumes in it, and what it tells about its run.

Existing files are not overwritten: a run is resumed or left unchanged, and only what a resumed run
regenerates is moved. Next to rows and checkpoints it holds

* config.json: the settings, and inputs/: copies of the user's own files that they name. The same
  path in a stranger's config.json may be another file; readers are led to the copies;
* spec.json: sizes and units of the task (`EnvSpec`), so that a policy acts without the environment;
* run.json: what code ran where and when, an attempt for every start: `{"attempts": [{"started":
  "2026-11-22T20:00:00Z", "from_step": 0, "ended": "…", "processor_seconds": 95.2, "to_step": 4000,
  "outcome": "complete", "commit": "1a2b3c4", "changed_files": 0, "versions": {"mbx": "…"},
  "machine": "…"}, …]}`. One without `ended` was killed.

A config.json may also name code. What this user has trained with is listed in
`$XDG_DATA_HOME/mbx/environments`, one name a line; other users' runs execute no code without
`--trust`.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import mbx
from mbx.agents.settings import RunSettings
from mbx.config import extensions, settings_class
from mbx.envs import custom
from mbx.envs.base import check_reward_range
from mbx.settings import flatten, from_dict, to_dict
from mbx.training.files import atomic_write, read_json
from mbx.training.logging import read_rows
from mbx.training.state import LoopState
from mbx.types import ActionPart, EnvSpec, Part

Config = Mapping[str, Any]
_LOG = 50e6  # bytes of rows, events and figures
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")

# What a run keeps from beginning to end; everything else may change when it is resumed.
_FIXED = ("agent", "seed", "num_seeds", "env", "model")
_ROWS = ("metrics.jsonl", "metrics.csv", "episodes.csv", "training_episodes.csv")
_READ: dict[str, type] = {  # by everything that opens a run
    "agent": str,
    **dict.fromkeys(("env", "train", "eval", "checkpoint", "replay"), dict),
    **{"env.name": str, "env.num_envs": int},
}
_MADE = (*_ROWS, "best", "tb", "curve.png", "report.html", "config.json")


def default(settings: RunSettings) -> str:
    """A directory for a new run, runs/TASK-sSEED-TIME."""
    when = time.strftime("%Y%m%d-%H%M%S")
    return os.path.join("runs", f"{custom.label(settings.env.name)}-s{settings.seed}-{when}")


def check(config: Config, workdir: str, log_dir: str) -> None:
    """Raise ValueError where a run of `config` cannot start or resume in `workdir`.
    log_dir: the directory of its rows; `workdir`, or that of the first of several seeds.
    """
    if os.path.exists(workdir) and not os.path.isdir(workdir):
        raise ValueError(f"workdir={workdir} is a file: choose another directory")
    names = ("metrics.jsonl", "best", "checkpoints")
    holds = [name for name in names if _holds(log_dir, name) or _holds(workdir, name)]
    if not config["resume"]:
        if holds:
            raise ValueError(
                f"workdir={workdir} already holds a run ({', '.join(holds)}): continue it with "
                "--config.resume=True or choose another directory"
            )
        return
    begun = [os.path.join(log_dir, "config.json"), os.path.join(workdir, ".lock")]
    if not holds and not any(os.path.exists(path) for path in begun):
        raise ValueError(
            f"workdir={workdir} holds no run to resume: fix the path, or begin one there without "
            "--config.resume=True"
        )
    _check_same(config, begun[0])


def set_aside(log_dirs: Sequence[str], first_checkpoint: int, steps: int) -> None:
    """Move rows, and what belongs to them, from before the first checkpoint into a directory.

    Args:
        log_dirs: directories of rows of a run without a checkpoint.
        first_checkpoint: environment steps at which the first was due; its write may last until the
            second.
        steps: environment steps of the whole run.

    Raises ValueError where the checkpoints of rows have been lost.
    """
    for log_dir in log_dirs:
        rows = read_rows(os.path.join(log_dir, "metrics.jsonl"))
        last = max((row["step"] for row in rows), default=0)
        if last > 2 * first_checkpoint or last >= steps:
            raise ValueError(
                f"{log_dir} has rows up to step {last:,} and no checkpoint: put checkpoints/ back, "
                "or begin again in another directory (resuming here would write over those rows)"
            )
    for log_dir in log_dirs:
        made = [name for name in _MADE if os.path.lexists(os.path.join(log_dir, name))]
        if "metrics.jsonl" not in made:
            continue
        number = 1
        while os.path.lexists(aside := os.path.join(log_dir, f"before-{number}")):
            number += 1
        os.makedirs(aside)
        for name in made:
            os.rename(os.path.join(log_dir, name), os.path.join(aside, name))
        warnings.warn(
            f"{log_dir} has no checkpoint yet: the run begins again, what was there is in {aside}",
            stacklevel=3,
        )


def _holds(directory: str, name: str) -> bool:
    """Whether a file or a non-empty directory exists."""
    path = os.path.join(directory, name)
    return bool(os.listdir(path)) if os.path.isdir(path) else os.path.lexists(path)


def _check_same(config: Config, path: str) -> None:
    """Raise ValueError where `config` describes another run than the one at `path`."""
    if not os.path.exists(path):
        return
    try:
        saved = read_json(path)
    except ValueError as error:
        warnings.warn(f"{error}: written again", stacklevel=4)
        return
    given = _as_saved({**config, "num_seeds": 1})  # each of several seeds keeps its own
    different = []
    for name in _FIXED:
        old, new = saved.get(name), given.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            # What only one of them has came, or went, with a version.
            inner = sorted(k for k in old.keys() & new.keys() if old[k] != new[k])
            different += [f"{name}.{k}={new[k]!r} (there {old[k]!r})" for k in inner]
        elif None not in (old, new) and old != new:
            different.append(f"{name}={new!r} (there {old!r})")
    if different:
        raise ValueError(
            f"{path} is of another run: {'; '.join(different[:4])}: give the settings it was "
            "started with, or choose another directory"
        )


def _as_saved(config: Config) -> dict[str, Any]:
    """A configuration as it comes back from JSON."""
    return json.loads(json.dumps(config))


def load_config(workdir: str) -> dict[str, Any]:
    """The configuration a run was started with.
    Raises FileNotFoundError if `workdir` holds no run, and ValueError if its file is malformed.
    """
    path = os.path.join(workdir, "config.json")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} does not exist: workdir={workdir} holds no run: correct the path, or train "
            "one there"
        )
    config = read_json(path)
    for name, kind in _READ.items():
        value: Any = config
        for part in name.split("."):
            value = value.get(part)
        if not isinstance(value, kind):
            raise ValueError(f"{path}: field {name!r} is missing or no {kind.__name__}")
    return config


def load_settings(workdir: str) -> RunSettings:
    """The settings a run was started with, with its own copies of the files they name.
    Raises FileNotFoundError if `workdir` holds no run, and ValueError where its settings are
    another version's or copies are missing.
    """
    values = load_config(workdir)
    extensions.require(values.get("imports", ()), os.path.join(workdir, "config.json"))
    return with_kept_inputs(_saved_settings(values, workdir, check_effects=False), workdir)


def _saved_settings(values: Mapping[str, Any], workdir: str, **options: bool) -> RunSettings:
    try:
        return from_dict(settings_class(values["agent"])(), values, **options)
    except ValueError as error:
        raise ValueError(
            f"{workdir}/config.json is of another version ({error}): use the code that wrote it"
        ) from error


def check_inputs(files: Mapping[str, str], log_dir: str) -> None:
    """Raise ValueError where the run in `log_dir` began with other files than these, by setting."""
    for name, path in files.items():
        copy = _copy(log_dir, name, path)
        if os.path.exists(copy) and _content(copy) != _content(path):
            raise ValueError(
                f"{name}={path} is not what the run in {log_dir} began with, which is {copy}: give "
                "that file, or choose another directory"
            )


def keep_inputs(files: Mapping[str, str], log_dir: str) -> None:
    """Copy the files that settings name into a run directory."""
    for name, path in files.items():
        copy = _copy(log_dir, name, path)
        if not os.path.exists(copy):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            atomic_write(copy, _content(path))


def with_kept_inputs(settings: RunSettings, log_dir: str) -> RunSettings:
    """`settings` from a run directory, with its copies in place of the files they name.

    Raises ValueError where there is none, or it is a link that leads out of the directory.
    """
    copies = {}
    for name, path in settings.files().items():
        copy = _copy(log_dir, name, path)
        inside = os.path.realpath(copy).startswith(os.path.realpath(log_dir) + os.sep)
        if not inside or not os.path.isfile(copy):
            raise ValueError(
                f"{name}={path} lies outside of the run and is not opened: if you trust that file, "
                f"copy it to {copy}"
            )
        copies[name] = copy
    return settings.with_files(copies)


def _copy(log_dir: str, name: str, path: str) -> str:
    return os.path.join(log_dir, "inputs", name + (os.path.splitext(path)[1] or ".yaml"))


def _content(path: str) -> bytes:
    """Of a file; of a folder that of its YAML files as one, a line `---` before each."""
    if os.path.isdir(path):
        files = sorted(name for name in os.listdir(path) if name.endswith(".yaml"))
        return b"".join(b"---\n" + _content(os.path.join(path, name)) + b"\n" for name in files)
    with open(path, "rb") as file:
        return file.read()


# Required fields of spec.json by JSON type.
_KINDS = {
    "name": str,
    "obs_shape": list,
    "obs_dtype": str,
    "action_dim": int,
    "episode_length": int,
    "action_repeat": int,
    "discrete": bool,
    "can_terminate": bool,
    "metrics": list,
    "action_low": list,
    "action_high": list,
}


def _action_dtype(value: Any) -> str:
    if np.dtype(value).kind not in "iuf":
        raise ValueError(f"{value!r} is no type of numbers")
    return np.dtype(value).name


# Fields left out at their defaults, and how each is read.
_IF_ANY: dict[str, Callable[[Any], Any]] = {
    "parts": lambda found: tuple(Part(str(name), tuple(map(int, shape))) for name, shape in found),
    "reward_range": lambda found: check_reward_range("the task", found),
    "choices": lambda found: tuple(
        (str(name), tuple((int(first), int(count)) for first, count in entries))
        for name, entries in found
    ),
    "action_shape": lambda found: tuple(map(int, found)),
    "action_dtype": _action_dtype,
    "action_parts": lambda found: tuple(
        ActionPart(
            str(name), tuple(map(int, shape)), _action_dtype(dtype), tuple(map(tuple, entries))
        )
        for name, shape, dtype, entries in found
    ),
}


def save_spec(spec: EnvSpec, workdir: str) -> None:
    """Write spec.json, where the task is no more than that."""
    if spec.tasks or spec.world is not None:
        return
    usual = EnvSpec._field_defaults
    values = {name: getattr(spec, name) for name in (*_KINDS, *_IF_ANY)}
    values = {n: x for n, x in values.items() if n in _KINDS or x != usual[n]}
    os.makedirs(workdir, exist_ok=True)  # of one of several seeds: nothing made it yet
    values["obs_dtype"] = np.dtype(spec.obs_dtype).name
    atomic_write(os.path.join(workdir, "spec.json"), json.dumps(values, indent=2).encode())


def load_spec(workdir: str) -> EnvSpec | None:
    """The spec that `save_spec` wrote; None without one. Raises ValueError for other content."""
    path, values = os.path.join(workdir, "spec.json"), {}
    if not os.path.exists(path):
        return None
    found = read_json(path)
    for name, kind in _KINDS.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"{path}: field {name!r} is missing or no {kind.__name__}")
        values[name] = tuple(found[name]) if kind is list else found[name]
    for name, read in {"obs_dtype": np.dtype, **_IF_ANY}.items():
        if name in found:
            try:
                values[name] = read(found[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: field {name!r}: {error}") from error
    return EnvSpec(**values)


@contextlib.contextmanager
def attempt(workdir: str, from_step: int) -> Iterator[dict[str, Any]]:
    """Record a start in WORKDIR/run.json, and how it ended.

    Yields its record, in which the run sets "to_step" and, unless it completes, "outcome". A file
    that cannot be read is replaced, with a warning. Raises OSError where it cannot be written.
    """
    try:
        earlier = attempts(workdir)
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}: written again", stacklevel=3)
        earlier = []
    unknown = dict.fromkeys(("ended", "processor_seconds", "to_step", "outcome"))
    before = sum(os.times()[:4])  # of the process and its children
    now = {"started": _clock(), "from_step": from_step, **unknown, **provenance()}
    now["devices"] = f"{jax.device_count()} {jax.devices()[0].device_kind}"

    def write(**fields: Any) -> None:
        if fields:
            now.update(fields, ended=_clock())
            now["processor_seconds"] = round(sum(os.times()[:4]) - before, 2)
        content = json.dumps({"attempts": [*earlier, now]}, indent=1) + "\n"
        atomic_write(os.path.join(workdir, "run.json"), content.encode())

    write()
    try:
        yield now
    except BaseException as error:
        with contextlib.suppress(OSError):  # the run's own error matters more
            write(outcome=type(error).__name__)
        raise
    write(outcome=now["outcome"] or "complete")


def attempts(workdir: str) -> list[dict[str, Any]]:
    """The attempts of a run, oldest first; [] where there is no run.json.

    Raises ValueError, naming the file, where it holds anything else.
    """
    path = os.path.join(workdir, "run.json")
    if not os.path.lexists(path):
        return []
    found = read_json(path).get("attempts")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path}: field 'attempts' is missing or no list of objects")
    return found


def provenance() -> dict[str, Any]:
    """Command, commit, versions and machine of what runs now: fields of an attempt.

    The commit is that of the checkout with mbx in it ("unknown" for an installed wheel).
    """
    root = pathlib.Path(mbx.__file__).resolve().parents[1]
    top = _git(root, "rev-parse", "--show-toplevel")
    own = bool(top) and pathlib.Path(top).resolve() == root
    changed = _git(root, "status", "--porcelain", "--untracked-files=no") if own else ""
    return {
        "command": shlex.join(sys.orig_argv),
        "commit": (_git(root, "rev-parse", "--short", "HEAD") if own else "") or "unknown",
        "changed_files": len(changed.splitlines()),
        "versions": {"mbx": mbx.__version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _git(root: pathlib.Path, *arguments: str) -> str:
    """What git says, '' where it is not there or does not answer."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _clock() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def saved_config(workdir: str) -> dict[str, Any]:
    """The configuration with which the run in `workdir` goes on where nothing else is said.

    Raises:
        FileNotFoundError: where there is no run.
        ValueError: where it is of another version, or its environment is code or a file that has to
            be named again.
    """
    names = os.listdir(workdir) if os.path.isdir(workdir) else []
    seeds = sorted(int(name[5:]) for name in names if re.fullmatch(r"seed-\d+", name))
    several = seeds and "config.json" not in names
    path = os.path.join(workdir, f"seed-{seeds[0]}") if several else workdir
    values = load_config(path)
    if several:
        values["num_seeds"] = len(seeds)
    settings = _saved_settings(values, path)
    check_trusted(settings.env.name, workdir, False)
    for name, file in settings.files().items():
        raise ValueError(
            f"the run in {workdir} was made from the file {name}={file}: name it again, with "
            "--config=… and the settings the run was started with"
        )
    return values


def changes(settings: RunSettings, log_dir: str, spec: EnvSpec) -> list[str]:
    """The settings in which a resumed run differs from its config.json, with both values in force.

    Args:
        settings: of the resumed run.
        log_dir: where its config.json is.
        spec: its task, which fills in what is left to it.
    """
    try:
        before = read_json(os.path.join(log_dir, "config.json"))
    except (FileNotFoundError, ValueError):  # damaged: `_check_same` has warned
        return []
    given = to_dict(settings)
    with contextlib.suppress(ValueError):  # of another version
        saved = from_dict(type(settings)(), before, check_effects=False)
        before, given = (to_dict(one.for_task(spec)) for one in (saved, settings))
    old, new = (dict(flatten(_as_saved(one))) for one in (before, given))
    ours = ("resume", "num_seeds", "seed")  # each of several seeds has its own
    changed = [name for name in new if name in old and name not in ours and old[name] != new[name]]
    return [f"{name}={new[name]!r} (was {old[name]!r})" for name in changed]


def evaluations_before(log_dirs: Sequence[str], step: int) -> list[tuple[int, float]]:
    """Steps and mean returns, over the seeds, of the evaluations up to `step`."""
    found: dict[int, list[float]] = {}
    for path in log_dirs:
        for row in read_rows(os.path.join(path, "metrics.jsonl")):
            if row["kind"] == "eval" and row["step"] <= step and "return_mean" in row:
                value = row["return_mean"]
                found.setdefault(row["step"], []).append(math.nan if value is None else value)
    # A step that not all seeds have evaluated has no mean.
    common = sorted(step for step, values in found.items() if len(values) == len(log_dirs))
    return [(step, float(np.mean(found[step]))) for step in common]


def remember_trusted(name: str) -> None:
    """Note that this user trains with a custom environment."""
    new = sorted(set(custom.own_names(name)) - _trusted_names())
    if new:
        with contextlib.suppress(OSError):  # a read-only home: `check_trusted` names the remedy
            os.makedirs(os.path.dirname(_trusted_file()), exist_ok=True)
            with open(_trusted_file(), "a") as file:
                file.writelines(f"{one}\n" for one in new)


def check_trusted(name: str, workdir: str, trusted: bool) -> None:
    """Raise ValueError where the run in `workdir` names code that this user never trained with.
    trusted: the user asked for it (`--trust`, `run.load(trusted=True)`).
    """
    inside = os.path.realpath(workdir).startswith(os.path.realpath(downloads()) + os.sep)
    known = set() if inside else _trusted_names()  # a stranger may use the names of this user
    foreign = [] if trusted else sorted(set(custom.own_names(name)) - known)
    if foreign:
        raise ValueError(
            f"the run in {workdir} executes {foreign[0].partition(':')[2]}, which no run of yours "
            "was made with: look at it, then ask for it with --trust (run.load: trusted=True)"
        )


def downloads() -> str:
    """Directory of runs that came from a hub."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(root, "mbx", "hub")


def _trusted_file() -> str:
    root = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(root, "mbx", "environments")


def _trusted_names() -> set[str]:
    with contextlib.suppress(OSError), open(_trusted_file()) as file:
        return set(file.read().splitlines())
    return set()


def check_room(
    config: Config, workdir: str, state: LoopState, steps: int, *, devices: int = 1
) -> None:
    """Raise ValueError, with the numbers and what to do, where a run cannot fit.

    Args:
        config: its configuration.
        workdir: where it will write.
        state: its state, abstract or not.
        steps: rows that it will make in all.
        devices: devices that it is divided among.
    """
    sizes = state_bytes(state)
    replay, train, capacity = sizes["replay"], sizes["train state"], config["replay"]["capacity"]
    copied = train + replay / devices  # a checkpoint, while it is written
    held = copied + 2 * sizes["parameters"]  # gradients and what the optimiser makes of them
    device = jax.local_devices()[0]
    stats = (device.memory_stats() if device.platform != "cpu" else None) or {}
    needed, free, where = (held + copied) * devices, free_memory(), "memory"
    if stats.get("bytes_limit") is not None:
        needed, where = copied, "memory for a checkpoint's copy"
        if copied <= free:
            free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
            needed, where = held, f"memory of {device}"
    if needed > free:
        raise ValueError(
            f"replay.capacity={capacity} and the model need at least {_gb(needed)} of {where} "
            f"(replay {_gb(replay)}, train state {_gb(train)}), {_gb(free)} is free: lower "
            "replay.capacity, or choose a smaller model"
        )
    filled = replay * min(1.0, steps / max(1, capacity))  # what is empty compresses to nothing
    checkpoints = 1 if config["resume"] else 2
    needed, free = checkpoints * (train + filled) + _LOG, free_disk(workdir)
    if needed > free:
        raise ValueError(
            f"workdir={workdir} has {_gb(free)} free, the run needs {_gb(needed)} for "
            f"{checkpoints} checkpoints and its log: free space there, choose another directory, "
            "or lower replay.capacity"
        )


def state_bytes(state: LoopState) -> dict[str, int]:
    """Bytes of the parts of a state that grow with settings."""
    return {
        "replay": _bytes(state.replay),
        "train state": _bytes(state.train),
        "parameters": _bytes(state.train.params),
    }


def free_memory() -> float:
    """Bytes that this process may still allocate; infinite where the system does not say.

    What the process has already of its own limits (`ulimit -v`, `ulimit -d`) is not taken off: much
    of that is room that its allocator reserved.
    """
    limits = [math.inf]
    with contextlib.suppress(OSError, KeyError), open("/proc/meminfo") as file:
        named = dict(line.split(":") for line in file)
        limits.append(float(named["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        own = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        limits += [float(limit) for limit in own if limit != resource.RLIM_INFINITY]
    for most, used in (  # a container's limits: cgroup version 2, then 1
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            with open(f"/sys/fs/cgroup/{most}") as file, open(f"/sys/fs/cgroup/{used}") as other:
                limits.append(float(file.read()) - float(other.read()))
    return max(0.0, min(limits))


def free_disk(path: str) -> float:
    """Bytes free where `path` is, or will be made."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def _bytes(tree: Any) -> int:
    def plain(x: Any) -> Any:
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    leaves = jax.tree.leaves(jax.eval_shape(lambda tree: jax.tree.map(plain, tree), tree))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _gb(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e8 else f"{number / 1e6:.3g} MB"
