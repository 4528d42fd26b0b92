"""What `mbx/__init__.py` loads when it is asked for, for type checkers and editors."""

from mbx.api import train as train
from mbx.api import train_fn as train_fn
from mbx.training.policy import load_policy as load_policy

__version__: str
