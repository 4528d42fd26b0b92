"""Policies as ONNX files: the run's actions by numpy and onnxruntime, without jax."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest

import mbx
from examples import run_onnx
from mbx import cli
from mbx.training import onnx_file
from mbx.types import ActionPart, EnvSpec
from tests.helpers import leave_untrained, tiny_config
from tests.training.test_policy import ROOT, SPEC

BITS = ((0, 2), (0, 2))  # two choices of two


def run_directory(path, spec=SPEC):
    """A run whose parameters are disturbed: of equal candidates none is the best."""
    leave_untrained(str(path), tiny_config(env=dict(name="gone:x")), spec, 0.1)
    return str(path)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return run_directory(tmp_path_factory.mktemp("onnx") / "run")


def test_the_planner_by_the_run_s_random_numbers(workdir, tmp_path, monkeypatch):
    """Two episodes through the runner, whose memory and numbers are those of the policy."""
    policy, graphs = mbx.load_policy(workdir), []
    made = onnx_file._Graph

    def kept(policy):
        graphs.append(made(policy))
        return graphs[0]

    monkeypatch.setattr(onnx_file, "_Graph", kept)
    assert "20 actions within" in onnx_file.save(policy, str(tmp_path / "policy.onnx"))
    (graph,) = graphs
    runner, numbers = run_onnx.Policy(tmp_path / "policy.onnx"), jax.jit(graph.numbers)
    shapes = {name: tuple(shape) for name, _, shape in runner.about["inputs"]}
    assert shapes["observation"] == (1, 2) and shapes["memory_0"] == (1, 3, 2)
    assert runner.about["action_high"] == [2.0, 4.0] and runner.about["task"] == "gone:x"
    policy.reset()
    policy._carry = policy.begun
    for i, obs in enumerate(np.random.default_rng(0).normal(size=(6, 2))):
        if i % 3 == 0:
            policy.reset()
            runner.reset()
        drawn = dict(zip(list(graph.inputs)[3:], numbers(policy._carry), strict=True))
        given = iter([np.asarray(drawn[name]) for name in shapes if name in drawn])
        runner.draw = dict.fromkeys(runner.draw, lambda shape, dtype, given=given: next(given))
        np.testing.assert_allclose(runner(obs), policy(obs), rtol=0, atol=1e-5)


def test_the_network_alone_in_a_process_without_jax(workdir, tmp_path, capsys):
    path, out = str(tmp_path / "policy.onnx"), str(tmp_path / "actions.npy")
    flags = ["--format=onnx", "--no-planner", "--batch=2"]
    cli.run(["export", workdir, f"--out={path}", *flags])
    assert "20 actions within" in capsys.readouterr().out
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import numpy as np, run_onnx\n"
        "policy = run_onnx.Policy(sys.argv[1])\n"
        "np.save(sys.argv[3], policy([[0.1, -2.0], [0.3, 0.4]]))\n"
        "assert not {'jax', 'mbx', 'flax'} & set(sys.modules)\n"
        "for bad in (np.zeros(3), [[np.nan, 0.0], [0.0, 0.0]]):\n"
        "    try:\n"
        "        policy(bad)\n"
        "    except ValueError:\n"
        "        continue\n"
        "    raise SystemExit(f'{bad} was taken')"
    )
    command = [sys.executable, "-c", program, path, str(ROOT / "examples"), out]
    subprocess.run(command, check=True, cwd=tmp_path, env={})
    wanted = mbx.load_policy(workdir, planner=False, batch=2)([[0.1, -2.0], [0.3, 0.4]])
    np.testing.assert_allclose(np.load(out), wanted, rtol=0, atol=1e-5)


def test_what_is_not_written(workdir, tmp_path, monkeypatch, capsys):
    path = tmp_path / "policy.onnx"
    flags = ["export", workdir, f"--out={path}", "--format=onnx", "--no-planner"]
    monkeypatch.setattr(onnx_file, "TOLERANCE", 0.0)
    with pytest.raises(SystemExit, match="an action of its graph differs from the run's by .*e-0"):
        cli.run(flags)
    with monkeypatch.context() as patch:
        patch.delitem(onnx_file._OPERATIONS, "dot_general")
        with pytest.raises(SystemExit, match="ONNX cannot express .* operation 'dot_general'"):
            cli.run(flags)
        patch.setitem(onnx_file._OPERATIONS, "dot_general", lambda g, e, a, b: g("And", a, b))
        with pytest.raises(SystemExit, match="onnxruntime refuses its graph .*: give --no-planner"):
            cli.run(flags)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SystemExit, match=r"pip install 'mbx-rl\[onnx\]'"):
        cli.run(flags)
    assert not path.exists()


def test_images_and_numbers_as_actions(tmp_path):
    """Convolutions; whole numbers in the shape of the environment's own action."""
    bounds = dict(action_low=(-9.0, -9.0), action_high=(9.0, 9.0))
    spec = EnvSpec("gone:x", (64, 64, 3), np.uint8, 2, 7, 1, **bounds)
    spec = spec._replace(action_shape=(2, 1), action_dtype="int64")
    policy = mbx.load_policy(run_directory(tmp_path / "run", spec), planner=False)
    onnx_file.save(policy, str(tmp_path / "policy.onnx"))
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    action = run_onnx.Policy(tmp_path / "policy.onnx")(image)
    assert action.dtype == np.int64 and np.any(action)
    np.testing.assert_array_equal(action, policy(image))


def test_actions_of_several_parts(tmp_path):
    """The policy gives the environment's own action, the file the number of the combination."""
    gear, on = ActionPart("gear", (), "int64", ((1, 3),)), ActionPart("on", (2,), "int8", BITS)
    own = dict(action_low=(0.0,), action_high=(), action_parts=(gear, on))
    spec = SPEC._replace(discrete=True, action_dim=12, **own)
    policy = mbx.load_policy(run_directory(tmp_path / "run", spec), planner=False)
    onnx_file.save(policy, str(tmp_path / "policy.onnx"))
    runner, found = run_onnx.Policy(tmp_path / "policy.onnx"), set()
    for obs in np.random.default_rng(0).normal(0, 3, (20, 2)).astype(np.float32):
        action, number = policy(obs), int(runner(obs))
        assert action["gear"] == 1 + number // 4 and np.shape(action["gear"]) == ()
        assert action["on"].tolist() == [number // 2 % 2, number % 2]
        assert action["on"].dtype == np.int8
        found.add(number)
    assert len(found) > 1
