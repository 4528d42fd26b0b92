"""Full disks, directories that go away or belong to another run: said in the last line."""

from __future__ import annotations

import shutil
import signal

import pytest

from tests.faults.processes import finish, rows_of, start, wait_for_step

FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Rows of 400 steps that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    code, output = finish(workdir, steps=400)
    assert code == 0, output
    return rows_of(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 700, 1500, 3000, 5000])
def test_a_full_disk_ends_in_a_line_and_the_run_resumes(size, tmp_path, whole):
    """Before the first row, in the log, in a checkpoint: whatever passes the size first."""
    workdir = tmp_path / "run"
    code, output = finish(workdir, steps=400, before=FULL.format(size=size))
    lines = output.strip().splitlines()
    assert code == 1 and lines[-1].startswith("error: "), output
    assert str(workdir) in lines[-1] and "free space there" in lines[-1], output
    assert "Traceback" not in output
    code, output = finish(workdir, steps=400)
    assert code == 0, output
    assert rows_of(workdir) == whole


@pytest.mark.slow
def test_a_directory_removed_midway_ends_the_run(tmp_path):
    process = start(tmp_path / "run", steps=400_000)
    wait_for_step(tmp_path / "run", 40, process)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"error: {tmp_path}/run") and "is gone: the run's" in last, output


@pytest.mark.slow
def test_of_two_processes_in_a_directory_one_is_refused(tmp_path):
    process = start(tmp_path / "run", steps=400_000)
    wait_for_step(tmp_path / "run", 20, process)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for name in ("run", "link"):
        code, output = finish(tmp_path / name, steps=400_000)
        assert code == 1 and "is being written by another run" in output.splitlines()[-1]
    wait_for_step(tmp_path / "run", rows_of(tmp_path / "run")[-1]["step"] + 20, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
