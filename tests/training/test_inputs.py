"""A run's copies of the user's own files: what it began with, and nothing else is read again."""

from __future__ import annotations

import dataclasses

import pytest

from mbx.training import rundir


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of a run with files of two kinds."""

    paths: tuple[tuple[str, str], ...]

    def files(self):
        return dict(self.paths)

    def with_files(self, paths):
        return dataclasses.replace(self, paths=tuple(sorted(paths.items())))


@pytest.fixture
def place(tmp_path):
    """(settings, run directory) of a run that has kept its two files."""
    for name, text in (("a.txt", "one"), ("b.bin", "two")):
        (tmp_path / name).write_text(text)
    (tmp_path / "run").mkdir()
    settings = Settings(paths=(("x", str(tmp_path / "a.txt")), ("y", str(tmp_path / "b.bin"))))
    rundir.check_inputs(settings.files(), str(tmp_path / "run"))  # before anything was kept
    rundir.keep_inputs(settings.files(), str(tmp_path / "run"))
    return settings, tmp_path / "run"


def test_copies_are_named_by_setting_and_made_once(place):
    settings, run = place
    held = {path.name: path.read_text() for path in (run / "inputs").iterdir()}
    assert held == {"x.txt": "one", "y.bin": "two"}
    (run.parent / "a.txt").write_text("other")
    rundir.keep_inputs(settings.files(), str(run))
    assert (run / "inputs/x.txt").read_text() == "one"
    with pytest.raises(ValueError, match="x=.*a.txt is not what the run .* began with"):
        rundir.check_inputs(settings.files(), str(run))


def test_a_run_is_read_with_its_copies_and_with_nothing_outside_of_it(place):
    settings, run = place
    (run.parent / "a.txt").unlink()
    wanted = (("x", str(run / "inputs/x.txt")), ("y", str(run / "inputs/y.bin")))
    assert rundir.with_kept_inputs(settings, str(run)).paths == wanted
    copy = run / "inputs/y.bin"
    copy.unlink()
    with pytest.raises(ValueError, match=f"y=.*b.bin lies outside of the run .* copy it to {copy}"):
        rundir.with_kept_inputs(settings, str(run))
    copy.symlink_to(run.parent / "b.bin")  # a file that is there, by a way out
    with pytest.raises(ValueError, match="y=.*b.bin lies outside of the run and is not opened"):
        rundir.with_kept_inputs(settings, str(run))
