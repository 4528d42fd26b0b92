"""Signals, closed pipes and kills: a run saves and ends, or goes on, and resumes to equal rows."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mbx.training import files, run
from mbx.training.run import Interrupt
from tests.faults.processes import finish, rows_of, start, wait_for_step
from tests.faults.small import small_config

FOREVER = 400_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Rows of 400 steps that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    run.train(small_config(train=dict(steps=400)), str(workdir))
    return rows_of(workdir)


def wait_for(process, words: str) -> None:
    """Return when the process has printed a line with these words."""
    while words not in process.stdout.readline():
        assert process.poll() is None


def continues(workdir, whole) -> None:
    """The run's rows are those of the undisturbed one, and go on as it does."""
    before = [row for row in rows_of(workdir) if row["step"] <= 400]
    assert before == whole[: len(before)]
    if before[-1]["step"] < 400:
        code, output = finish(workdir, steps=400)
        assert code == 0, output
        assert rows_of(workdir) == whole


@pytest.mark.parametrize(
    "name",
    ["SIGTERM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGHUP"))],
)
def test_a_signal_saves_and_ends_with_its_status(name, tmp_path, whole):
    """In a run that would take minutes: it stops somewhere, says where, and has saved that.

    Under nohup, SIGHUP is left alone and other signals are not.
    """
    number, workdir = getattr(signal, name), tmp_path / "run"
    nohup = "signal.signal(signal.SIGHUP, signal.SIG_IGN)" if name == "SIGTERM" else ""
    process = start(workdir, steps=FOREVER, before=nohup)
    wait_for_step(workdir, 60, process)
    if nohup:
        process.send_signal(signal.SIGHUP)
        wait_for_step(workdir, rows_of(workdir)[-1]["step"] + 100, process)
    process.send_signal(number)
    output = process.communicate(timeout=300)[0]
    last = rows_of(workdir)[-1]["step"]
    assert process.returncode == 128 + number, output
    assert f"stopped at {last:,} of 400,000 steps, saved; continue with" in output
    assert str(last) in os.listdir(workdir / "checkpoints")
    continues(workdir, whole)


STUCK = """
from mbx.training import run
prepare = run.prepare
def patched(config):
    job, left = prepare(config), [{intervals}]
    def interval(state, until):
        left[0] -= 1
        if left[0] >= 0:
            return job.interval(state, until)
        import ctypes
        print("stuck", flush=True)
        while True:
            ctypes.CDLL(None).sleep(600)
    return job._replace(interval=interval)
run.prepare = patched
"""


SLOW_EVALUATION = """
from mbx.training import run
prepare = run.prepare
def patched(config):
    job = prepare(config)
    def evaluate(train, keys):
        import ctypes
        print("evaluating", flush=True)
        ctypes.CDLL(None).sleep(5)
        return job.evaluate(train, keys)
    return job._replace(evaluate=evaluate)
run.prepare = patched
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_within_an_evaluation_saves_after_it(name, tmp_path, whole):
    number, workdir = getattr(signal, name), tmp_path / "run"
    process = start(workdir, steps=400, before=SLOW_EVALUATION)
    wait_for(process, "evaluating")
    process.send_signal(number)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + number, output
    assert "stopped at 40 of 400 steps, saved" in output
    assert rows_of(workdir) == [row for row in whole if row["step"] <= 40]
    continues(workdir, whole)


OWN_TERMINAL = """
import fcntl, os, termios
os.setsid()
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
"""


@pytest.mark.slow
def test_a_terminal_that_is_closed_and_hangs_up_saves_and_ends(tmp_path, whole):
    """The run's controlling terminal: the system sends SIGHUP when it goes."""
    workdir = tmp_path / "run"
    own, other = pty.openpty()
    process = start(workdir, steps=FOREVER, stdout=other, before=OWN_TERMINAL)
    os.close(other)
    wait_for_step(workdir, 60, process)
    os.close(own)
    assert process.wait(timeout=300) == 128 + signal.SIGHUP
    assert str(rows_of(workdir)[-1]["step"]) in os.listdir(workdir / "checkpoints")
    continues(workdir, whole)


@pytest.mark.parametrize(  # each signal is sent by one test that is not slow
    "name",
    ["SIGHUP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGTERM"))],
)
def test_a_signal_while_the_first_program_compiles_ends_at_once(name, tmp_path):
    """Nothing is lost then. A program that sleeps stands for one that compiles."""
    process = start(tmp_path / "run", steps=80, before=STUCK.format(intervals=0))
    wait_for(process, "stuck")
    process.send_signal(getattr(signal, name))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + getattr(signal, name)
    assert "stopped before the first step" in output


def test_the_second_signal_ends_at_once(tmp_path):
    """In an interval that never ends, after one that has and is to be saved."""
    process = start(tmp_path / "run", steps=FOREVER, before=STUCK.format(intervals=1))
    wait_for(process, "stuck")
    process.send_signal(signal.SIGINT)
    wait_for(process, "stopping: saving")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_library_call_gets_a_keyboard_interrupt_at_the_second():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested and interrupt.number == signal.SIGTERM
        with interrupt:  # as a run does within a command
            pass
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_pipe_whose_reader_leaves_ends_nothing(tmp_path, whole):
    """`| head -1`."""
    process = start(tmp_path / "run", steps=400)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert rows_of(tmp_path / "run") == whole


@pytest.mark.slow
def test_a_closed_terminal_that_sends_no_signal_ends_nothing(tmp_path, whole):
    own, other = pty.openpty()
    process = start(tmp_path / "run", steps=400, stdout=other)
    os.close(other)
    wait_for_step(tmp_path / "run", 20, process)
    os.close(own)
    assert process.wait(timeout=300) == 0
    assert rows_of(tmp_path / "run") == whole


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty])
def test_output_goes_nowhere_once_it_cannot_be_written(opened, monkeypatch):
    reader, writer = opened()
    stream = io.TextIOWrapper(os.fdopen(writer, "wb", buffering=0), write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    files.tolerate_closed_output()
    print("read", flush=True)
    assert os.read(reader, 10).split() == [b"read"]
    os.close(reader)
    for _ in range(3):
        print("lost", flush=True)
    os.write(stream.fileno(), b"a library's word")
    stream.close()


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path, whole):
    """kill -9 in the start, while compiling, in steps, evaluations and saves: 100 times.

    The seed of the moments is in the environment's MBX_SEED; how far a moment then is depends on
    the machine.
    """
    rng = np.random.default_rng(int(os.environ.get("MBX_SEED", "0")))
    began = time.time()
    assert finish(tmp_path / "timed", steps=400)[0] == 0
    lasts, kills, number = time.time() - began, 0, 0
    while kills < int(os.environ.get("MBX_KILLS", "100")):
        workdir, killed, number = tmp_path / f"run-{number}", True, number + 1
        while killed:
            process = start(workdir, steps=400)
            try:
                output = process.communicate(timeout=rng.uniform(0.2, 1.1) * lasts)[0]
                killed = False
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
        assert process.returncode == 0, output
        assert rows_of(workdir) == whole


@pytest.mark.slow
def test_a_long_run_that_is_killed_every_few_seconds(tmp_path):
    """2,000 intervals (or MBX_SOAK), each with a checkpoint: equal rows, and nothing piles up."""
    steps = 20 * int(os.environ.get("MBX_SOAK", "2000"))
    rng, workdir, kills = np.random.default_rng(0), tmp_path / "run", 0
    assert finish(tmp_path / "whole", steps=steps, timeout=3600)[0] == 0
    while True:
        before = max((row["step"] for row in rows_of(workdir)), default=0)
        process = start(workdir, steps=steps, stdout=subprocess.DEVNULL)
        while process.poll() is None and all(row["step"] <= before for row in rows_of(workdir)):
            time.sleep(0.1)  # however slow the machine is, each start makes a row
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=rng.uniform(0.0, 4.0))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    print(f"{kills} kills")
    assert process.returncode == 0 and kills
    assert rows_of(workdir) == rows_of(tmp_path / "whole")
    assert len(list((workdir / "checkpoints").iterdir())) <= 3
    assert len(list((workdir / "best").iterdir())) <= 2
