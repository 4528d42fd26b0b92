"""Full disks, directories that go away or belong to another run: said in the last line."""

from __future__ import annotations

import shutil
import signal

import pytest

from tests.faults.processes import OBEY, finish, rows_of, start, wait_for_step

FOREVER = 400_000
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


@pytest.fixture
def closed():
    """Takes the right to write in a directory and all below it from us, and gives it back."""
    changed = set()

    def change(workdir, mode: int) -> None:
        for path in (workdir, *workdir.rglob("*")):
            if path.is_dir():
                path.chmod(mode)
        changed.add(workdir)

    yield change
    for workdir in list(changed):
        change(workdir, 0o755)


@pytest.mark.slow
def test_a_directory_that_becomes_read_only_ends_in_a_line_and_the_run_resumes(tmp_path, closed):
    workdir = tmp_path / "run"
    process = start(workdir, steps=FOREVER, before=OBEY)
    wait_for_step(workdir, 60, process)
    closed(workdir, 0o555)
    output = process.communicate(timeout=300)[0]
    last = output.strip().splitlines()[-1]
    assert process.returncode == 1 and last.startswith("error: a checkpoint could not be"), output
    assert str(workdir) in last and "correct its permissions" in last
    before = (workdir / "metrics.jsonl").read_bytes()
    code, output = finish(workdir, steps=FOREVER, before=OBEY)
    last = output.strip().splitlines()[-1]
    assert code == 1 and last.startswith(f"error: {workdir}/") and "cannot be written (Perm" in last
    assert (workdir / "metrics.jsonl").read_bytes() == before
    closed(workdir, 0o755)
    process = start(workdir, steps=FOREVER)
    wait_for_step(workdir, rows_of(workdir)[-1]["step"] + 400, process)
    process.kill()
    process.communicate()
    rows, steps = rows_of(workdir), 400
    assert finish(tmp_path / "whole", steps=steps)[0] == 0
    assert [row for row in rows if row["step"] <= steps] == rows_of(tmp_path / "whole")


READ = """
from tests.faults.small import small_config
small_config()
from mbx.training import run
from mbx.analysis.curves import load_curve
print([run.load(sys.argv[1], which=which)[1].step.item() for which in ("best", "latest")])
print(len(load_curve(sys.argv[1], "train/loss")[0]))
sys.exit()
"""


@pytest.mark.slow
def test_a_run_that_may_only_be_read_is_read(tmp_path, closed):
    workdir = tmp_path / "run"
    assert finish(workdir, steps=80)[0] == 0
    closed(workdir, 0o555)
    code, output = finish(workdir, steps=80, before=OBEY + READ)
    assert code == 0, output
    assert output.strip().splitlines()[-1] == "4", output


@pytest.mark.slow
def test_a_directory_removed_midway_ends_the_run(tmp_path):
    process = start(tmp_path / "run", steps=FOREVER)
    wait_for_step(tmp_path / "run", 40, process)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"error: {tmp_path}/run") and "is gone: the run's" in last, output


@pytest.mark.slow
def test_of_two_processes_in_a_directory_one_is_refused(tmp_path):
    process = start(tmp_path / "run", steps=FOREVER)
    wait_for_step(tmp_path / "run", 20, process)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for name in ("run", "link"):
        code, output = finish(tmp_path / name, steps=FOREVER)
        assert code == 1 and "is being written by another run" in output.splitlines()[-1]
    wait_for_step(tmp_path / "run", rows_of(tmp_path / "run")[-1]["step"] + 20, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
