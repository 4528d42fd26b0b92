"""Official TD-MPC2 checkpoints: their networks here, and a run's networks there."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.agents.tdmpc import official
from mbx.commands import import_tdmpc2
from mbx.commands.export_tdmpc2 import state_dict
from mbx.training import build, run
from mbx.types import TaskSet
from mbx.world_model import WorldModelConfig, make_world_model
from tests.helpers import FIXTURES, compiled, load_fixture, register_toy

NAMES = ("single", "episodic", "multitask")
CLOSE = dict(rtol=1e-5, atol=1e-6)


def read_state(name):
    return dict(np.load(FIXTURES / "tdmpc" / f"checkpoint_{name}_state.npz"))


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request):
    """Inputs and official outputs, the model, its parameters, target heads, and the state dict."""
    arrays, config = load_fixture("tdmpc", f"checkpoint_{request.param}")
    state = official.clean(read_state(request.param))
    fields = official.world_fields(state)
    tasks = None
    if config["multitask"]:
        tasks = TaskSet(tuple(config["tasks"]), tuple(config["action_dims"]), config["task_dim"])
        assert official.task_action_dims(state) == tasks.action_dims
    world = WorldModelConfig(**fields, tasks=tasks)
    params, target = official.to_params(state)
    return arrays, config, compiled(make_world_model(world)), params, target, state


def inputs(checkpoint):
    arrays, _, model, params, _, _ = checkpoint
    obs, tasks = jnp.asarray(arrays["obs"]), model.config.tasks
    if tasks is not None:
        obs = jnp.concatenate([obs, jax.nn.one_hot(arrays["task"], tasks.num)], axis=-1)
    return model.encode(params, obs), jnp.asarray(arrays["action"])


def test_every_network_gives_what_the_official_one_gives(checkpoint):
    arrays, _, model, params, target, _ = checkpoint
    latent = model.config.latent_dim
    with jax.default_matmul_precision("highest"):
        z, action = inputs(checkpoint)
        np.testing.assert_allclose(z[:, :latent], arrays["z"], **CLOSE)
        new = model.step(params, z[None], action)[0]
        np.testing.assert_allclose(new[:, :latent], arrays["next_z"], **CLOSE)
        reward = model.reward(params, z[None], action)[0, 0]
        np.testing.assert_allclose(reward, arrays["reward_logits"], **CLOSE)
        for heads, name in ((params["value"], "q_logits"), (target, "target_q_logits")):
            np.testing.assert_allclose(model.value(heads, z, action), arrays[name], **CLOSE)
        mean, log_std = model.policy(params, z)
        # The official policy bounds its raw deviations by tanh, and masks both halves.
        low, high = model.config.log_std_min, model.config.log_std_max
        bounded = low + 0.5 * (high - low) * (np.tanh(arrays["pi_log_std_raw"]) + 1.0)
        mask = arrays["action_mask"][arrays["task"]] if "action_mask" in arrays else 1.0
        np.testing.assert_allclose(mean, arrays["pi_mean_pretanh"] * mask, **CLOSE)
        np.testing.assert_allclose(log_std, bounded * mask, **CLOSE)
        if model.config.episodic:
            logit = arrays["termination_logit"][:, 0]
            np.testing.assert_allclose(model.termination(params, z), logit, **CLOSE)


def test_there_and_back_is_exact(checkpoint):
    _, _, model, params, target, state = checkpoint
    written = official.to_state(params, target, model.config)
    again = official.clean(written)
    assert again.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_names_and_shapes_written_are_those_of_an_official_file(checkpoint):
    _, config, model, params, target, _ = checkpoint
    name = "multitask" if config["multitask"] else "episodic" if config["episodic"] else "single"
    keys = json.loads((FIXTURES / "tdmpc" / f"checkpoint_{name}.json").read_text())["keys"]
    written = official.to_state(params, target, model.config)
    assert {k: list(np.shape(v)) for k, v in written.items()} == keys


def test_numbered_heads_of_older_checkpoints_are_the_same_heads():
    state = official.clean(read_state("single"))
    leaves = [(0, x) for x in ("weight", "bias", "ln.weight", "ln.bias")]
    leaves += [(1, x) for _, x in leaves] + [(2, "weight"), (2, "bias")]
    old = {name: x for name, x in state.items() if "Qs" not in name}
    for number, (layer, leaf) in enumerate(leaves):
        old[f"_Qs.params.{number}"] = state[f"_Qs.params.{layer}.{leaf}"]
        old[f"_target_Qs.params.{number}"] = state[f"_target_Qs_params.{layer}.{leaf}"]
    old["_Qs.params.__batch_size"] = np.float32(5)
    del old["log_std_min"], old["log_std_dif"]
    found = official.clean(old)
    for name, array in found.items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)
    fields = official.world_fields(found)
    assert (fields["log_std_min"], fields["log_std_max"]) == (-10.0, 2.0)


def test_long_task_embeddings_are_shortened_as_they_are_on_use_there():
    state = official.clean(read_state("multitask"))
    long = state["_task_emb.weight"] * np.float32([[0.5], [3.0], [50.0]])
    task = official.to_params(state | {"_task_emb.weight": long})[0]["task"]
    norms = np.linalg.norm(long, axis=1)
    np.testing.assert_allclose(np.linalg.norm(task, axis=1), np.minimum(norms, 1.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_encoder.rgb.2.weight": np.zeros(1)}, "_encoder.rgb.2.weight: the model reads images"),
        ({"_world.0.weight": np.zeros(1)}, "_world.0.weight: not an array of the official"),
        ({"_reward.0.weight": None}, "_reward.0.weight is missing"),
    ],
)
def test_other_files_are_refused_in_words(change, message):
    state = read_state("single") | change
    with pytest.raises(ValueError, match=message):
        official.clean({name: x for name, x in state.items() if x is not None})
    with pytest.raises(ValueError, match="of no published size"):
        official.size_name(official.clean(read_state("single")))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(critic="v"), "model.critic='v'"),
        (dict(policy="tanh_mean"), "model.policy='tanh_mean'"),
        (dict(num_dynamics=2), "model.num_dynamics=2"),
        (dict(bin_min=-1.0), "model.bin_min=-1.0"),
        (dict(bin_max=7.0), "model.bin_max=7.0"),
        (dict(normalize_observations=True), "model.normalize_observations=True"),
    ],
)
def test_models_that_the_official_code_lacks_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        official.require_official(WorldModelConfig(obs_shape=(3,), action_dim=1, **overrides))


def test_a_run_directory_is_loaded_like_any_other(tmp_path, monkeypatch):
    register_toy()
    spec = envs.make("toy:point", 1).spec
    fields = dict(enc_dim=96, mlp_dim=96, latent_dim=64, num_values=2)
    world = WorldModelConfig(obs_shape=spec.obs_shape, action_dim=spec.action_dim, **fields)
    params = make_world_model(world).init(jax.random.key(0))
    target = jax.tree.map(lambda x: x + 1.0, params["value"])
    arrays = official.to_state(params, target, world)
    workdir = str(tmp_path / "run")
    import_tdmpc2.write_run(arrays, "toy:point", workdir)
    agent, train, settings = run.load(workdir)
    assert settings.model.size == "tiny" and settings.model.num_values == 2
    jax.tree.map(np.testing.assert_array_equal, train.params, params)
    jax.tree.map(np.testing.assert_array_equal, train.target_value, target)
    back = state_dict(workdir)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    own = dataclasses.replace(settings.model, bins="auto")  # as resolved: not the official range
    other = dataclasses.replace(settings, model=own)
    monkeypatch.setattr(run, "load", lambda workdir: (agent, train, other))
    found = build.environment_spec(settings)._replace(reward_range=(0.0, 1.0))
    with monkeypatch.context() as patched:
        patched.setattr(build, "environment_spec", lambda settings: found)
        with pytest.raises(ValueError, match="model.bin_min=-1.0: the official TD-MPC2 has -10.0"):
            state_dict(workdir)
    with pytest.raises(ValueError, match="is not empty"):
        import_tdmpc2.write_run(arrays, "toy:point", workdir)
    with pytest.raises(ValueError, match="the model reads"):
        import_tdmpc2.write_run(arrays, "gymnax:Pendulum-v1", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="the model is of 1 tasks, the name gives 2"):
        name = "multi:toy:point+gymnax:Pendulum-v1"
        import_tdmpc2.write_run(arrays, name, str(tmp_path / "several"))


def test_a_model_of_several_tasks_becomes_a_run_that_knows_them_in_order(tmp_path):
    register_toy()
    tasks = TaskSet(("toy:point", "toy:line"), (2, 1), 96)
    fields = dict(enc_dim=96, mlp_dim=96, latent_dim=64, num_values=2)
    # Observations of two numbers, the shorter padded, and which task it is.
    world = WorldModelConfig(obs_shape=(2 + 2,), action_dim=2, tasks=tasks, **fields)
    params = make_world_model(world).init(jax.random.key(0))
    arrays = official.to_state(params, jax.tree.map(lambda x: x + 1.0, params["value"]), world)
    workdir = str(tmp_path / "run")
    import_tdmpc2.write_run(arrays, "multi:toy:point+toy:line", workdir)
    _, train, settings = run.load(workdir)
    assert settings.model.task_dim == 96 and settings.env.pad_to == (2, 2)
    jax.tree.map(np.testing.assert_array_equal, train.params, params)
    for name, array in state_dict(workdir).items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    with pytest.raises(ValueError, match=r"\(2, 1\) in the model, \(1, 2\) in the tasks"):
        name = "multi:toy:line+toy:point"
        import_tdmpc2.write_run(arrays, name, str(tmp_path / "turned"))
    with pytest.raises(ValueError, match="the model is of 2 tasks, the name gives 1"):
        import_tdmpc2.write_run(arrays, "toy:point", str(tmp_path / "one"))


@pytest.mark.slow
def test_a_file_of_pytorch_is_read_and_written(tmp_path):
    torch = pytest.importorskip("torch")
    state = read_state("single")
    tensors = {name: torch.from_numpy(np.asarray(x)) for name, x in state.items()}
    tensors["_Qs.module.0.weight"] = torch.empty(32, 19, device="meta")
    torch.save({"model": tensors}, tmp_path / "model.pt")
    arrays = import_tdmpc2.read(str(tmp_path / "model.pt"))
    assert arrays.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    torch.save({"model": object()}, tmp_path / "code.pt")
    with pytest.raises(ValueError, match="not a PyTorch file of weights alone"):
        import_tdmpc2.read(str(tmp_path / "code.pt"))
