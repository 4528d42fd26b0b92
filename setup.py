"""What setup.cfg cannot say: a wheel holds `configs` and `experiments` inside `mbx`.

So an installation adds one name to an environment; in a checkout they stay beside `mbx`.
"""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCommands(build_py):
    """Copies the commands and the configurations into the package that is built."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("configs", "experiments"):
                target = pathlib.Path(self.build_lib, "mbx", name)
                target.mkdir(parents=True, exist_ok=True)
                for path in sorted(pathlib.Path(name).glob("*.py")):
                    shutil.copy(path, target / path.name)


setup(cmdclass={"build_py": BuildWithCommands})
