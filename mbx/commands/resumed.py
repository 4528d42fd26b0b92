"""The configuration of a run that is resumed: `--config=experiments/resumed.py:DIR`.

`python -m experiments.train --workdir=DIR --config.resume=True` means this file.
"""

from __future__ import annotations

from ml_collections import config_dict

from mbx.training import resume


def get_config(workdir: str) -> config_dict.ConfigDict:
    """Every setting of the run in `workdir`."""
    return config_dict.ConfigDict(resume.saved_config(workdir))
