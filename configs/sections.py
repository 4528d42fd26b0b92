"""Sections that the configurations of all agents have in common."""

from ml_collections import config_dict


def distributed() -> config_dict.ConfigDict:
    """One run on many devices or processes: docs/pods.md."""
    config = config_dict.ConfigDict()
    config.enabled = False  # divide environments and batches among all devices
    config.coordinator = ""  # HOST:PORT of process 0; empty: found out on a cluster
    config.num_processes = 0  # 0: found out; 1: only the devices of this machine
    config.process_id = -1  # -1: found out
    config.fsdp = False  # divide large parameters, too
    config.heartbeat_timeout = 60  # seconds after which a silent process is given up
    return config


def log() -> config_dict.ConfigDict:
    """Where the log goes beside the run directory."""
    config = config_dict.ConfigDict()
    config.wandb = ""  # project of Weights & Biases that mirrors the rows (empty: none)
    config.wandb_entity = ""  # user or team that the project belongs to (empty: your default)
    return config
