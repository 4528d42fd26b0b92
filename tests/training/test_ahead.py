"""What an evaluation runs is compiled beside training: the very programs, in another thread."""

from __future__ import annotations

import dataclasses
import threading
import types

import jax
import jax.numpy as jnp
import pytest

from mbx.agents.base import Ahead, Diagnostics
from mbx.training import ahead, build, evaluation, job, run, sharding
from tests.faults import small
from tests.helpers import FUSED, counting, once, programs_of, tiny_config
from tests.training.test_compile_once import small_dreamer
from tests.training.test_evaluation import KEYS, LENGTHS, OnHost, act, expect, of_lengths


def bound(x):
    """To its device, as a run's state is."""
    x = jnp.float32(x)
    return jax.device_put(x, x.sharding)


@pytest.mark.parametrize("make", [of_lengths, OnHost])
def test_a_call_finds_its_program_and_the_episodes_are_as_announced(make):
    evaluate = evaluation.make_evaluate(act, jnp.zeros, make(LENGTHS), record=True)
    train = bound(0.5)
    announced = evaluate.compile(ahead.abstract(train), jax.eval_shape(lambda: KEYS[0]))
    with counting() as counter:
        found = evaluate(train, KEYS[0])
    assert counter["traced", "evaluation"] == counter["compiled", "evaluation"] == 0
    expect(found, 0.5)

    def shapes(episodes):
        return jax.tree.map(lambda x: (x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), episodes)

    assert shapes(announced) == shapes(found.episodes)


@pytest.mark.parametrize("make", [of_lengths, OnHost])
def test_no_episodes_are_announced_where_none_are_kept(make):
    evaluate = evaluation.make_evaluate(act, jnp.zeros, make(LENGTHS))
    train = ahead.abstract(bound(0.5))
    assert evaluate.compile(train, jax.eval_shape(lambda: KEYS[0])) is None


def compiled_where(config, workdir):
    """Run it: what is compiled, counted, and which programs this thread and others compiled."""
    here, elsewhere = set(), set()

    def listen(event: str, seconds: float, **labels: str) -> None:
        if event.endswith("backend_compile_duration"):
            mine = threading.current_thread() is threading.main_thread()
            (here if mine else elsewhere).add(labels["fun_name"][4:-1])  # jit(NAME)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with counting() as counter:
            run.train(config, str(workdir))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return counter, here, elsewhere


def watched(config, spec):
    """A small agent that looks at itself with every evaluation, by two programs."""
    agent = small.make_agent(config, spec)

    def looks(name, measure):
        def program(train, *seen):
            return measure(train.params.T @ train.params, seen)

        program.__name__ = name
        compiled = jax.jit(program)

        def call(*args):
            return Diagnostics({name: float(compiled(*args))}, {})

        return Ahead(call, lambda *args: compiled.lower(*args).compile())

    return agent._replace(
        diagnostics=looks("look_within", lambda x, seen: jnp.sum(x)),
        review=looks("look_back", lambda x, seen: jnp.sum(x) + jnp.sum(seen[1].rewards)),
    )


def test_a_run_compiles_evaluation_and_looks_beside_training_once_each(tmp_path, capsys):
    config = small.small_config(agent="watched", train=dict(steps=40))
    config["eval"].update(exploring=True)
    config["matmul_precision"] = "highest"  # of a context that a thread has to enter by itself
    build.register("watched", small.Settings, watched)
    counter, here, elsewhere = compiled_where(config, tmp_path / "run")
    twice = {(how, "evaluation"): 2 for how in ("traced", "compiled")}  # with and without noise
    assert programs_of(counter) == once(*FUSED) | twice
    looks = {"look_within", "look_back"}
    assert all(counter["compiled", name] == 1 for name in looks)
    assert elsewhere >= {"evaluation"} | looks and not here & ({"evaluation"} | looks)
    said = capsys.readouterr().err
    assert "compiling the evaluation beside training" in said
    assert "compiling the evaluation (" not in said


@pytest.mark.parametrize("pieces", [False, True])
def test_an_evaluation_before_anything_is_learned_compiles_in_front(
    pieces, tmp_path, capsys, monkeypatch
):
    alone = dataclasses.replace(sharding.ONE_DEVICE, pieces=pieces)
    monkeypatch.setattr(sharding, "ONE_DEVICE", alone)
    config = small.small_config(train=dict(steps=40, seed_steps=100))
    counter, here, elsewhere = compiled_where(config, tmp_path / "run")
    assert programs_of(counter) == once(*FUSED) and "evaluation" in here - elsewhere
    said = capsys.readouterr().err
    assert "compiling the evaluation (20 s or more the first time, kept for the next)" in said
    assert ("compiling the train step (20 s or more at every start)" in said) is pieces


def test_what_goes_wrong_ahead_is_raised_where_it_is_waited_for(monkeypatch):
    def broken(train, keys):
        raise ValueError("no such plan")

    parts = job.prepare(small.small_config())
    parts = parts._replace(evaluate=parts.evaluate._replace(compile=broken))
    state = types.SimpleNamespace(train=None)
    monkeypatch.setattr(ahead, "abstract", lambda state: state)
    begun = ahead.start(parts, state, "default", talk=False)
    with pytest.raises(ValueError, match="no such plan"):
        begun.result()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "look"),
    [(small_dreamer, "open_loop"), (lambda: tiny_config(eval=dict(model=True)), "look")],
    ids=["dreamer", "tdmpc"],
)
def test_an_agent_looks_at_its_model_without_compiling_again(make, look, tmp_path):
    config = make()
    config["train"].update(steps=80)
    config["eval"].update(interval=80)
    counter, here, elsewhere = compiled_where(config, tmp_path / "run")
    assert programs_of(counter) == once(*FUSED) and counter["compiled", look] == 1
    assert elsewhere >= {"evaluation", look} and "evaluation" in elsewhere - here
