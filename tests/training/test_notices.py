"""What a run says before its first row."""

from __future__ import annotations

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
