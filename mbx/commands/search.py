"""Search for the best settings by Optuna, whose trials are a sweep's runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mbx.commands.jobs import CONTINUES, UNMEASURED, Job, run_all

_NUMBER = r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}( log)?")


def bounds(value: str) -> tuple[float, float, bool] | None:
    """Ends of the range "LOW..HIGH" or "LOW..HIGH log", whole where both are; None if it is none.
    Raises ValueError for an empty range, and for a logarithmic one of numbers below 0.
    """
    if (found := _RANGE.fullmatch(value)) is None:
        return None
    low, high = (float(x) if set(".eE") & set(x) else int(x) for x in found.groups()[:2])
    if not low < high or (found[3] and low <= 0):
        raise ValueError(f"the range {value} is empty or has no logarithm: write LOW..HIGH log")
    return low, high, bool(found[3])


def search(
    axes: Mapping[str, Sequence[str]],
    make: Callable[[Mapping[str, str]], list[Job]],
    *,
    trials: int,
    workers: int,
    devices: int,
    storage: str,
) -> tuple[list[Job], list[str]]:
    """Run trials until there are enough: the runs of complete ones, best first, and messages.

    Args:
        axes: texts of each setting's values; a range, alone, is searched in.
        make: values of the settings -> a run for each seed.
        trials: number of trials in the database, with those of earlier commands.
        workers, devices: as `run_all`.
        storage: URL of the database.

    Raises:
        ImportError: without Optuna.
        ValueError: for invalid settings, and a database that cannot be used for them.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("--search=optuna needs Optuna: pip install 'mbx-rl[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space, ends = _space(optuna.distributions, axes)
    first = {name: values[0] for name, values in ends.items()}
    for name, value in [(one, x) for one, values in ends.items() for x in values]:
        make(first | {name: value})  # checks it
    at_once = -(-workers // len(runs := make(first)))
    study, problems = _study(optuna, storage, space, runs), list[str]()
    state = optuna.trial.TrialState

    def runs_of(trial: Any) -> list[Job]:
        return make({name: _shown(trial.params[name], space[name]) for name in axes})

    begun = study.get_trials(states=(state.RUNNING,))  # by a command that was stopped
    waiting: list[Any] = [trial for trial in begun if len(trial.params) == len(space)]
    while not any(end in problem for problem in problems for end in (CONTINUES, UNMEASURED)):
        room = min(at_once - len(waiting), trials - len(study.trials))
        waiting += [study.ask(space) for _ in range(room)]
        if not waiting or not trials:
            break
        jobs = {trial.number: runs_of(trial) for trial in waiting}
        unique = {job.workdir: job for several in jobs.values() for job in several}
        problems += run_all(list(unique.values()), workers=workers, devices=devices)
        for number, several in jobs.items():
            scores = [job.curve().values[-1] for job in several if job.complete()]
            if len(scores) == len(several) and np.isfinite(scores).all():
                study.tell(number, float(np.mean(scores)))
            elif not any(CONTINUES in problem for problem in problems):
                study.tell(number, state=state.FAIL)
        waiting = []
    done = [trial for trial in study.trials if trial.value is not None]
    done.sort(key=lambda trial: -trial.value)
    ranked = {job.workdir: job for trial in done for job in runs_of(trial)}
    return list(ranked.values()), problems


def _shown(value: Any, kind: Any) -> str:
    """A value as text, short where that is within the ends of its range."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.4g}"
    return short if kind.low <= float(short) <= kind.high else repr(value)


def _space(kinds: Any, axes: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Optuna's distribution of each setting, and its values or the ends of its range."""
    space: dict[str, Any] = {}
    ends: dict[str, Any] = {}
    for name, values in axes.items():
        space[name], ends[name] = kinds.CategoricalDistribution(values), values
        if found := next(filter(None, map(bounds, values)), None):
            if len(values) > 1:
                raise ValueError(f"--set={name}: a range stands alone, leave out the other values")
            *limits, log = found
            whole = not any(isinstance(x, float) for x in limits)
            kind = kinds.IntDistribution if whole else kinds.FloatDistribution
            space[name], ends[name] = kind(*limits, log=log), [str(x) for x in limits]
    return space, ends


def _study(optuna: Any, storage: str, space: Mapping[str, Any], runs: Sequence[Job]) -> Any:
    """The study in a database. Raises ValueError where that is none, or one of other settings.
    runs: of one trial; another configuration, metric or number of seeds means other scores.
    """
    own = [part for part in runs[0].command if part.startswith("--config=")]
    about = dict(seeds=len(runs), metric=runs[0].metric, command=own)
    try:
        study = optuna.create_study(
            storage=storage, study_name="sweep", direction="maximize", load_if_exists=True
        )
        for old in study.trials[:1]:
            if set(old.distributions) != set(space):
                raise ValueError(f"its trials are of {', '.join(old.distributions)}")
            for name, kind in space.items():
                optuna.distributions.check_distribution_compatibility(old.distributions[name], kind)
            if (was := study.user_attrs.get("about", about)) != about:
                raise ValueError(f"its trials are of {was}, not {about}")
        study.set_user_attr("about", about)
    except Exception as error:  # a database's have many types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        remedy = "give another --out or --storage"
        raise ValueError(f"{storage} cannot be used: {reason}: {remedy}") from error
    # Another seed than before, whose draws would be the same.
    study.sampler = optuna.samplers.TPESampler(constant_liar=True, seed=len(study.trials))
    return study
