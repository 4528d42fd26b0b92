"""Starting from another run: its parameters for a new task, or its rows without acting.

`train.init_from=RUN` begins with the best parameters of RUN (fine-tuning). A run of several tasks
(`multi:…`) may be fine-tuned on others: they are padded to the sizes of RUN, tasks of the same name
keep their embedding and new ones start from the mean of all. `train.dataset=FILE` learns from rows
that were recorded before (`mbx.training.datasets`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mbx import tasks
from mbx.envs.base import EnvSpec
from mbx.training import datasets
from mbx.training.checkpoint import Checkpointer, load_config
from mbx.training.environments import environment_spec

Config = Mapping[str, Any]


def resolve(config: Config) -> Config:
    """`config` with what another run or a dataset decides filled in.

    Raises ValueError for agents or combinations that cannot start from something else.
    """
    source, dataset = config["train"].get("init_from"), config["train"].get("dataset")
    if not source and not dataset:
        return config
    for field, value in (("init_from", source), ("dataset", dataset)):
        if value and (config["agent"] != "tdmpc" or config.get("num_seeds", 1) > 1):
            raise ValueError(
                f"train.{field}={value!r} needs config.agent='tdmpc' (not {config['agent']!r}) and "
                "config.num_seeds=1"
            )
    env, replay = dict(config["env"]), dict(config["replay"])
    if source and env["name"].startswith("multi:"):
        spec = environment_spec(load_config(source))
        env["pad_to"] = (spec.obs_shape[0] - len(spec.tasks), spec.action_dim)
    if dataset:
        env["num_envs"], rows = datasets.shape(dataset)
        replay["capacity"] = env["num_envs"] * rows
    return {**config, "env": env, "replay": replay}


def start_from(config: Config, spec: EnvSpec, train: Any, build: Any) -> Any:
    """`train`, a fresh train state, with the parameters of the run `train.init_from`.

    Optimisers, scales and the update counter stay fresh. build(config, spec) -> agent.

    Raises ValueError, naming the component, where the two models differ in shape.
    """
    source = config["train"]["init_from"]
    old_config = load_config(source)
    old_spec = environment_spec(old_config)
    example = jax.eval_shape(build(old_config, old_spec).init, jax.random.key(0))
    checkpointer = Checkpointer(source)
    old, _ = checkpointer.restore_best(example)
    checkpointer.close()
    params = dict(old.params)
    if "task" in params and spec.tasks:
        names = [[task.name for task in s.tasks] for s in (old_spec, spec)]
        params["task"] = tasks.carry_over(params["task"], *names)
    _check_same(source, params, train.params)
    copies = {"target_value": "value", "target_aux": "aux_value", "target_policy": "policy"}
    moved = {
        field: jax.tree.map(jnp.copy, params[name])
        for field, name in copies.items()
        if getattr(train, field) is not None
    }
    return train.replace(params={name: params[name] for name in train.params}, **moved)


def _check_same(source: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name, wanted in new.items():
        have = jax.tree.map(jnp.shape, old.get(name))
        want = jax.tree.map(jnp.shape, wanted)
        if have != want:
            raise ValueError(
                f"train.init_from={source}: the component '{name}' has other shapes there: use the "
                "same config.model, and a task with the same sizes or a multi:… one"
            )
