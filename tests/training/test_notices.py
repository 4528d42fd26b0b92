"""What a run says before its first row."""

from __future__ import annotations

import sys
import types

from mbx.training import notices


def test_the_device_and_what_takes_so_long(capsys):
    notices.starting()
    out, err = capsys.readouterr()
    assert out == ""  # rows alone go there
    assert "device(s)" in err and "cpu" in err and "compiling the train step" in err


def test_a_gpu_that_this_jaxlib_cannot_use(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(notices, "_NVIDIA", str(tmp_path / "nvidia[0-9]*"))
    assert notices.missed_gpu("cpu") == ""  # asked for the processor
    assert "jax[cuda12]" in notices.missed_gpu(None)
    monkeypatch.setattr(notices, "_NVIDIA", str(tmp_path / "none"))
    assert notices.missed_gpu(None) == ""


def test_only_writes_of_a_checkpoint_that_was_given_up_are_left_out(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(str(found.exc_value)))

    def report(error: Exception) -> None:
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))

    with notices.without_closed_loops():
        report(RuntimeError("Event loop is closed"))
        report(RuntimeError("another"))
        report(ValueError("Event loop is closed"))
    report(RuntimeError("Event loop is closed"))
    assert seen == ["another", "Event loop is closed", "Event loop is closed"]
