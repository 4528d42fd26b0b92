"""Convert parameters of the official PyTorch TD-MPC2 to ours and back.

Its state dict has one entry an array; `I` counts the layers of a network:

    _encoder.state.I.weight [out, in]   and .bias, .ln.weight, .ln.bias; also for _dynamics.I,
                                        _reward.I, _termination.I (episodic tasks) and _pi.I
    _Qs.params.I.weight [V, out, in]    value heads; _target_Qs_params.I those of the target
    _task_emb.weight [K, D]             of several tasks, with _action_masks [K, A]
    log_std_min, log_std_dif            bounds of the policy

It repeats the heads under further names (`_detach_Qs…`, `_Qs.module`, …). Checkpoints of 2023 and
2024 number the heads' arrays instead: `_Qs.params.N`, `_target_Qs.params.N`. Arrays are NumPy's;
PyTorch is not loaded. Axes: V value heads, K tasks, D embedding dims, A action dims.
Source: TD-MPC2 (arXiv 2310.16828), its reference code and the checkpoints published with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mbx.agents.tdmpc.types import TrainState
from mbx.types import Params, TaskSet
from mbx.world_model import MODEL_SIZES, WorldModelConfig

State = dict[str, np.ndarray]

_NETWORKS = dict(
    encoder="_encoder.state",
    dynamics="_dynamics",
    reward="_reward",
    termination="_termination",
    policy="_pi",
    value="_Qs.params",
    target_value="_target_Qs_params",
)
_LEAVES = ("weight", "bias", "ln.weight", "ln.bias")
_LEAF = re.compile(
    rf"({'|'.join(map(re.escape, _NETWORKS.values()))})\.\d+\.({'|'.join(map(re.escape, _LEAVES))})"
)
_ONES = ("dynamics", "reward")  # one network there, an ensemble of one here
# The heads under other names, and TensorDict's metadata.
_REPEATED = ("_Qs.module.", "_detach_Qs", "_target_Qs.module.")
_NOTES = re.compile(r"_(detach_|target_)?Qs[._]params\.__(batch_size|device)")
_NUMBERED = re.compile(r"(_Qs|_target_Qs)\.params\.(\d+)")
_EXTRA = ("_task_emb.weight", "_action_masks", "log_std_min", "log_std_dif")


def clean(state: Mapping[str, Any]) -> State:
    """A state dict without repeated arrays, in the newest layout, as float32.

    Raises:
        ValueError: for a name that no vector TD-MPC2 has, and where networks are missing.
    """
    found: State = {}
    for name, array in state.items():
        if name.startswith(_REPEATED) or _NOTES.fullmatch(name):
            continue
        old = _NUMBERED.fullmatch(name)
        if old:
            layer, leaf = divmod(int(old[2]), len(_LEAVES))
            network = _NETWORKS["value" if old[1] == "_Qs" else "target_value"]
            name = f"{network}.{layer}.{_LEAVES[leaf]}"
        elif name.startswith("_encoder.rgb"):
            raise ValueError(f"{name}: the model reads images; only vectors are converted")
        elif name not in _EXTRA and not _LEAF.fullmatch(name):
            raise ValueError(f"{name}: not an array of the official TD-MPC2, which layout is this?")
        found[name] = np.asarray(array, np.float32)
    for network, prefix in _NETWORKS.items():
        if network != "termination" and f"{prefix}.0.weight" not in found:
            raise ValueError(f"{prefix}.0.weight is missing: this is no whole TD-MPC2 model")
    return found


def world_fields(state: State) -> dict[str, Any]:
    """Fields of `WorldModelConfig` that a clean state dict determines, without `tasks`."""

    def shape(network: str, layer: int = 0) -> tuple[int, ...]:
        return state[f"{_NETWORKS[network]}.{layer}.weight"].shape

    layers = _num_layers(state, "encoder")
    task_dim = state["_task_emb.weight"].shape[1] if "_task_emb.weight" in state else 0
    low, span = state.get("log_std_min", np.float32(-10)), state.get("log_std_dif", np.float32(12))
    return dict(
        obs_shape=(shape("encoder")[1] - task_dim,),
        action_dim=shape("policy", _num_layers(state, "policy") - 1)[0] // 2,
        enc_dim=shape("encoder")[0],
        mlp_dim=shape("dynamics")[0],
        latent_dim=shape("encoder", layers - 1)[0],
        num_enc_layers=layers,
        num_values=shape("value")[0],
        num_bins=shape("reward", _num_layers(state, "reward") - 1)[0],
        critic="q",
        policy="squashed",
        episodic=f"{_NETWORKS['termination']}.0.weight" in state,
        log_std_min=float(low),
        log_std_max=float(low + span),
    )


def _num_layers(state: State, network: str) -> int:
    layer = re.compile(rf"{re.escape(_NETWORKS[network])}\.\d+\.bias")
    return sum(bool(layer.fullmatch(name)) for name in state)


def size_name(state: State) -> str:
    """The published size of a clean state dict, by its widths.

    Raises:
        ValueError: naming the widths, where no published size has them.
    """
    fields = world_fields(state)
    widths = {name: fields[name] for name in ("enc_dim", "mlp_dim", "latent_dim", "num_enc_layers")}
    for size, published in MODEL_SIZES.items():
        if all(published[name] == width for name, width in widths.items()):
            return size
    raise ValueError(f"widths {widths} are of no published size: choose from {MODEL_SIZES}")


def task_action_dims(state: State) -> tuple[int, ...]:
    """Actions of each of several tasks. Raises ValueError without `_action_masks`."""
    if "_action_masks" not in state:
        raise ValueError("_action_masks is missing: the tasks' numbers of actions are not known")
    return tuple(int(n) for n in state["_action_masks"].sum(axis=1))


def to_params(state: State) -> tuple[Params, Params]:
    """Parameters of world model and target value heads, from a clean state dict."""
    params: dict[str, Any] = {}
    for network, prefix in _NETWORKS.items():
        num = _num_layers(state, network)
        for i in range(num):
            weight, bias, scale, shift = (state.get(f"{prefix}.{i}.{leaf}") for leaf in _LEAVES)
            layer: Any = dict(kernel=np.swapaxes(weight, -1, -2), bias=bias)
            if scale is not None:
                layer = dict(dense=layer, norm=dict(scale=scale, bias=shift))
            params.setdefault(network, {})["out" if i == num - 1 else f"layer_{i}"] = layer
    for network in _ONES:
        params[network] = jax.tree.map(lambda x: x[None], params[network])
    if "_task_emb.weight" in state:
        embedding = state["_task_emb.weight"]  # the official code limits its norm on reading
        norm = np.linalg.norm(embedding, axis=-1, keepdims=True)
        params["task"] = embedding / np.maximum(norm, np.float32(1.0))
    return params, params.pop("target_value")


def to_state(params: Params, target_value: Params, config: WorldModelConfig) -> State:
    """The state dict, repeated names included, that the official code loads.

    Raises:
        ValueError: for a model that the official code cannot have.
    """
    require_official(config)
    state: State = {
        "log_std_min": np.float32(config.log_std_min),
        "log_std_dif": np.float32(config.log_std_max - config.log_std_min),
    }
    if config.tasks is not None:
        dims = np.asarray(config.tasks.action_dims)[:, None]
        state["_action_masks"] = (np.arange(config.action_dim) < dims).astype(np.float32)
        state["_task_emb.weight"] = np.asarray(params["task"])
    for network in _NETWORKS:
        tree = target_value if network == "target_value" else params.get(network)
        if tree is None:
            continue
        if network in _ONES:
            tree = jax.tree.map(lambda x: x[0], tree)
        hidden = sorted((name for name in tree if name != "out"), key=lambda n: int(n[6:]))
        for i, name in enumerate((*hidden, "out")):
            layer, at = tree[name], f"{_NETWORKS[network]}.{i}."
            dense = layer.get("dense", layer)
            state[f"{at}weight"] = np.swapaxes(np.asarray(dense["kernel"]), -1, -2)
            state[f"{at}bias"] = np.asarray(dense["bias"])
            if "norm" in layer:
                state[f"{at}ln.weight"] = np.asarray(layer["norm"]["scale"])
                state[f"{at}ln.bias"] = np.asarray(layer["norm"]["bias"])
    return state | _repeated(state)


def _repeated(state: State) -> State:
    more: State = {}
    for name, array in state.items():
        for own, others in (
            ("_Qs.params.", ("_detach_Qs_params.", "_detach_Qs.module.")),
            ("_target_Qs_params.", ("_target_Qs.module.",)),
        ):
            if name.startswith(own):
                more |= {other + name.removeprefix(own): array for other in others}
        if name.startswith("_Qs.params."):
            more["_Qs.module." + name.removeprefix("_Qs.params.")] = array[0]
    return more


def require_official(config: WorldModelConfig) -> None:
    """Raises ValueError, naming the setting, for a model that the official code lacks."""
    wanted = dict(critic="q", policy="squashed", num_dynamics=1, num_rewards=1, prior_scale=0.0)
    wanted |= dict(bin_min=-10.0, bin_max=10.0, normalize_observations=False)
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"model.{name}={getattr(config, name)!r}: the official TD-MPC2 has {value!r} only"
            )
    if config.pixels:
        raise ValueError(f"obs_shape={config.obs_shape}: models of images are not converted")


def with_parameters(train: TrainState, state: State) -> TrainState:
    """A fresh train state with the parameters of a clean state dict.

    Raises:
        ValueError: naming the network and both shapes, where the agent's model has another.
    """
    params, target_value = to_params(state)
    for name, wanted in train.params.items():
        have, want = (jax.tree.map(np.shape, x) for x in (params.get(name), wanted))
        if have != want:
            raise ValueError(f"{name}: the file has {have}, the agent of this task {want}")
    return train.replace(params=params, target_value=target_value)


def check_task(state: State, obs_dim: int, action_dim: int, tasks: TaskSet | None) -> None:
    """Raises ValueError where a task is not one that the model was made for.

    Args:
        state: a clean state dict.
        obs_dim: numbers of an observation; padded, with several tasks.
        action_dim: actions; padded, with several tasks.
        tasks: None for one task.
    """
    fields = world_fields(state)
    num = state["_task_emb.weight"].shape[0] if "_task_emb.weight" in state else 1
    given = 1 if tasks is None else tasks.num
    if num != given or ("_task_emb.weight" in state) != (tasks is not None):
        raise ValueError(f"the model is of {num} tasks, the name gives {given}: name all, in order")
    if fields["obs_shape"] != (obs_dim,) or fields["action_dim"] != action_dim:
        raise ValueError(
            f"the model reads {fields['obs_shape'][0]} numbers and has {fields['action_dim']} "
            f"actions, the task has {obs_dim} and {action_dim}: name the task it was trained on"
        )
    if tasks is not None and tasks.action_dims != task_action_dims(state):
        raise ValueError(
            f"actions a task: {task_action_dims(state)} in the model, {tasks.action_dims} in the "
            "tasks: name them in the model's order"
        )
