"""What a run says before its first row."""

from __future__ import annotations

import sys
import types
import warnings

import jax
import pytest

from mbx.agents.tdmpc.settings import Env, Settings
from mbx.training import logging
from mbx.types import EnvSpec


def test_the_device_and_what_takes_so_long(capsys):
    logging.print_devices()
    out, err = capsys.readouterr()
    assert out == ""  # rows alone go there
    count = jax.device_count()
    devices = f"{count} CPU device{'s' * (count > 1)}"
    assert err == f"mbx: running on {devices}, jax {jax.__version__}\n"


def test_what_the_task_decides_is_said(capsys):
    settings = Settings(env=Env(name="toy:point"))
    spec = EnvSpec("toy:point", (3,), "float32", 2, episode_length=20, action_repeat=4)
    logging.print_task_settings(settings, settings.for_task(spec))
    logging.print_task_settings(
        settings.for_task(spec), settings.for_task(spec)
    )  # nothing was left to it
    assert capsys.readouterr().err == (
        "mbx: for toy:point: env.action_repeat=4, train.seed_hold=4, train.utd_ratio=2.0, "
        "loss.discount=0.95, optimizer.learning_rate=0.001, "
        "optimizer.final_learning_rate=0.0003, optimizer.policy_lr_scale=0.3\n"
    )


def test_the_kind_of_a_gpu_is_said(capsys, monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    monkeypatch.setattr(logging.jax, "devices", lambda: [gpu])
    monkeypatch.setattr(logging.jax, "device_count", lambda: 1)
    monkeypatch.setattr(logging.jax, "default_backend", lambda: "gpu")
    logging.print_devices()
    said = f"mbx: running on 1 GPU device (NVIDIA H100), jax {jax.__version__}\n"
    assert capsys.readouterr().err == said


def test_what_is_compiled_is_said_before_and_how_long_it_took_after(capsys, monkeypatch):
    clock = iter([100.0, 200.0, 300.0, 304.0])
    monkeypatch.setattr(logging, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with logging.printed_compilation("the toy"):
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/backend_compile_duration", 3.0, fun_name="jit(toy)"
        )
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/jaxpr_trace_duration", 2.2, fun_name="jit(toy)"
        )
        jax.monitoring.record_event_duration_secs("/other", 50.0, fun_name="toy")
        assert "compiling the toy (20 s or more" in capsys.readouterr().err
    jax.monitoring.record_event_duration_secs(
        "/jax/core/compile/backend_compile_duration", 9.0, fun_name="jit(toy)"
    )
    assert capsys.readouterr().err == "mbx: compiled the toy in 5 s\n"
    with logging.printed_compilation("the toy"):  # programs inside programs are reported twice
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/jaxpr_trace_duration", 9.0, fun_name="jit(toy)"
        )
    assert capsys.readouterr().err.endswith("mbx: compiled the toy in 4 s\n")
    monkeypatch.setattr(logging.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(logging, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    with logging.printed_compilation("the toy"):
        pass
    assert "the toy (half a minute to some minutes the first time" in capsys.readouterr().err
    with logging.printed_compilation("the toy", kept=False):
        pass
    assert "(half a minute to some minutes at every start)" in capsys.readouterr().err
    with logging.printed_compilation("the toy", talk=False):
        pass
    assert capsys.readouterr().err == ""


def test_deprecations_of_other_packages_are_not_shown_and_all_else_is(monkeypatch):
    def warn(category: type[Warning], module: str) -> None:
        warnings.warn_explicit("old", category, "file.py", 1, module=module)

    monkeypatch.setattr(sys, "warnoptions", [])
    with pytest.warns() as seen, logging.without_foreign_deprecations():
        warn(DeprecationWarning, "dm_control.suite.base")
        warn(FutureWarning, "jax")
        warn(UserWarning, "dm_control.suite.base")
        warn(DeprecationWarning, "jaxtra")
        warn(DeprecationWarning, "mine")
    assert [w.category for w in seen] == [UserWarning, DeprecationWarning, DeprecationWarning]
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    with pytest.warns(FutureWarning), logging.without_foreign_deprecations():
        warn(FutureWarning, "jax")


def test_a_gpu_that_this_jaxlib_cannot_use(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(logging, "_NVIDIA", str(tmp_path / "nvidia[0-9]*"))
    assert logging.missed_gpu("cpu") == ""  # asked for the processor
    assert "jax[cuda12]" in logging.missed_gpu(None)
    monkeypatch.setattr(logging, "_NVIDIA", str(tmp_path / "none"))
    assert logging.missed_gpu(None) == ""


def test_only_writes_of_a_checkpoint_that_was_given_up_are_left_out(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(str(found.exc_value)))

    def report(error: Exception) -> None:
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))

    for _ in range(2):
        logging.quiet_storage()
    report(RuntimeError("Event loop is closed"))
    report(RuntimeError("another"))
    report(ValueError("Event loop is closed"))
    assert seen == ["another", "Event loop is closed"]
