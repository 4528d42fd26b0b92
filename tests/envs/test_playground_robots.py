"""MuJoCo Playground's robots: its own code and XML, with stand-ins for the meshes it downloads.

Of the Go1 meshes are only seen: inertias and what collides are in the XML, and it moves as it does.
"""

from __future__ import annotations

import struct

import jax
import numpy as np
import pytest

from mbx import envs
from tests.envs.toys import rollout

pytestmark = pytest.mark.slow


def tetrahedron() -> bytes:
    """A small solid in binary STL."""
    corners = 0.02 * np.float32([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    faces = [(0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3)]
    found = b"\0" * 80 + struct.pack("<I", len(faces))
    for face in faces:
        found += struct.pack("<3f", 0, 0, 0) + corners[list(face)].tobytes() + b"\0\0"
    return found


SOLID = b"""
v 0 0 0
v 0.02 0 0
v 0 0.02 0
v 0 0 0.02
f 1 3 2
f 1 2 4
f 1 4 3
f 2 3 4
"""
MESHES = {
    "unitree_go1": "trunk.stl hip.stl thigh.stl thigh_mirror.stl calf.stl",
    "leap_hand": "palm_right.obj base.obj proximal.obj medial.obj distal.obj tip.obj "
    "thumb_base.obj thumb_proximal.obj thumb_distal.obj thumb_tip.obj",
}


@pytest.fixture
def meshes(tmp_path, monkeypatch):
    pytest.importorskip("mujoco_playground", reason="pip install -e '.[playground]'")
    from mujoco_playground._src import mjx_env

    for robot, names in MESHES.items():
        folder = tmp_path / robot / "assets"
        folder.mkdir(parents=True)
        for name in names.split():
            solid = SOLID if name.endswith(".obj") else tetrahedron()
            (folder / name).write_bytes(solid)
    place = type(mjx_env.MENAGERIE_PATH)(tmp_path)
    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", place)


@pytest.mark.parametrize(
    ("task", "action_dim"), [("Go1JoystickFlatTerrain", 12), ("LeapCubeRotateZAxis", 16)]
)
def test_robots_step(meshes, task, action_dim):
    """Locomotion and manipulation.

    LeapCubeReorient of Playground 0.2.0 fails with JAX 0.10, in its own code (jnp.clip).
    """
    with jax.numpy_rank_promotion("allow"):
        environment = envs.make(f"playground:{task}", 2, episode_length=3)
        spec = environment.spec
        assert (spec.action_dim, spec.action_repeat) == (action_dim, 1)
        assert [part.name for part in spec.parts] == ["state"]
        obs, rows = rollout(environment, 3)
    assert all(np.isfinite(row.final_obs).all() and np.isfinite(row.reward).all() for row in rows)
    assert (obs[0] != obs[1]).any() and (rows[0].final_obs != obs).any()
    if task.startswith("Go1"):
        assert spec.obs_shape == (48,)
        assert rows[2].truncated.all() and not rows[2].terminated.any()
        assert (rows[2].obs != rows[2].final_obs).any()


def test_mujoco_warp():
    """Needs the extra playground; without a GPU its kernels are compiled for the processor."""
    pytest.importorskip("mujoco_playground")
    options = dict(episode_length=2, action_repeat=1, kwargs={"impl": "warp"})
    environment = envs.make("playground:CartpoleBalance", 3, **options)
    first, rows = rollout(environment, 3)
    assert [row.truncated.tolist() for row in rows] == [[False] * 3, [True] * 3, [False] * 3]
    for row in rows:
        assert row.obs.shape == (3, 5) and np.isfinite(row.obs).all()
        assert (row.reward > 0.5).all() and (row.reward <= 1.0).all()
    assert not np.allclose(rows[1].obs, rows[1].final_obs) and len(set(first[:, 0].tolist())) == 3
