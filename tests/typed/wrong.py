"""What pyright has to find; never run."""
# ruff: noqa: B018, F401

import jax

import mbx
from mbx import distributions, envs, heads, mppi, planners, power, replay, returns, successors
from mbx.agents.base import Agent, Diagnostics
from mbx.empo.multigrid import packed
from mbx.envs.base import RawEnvironment, Timestep
from mbx.training import build, run

x = jax.random.key(0)
distributions.two_hat(x, x)  # wrong
distributions.symlog()  # wrong
distributions.two_hot_mean(x, bin=x)  # wrong
returns.lambda_return(x, 0.9, x, 0.9)  # wrong
returns.lambda_returns(x, 0.9, x, lamda=0.9)  # wrong
returns.init_return_ema().hight  # wrong
returns.init_return_ema().replacd(low=x)  # wrong
mppi.MPPIConfig(num_sample=3)  # wrong
mppi.MPPIConfig(num_samples="3")  # wrong
mppi.plan(x, lambda k: x, x, x, config=mppi.MPPIConfig())  # wrong
mppi.plan(x, lambda k, a: x, x, x)  # wrong
mppi.plan(x, lambda k, a: x, x, x, config=mppi.MPPIConfig()).actoin  # wrong
successors.segment_expectation(x, x, x)  # wrong
power.robot_policy(x, beta=1.0)  # wrong
power.PowerParams(bta_h=1.0)  # wrong
power.solved  # wrong
packed.decod(x)  # wrong
replay.init({}, num_env=2, capacity=3)  # wrong
state = replay.init({}, num_envs=2, capacity=3)
state.sizes  # wrong
state.replaced(size=x)  # wrong
replay.sample(state, x, batch=3, length=2)  # wrong
replay.sample(state, x, batch_size=3, length=2).rowz  # wrong
replay.insert_steps(state, {}, {}, x)  # wrong
heads.Head(network=lambda spec: None, inputs=lambda w: (w.encodd,), target=lambda w: w.obs)  # wrong
heads.Head(network=lambda spec: None, inputs=lambda w: (w.obs,))  # wrong
planners.register("mine", lambda key: key)  # wrong
envs.mak("gymnax:Pendulum-v1", 1)  # wrong
envs.make("gymnax:Pendulum-v1")  # wrong
envs.Suite(row=None)  # wrong
RawEnvironment("a", (2,))  # wrong
Timestep(1.0).rewards  # wrong
Diagnostics({}, file={})  # wrong


def act(train: object, obs: jax.Array) -> jax.Array:
    """Not an agent's act."""
    return obs


def update(train: object, replay: replay.ReplayState, key: jax.Array) -> jax.Array:
    """Not an agent's update."""
    return key


def both(agent: Agent) -> None:
    """Functions of other shapes than an agent's."""
    agent.acts  # wrong
    agent._replace(act=act, update=update)
    Agent(agent.init, agent.init_actor, act, agent.update, agent.example_row)  # wrong
    Agent(agent.init, agent.init_actor, agent.act, update, agent.example_row)  # wrong
    agent.act(0, 0, x, x, x)  # wrong


mbx.trian("gymnax:Pendulum-v1")  # wrong
mbx.train("gymnax:Pendulum-v1", steps="many")  # wrong
mbx.load_policy("runs/a", planer=False)  # wrong
mbx.load_policy("runs/a").rest()  # wrong
run.load("runs/a").agent  # wrong
run.train({})  # wrong
build.registr("mine", object, act)  # wrong
